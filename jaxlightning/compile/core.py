"""The pure functions behind every step: run the user's code on given variables, differentiate, update, pack logs.

Nothing here holds state between steps. `engine` compiles these functions and carries their state; `functional` hands
them to people who write their own loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax

from jaxlightning.compile import packing
from jaxlightning.compile.attributes import same_carried
from jaxlightning.compile.differentiation import gradients, nothing
from jaxlightning.compile.freezing import Frozen, frozen_of, keep_frozen, keep_statistics, without_frozen
from jaxlightning.compile.guarded_update import device_logs, guarded_update
from jaxlightning.compile.manual import manual_train_step
from jaxlightning.compile.manual_eager import eager_train_step
from jaxlightning.compile.manual_events import ManualOptions
from jaxlightning.compile.paths import flatten, merge, select
from jaxlightning.compile.replay import Replay
from jaxlightning.compile.run_step import OutputTree, StepInfo, run_user_step, step_key
from jaxlightning.compile.state import TrainState
from jaxlightning.compile.trace import Scalars, Trace
from jaxlightning.compile.traced_state import attribute_values, take_effects, traced_attributes, traced_numbers
from jaxlightning.optim import Optimizer, clip_gradients
from jaxlightning.utilities.exceptions import MisconfigurationException

if TYPE_CHECKING:
    from jaxlightning.compile.binding import Binding

__all__ = ["FLOATS", "EvalOptions", "TrainOptions", "eval_step", "gradients", "hyper_of", "train_step", "update"]

FLOATS = 3
"""Leading entries of the float inputs: 1/accumulate, window scale, clip value; then hyper-parameters."""


@dataclass(frozen=True)
class TrainOptions:
    """Static choices of a training variant.

    Attributes:
        buffer: Gradients are accumulated in the state (accumulation over batches, or the split path).
        window_start: The batch is the first of an accumulation window.
        apply: The batch ends in an optimizer update.
        clip: `"norm"`, `"value"` or None.
        outputs: The return value of the step is wanted.
        check_finite: Losses and gradients are checked; a non-finite one blocks the update.
        manual: The choices of a step that optimizes by itself, None in automatic optimization.
    """

    buffer: bool = False
    window_start: bool = True
    apply: bool = True
    clip: str | None = None
    outputs: bool = False
    check_finite: bool = False
    manual: ManualOptions | None = None


@dataclass(frozen=True)
class EvalOptions:
    """Static choices of an evaluation or prediction variant.

    Attributes:
        stage: `"validate"`, `"test"`, `"sanity_check"` or `"predict"`.
        dataloader_idx: Index of the loader from 0, None when there is only one.
        outputs: The return value of the step is wanted.
    """

    stage: str
    dataloader_idx: int | None = None
    outputs: bool = False


def _write_back(binding: Binding, trace: Trace) -> None:
    """Lets an evaluation step return the carried attributes that it changed: it gets the state only to read."""
    if trace.attributes is None:
        return
    start = trace.attributes.start
    changed = {path: value for path, value in trace.attributes.values.items() if not same_carried(start[path], value)}
    if changed:
        trace.replays.insert(0, Replay("carried attributes", changed, binding.engine.set_attributes, state=True))


def update(
    binding: Binding,
    state: TrainState,
    grads: Any,
    hyper: Sequence[Any],
    **extra: Any,
) -> TrainState:
    """Applies the optimizers to gradients of the parameters that they own."""
    if len(state.opt_state) != len(binding.optimizers):
        raise RuntimeError(
            f"`{type(binding.module).__name__}.training_step` calls no network with parameters, so there is nothing to "
            "train. Put the networks on `self` in `__init__` and call them in the step."
        )
    params, states = state.params, []
    frozen = frozen_of(binding, state.params, state.variables)
    for handle, opt_state, values in zip(binding.optimizers, state.opt_state, hyper, strict=True):
        if state.scaler is not None and handle.needs_value_fn:
            raise MisconfigurationException(
                f"AMP and the LBFGS optimizer are not compatible: {handle.name} evaluates the loss several times per "
                'update, which a loss scale does not follow. Use precision="bf16-mixed".'
            )
        own = binding.owned_by(handle)
        mine = params if own is None else select(params, own)
        own_grads = grads if own is None else select(grads, own)
        updates, new_state = handle.update(own_grads, opt_state, mine, values, **extra)
        updated = optax.apply_updates(mine, updates)
        if frozen is not None:
            updated = merge(updated, select(mine, frozen.params.__contains__))
            grouped = isinstance(handle, Optimizer)
            new_state = keep_frozen(frozen, mine, new_state, opt_state, grouped=grouped)
        mine, opt_state = updated, new_state
        params = mine if own is None else merge(params, mine)
        states.append(opt_state)
    return state.replace(params=params, opt_state=tuple(states))


def hyper_of(binding: Binding, floats: Any) -> list[Any]:
    """The hyper-parameters of each optimizer out of the float inputs."""
    out, start = [], FLOATS
    for handle in binding.optimizers:
        n = len(handle.host_hyper())
        out.append(floats[start : start + n])
        start += n
    return out


def train_step(
    binding: Binding,
    table: packing.SlotTable,
    info: StepInfo,
    options: TrainOptions,
    state: TrainState,
    batch: Any,
    scalars: Scalars,
    seed: Any,
    floats: Any,
) -> tuple[TrainState, jax.Array, tuple[Any, ...], tuple[Any, ...], Any, tuple[Any, ...]]:
    """One training batch: gradients, accumulation, clipping, update, packed logs.

    Returns:
        The new state, the step values, states of metric objects, the arrays of the outputs, finite flags (or None),
        the arrays of effects on the host.
    """
    if options.manual is not None:
        run = manual_train_step if binding.jit else eager_train_step
        carried = traced_attributes(binding, state.attributes)
        new, values, states, returned, flags, trace = run(
            binding, table, info, options, state, carried, traced_numbers(info, False), batch, scalars, seed, floats
        )
        return (
            new.replace(attributes=attribute_values(trace)),
            values,
            states,
            returned,
            flags,
            take_effects(info, trace),
        )
    owned = nothing if not binding.optimizers else binding.owned
    old = state
    policy = binding.precision
    frozen = frozen_of(binding, state.params, state.variables)
    if frozen is not None:
        owned = _trainable(owned, frozen, state.params)
    result = gradients(
        binding, state.params, state.variables, state.attributes, policy.convert_input(batch), scalars, seed, info,
        owned=owned, scaler=state.scaler,
    )  # fmt: skip
    loss, grads, logs, variables = result.loss, result.grads, result.logs, result.variables
    grads = without_frozen(frozen, _owned_part(binding, state.params), grads)
    variables = keep_statistics(frozen, variables, state.variables)
    if policy.casts:  # what the step carries keeps its dtype
        variables = jax.tree.map(lambda new, like: new.astype(like.dtype), variables, state.variables)
    state = state.replace(params={**state.params, **result.written}, variables=variables, attributes=result.attributes)
    if loss is not None and options.buffer:
        loss = loss * floats[0].astype(loss.dtype)
    flags = None
    if options.check_finite and loss is not None:
        # Gradients of a scaled loss may overflow: that is what the scale is moved by.
        info.finite_names, flags = _finite(loss, None if policy.scaler is not None else grads)
    if options.buffer:
        state, grads = _accumulate(state, grads, floats, options)
    if options.apply and grads is not None:
        raw, before = grads, state
        if options.clip is not None:
            grads = clip_gradients(grads, floats[2], options.clip)
        state = update(
            binding, state, grads, hyper_of(binding, floats), value=loss, grad=grads, value_fn=result.value_fn
        )
        state = guarded_update(binding, before, state, raw, loss)
        if flags is not None:
            good = jnp.all(flags)
            kept = jax.tree.map(
                lambda n, o: jnp.where(good, n, o),
                (state.params, state.variables, state.opt_state),
                (before.params, old.variables, before.opt_state),
            )
            state = state.replace(params=kept[0], variables=kept[1], opt_state=kept[2])
    logs = [*logs, *device_logs(state, old)]
    info.plan = packing.plan_of(table, logs)
    values, acc = packing.pack(table, logs, old.acc) if table.needed <= table.capacity else (jnp.zeros(()), old.acc)
    state = state.replace(acc=acc)
    arrays: tuple[Any, ...] = ()
    if options.outputs:
        output = OutputTree({} if loss is None else {"loss": loss, **result.extras})
        arrays, info.outputs = output.detach(), output
    return state, values, packing.states_of(logs), arrays, flags, result.effects


def _owned_part(binding: Binding, params: dict[str, Any]) -> dict[str, Any]:
    owned = binding.owned
    return params if owned is None else select(params, owned)


def _trainable(
    owned: Callable[[str], bool] | None, frozen: Frozen, params: dict[str, Any]
) -> Callable[[str], bool] | None:
    """Which parameters are differentiated when some are frozen."""

    def trained(path: str) -> bool:
        return path not in frozen.params and (owned is None or owned(path))

    return trained if any(trained(path) for path in flatten(params)) else nothing


def _accumulate(state: TrainState, grads: Any, floats: Any, options: TrainOptions) -> tuple[TrainState, Any]:
    """Adds g/N to the buffer; on apply gives the window's gradient: N/count times the buffer."""
    if grads is None:  # skipped, or nothing to train
        if options.window_start:
            state = state.replace(grads=jax.tree.map(jnp.zeros_like, state.grads))
        total = state.grads
        pending = not options.window_start
    else:
        share = jax.tree.map(lambda g: g * floats[0].astype(g.dtype), grads)
        total = share if options.window_start else jax.tree.map(jnp.add, state.grads, share)
        state = state.replace(grads=total)
        pending = True
    if not options.apply or not pending:
        return state, None
    return state, jax.tree.map(lambda g: g * floats[1].astype(g.dtype), total)


def _finite(loss: Any, grads: Any) -> tuple[tuple[str, ...], Any]:
    named = [("the loss", loss)]
    if grads is not None:
        named += [
            (f"the gradient of {jax.tree_util.keystr(path, simple=True, separator='/')}", leaf)
            for path, leaf in jax.tree_util.tree_flatten_with_path(grads)[0]
        ]
    return tuple(name for name, _ in named), jnp.stack([jnp.all(jnp.isfinite(leaf)) for _, leaf in named])


def eval_step(
    binding: Binding,
    table: packing.SlotTable,
    info: StepInfo,
    options: EvalOptions,
    params: Any,
    variables: Any,
    attributes: Any,
    acc: Any,
    batch: Any,
    scalars: Scalars,
    seed: Any,
) -> tuple[Any, jax.Array, tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
    """One evaluation or prediction batch.

    Returns:
        New accumulators, step values, states of metric objects, arrays of the outputs, arrays of effects on the host.
    """
    scalars = dataclasses.replace(scalars, dataloader_idx=options.dataloader_idx)
    trace = Trace(
        kind=options.stage, key=step_key(seed, scalars.micro_step, options.stage), scalars=scalars,
        params=dict(params), variables=dict(variables), attributes=traced_attributes(binding, attributes),
        numbers=traced_numbers(info, False),
    )  # fmt: skip
    result = run_user_step(binding, trace, binding.precision.convert_input(batch), info, strict=binding.jit)
    _write_back(binding, trace)
    info.stage_read = trace.stage_read
    info.plan = packing.plan_of(table, trace.logs)
    fits = table.needed <= table.capacity
    values, acc = packing.pack(table, trace.logs, acc) if fits else (jnp.zeros(()), acc)
    arrays: tuple[Any, ...] = ()
    if options.outputs:
        output = OutputTree(result)
        arrays, info.outputs = output.detach(), output
    return acc, values, packing.states_of(trace.logs), arrays, take_effects(info, trace)
