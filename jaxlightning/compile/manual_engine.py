"""The engine's side of manual optimization: runs the steps, keeps what must live between them, serves the words."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from jaxlightning.compile.host_values import HostEnvironment
from jaxlightning.compile.manual_events import LEADING_FLOATS, ManualOptions, ManualPlan, RetraceManualError
from jaxlightning.compile.manual_schedulers import foreseen
from jaxlightning.compile.paths import flatten, select
from jaxlightning.compile.trace import current_trace
from jaxlightning.optim import clip_gradients, find_ownership, parse_optimizers
from jaxlightning.utilities.exceptions import MisconfigurationException

if TYPE_CHECKING:
    from jaxlightning.compile.engine_training import EngineTraining
    from jaxlightning.compile.step_output import StepOutput

__all__ = ["ManualSteps"]


class ManualSteps:
    """Runs the steps of a module with `automatic_optimization = False`.

    Args:
        engine: The engine whose state they change.

    Attributes:
        live: Optimizers (by number) that hold gradients now.
        hooks: Overridden hooks that run on the host in the middle of a step.
        call: Runs a hook on the host: its name, the number of the optimizer or None, the loss or None, the number
            of optimizer steps before it in this batch.
        on_step: Called with the number of optimizer steps when `opt.step()` is called outside of a step.
    """

    def __init__(self, engine: EngineTraining) -> None:
        self.engine = engine
        self.live: frozenset[int] = frozenset()
        self.hooks: frozenset[str] = frozenset()
        self.call: Callable[[str, int | None, Any, int], None] = lambda *_: None
        self.on_step: Callable[[int], None] | None = None
        self._dropped: frozenset[int] = frozenset()
        self._snapshots = 0
        self._schedulers = False
        self._checked: set[str] | None = None
        self._provisional: Any = None

    def reset(self) -> None:
        """Forgets gradients and findings: a run with other optimizers begins."""
        self.live = self._dropped = frozenset()
        self._snapshots, self._schedulers = 0, False
        self._checked = None

    # --- steps ------------------------------------------------------------------------------------------------------

    def run(
        self,
        batch: Any,
        *,
        batch_idx: int,
        current_epoch: int = 0,
        global_step: int = 0,
        micro_step: int = 0,
        want_outputs: bool = False,
    ) -> StepOutput:
        """Runs one training batch.

        Args:
            batch: Pytree of arrays; other leaves stay on the host.
            batch_idx: Index of the batch in the epoch, from 0.
            current_epoch: Index of the epoch, from 0.
            global_step: Optimizer steps so far.
            micro_step: Batches so far, over the whole run; random keys derive from it.
            want_outputs: Whether the return value of the step is needed.

        Returns:
            Log values and outputs, still being computed; its `manual` says which optimizers stepped.
        """
        engine = self.engine
        while True:
            options = ManualOptions(self.live, self._snapshots, self.hooks, self._schedulers)
            try:
                out = engine._train(
                    (False, True, True, None, want_outputs, options), batch, batch_idx, current_epoch, global_step,
                    micro_step, 1.0, 1.0, 0.0,
                )  # fmt: skip
            except RetraceManualError as more:
                self._learn(more)
                continue
            break
        plan = out.manual
        self.live, self._dropped = plan.live, plan.dropped
        for index, count in plan.applied.items():
            engine.binding.optimizers[index].record_update(count)
        for step in plan.schedulers:
            step.apply(None)
        return out

    def _learn(self, more: RetraceManualError) -> None:
        if more.buffers:
            lost = more.buffers & self._dropped
            if lost:
                names = ", ".join(self.engine.binding.optimizers[index].name for index in sorted(lost))
                raise RuntimeError(f"The gradients of {names} were needed after they were let go.")
            self.engine.ensure_manual_buffers(more.buffers)
        self._snapshots = max(self._snapshots, more.snapshots)
        self._schedulers = self._schedulers or more.schedulers

    def padded(self, hyper: tuple[float, ...], options: ManualOptions) -> tuple[float, ...]:
        """Float inputs with room for the hyper-parameters after each of the schedulers' steps."""
        return hyper + hyper[LEADING_FLOATS:] * options.snapshots

    def set_floats(self, plan: ManualPlan | None, hyper: tuple[float, ...], env: Any) -> None:
        """Sets the float inputs of a step in which a scheduler steps before an optimizer does.

        The schedulers step for good when the step has run; here they are asked what they will set.

        Args:
            plan: What the step does; None before an eager step has run.
            hyper: Its float inputs, from `padded`.
            env: The numbers of the host in the step.
        """
        if plan is None or not plan.snapshots or not self.engine.jit:
            return
        handles = self.engine.binding.optimizers
        width = sum(len(handle.host_hyper()) for handle in handles)
        values = list(hyper)
        if env is None:
            env = HostEnvironment({})
        coming = [step for step in plan.schedulers if not step.waits][: plan.snapshots]
        with foreseen(handles, coming, env) as doing:
            for number, _ in enumerate(doing, 1):
                start = LEADING_FLOATS + number * width
                values[start : start + width] = [v for handle in handles for v in handle.host_hyper()]
        self.engine._set_floats(tuple(values))

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def held(self, buffers: Any) -> Any:
        """The part of the gradient buffers that holds gradients; None when there are none."""
        if buffers is None or not self.live:
            return None
        handles = [self.engine.binding.optimizers[index] for index in sorted(self.live)]
        owns = [self.engine.binding.owned_by(handle) for handle in handles]
        return select(buffers, lambda path: any(own is None or own(path) for own in owns))

    def load(self, gradients: dict[str, Any]) -> None:
        """Takes back what `held` gave.

        Raises:
            RuntimeError: If it does not fit the parameters.
        """
        engine = self.engine
        found, params = flatten(gradients), flatten(engine.params_live)
        wrong = [path for path, leaf in found.items() if path not in params or leaf.shape != params[path].shape]
        if wrong:
            raise RuntimeError(f"The gradients in the checkpoint do not fit the parameters: {wrong[:20]}")
        owns = [engine.binding.owned_by(handle) for handle in engine.binding.optimizers]
        self.live = frozenset(
            index for index, own in enumerate(owns) if any(own is None or own(path) for path in found)
        )
        engine.ensure_manual_buffers(self.live)
        engine.replace_gradients(engine.strategy.put(jax.tree.map(jax.numpy.array, gradients)))

    # --- who owns what -----------------------------------------------------------------------------------------------

    def check_ownership(self) -> None:
        """Every parameter has exactly one owner, or is declared frozen.

        Raises:
            MisconfigurationException: If not; the message lists the paths.
        """
        binding = self.engine.binding
        paths = set(flatten(self.engine.params_live))
        if paths == self._checked or not binding.optimizers:
            return
        self._checked = paths
        found = find_ownership(binding.optimizers, sorted(paths))
        owner = type(binding.module).__name__
        if found.shared:
            lines = [
                f"{path} ({', '.join(_named(binding.optimizers, i) for i in found.owners[path])})"
                for path in found.shared
            ]
            raise MisconfigurationException(
                f"{owner}: these parameters belong to more than one optimizer:\n  " + _listing(lines) + "\nSay which"
                ' optimizer owns what: `{"optimizer": optax.adam(2e-4), "params": self.generator}` (a network, a list'
                " of networks, or a path pattern) in `configure_optimizers`."
            )
        unowned = [path for path in found.unowned if not self.engine.is_frozen(path)]
        if unowned:
            raise MisconfigurationException(
                f"{owner}: no optimizer owns these parameters:\n  " + _listing(unowned) + '\nAdd them to the `"params"`'
                " of an optimizer in `configure_optimizers`, or declare them frozen with `self.freeze(network)`."
            )

    # --- the words of an optimizer ------------------------------------------------------------------------------------

    def words(self, handle: Any) -> dict[str, Any]:
        """What `handle.bind` gets, so that the optimizer's words work in manual optimization."""
        if self.engine.module.automatic_optimization:
            return {}
        return {
            "step": functools.partial(self._step, handle),
            "zero_grad": functools.partial(self._zero_grad, handle),
            "toggle": self.toggle,
        }

    def provisional(self) -> Any:
        """What `configure_optimizers` gives, for a creation of variables before there is a trainer."""
        if self._provisional is None:
            module = self.engine.module
            setup = parse_optimizers(module, module.configure_optimizers())
            for handle in setup.optimizers:
                handle.bind(**self.words(handle))
            for config in setup.schedulers:
                config.scheduler.__dict__["step"] = lambda *_, **__: None  # for this creation only
            self._provisional = setup
        return self._provisional

    def _step(self, handle: Any, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        trace = current_trace()
        if trace is not None:
            if trace.manual is not None:
                return trace.manual.step(handle, closure, **kwargs)
            if trace.creating:
                return None if closure is None else closure()
            raise _wrong_step(f"{handle.name}.step()", trace.kind)
        result = None if closure is None else closure()
        self._step_outside(handle)
        return result

    def _step_outside(self, handle: Any) -> None:
        """`opt.step()` in a hook, on gradients that earlier steps left."""
        engine, index = self.engine, self.engine.binding.optimizers.index(handle)
        if index in self.live:
            state = engine.tree
            own = engine.binding.owned_by(handle)
            grads = state.grads if own is None else select(state.grads, own)
            params = state.params if own is None else select(state.params, own)
            hyper = jax.numpy.asarray(handle.host_hyper(), engine.floats.dtype)
            engine.apply_outside(index, handle, params, grads, hyper)
            handle.record_update()
        if self.on_step is not None:
            self.on_step(1)

    def _zero_grad(self, handle: Any) -> None:
        trace = current_trace()
        if trace is None:
            self.live -= {self.engine.binding.optimizers.index(handle)}
        elif trace.manual is not None:
            trace.manual.zero_grad(handle)
        elif not trace.creating:
            raise _wrong_step(f"{handle.name}.zero_grad()", trace.kind)

    def zero_grad(self) -> None:
        """Forgets the gradients of all optimizers."""
        self.live = frozenset()

    def toggle(self, handle: Any, on: bool) -> None:
        """`toggle_optimizer` and `untoggle_optimizer`; outside of a step there are no gradients to restrict."""
        trace = current_trace()
        if trace is not None and trace.manual is not None:
            trace.manual.toggle(handle, on)

    def backward(self, loss: Any, gradient: Any = None) -> None:
        """`manual_backward`.

        Raises:
            MisconfigurationException: Outside of `training_step`.
        """
        trace = current_trace()
        if trace is None:
            raise MisconfigurationException(
                "`manual_backward` was called outside of `training_step`. An array of JAX does not remember how it was "
                "computed: compute the loss and call `manual_backward` in the same `training_step`, or use `jax.grad` "
                "in the hook."
            )
        if trace.manual is not None:
            trace.manual.backward(loss, gradient)
        elif not trace.creating:
            raise _wrong_step("manual_backward", trace.kind)

    def clip(self, handle: Any, value: float, algorithm: str) -> None:
        """`self.clip_gradients(opt, ...)`."""
        trace = current_trace()
        if trace is not None:
            if trace.manual is not None:
                trace.manual.clip(handle, value, algorithm)
            return
        engine = self.engine
        if engine.tree.grads is not None:
            own = engine.binding.owned_by(handle)
            grads = engine.grads
            mine = grads if own is None else select(grads, own)
            engine.replace_gradients(jax.jit(clip_gradients, static_argnums=2)(mine, value, algorithm))


def _wrong_step(what: str, kind: str) -> MisconfigurationException:
    return MisconfigurationException(
        f"`{what}` was called in the {kind} step. It belongs into `training_step` with `self.automatic_optimization = "
        "False`."
    )


def _named(handles: list[Any], index: int) -> str:
    return f"{handles[index].name} (number {index})"


def _listing(items: list[str], limit: int = 40) -> str:
    text = "\n  ".join(items[:limit])
    return text if len(items) <= limit else f"{text}\n  and {len(items) - limit} more"
