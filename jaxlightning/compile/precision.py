"""Precision policies: which dtype parameters, computation and results of networks have, and the dynamic loss scale.

A policy is applied inside the compiled step. Parameters keep their dtype (or get the policy's), networks compute in the
policy's compute dtype (`precision_layers` sees to their layers), and what a network returns is cast back, so that
losses, metrics and reductions are float32. Statistics of normalisation layers stay float32 as well.

The loss scale of float16 is part of the device state; nothing here reads it on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxlightning.utilities.exceptions import MisconfigurationException

__all__ = [
    "DoublePrecision",
    "GradScaler",
    "HalfPrecision",
    "MixedPrecision",
    "Precision",
    "ScalerState",
    "cast_floats",
    "finish_update",
    "make_precision",
    "scale_loss",
    "unscale",
]

T = TypeVar("T")

_HALF = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


# --- the dynamic loss scale ---------------------------------------------------------------------------------------


class ScalerState(NamedTuple):
    """The loss scale on the device; part of the train state.

    Attributes:
        scale: What losses are multiplied with, float32, shape ().
        growth_tracker: Updates in a row whose gradients were finite, int32, shape ().
        skipped: Updates left out so far because a gradient was not finite, int32, shape ().
    """

    scale: Any
    growth_tracker: Any
    skipped: Any


@dataclass(frozen=True)
class GradScaler:
    """Options of the dynamic loss scale, with the names and defaults of `torch.amp.GradScaler`.

    Attributes:
        init_scale: The scale at the start.
        growth_factor: What it is multiplied with after `growth_interval` finite updates in a row.
        backoff_factor: What it is multiplied with when a gradient was not finite; that update is left out.
        growth_interval: See `growth_factor`.
        enabled: False keeps the scale at 1 and leaves nothing out.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True

    def __post_init__(self) -> None:
        """Checks the numbers.

        Raises:
            ValueError: If one of them cannot work.
        """
        if not self.growth_factor > 1.0:
            raise ValueError(f"GradScaler: growth_factor must be greater than 1, but got {self.growth_factor!r}.")
        if not 0.0 < self.backoff_factor < 1.0:
            raise ValueError(f"GradScaler: backoff_factor must be between 0 and 1, but got {self.backoff_factor!r}.")
        if not self.init_scale > 0.0 or self.growth_interval < 1:
            raise ValueError(
                f"GradScaler: init_scale and growth_interval must be positive, but got {self.init_scale!r} and "
                f"{self.growth_interval!r}."
            )

    def init(self) -> ScalerState:
        """The state before the first update."""
        return ScalerState(
            jnp.asarray(self.init_scale, jnp.float32), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
        )

    def update(self, state: ScalerState, finite: Any) -> ScalerState:
        """The state after one update; pure, by the rule of `torch.amp.GradScaler.update`.

        Args:
            state: The state that the update ran with.
            finite: Whether its gradients were finite, boolean, shape ().

        Returns:
            The new state.
        """
        tracker = jnp.where(finite, state.growth_tracker + 1, 0)
        grown = tracker >= self.growth_interval
        factor = jnp.where(finite, jnp.where(grown, self.growth_factor, 1.0), self.backoff_factor)
        return ScalerState(
            scale=(state.scale * factor).astype(jnp.float32),
            growth_tracker=jnp.where(grown, 0, tracker).astype(jnp.int32),
            skipped=(state.skipped + jnp.where(finite, 0, 1)).astype(jnp.int32),
        )


def scale_loss(state: ScalerState | None, loss: Any) -> Any:
    """The loss to differentiate: `loss * scale`; without a loss scale the loss itself.

    Args:
        state: The loss scale, None where the policy has none.
        loss: Loss, shape ().

    Returns:
        The scaled loss, dtype of the loss.
    """
    return loss if state is None else loss * state.scale.astype(loss.dtype)


def unscale(state: ScalerState | None, grads: T) -> T:
    """The gradients of the loss from those of the scaled loss; what was not finite stays so.

    Args:
        state: The loss scale that the loss was multiplied with, None where the policy has none.
        grads: A pytree of gradients.

    Returns:
        The same pytree divided by the scale.
    """
    if state is None:
        return grads
    inverse = 1.0 / state.scale
    out: T = jax.tree.map(lambda leaf: leaf * inverse.astype(leaf.dtype), grads)
    return out


def finish_update(
    scaler: GradScaler | None, state: ScalerState | None, grads: Any, new: T, old: T
) -> tuple[T, ScalerState | None]:
    """Keeps or drops an update with scaled gradients, and moves the scale; pure, no host read.

    This is all that an optimizer step with a loss scale needs besides `scale_loss` and `unscale`, in automatic and in
    manual optimization, once for each `optimizer.step()`:

        grads = unscale(state, jax.grad(lambda p: scale_loss(state, loss(p)))(params))
        new_params, new_opt_state = ...  # the update as if the gradients were good
        (params, opt_state), state = finish_update(
            scaler, state, grads, (new_params, new_opt_state), (params, opt_state)
        )

    Counters on the host (`global_step`, the handles' `updates`, schedulers) go on as if the update had been applied, as
    in Lightning; how many were left out is `state.skipped`.

    Args:
        scaler: The policy's options, None where it has no loss scale.
        state: The loss scale, None where the policy has none.
        grads: The unscaled gradients of this update, before clipping.
        new: Parameters, optimizer state and whatever else the update changed, after it.
        old: The same before it.

    Returns:
        The values to keep and the next state; `new` and `state` as they came in without a loss scale.
    """
    if scaler is None or state is None:
        return new, state
    from jaxlightning.optim._nonfinite import all_finite, select

    finite = all_finite(grads)
    return select(finite, new, old), scaler.update(state, finite)


# --- policies -----------------------------------------------------------------------------------------------------


def cast_floats(tree: T, dtype: Any, *, keep_half: bool = False) -> T:
    """Casts the floating-point arrays of a pytree; everything else passes through.

    Args:
        tree: A pytree; leaves may be of any type.
        dtype: The dtype; None leaves all as it is.
        keep_half: Whether leaves of a 16-bit dtype are left alone: somebody chose it.

    Returns:
        The pytree.
    """
    if dtype is None:
        return tree
    wanted = jnp.dtype(dtype)

    def cast(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
            return leaf
        have = leaf.dtype
        if have == wanted or not jnp.issubdtype(have, jnp.floating) or (keep_half and have in _HALF):
            return leaf
        return leaf.astype(wanted)

    out: T = jax.tree.map(cast, tree)
    return out


def _is_double(dtype: Any) -> bool:
    return dtype is not None and jnp.dtype(dtype) == jnp.dtype(np.float64)  # NumPy holds None for float64


class Precision:
    """A policy of dtypes. Without arguments it is "32-true": nothing is cast.

    Give an own policy to the trainer as `Trainer(plugins=Precision(compute_dtype=jnp.bfloat16, name="mine"))`. A
    `dtype` that a Flax layer was given wins over the policy.

    Args:
        param_dtype: Dtype of parameters; None leaves them as their layers make them (float32).
        compute_dtype: Dtype in which networks compute: that of their inputs, of parameters while they are used, and of
            Flax layers without a `dtype` of their own. None leaves it to the layers.
        output_dtype: Dtype of what networks return and of the loss; None leaves it.
        input_dtype: Dtype of the floating-point arrays of a batch, as the step sees them; None leaves them.
        scaler: Options of a dynamic loss scale, None for none.
        name: What `trainer.precision` says.
    """

    precision: str = "32-true"

    def __init__(
        self,
        *,
        param_dtype: Any = None,
        compute_dtype: Any = None,
        output_dtype: Any = None,
        input_dtype: Any = None,
        scaler: GradScaler | None = None,
        name: str | None = None,
    ) -> None:
        dtypes = {
            "param_dtype": param_dtype,
            "compute_dtype": compute_dtype,
            "output_dtype": output_dtype,
            "input_dtype": input_dtype,
        }
        for key, dtype in dtypes.items():
            if dtype is not None and not jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
                raise ValueError(
                    f"{type(self).__name__}: {key} must be a floating-point dtype such as jnp.bfloat16, but got "
                    f"{dtype!r}."
                )
            setattr(self, key, None if dtype is None else jnp.dtype(dtype))
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise TypeError(
                f"{type(self).__name__}: scaler must be a `jaxlightning.plugins.GradScaler`, but got "
                f"{type(scaler).__name__}."
            )
        self.scaler = scaler if scaler is not None and scaler.enabled else None
        if name is not None:
            self.precision = name
        elif type(self) is Precision and (self.casts or self.param_dtype is not None):
            self.precision = "custom"

    param_dtype: Any
    compute_dtype: Any
    output_dtype: Any
    input_dtype: Any

    @property
    def casts(self) -> bool:
        """Whether the compiled step differs from that of "32-true"."""
        return any(dtype is not None for dtype in (self.compute_dtype, self.output_dtype, self.input_dtype))

    @property
    def needs_x64(self) -> bool:
        """Whether a run needs JAX's x64 mode."""
        dtypes = (self.param_dtype, self.compute_dtype, self.output_dtype, self.input_dtype)
        return any(_is_double(dtype) for dtype in dtypes)

    def scope(self) -> AbstractContextManager[Any]:
        """A context for a run: x64 mode where the policy has a float64 dtype, restored at its end."""
        return jax.enable_x64(True) if self.needs_x64 else nullcontext()

    def convert_params(self, params: T) -> T:
        """Parameters in the policy's dtype; those that have a 16-bit dtype of their own keep it."""
        return cast_floats(params, self.param_dtype, keep_half=True)

    def convert_variables(self, variables: T) -> T:
        """Other variables: float64 in double precision; statistics are not lowered to 16 bits."""
        return cast_floats(variables, np.float64, keep_half=True) if _is_double(self.param_dtype) else variables

    def convert_input(self, data: T) -> T:
        """The batch as the step sees it."""
        return cast_floats(data, self.input_dtype)

    def convert_compute(self, data: T) -> T:
        """Inputs and raw parameters of networks."""
        return cast_floats(data, self.compute_dtype)

    def convert_output(self, data: T) -> T:
        """What networks return, and the loss."""
        return cast_floats(data, self.output_dtype)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.precision!r})"

    @property
    def signature(self) -> tuple[Any, ...]:
        """What two policies must agree in for one compiled step to serve both."""
        return (self.param_dtype, self.compute_dtype, self.output_dtype, self.input_dtype, self.scaler)


class DoublePrecision(Precision):
    """Everything in float64; JAX's x64 mode is on for the time of a run only."""

    precision = "64-true"

    def __init__(self) -> None:
        double = np.float64
        super().__init__(param_dtype=double, compute_dtype=double, output_dtype=double, input_dtype=double)


class HalfPrecision(Precision):
    """Parameters and computation in 16 bits; statistics, losses, metrics and reductions in float32.

    Args:
        precision: `"bf16-true"` or `"16-true"`.
    """

    def __init__(self, precision: str = "16-true") -> None:
        if precision not in ("16-true", "bf16-true"):
            raise ValueError(
                f"Passed `{type(self).__name__}(precision={precision!r})`. Precision must be '16-true' or 'bf16-true'."
            )
        half = jnp.bfloat16 if precision == "bf16-true" else jnp.float16
        super().__init__(
            param_dtype=half, compute_dtype=half, output_dtype=jnp.float32, input_dtype=half, name=precision
        )


class MixedPrecision(Precision):
    """Computation in 16 bits with float32 parameters; float16 with a dynamic loss scale.

    Args:
        precision: `"bf16-mixed"` or `"16-mixed"`.
        device: Accepted for Lightning's sake: XLA computes on whatever device the step runs on.
        scaler: Options of the loss scale of `"16-mixed"`; those of torch by default.

    Raises:
        ValueError: For another precision.
        MisconfigurationException: For a scaler with `"bf16-mixed"`.
    """

    def __init__(self, precision: str = "bf16-mixed", device: str | None = None, scaler: GradScaler | None = None):
        if precision not in ("16-mixed", "bf16-mixed"):
            raise ValueError(
                f"Passed `{type(self).__name__}(precision={precision!r})`. Precision must be '16-mixed' or "
                "'bf16-mixed'."
            )
        if precision == "bf16-mixed" and scaler is not None:
            raise MisconfigurationException(f"`precision='bf16-mixed'` does not use a scaler, found {scaler}.")
        if precision == "16-mixed" and scaler is None:
            scaler = GradScaler()
        half = jnp.bfloat16 if precision == "bf16-mixed" else jnp.float16
        super().__init__(compute_dtype=half, output_dtype=jnp.float32, scaler=scaler, name=precision)
        self.device = device


_MAKERS: dict[str, Callable[[], Precision]] = {
    "32-true": Precision,
    "64-true": DoublePrecision,
    "16-true": lambda: HalfPrecision("16-true"),
    "bf16-true": lambda: HalfPrecision("bf16-true"),
    "16-mixed": lambda: MixedPrecision("16-mixed"),
    "bf16-mixed": lambda: MixedPrecision("bf16-mixed"),
}


def make_precision(name: str) -> Precision:
    """The policy of a canonical name such as `"bf16-mixed"`.

    Args:
        name: The name.

    Returns:
        The policy.

    Raises:
        NotImplementedError: For a precision that JAX has no counterpart of.
    """
    maker = _MAKERS.get(name)
    if maker is None:
        raise NotImplementedError(
            f"`Trainer(precision={name!r})` needs NVIDIA's Transformer Engine for PyTorch. Use one of "
            f"{sorted(_MAKERS)}, or a policy of your own: `Trainer(plugins=jaxlightning.plugins.Precision(...))`."
        )
    return maker()
