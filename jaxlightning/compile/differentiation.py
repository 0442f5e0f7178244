"""Runs a training step under `value_and_grad`: the loss, its gradients, and all that the step did besides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxlightning.compile import precision
from jaxlightning.compile.host_random import generator_states
from jaxlightning.compile.paths import merge, select
from jaxlightning.compile.run_step import OutputTree, StepInfo, is_array, run_user_step, step_key
from jaxlightning.compile.trace import LogEntry, Scalars, Trace
from jaxlightning.compile.traced_state import attribute_values, take_effects, traced_attributes, traced_numbers
from jaxlightning.compile.writes import Snapshot, as_it_was
from jaxlightning.utilities.exceptions import MisconfigurationException

if TYPE_CHECKING:
    from jaxlightning.compile.binding import Binding

__all__ = ["Differentiated", "gradients", "nothing"]


def _normalise_loss(result: Any, where: str) -> tuple[Any, dict[str, Any]]:
    """The loss and the further entries of a training step's return value; loss None means "skip"."""
    if result is None:
        return None, {}
    extras: dict[str, Any] = {}
    loss = result
    if isinstance(result, dict):
        if "loss" not in result:
            raise MisconfigurationException(
                f"`{where}` returned a dict without the key 'loss' (it has {sorted(map(str, result))}). In automatic "
                "optimization a dict must hold the scalar to minimise under 'loss'."
            )
        loss = result["loss"]
        extras = {key: value for key, value in result.items() if key != "loss"}
    if any(c.__module__.split(".")[0] == "torch" for c in type(loss).__mro__):
        raise TypeError(
            f"`{where}` returned a torch tensor. The step must return a JAX array: compute the loss with jax.numpy / "
            "optax "
            "from the arrays of the batch."
        )
    if not is_array(loss):
        raise MisconfigurationException(
            f"In automatic optimization `{where}` must return a scalar array, a dict with 'loss', or None (to skip the "
            f"update). Received: {type(loss).__name__} {loss!r:.80}."
        )
    if loss.size != 1:
        raise RuntimeError(
            f"`{where}` returned a loss of shape {tuple(loss.shape)}; a gradient needs a scalar. Reduce it: "
            "`loss.mean()`."
        )
    if not jnp.issubdtype(loss.dtype, jnp.floating):
        raise RuntimeError(
            f"`{where}` returned a loss of dtype {loss.dtype}; a gradient needs a real floating-point scalar."
        )
    return loss.reshape(()), extras


@dataclass
class Differentiated:
    """One training batch, differentiated.

    Attributes:
        loss: The loss, None when the step returned None.
        extras: Further entries of the step's return value.
        grads: Gradients of the owned parameters, None when there is nothing to differentiate.
        variables: Updated collections of the networks.
        written: Parameters that the step assigned, by network.
        attributes: Updated attributes that are carried.
        logs: Calls of `self.log`.
        effects: The arrays of what is repeated on the host; `StepInfo.effects` says what is done with them.
        value_fn: The loss as a function of the owned parameters.
    """

    loss: Any
    extras: dict[str, Any]
    grads: Any
    variables: dict[str, Any]
    written: dict[str, Any]
    attributes: dict[str, Any]
    logs: list[LogEntry]
    effects: tuple[Any, ...]
    value_fn: Callable[[Any], Any]


def gradients(
    binding: Binding,
    params: dict[str, Any],
    variables: dict[str, Any],
    attributes: dict[str, Any],
    batch: Any,
    scalars: Scalars,
    seed: Any,
    info: StepInfo,
    *,
    owned: Callable[[str], bool] | None,
    scaler: Any = None,
) -> Differentiated:
    """Loss and gradients of one training batch.

    With a loss scale (`scaler`) the scaled loss is differentiated; gradients and loss come back without it.
    """
    where = f"{type(binding.module).__name__}.training_step"
    trainable = params if owned is None else select(params, owned)
    metas: list[LogEntry] = []
    strict = binding.jit

    def run(train_params: Any, silent: bool, record: bool) -> tuple[Any, Trace]:
        full = train_params if owned is None else merge(params, train_params)
        trace = Trace(
            kind="train",
            key=step_key(seed, scalars.micro_step, "train"),
            scalars=scalars,
            params=dict(full),
            variables=dict(variables),
            silent=silent,
            attributes=traced_attributes(binding, attributes),
            numbers=traced_numbers(info, silent),
            differentiated=True,
        )
        return run_user_step(binding, trace, batch, info if record else None, strict=strict), trace

    # Run eagerly, the step's own writes are there before it is run again for gradients.
    start = [] if strict else [Snapshot(owner, prefix) for prefix, owner in binding.owners.items()]
    generators = None if strict else generator_states()

    def loss_fn(train_params: Any, silent: bool = False, record: bool = True) -> tuple[Any, Any]:
        with as_it_was(start if silent else [], generators if silent else None):
            result, trace = run(train_params, silent, record)
        loss, extras = _normalise_loss(result, where)
        if not silent:
            metas[:] = trace.logs
        logged = [(entry.value, entry.weight) for entry in trace.logs]
        if loss is None:
            raise _SkippedError(trace, extras)
        loss = binding.precision.convert_output(loss)
        output = OutputTree(extras)
        effects = take_effects(info, trace)
        aux = (
            loss,
            trace.variables,
            trace.written,
            attribute_values(trace),
            logged,
            effects,
            output.detach(),
            _Static(output),
        )
        return precision.scale_loss(scaler, loss), aux

    def scaled_fn(train_params: Any) -> Any:
        return loss_fn(train_params, silent=True, record=False)[0]

    def value_fn(train_params: Any) -> Any:
        return loss_fn(train_params, silent=True, record=False)[1][0]

    info.skipped = False
    try:
        if not binding.jit:
            # Once concretely, for effects and for a person at a breakpoint; once silently, for gradients.
            _, (loss, variables, written, attributes, logged, effects, extra_arrays, static) = loss_fn(trainable)
            grads = (
                jax.grad(scaled_fn)(trainable)
                if jax.tree_util.tree_leaves(trainable) and owned is not nothing
                else None
            )
        elif owned is nothing:
            _, (loss, variables, written, attributes, logged, effects, extra_arrays, static) = loss_fn(trainable)
            grads = None
        else:
            (_, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(trainable)
            loss, variables, written, attributes, logged, effects, extra_arrays, static = aux
    except _SkippedError as skipped:
        info.skipped = True
        trace = skipped.trace
        if binding.jit and owned is not nothing:
            # Values of the differentiated run die with it; run once more without differentiation.
            trace = _skipped_again(loss_fn, trainable)
        return Differentiated(
            loss=None,
            extras={},
            grads=None,
            variables=trace.variables,
            written=trace.written,
            attributes=attribute_values(trace),
            logs=list(trace.logs),
            effects=take_effects(info, trace),
            value_fn=value_fn,
        )
    logs = [LogEntry(entry.meta, value, weight) for entry, (value, weight) in zip(metas, logged, strict=True)]
    extras = static.output.rebuild(extra_arrays)
    grads = precision.unscale(scaler, grads)
    return Differentiated(loss, extras, grads, variables, written, attributes, logs, effects, value_fn)


def _skipped_again(loss_fn: Callable[[Any], Any], trainable: Any) -> Trace:
    try:
        loss_fn(trainable)
    except _SkippedError as skipped:
        return skipped.trace
    raise RuntimeError("`training_step` returned None in one trace and a loss in the next, with the same inputs.")


class _SkippedError(Exception):
    """The training step returned None; carries the trace out of `value_and_grad`."""

    def __init__(self, trace: Trace, extras: dict[str, Any]) -> None:
        super().__init__("skipped")
        self.trace = trace


@jax.tree_util.register_static
class _Static:
    """Carries a Python object through `value_and_grad`'s auxiliary output."""

    def __init__(self, output: OutputTree) -> None:
        self.output = output


def nothing(_path: str) -> bool:
    """What a step owns that has nothing to differentiate; compared by identity."""
    return False
