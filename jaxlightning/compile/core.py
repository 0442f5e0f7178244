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

from jaxlightning.compile import packing, precision
from jaxlightning.compile.attributes import TracedAttributes, same_carried
from jaxlightning.compile.freezing import Frozen, frozen_of, keep_frozen, keep_statistics, without_frozen
from jaxlightning.compile.guarded_update import device_logs, guarded_update
from jaxlightning.compile.host_attributes import HostAttributes
from jaxlightning.compile.host_random import generator_states
from jaxlightning.compile.manual import manual_train_step
from jaxlightning.compile.manual_eager import eager_train_step
from jaxlightning.compile.manual_events import ManualOptions
from jaxlightning.compile.paths import flatten, merge, select
from jaxlightning.compile.replay import HostEffects, Replay
from jaxlightning.compile.run_step import OutputTree, StepInfo, is_array, run_user_step, step_key
from jaxlightning.compile.state import TrainState
from jaxlightning.compile.trace import LogEntry, Scalars, Trace
from jaxlightning.compile.writes import Snapshot, as_it_was
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
    """Static choices of an evaluation or prediction variant."""

    stage: str
    dataloader_idx: int | None = None
    outputs: bool = False


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
            kind="train", key=step_key(seed, scalars.micro_step, "train"), scalars=scalars,
            params=dict(full), variables=dict(variables), silent=silent, attributes=_carried(binding, attributes),
            numbers=_numbers(info, silent), differentiated=True,
        )  # fmt: skip
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
        effects = _leave(info, trace)
        aux = (loss, trace.variables, trace.written, _values(trace), logged, effects, output.detach(), _Static(output))
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
                if jax.tree_util.tree_leaves(trainable) and owned is not _nothing
                else None
            )
        elif owned is _nothing:
            _, (loss, variables, written, attributes, logged, effects, extra_arrays, static) = loss_fn(trainable)
            grads = None
        else:
            (_, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(trainable)
            loss, variables, written, attributes, logged, effects, extra_arrays, static = aux
    except _SkippedError as skipped:
        info.skipped = True
        trace = skipped.trace
        if binding.jit and owned is not _nothing:
            # Values of the differentiated run die with it; run once more without differentiation.
            trace = _skipped_again(loss_fn, trainable)
        return Differentiated(
            None, {}, None, trace.variables, trace.written, _values(trace), list(trace.logs), _leave(info, trace),
            value_fn,
        )  # fmt: skip
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


def _carried(binding: Binding, attributes: dict[str, Any]) -> TracedAttributes | None:
    return TracedAttributes(attributes, binding.engine) if binding.jit else None


def _numbers(info: StepInfo, silent: bool) -> HostAttributes | None:
    return None if info.host is None else HostAttributes(info.host, silent=silent)


def _values(trace: Trace) -> dict[str, Any]:
    return {} if trace.attributes is None else trace.attributes.values


def _write_back(binding: Binding, trace: Trace) -> None:
    """Lets an evaluation step return the carried attributes that it changed: it gets the state only to read."""
    if trace.attributes is None:
        return
    start = trace.attributes.start
    changed = {path: value for path, value in trace.attributes.values.items() if not same_carried(start[path], value)}
    if changed:
        trace.replays.insert(0, Replay("carried attributes", changed, binding.engine.set_attributes, state=True))


def _leave(info: StepInfo, trace: Trace) -> tuple[Any, ...]:
    """The arrays of what a step wants done on the host; what that is goes to `info`."""
    if trace.silent:
        return ()
    effects = HostEffects(trace.replays)
    info.effects = effects if effects else None
    info.needs_host = info.needs_host or info.effects is not None
    return effects.detach()


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


def _nothing(_path: str) -> bool:
    return False


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
        carried = _carried(binding, state.attributes)
        new, values, states, returned, flags, trace = run(
            binding, table, info, options, state, carried, _numbers(info, False), batch, scalars, seed, floats
        )
        return new.replace(attributes=_values(trace)), values, states, returned, flags, _leave(info, trace)
    owned = _nothing if not binding.optimizers else binding.owned
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

    return trained if any(trained(path) for path in flatten(params)) else _nothing


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
        params=dict(params), variables=dict(variables), attributes=_carried(binding, attributes),
        numbers=_numbers(info, False),
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
    return acc, values, packing.states_of(trace.logs), arrays, _leave(info, trace)
