"""The host object that stands for one optimizer: what the engine compiles with and what the user holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from jaxlightning.optim._groups import Selection
from jaxlightning.utilities.exceptions import MisconfigurationException

Hyper = Any
"""Float array `[n_hyper]`: the hyper-parameters of all groups, an input of the compiled step."""


class OptimizerHandle:
    """One optimizer: pure `init`/`update` for the engine, `param_groups` and torch's words for the user.

    Every number that may change during a run (learning rate, weight decay, momentum, ...) is an entry of one float
    vector that the compiled step takes as an input. Writing to a parameter group refreshes that vector on the host;
    nothing is compiled again.

    Attributes:
        name: What LearningRateMonitor calls it, for example `"Adam"`.
        param_groups: One dictionary per group; `"params"` is the group's selection.
        defaults: The values that a group takes when it does not give its own.
        owns: Which parameters belong to it; None means all.
        needs_value: Whether `update` must get `value=` (the loss).
        needs_value_fn: Whether `update` must get `value_fn=` (parameters -> loss) and `grad=`.
        updates: How many updates were applied so far, counted on the host.
        structure_version: Grows when the optimizer state must be extended (`add_param_group`).
    """

    name: str
    param_groups: list[Any]
    defaults: dict[str, Any]
    owns: Selection | None = None
    needs_value: bool = False
    needs_value_fn: bool = False

    def __init__(self) -> None:
        self.updates = 0
        self.structure_version = 0
        self._hyper_cache: list[float] | None = None
        self._initialised = False
        self._step: Callable[..., Any] | None = None
        self._zero_grad: Callable[[], None] | None = None
        self._get_state: Callable[[], Any] | None = None
        self._toggle: Callable[[OptimizerHandle, bool], None] | None = None
        self._get_skipped: Callable[[], int] | None = None

    # --- for the engine -----------------------------------------------------------------------------------------

    def init(self, params: Any) -> Any:
        """Makes the optimizer state.

        Args:
            params: Nested dictionary `{network: tree}` of the owned parameters.

        Returns:
            A pytree of arrays made of optax states.
        """
        raise NotImplementedError

    def update(self, grads: Any, opt_state: Any, params: Any, hyper: Hyper, **extra: Any) -> tuple[Any, Any]:
        """Turns gradients into updates; pure, runs under a trace.

        Args:
            grads: Gradients, the same tree as `params`.
            opt_state: From `init` or the last `update`.
            params: The owned parameters.
            hyper: Float array `[len(host_hyper())]`.
            **extra: `value` (loss), `grad`, `value_fn` for those that want them; others ignore them.

        Returns:
            `(updates, opt_state)`; the updates are added with `optax.apply_updates`.
        """
        raise NotImplementedError

    @property
    def hyper_names(self) -> list[str]:
        """A name for every entry of the hyper-parameter vector, for example `"0.lr"`."""
        return []

    def host_hyper(self) -> list[float]:
        """The current hyper-parameters, in the order of `hyper_names`; cached until a group changes."""
        if self._hyper_cache is None:
            self._hyper_cache = self._collect_hyper()
        return self._hyper_cache

    def _collect_hyper(self) -> list[float]:
        return []

    def read_lr(self, opt_state: Any = None) -> list[float | None]:
        """The learning rate of every group; None where it cannot be known.

        Args:
            opt_state: The current state. Only a learning rate that lives on the device reads it.
        """
        return [None if group.get("lr") is None else float(group["lr"]) for group in self.param_groups]

    def record_update(self, count: int = 1) -> None:
        """Tells the handle that `count` more updates were applied."""
        self.updates += count

    def eval_params(self, opt_state: Any, params: Any) -> Any:
        """The parameters to evaluate with; other than `params` only for averaging optimizers."""
        return params

    @property
    def has_eval_params(self) -> bool:
        """Whether `eval_params` returns other parameters than those being trained."""
        return False

    def bind(
        self,
        *,
        step: Callable[..., Any] | None = None,
        zero_grad: Callable[[], None] | None = None,
        get_state: Callable[[], Any] | None = None,
        toggle: Callable[[OptimizerHandle, bool], None] | None = None,
        get_skipped: Callable[[], int] | None = None,
    ) -> None:
        """Gives the user's words their meaning for the time of a run.

        Args:
            step: Called by `step(closure, **kwargs)`.
            zero_grad: Called by `zero_grad()`.
            get_state: Returns the current optimizer state.
            toggle: Called with `(handle, True)` and `(handle, False)` around `toggle_model()`.
            get_skipped: Returns how many updates the device left out; it reads the device.
        """
        self._step, self._zero_grad, self._get_state, self._toggle = step, zero_grad, get_state, toggle
        self._get_skipped = get_skipped

    # --- for the user -------------------------------------------------------------------------------------------

    @property
    def optimizer(self) -> Any:
        """The wrapped object: the optax transformation, or the optimizer itself."""
        return self

    @property
    def state(self) -> Any:
        """The current optimizer state, an empty dictionary outside a run."""
        # A copy: the live state is donated to the next step.
        return {} if self._get_state is None else jax.tree.map(jnp.array, self._get_state())

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Applies one update, in manual optimization or in an `optimizer_step` hook.

        Args:
            closure: Computes the loss and its gradients; run before the update.
            **kwargs: Handed on to the engine.

        Returns:
            What the closure returned.

        Raises:
            MisconfigurationException: If `closure` is not callable.
            RuntimeError: If no trainer runs this optimizer.
        """
        if closure is not None and not callable(closure):
            raise MisconfigurationException(
                f"`optimizer.step(closure)` wants a function, but got {type(closure).__name__}."
            )
        if self._step is None:
            raise RuntimeError(
                f"{self.name}.step() works only while a Trainer runs this optimizer: it belongs into `training_step` "
                "with `self.automatic_optimization = False`, or into the `optimizer_step` hook."
            )
        return self._step(closure, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients collected so far.

        Args:
            set_to_none: Accepted for torch's sake; both values mean the same here.

        Raises:
            RuntimeError: If no trainer runs this optimizer.
        """
        if self._zero_grad is None:
            raise RuntimeError(
                f"{self.name}.zero_grad() works only while a Trainer runs this optimizer: it belongs into "
                "`training_step` with `self.automatic_optimization = False`, or into the `optimizer_zero_grad` hook."
            )
        self._zero_grad()

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Restricts gradients to this optimizer's parameters for the length of a `with` block.

        Args:
            sync_grad: Accepted for Lightning's sake: devices agree on gradients inside the compiled step.

        Raises:
            RuntimeError: If no trainer runs this optimizer.
        """
        if self._toggle is None:
            raise RuntimeError(f"{self.name}.toggle_model() works only while a Trainer runs this optimizer.")
        self._toggle(self, True)
        try:
            yield
        finally:
            self._toggle(self, False)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the optimizer state: the groups' values and the number of updates.

        Returns:
            A JSON-able dictionary (tuples appear as lists).
        """
        groups = [
            {key: _jsonable(value) for key, value in group.items() if key != "params"} for group in self.param_groups
        ]
        return {"name": self.name, "updates": self.updates, "param_groups": groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` gave.

        Args:
            state: From `state_dict`.

        Raises:
            ValueError: If the number of parameter groups differs.
        """
        groups = state["param_groups"]
        if len(groups) != len(self.param_groups):
            raise ValueError(
                f"The saved state of {state.get('name', 'the optimizer')} has {len(groups)} parameter groups, but "
                f"{self.name} has {len(self.param_groups)}."
            )
        for group, saved in zip(self.param_groups, groups, strict=True):
            for key, value in saved.items():
                if key != "params":
                    self._restore_value(group, key, tuple(value) if isinstance(group.get(key), tuple) else value)
        self.updates = int(state.get("updates", 0))

    def _restore_value(self, group: Any, key: str, value: Any) -> None:
        group[key] = value

    def _changed(self) -> None:
        self._hyper_cache = None


def as_number(value: Any, what: str) -> float:
    """A Python float of a number or 0-d array.

    Args:
        value: The number.
        what: What it is, for the message.

    Returns:
        The number as a float.

    Raises:
        TypeError: If it is no number.
        ValueError: If it is not finite.
    """
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{what} must be a number, but got {type(value).__name__}: {value!r}.") from error
    if not math.isfinite(number):
        raise ValueError(f"{what} must be finite, but got {number}.")
    return number


def settle(new: Any, old: Any = None) -> Any:
    """Gives a state the dtypes of the one before it, strongly typed, and every leaf a buffer of its own.

    Float32 hyper-parameters would widen bfloat16 moments; a weak type that becomes a strong one would compile the step
    a second time; and the step donates every leaf, so none may be another one's (as in `optax.scale_by_lbfgs`).

    Args:
        new: The new state.
        old: The state before; None if there is none.

    Returns:
        The new state.
    """
    if old is None:
        seen: set[int] = set()

        def own(leaf: Any) -> Any:
            array = jnp.array(leaf, dtype=jnp.result_type(leaf), copy=id(leaf) in seen)
            seen.add(id(leaf))
            return array

        return jax.tree.map(own, new)
    return jax.tree.map(lambda leaf, like: jnp.asarray(leaf, dtype=jnp.result_type(like)), new, old)


def _jsonable(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_jsonable(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if hasattr(value, "item"):
        return value.item()
    return str(value)
