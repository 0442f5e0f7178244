"""Manual optimization with `jit=False`: the step runs on concrete arrays, so a debugger and prints see real numbers.

A concrete array does not remember how it was computed. So each `manual_backward` runs the step once more from its
start, silently, as a function of small changes of the parameters, up to the same call, and differentiates that.
Updates that happened before the call are known numbers then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxlightning.compile import packing, precision
from jaxlightning.compile.manual import finish_step
from jaxlightning.compile.manual_base import ManualBase, OptimizerUpdate, check_loss, independent_loss
from jaxlightning.compile.manual_events import ManualOptions
from jaxlightning.compile.manual_replay import Replayer, ReplayRun, closure_value, replayer
from jaxlightning.compile.manual_result import manual_outputs
from jaxlightning.compile.manual_tape import probe
from jaxlightning.compile.run_step import StepInfo, run_user_step, step_key
from jaxlightning.compile.state import TrainState
from jaxlightning.compile.trace import Scalars, Trace
from jaxlightning.optim import clip_gradients

if TYPE_CHECKING:
    from jaxlightning.compile.binding import Binding

__all__ = ["EagerRun", "eager_train_step"]


class EagerRun(ManualBase):
    """The state of manual optimization in one eager run of a step.

    Args:
        binding: The module, its networks and optimizers.
        state: The training state at the start of the step.
        options: Static choices.
        check: Whether losses and gradients are checked for being finite.
        where: The user's step, for messages.
        replay: Runs the step once more with another run in place of this one.
    """

    def __init__(
        self,
        binding: Binding,
        state: TrainState,
        options: ManualOptions,
        check: bool,
        where: str,
        replay: Replayer,
    ) -> None:
        super().__init__(binding, state, options, check, where)
        self.replay = replay
        self.backwards = 0
        self.gradients: dict[int, Any] = {
            leaf: self.buffers[self.paths[leaf]]
            for leaf in self.owned
            if self.owners[leaf] in options.live and self.paths[leaf] in self.buffers
        }

    def _show(self, leaves: Sequence[int]) -> None:
        for leaf in leaves:
            self.views[leaf] = self.raw[leaf]

    def _assigned(self, changed: list[int], current: list[Any]) -> None:
        super()._assigned(changed, current)
        self.history.append(list(self.raw))

    def backward(self, loss: Any, gradient: Any = None) -> None:
        """`manual_backward`: adds the gradients of the loss to those that are there."""
        self._enter("`manual_backward`")
        loss = self.binding.precision.convert_output(check_loss(loss, gradient is not None, self.where))
        self._cut("on_before_backward", loss=loss)
        self._cut("backward", loss=loss)
        self.loss = loss
        self.backwards += 1
        changes = {leaf: jnp.zeros_like(self.raw[leaf]) for leaf in self.owned if self._inexact(leaf)}
        reached: set[int] = set()

        def replayed(values: dict[int, Any]) -> Any:
            probed = {leaf: probe(reached, leaf)(value) for leaf, value in values.items()}
            again = self.replay(ReplayRun(self, probed, self.backwards))
            return self.binding.precision.convert_output(check_loss(again, gradient is not None, self.where))

        _, pull = jax.vjp(replayed, changes)
        reached.clear()
        cotangent = jnp.ones((), loss.dtype) if gradient is None else jnp.asarray(gradient, loss.dtype)
        scaler = self.guards[0]
        (found,) = pull(precision.scale_loss(scaler, cotangent))
        found = precision.unscale(scaler, found)
        if not any(self._takes_part(leaf) for leaf in reached):
            raise independent_loss(self.backwards, self.where)
        for leaf in sorted(reached):
            if self._takes_part(leaf):
                old = self.gradients.get(leaf)
                self.gradients[leaf] = found[leaf] if old is None else old + found[leaf]
        if self.check:
            checked = [loss, *(found[leaf] if leaf in reached else jnp.zeros(()) for leaf in self.owned)]
            self.flags.append(jnp.stack([jnp.all(jnp.isfinite(value)) for value in checked]))
            self._name_flags()
        self._cut("on_after_backward")

    def _inexact(self, leaf: int) -> bool:
        return bool(jnp.issubdtype(self.raw[leaf].dtype, jnp.inexact))

    def step(self, handle: Any, closure: Callable[[], Any] | None, **kwargs: Any) -> Any:
        """`opt.step()`: runs the closure, then applies the optimizer to its gradients."""
        self.entered += 1
        number = self.entered
        result = None if closure is None else closure()
        self._enter(f"`{handle.name}.step()`")
        index = self._index(handle)
        self._cut("on_before_optimizer_step", index=index)
        value = closure_value(self, index, number, closure)
        self._stepped(index)
        leaves = self.leaves_of(index)
        if index >= len(self.opt_states) or not any(leaf in self.gradients for leaf in leaves):
            self.history.append(list(self.raw))
            return result
        self.plan.applied[index] = self.plan.applied.get(index, 0) + 1
        handle = self.binding.optimizers[index]
        update = OptimizerUpdate(self, index, handle, value)
        grads = [self.gradients.get(leaf, jnp.zeros_like(self.raw[leaf])) for leaf in leaves]
        hyper = jnp.asarray(handle.host_hyper(), packing.float_dtype())
        further = [hyper] + ([] if self.loss is None else [self.loss]) + ([] if value is None else list(value.consts))
        update.put(self, index, update(grads, update.kept(self, index), further))
        self.history.append(list(self.raw))
        self._show(leaves)
        self._publish()
        return result

    def zero_grad(self, handle: Any) -> None:
        """`opt.zero_grad()`: forgets the gradients of one optimizer."""
        self._enter(f"`{handle.name}.zero_grad()`")
        for leaf in self.leaves_of(self._index(handle)):
            self.gradients.pop(leaf, None)

    def clip(self, handle: Any, value: Any, algorithm: str) -> None:
        """`self.clip_gradients(opt, ...)`: limits the gradients of one optimizer."""
        self._enter("`self.clip_gradients(...)`")
        present = [leaf for leaf in self.leaves_of(self._index(handle)) if leaf in self.gradients]
        clipped = clip_gradients([self.gradients[leaf] for leaf in present], jnp.asarray(value), algorithm)
        self.gradients.update(zip(present, clipped, strict=True))

    def scheduler_step(self, scheduler: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """`scheduler.step()`: happens at once, numbers are concrete here."""
        type(scheduler).step(scheduler, *args, **kwargs)

    def _cut(self, hook: str, *, index: int | None = None, loss: Any = None) -> None:
        if hook not in self.options.hooks:
            return
        from jaxlightning.compile.manual_hooks import HookState, run_hook, undisturbed

        state = HookState(
            self.nested(self.raw),
            dict(self.trace.variables),
            tuple(self.opt_states),
            {self.paths[leaf]: value for leaf, value in self.gradients.items()},
        )
        with undisturbed(self.binding):
            after = run_hook(self.binding.engine, hook, state, index, loss, len(self.plan.steps))
        self.gradients = {leaf: after.gradients[self.paths[leaf]] for leaf in self.gradients}
        self.raw, self.opt_states = jax.tree_util.tree_leaves(after.params), list(after.opt_states)
        self.trace.variables.update(after.variables)
        self.history.append(list(self.raw))
        self._show(list(range(len(self.raw))))
        self._publish()

    def finish(self) -> TrainState:
        """The training state after the step."""
        self.absorb()
        holding = frozenset(owner for leaf in self.gradients if (owner := self.owners[leaf]) is not None)
        self.plan.live = holding
        by_path = {self.paths[leaf]: value for leaf, value in self.gradients.items()}
        # The engine gives an eager step buffers for every optimizer.
        grads = self._with_gradients(lambda path: by_path.get(path, self.buffers[path]))
        return self._left(grads)


def eager_train_step(
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
    """One training batch of a module that optimizes by itself, with `jit=False`; as `manual_train_step`."""
    where = f"{type(binding.module).__name__}.training_step"
    batch = binding.precision.convert_input(batch)
    key = step_key(seed, scalars.micro_step, "train")
    replay = replayer(binding, state, batch, scalars, key, where)
    run = EagerRun(binding, state, options.manual, options.check_finite, where, replay)
    trace = Trace(
        kind="train", key=key, scalars=scalars, params={}, variables=dict(state.variables), attributes=attributes,
        numbers=numbers, manual=run,
    )  # fmt: skip
    run.start(trace)
    result = run_user_step(binding, trace, batch, info, strict=False)
    outputs = manual_outputs(result, where)
    return finish_step(run, run.finish(), trace, table, info, outputs if options.outputs else None)
