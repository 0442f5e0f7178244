"""Manual optimization inside a compiled step: what `manual_backward`, `opt.step()` and the like do in its trace.

The words keep the parameters, optimizer states and gradients of the step up to date and add an event to the trace each
time (`manual_events`); `manual_tape` gives the events their meaning when the step is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxlightning.compile import packing
from jaxlightning.compile.guarded_update import device_logs
from jaxlightning.compile.manual_base import ManualBase, OptimizerUpdate, check_loss
from jaxlightning.compile.manual_events import (
    Backward,
    Clip,
    Cut,
    Forget,
    Keep,
    ManualOptions,
    Read,
    Update,
    aval_of,
    emit,
)
from jaxlightning.compile.manual_replay import Replayer, closure_value, replayer
from jaxlightning.compile.manual_result import manual_outputs
from jaxlightning.compile.manual_schedulers import Rates
from jaxlightning.compile.run_step import OutputTree, StepInfo, run_user_step, step_key
from jaxlightning.compile.state import TrainState
from jaxlightning.compile.trace import Scalars, Trace

if TYPE_CHECKING:
    from jaxlightning.compile.binding import Binding

__all__ = ["ManualRun", "finish_step", "manual_train_step"]


class ManualRun(ManualBase):
    """The state of manual optimization in one trace of a compiled step.

    Args:
        binding: The module, its networks and optimizers.
        state: The training state at the start of the step.
        options: Static choices of the variant.
        floats: Float inputs of the step: leading ones, then the hyper-parameters of all optimizers, once more for each
            snapshot.
        check: Whether losses and gradients are checked for being finite.
        where: The user's step, for messages.
        info: Knows the Python decisions so far.
        replay: Runs the step once more, for optimizers that evaluate their closure several times.
    """

    def __init__(
        self,
        binding: Binding,
        state: TrainState,
        options: ManualOptions,
        floats: Any,
        check: bool,
        where: str,
        info: StepInfo,
        replay: Replayer,
    ) -> None:
        super().__init__(binding, state, options, check, where)
        self.info = info
        self.replay = replay
        self.rates = self._rates = Rates(self, floats)
        self.touched: dict[int, str] = {}
        kept = {leaf for leaf in self.owned if self.owners[leaf] in options.live and self.paths[leaf] in self.buffers}
        absent = [leaf for leaf in self.owned if leaf not in kept]
        self.gradients: dict[int, Any] = {leaf: self.buffers[self.paths[leaf]] for leaf in kept}
        self._forget(absent)
        self._show(self.owned)

    def _forget(self, leaves: list[int]) -> None:
        if leaves:
            event = Forget([aval_of(self.raw[leaf]) for leaf in leaves])
            self.gradients.update(zip(leaves, emit(event), strict=True))

    def _show(self, leaves: Sequence[int]) -> None:
        for leaf in leaves:
            self.views[leaf] = self.raw[leaf]
        tracked = self._tracked(leaves)
        if tracked:
            event = Read([aval_of(self.raw[leaf]) for leaf in tracked], tracked)
            for leaf, view in zip(tracked, emit(event, *(self.raw[leaf] for leaf in tracked)), strict=True):
                self.views[leaf] = view

    def _touch(self, index: int, how: str) -> None:
        """Remembers whether gradients that an optimizer holds at first are used or forgotten (adding is neither)."""
        if index not in self.touched:
            decided = 0 if self.info.host is None else len(self.info.host.guards)
            self.touched[index] = "forgotten" if how == "forget" and not decided else "read"

    # --- the words ----------------------------------------------------------------------------------------------

    def backward(self, loss: Any, gradient: Any = None) -> None:
        """`manual_backward`: adds the gradients of the loss to those that are there."""
        self._enter("`manual_backward`")
        loss = self.binding.precision.convert_output(check_loss(loss, gradient is not None, self.where))
        self.loss = loss
        self._cut("on_before_backward", loss=loss)
        self._cut("backward", loss=loss)
        allowed = [self._takes_part(leaf) for leaf in self.owned]
        avals = [aval_of(self.raw[leaf]) for leaf in self.owned]
        if self.check:
            avals.append(aval_of(jnp.zeros((1 + len(self.owned),), bool)))
        names = [self.paths[leaf] for leaf in self.owned]
        scaler = self.guards[0]
        event = Backward(
            avals, list(self.owned), allowed, gradient is not None, scaler is not None, self.where, names, self.check
        )
        given = [] if gradient is None else [jnp.asarray(gradient, loss.dtype)]
        given += [] if scaler is None else [scaler.scale]
        results = emit(event, loss, *given, *(self.gradients[leaf] for leaf in self.owned))
        if self.check:
            self.flags.append(results.pop())
            self._name_flags()
        self.gradients.update(zip(self.owned, results, strict=True))
        self._cut("on_after_backward")

    def step(self, handle: Any, closure: Callable[[], Any] | None, **kwargs: Any) -> Any:
        """`opt.step()`: runs the closure, then applies the optimizer to its gradients."""
        self.entered += 1
        number = self.entered
        result = None if closure is None else closure()
        self._enter(f"`{handle.name}.step()`")
        index = self._index(handle)
        self._cut("on_before_optimizer_step", index=index)
        self._touch(index, "read")
        leaves = self.leaves_of(index)
        value = closure_value(self, index, number, closure)
        self._stepped(index)
        if not leaves or index >= len(self.opt_states):
            self.history.append(list(self.raw))
            return result
        update = OptimizerUpdate(self, index, self.binding.optimizers[index], value)
        kept = update.kept(self, index)
        further = [self._rates.hyper(index)] + ([] if self.loss is None else [self.loss])
        further += [] if value is None else list(value.consts)
        event = Update([aval_of(value) for value in kept], index, len(leaves), len(kept), update, self.plan)
        update.put(self, index, emit(event, *(self.gradients[leaf] for leaf in leaves), *kept, *further))
        self.history.append(list(self.raw))
        self._show(leaves)
        self._publish()
        return result

    def zero_grad(self, handle: Any) -> None:
        """`opt.zero_grad()`: forgets the gradients of one optimizer."""
        self._enter(f"`{handle.name}.zero_grad()`")
        index = self._index(handle)
        self._touch(index, "forget")
        self._forget(self.leaves_of(index))

    def clip(self, handle: Any, value: Any, algorithm: str) -> None:
        """`self.clip_gradients(opt, ...)`: limits the gradients of one optimizer."""
        self._enter("`self.clip_gradients(...)`")
        index = self._index(handle)
        self._touch(index, "read")
        leaves = self.leaves_of(index)
        if leaves:
            event = Clip([aval_of(self.raw[leaf]) for leaf in leaves], algorithm)
            operands = [self.gradients[leaf] for leaf in leaves]
            self.gradients.update(zip(leaves, emit(event, jnp.asarray(value), *operands), strict=True))

    def scheduler_step(self, scheduler: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """`scheduler.step()`: happens on the host, every time the step runs."""
        self._rates.step(scheduler, args, kwargs)

    # --- hooks and the end ------------------------------------------------------------------------------------------

    def _cut(self, hook: str, *, index: int | None = None, loss: Any = None) -> None:
        """Lets the host run an overridden hook here, with the state as it is now."""
        if hook not in self.options.hooks:
            return
        self.plan.cut = True
        for owner in range(len(self.binding.optimizers)):
            self._touch(owner, "read")
        state = (self.nested(self.raw), dict(self.trace.variables), tuple(self.opt_states))
        rest, treedef = jax.tree_util.tree_flatten(state)
        avals = [aval_of(self.raw[leaf]) for leaf in self.owned] + [aval_of(value) for value in rest]
        names = [self.paths[leaf] for leaf in self.owned]
        event = Cut(avals, hook, len(self.owned), index, loss is not None, len(self.plan.steps), treedef, names)
        operands = [*(self.gradients[leaf] for leaf in self.owned), *rest, *([] if loss is None else [loss])]
        results = emit(event, *operands)
        self.gradients.update(zip(self.owned, results[: len(self.owned)], strict=True))
        params, variables, states = jax.tree_util.tree_unflatten(treedef, results[len(self.owned) :])
        self.raw, self.opt_states = jax.tree_util.tree_leaves(params), list(states)
        self.trace.variables.update(variables)
        self.history.append(list(self.raw))
        self._show(list(range(len(self.raw))))
        self._publish()

    def _assigned(self, changed: list[int], current: list[Any]) -> None:
        super()._assigned(changed, current)
        self.history.append(list(self.raw))

    def finish(self) -> TrainState:
        """The training state after the step."""
        self.absorb()
        names = list(self.buffers)
        places: list[int | None] = [
            names.index(self.paths[leaf]) if self.paths[leaf] in self.buffers else None for leaf in self.owned
        ]
        forgotten = frozenset(index for index, how in self.touched.items() if how == "forgotten")
        # A gradient that a step forgets before it reads it need not live until then.
        buffers = [self.buffers[name] for name in names]
        owners = [self.owners[leaf] or 0 for leaf in self.owned]
        event = Keep([aval_of(value) for value in buffers], owners, places, forgotten, self.plan)
        results = emit(event, *(self.gradients[leaf] for leaf in self.owned), *buffers)
        grads = self._with_gradients(lambda path: results[names.index(path)])
        return self._left(grads)


def manual_train_step(
    binding: Binding,
    table: packing.SlotTable,
    info: StepInfo,
    options: Any,
    state: TrainState,
    attributes: Any,
    numbers: Any,
    batch: Any,
    scalars: Scalars,
    seed: Any,
    floats: Any,
) -> tuple[TrainState, jax.Array, tuple[Any, ...], tuple[Any, ...], Any, Trace]:
    """One training batch of a module that optimizes by itself; as `core.train_step`, but it emits events.

    Returns:
        The new state, the step values, states of metric objects, the arrays of the outputs, finite flags (or None),
        the trace.
    """
    where = f"{type(binding.module).__name__}.training_step"
    batch, key = binding.precision.convert_input(batch), step_key(seed, scalars.micro_step, "train")
    replay = replayer(binding, state, batch, scalars, key, where, attributes, info.host)
    run = ManualRun(binding, state, options.manual, floats, options.check_finite, where, info, replay)
    trace = Trace(
        kind="train", key=key, scalars=scalars,
        params={}, variables=dict(state.variables), attributes=attributes, numbers=numbers, manual=run,
    )  # fmt: skip
    run.start(trace)
    result = run_user_step(binding, trace, batch, info, strict=True)
    outputs = manual_outputs(result, where)
    return finish_step(run, run.finish(), trace, table, info, outputs if options.outputs else None)


def finish_step(
    run: ManualBase, new: TrainState, trace: Trace, table: packing.SlotTable, info: StepInfo, outputs: Any
) -> tuple[TrainState, jax.Array, tuple[Any, ...], tuple[Any, ...], Any, Trace]:
    """Packs what a manual step logged and returned, and undoes its updates where something was not finite.

    Args:
        run: The run, at its end.
        new: The state that it leaves.
        trace: Its trace.
        table: Slots of logged keys.
        info: Told what the step did.
        outputs: What `on_train_batch_end` gets; None when nobody wants it.

    Returns:
        As `manual_train_step`.
    """
    state = run.state
    info.manual = run.plan
    flags = jnp.concatenate(run.flags) if run.flags else None
    if flags is not None:
        info.finite_names = tuple(run.flag_names)
        good = jnp.all(flags)
        kept = jax.tree.map(
            lambda n, o: jnp.where(good, n, o), (new.params, new.opt_state), (state.params, state.opt_state)
        )
        new = new.replace(params=kept[0], opt_state=kept[1])
    logs = [*trace.logs, *device_logs(new, state)]
    info.plan = packing.plan_of(table, logs)
    fits = table.needed <= table.capacity
    values, acc = packing.pack(table, logs, state.acc) if fits else (jnp.zeros(()), state.acc)
    arrays: tuple[Any, ...] = ()
    if outputs is not None:
        output = OutputTree(outputs)
        arrays, info.outputs = output.detach(), output
    return new.replace(acc=acc), values, packing.states_of(logs), arrays, flags, trace
