"""Training steps of an engine: the fused step, the two halves of a split one, and the short way of the hot loop."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxlightning.compile import batch as batches
from jaxlightning.compile.binding import Binding
from jaxlightning.compile.compiled_step import CompiledStep
from jaxlightning.compile.core import TrainOptions
from jaxlightning.compile.engine_evaluation import EngineEvaluation
from jaxlightning.compile.host_values import HostEnvironment
from jaxlightning.compile.manual_engine import ManualSteps
from jaxlightning.compile.packing import float_dtype
from jaxlightning.compile.step_output import StepOutput
from jaxlightning.compile.trace import Scalars
from jaxlightning.compile.variants import Variants

__all__ = ["EngineTraining"]


def _joined(lead: tuple[float, ...], lists: list[list[float]]) -> tuple[float, ...]:
    return (*lead, *(value for values in lists for value in values))


class EngineTraining(EngineEvaluation):
    """Adds the steps that change the state.

    Args:
        module: The user's module.
        binding: Its networks and optimizers.
        strategy: Places arrays on devices.
        variants: Compiles its steps.

    Attributes:
        manual: The steps of a module that optimizes by itself.
    """

    detect_anomaly: bool

    def __init__(self, module: Any, binding: Binding, strategy: Any, variants: Variants) -> None:
        super().__init__(module, binding, strategy, variants)
        self.manual = ManualSteps(self)
        self._plain_choice: tuple[Any, bool] | None = None
        self._hyper_lists: list[list[float]] = []
        self._floats: Any = None
        self._floats_of: tuple[float, ...] = ()
        self._floats_changed = False

    def train_step(
        self,
        batch: Any,
        *,
        batch_idx: int,
        current_epoch: int = 0,
        global_step: int = 0,
        micro_step: int = 0,
        accumulate: int = 1,
        window_start: bool = True,
        apply: bool = True,
        window_count: int = 1,
        clip: tuple[float | None, str | None] = (None, None),
        want_outputs: bool = False,
    ) -> StepOutput:
        """Runs one training batch, fused with the update when it ends an accumulation window.

        Args:
            batch: Pytree of arrays; other leaves stay on the host.
            batch_idx: Index of the batch in the epoch, from 0.
            current_epoch: Index of the epoch, from 0.
            global_step: Optimizer steps so far.
            micro_step: Batches so far, over the whole run; random keys derive from it.
            accumulate: Batches per accumulation window (N).
            window_start: Whether the batch is the first of its window.
            apply: Whether the batch ends in an update.
            window_count: Batches in the window so far, this one included; the gradient is their mean.
            clip: Clip value (None: off) and algorithm, `"norm"` or `"value"`.
            want_outputs: Whether the return value of the step is needed.

        Returns:
            Log values and outputs, still being computed.
        """
        value, algorithm = clip
        buffer = accumulate != 1 or self.keep_gradients
        clipping = (algorithm or "norm") if value else None
        # A window whose batches so far gave no gradient (None was returned) has not really begun.
        held = buffer and self.has_gradients and not window_start
        out = self._train(
            (buffer, not held, apply, clipping, want_outputs), batch, batch_idx, current_epoch, global_step,
            micro_step,
            1.0 / accumulate, accumulate / window_count, value or 0.0,
        )  # fmt: skip
        if buffer:
            self.has_gradients = held or not out.skipped
        if apply and not (out.skipped and not held):
            for handle in self.binding.optimizers:
                handle.updates += 1
        return out

    def train_batch(
        self,
        batch: Any,
        batch_idx: int,
        current_epoch: int,
        global_step: int,
        micro_step: int,
        clip: tuple[float | None, str | None],
        want_outputs: bool,
    ) -> StepOutput:
        """What `train_step` does for a batch that is a window by itself, without a look at anything that cannot differ.

        Whatever is not as it was in the batch before (a shape, a hyper-parameter, an attribute) goes to `train_step`.
        """
        variant, hyper_lists = self._plain, self._hyper_lists
        if (
            variant is not None
            and not self._dirty
            and not self._nnx_exposed
            and self._plain_choice == (clip, want_outputs)
        ):
            leaves, treedef = jax.tree_util.tree_flatten(batch)
            handles = self.binding.optimizers
            for handle, known in zip(handles, hyper_lists, strict=True):
                if handle.host_hyper() is not known:  # a schedule, a plateau or a person changed something
                    self._hyper_lists = [each.host_hyper() for each in handles]
                    hyper = _joined((1.0, 1.0, clip[0] or 0.0), self._hyper_lists)
                    if hyper != self._floats_of:
                        self._set_floats(hyper)
                    break
            else:
                if self._floats_changed:
                    self._settle_floats()
            if treedef == variant.treedef:
                ints = np.array((self._seed32, micro_step, batch_idx, current_epoch, global_step), np.int32)
                try:
                    self._leaves, values, states, outputs, finite, _ = variant.call(
                        self._leaves, leaves, ints, self._floats
                    )
                except TypeError:  # another shape or kind of leaf; nothing was consumed
                    pass
                else:
                    self._nnx_stale = True
                    info = variant.info
                    if finite is not None:
                        self._raise_anomaly(finite, variant, micro_step, batch)
                    if not info.skipped:
                        for handle in handles:
                            handle.updates += 1
                    return StepOutput(info.plan, values, states, info.skipped, info.outputs, outputs)
        out = self.train_step(
            batch,
            batch_idx=batch_idx,
            current_epoch=current_epoch,
            global_step=global_step,
            micro_step=micro_step,
            clip=clip,
            want_outputs=want_outputs,
        )
        value, algorithm = clip
        flags = (self.keep_gradients, True, True, (algorithm or "norm") if value else None, want_outputs)
        hot = None if self.keep_gradients else self._hot.get(flags)
        self._plain = hot if hot is not None and hot.plain else None
        self._repeatable = hot if hot is not None and hot.repeatable else None
        self._plain_choice = (clip, want_outputs)
        self._hyper_lists = [handle.host_hyper() for handle in self.binding.optimizers]
        if self._floats_of != _joined((1.0, 1.0, value or 0.0), self._hyper_lists):
            self._plain = self._repeatable = None
        return out

    def grad_step(
        self,
        batch: Any,
        *,
        batch_idx: int,
        current_epoch: int = 0,
        global_step: int = 0,
        micro_step: int = 0,
        accumulate: int = 1,
        window_start: bool = True,
        want_outputs: bool = False,
    ) -> StepOutput:
        """The first half of a split step: adds g/N to `grads`; arguments as in `train_step`."""
        if not self.keep_gradients:
            self.keep_gradients = True
            self._forget(keep_evaluation=True)
        out = self._train(
            (True, window_start, False, None, want_outputs), batch, batch_idx, current_epoch, global_step, micro_step,
            1.0 / accumulate, 1.0, 0.0,
        )  # fmt: skip
        self.has_gradients = not out.skipped or (self.has_gradients and not window_start)
        return out

    def update_step(self, *, window_count: int = 1, accumulate: int = 1) -> None:
        """The second half of a split step: the optimizers apply `grads`, times N/count."""
        if not self.binding.optimizers or not self.has_gradients:
            return
        handles = self.binding.optimizers
        hyper = _joined((1.0, accumulate / window_count, 0.0), [handle.host_hyper() for handle in handles])
        for handle in handles:
            handle.updates += 1
        if hyper != self._floats_of:
            self._set_floats(hyper)
            self._plain = self._repeatable = None
        variant = self.variants.update(self)
        self._leaves = variant.call(self._leaves, self._floats)
        self._nnx_stale = True

    # --- behind them --------------------------------------------------------------------------------------------

    def _train(
        self,
        flags: tuple[Any, ...],
        batch: Any,
        batch_idx: int,
        current_epoch: int,
        global_step: int,
        micro_step: int,
        share: float,
        scale: float,
        clip: float,
    ) -> StepOutput:
        leaves, treedef = jax.tree_util.tree_flatten(batch)
        arrays, positions = batches.split(leaves)
        self.batch_leaves = None if positions is None else leaves
        if self._dirty or self._nnx_exposed:
            self.check_constants()
        hyper = _joined((share, scale, clip), [handle.host_hyper() for handle in self.binding.optimizers])
        if flags[5:]:
            hyper = self.manual.padded(hyper, flags[5])
        if hyper != self._floats_of:
            self._set_floats(hyper)
            self._plain = self._repeatable = None
        elif self._floats_changed:
            self._settle_floats()
        ints = np.array((self._seed32, micro_step, batch_idx, current_epoch, global_step), np.int32)
        variant, env = self._hot.get(flags), None
        host: tuple[Any, ...] = ()
        if variant is not None and variant.info.host is not None:
            env = self.environment(batch_idx, current_epoch, global_step)
            variant, host = self._choose(variant, env)
        if variant is not None and variant.treedef == treedef and variant.positions == positions:
            if flags[5:]:
                self.manual.set_floats(variant.info.manual, hyper, env)
            try:
                self._leaves, values, states, outputs, finite, effects = variant.call(
                    self._leaves, arrays, ints, self._floats, *host
                )
            except TypeError:  # another shape; the compiled call checks before it consumes anything
                variant = None
        else:
            variant = None
        if variant is None:
            env = self.environment(batch_idx, current_epoch, global_step)
            variant = self._train_variant(flags, batch, arrays, treedef, positions, ints, env)
            host = () if variant.info.host is None else variant.info.host.inputs(env)
            if flags[5:]:
                self.manual.set_floats(variant.info.manual, hyper, env)
            self._leaves, values, states, outputs, finite, effects = variant.call(
                self._leaves, arrays, ints, self._floats, *host
            )
        self._nnx_stale = True
        if not self.jit and self.binding.missing(self.params_live):
            self._hot.clear()  # an eager step has to be asked again whether it calls a network that is not there yet
        if finite is not None:
            self._raise_anomaly(finite, variant, micro_step, batch)
        if variant.info.needs_host:
            self._after_call(variant.info, effects, env)
        if variant.info.host is not None and env is not None:
            variant.info.host.finish(env)
        info = variant.info
        out = StepOutput(info.plan, values, states, info.skipped, info.outputs, outputs, self.batch_leaves)
        out.manual = info.manual
        return out

    def _train_variant(
        self,
        flags: tuple[Any, ...],
        batch: Any,
        arrays: Any,
        treedef: Any,
        positions: Any,
        ints: Any,
        env: HostEnvironment,
    ) -> CompiledStep:
        self.ensure_created("train", batch, Scalars.of([int(i) for i in ints[1:]]))
        buffer, window_start, apply, clip, outputs, *manual = flags
        options = TrainOptions(
            buffer, window_start, apply, clip, outputs, self.detect_anomaly, manual[0] if manual else None
        )
        if manual:
            self.manual.check_ownership()
        if buffer:
            self.ensure_gradient_buffer()
        self.ensure_optimizer_states()
        if manual and (manual[0].hooks or not self.jit):
            self.ensure_manual_buffers(range(len(self.binding.optimizers)))
        table = self._table("train")
        variant = self.variants.train(self, options, table, batch, arrays, treedef, positions, ints, env)
        self._hot[flags] = variant
        return variant

    def _set_floats(self, hyper: tuple[float, ...]) -> None:
        values = np.array(hyper, float_dtype())
        # A device array costs less per call than a numpy array, but to make one costs more than many calls: what
        # changes at every step goes in as it is.
        self._floats = values if self._floats_changed else self.strategy.put(values)
        self._floats_changed = True
        self._floats_of = hyper

    def _settle_floats(self) -> None:
        """Puts the float inputs on the device: they stayed as they were for a step."""
        self._floats_changed = False
        self._floats = self.strategy.put(self._floats)

    def _raise_anomaly(self, finite: Any, variant: CompiledStep, micro_step: int, batch: Any) -> None:
        flags = np.asarray(finite)
        if not flags.all():
            from jaxlightning.compile.anomaly import raise_anomaly

            state = self.tree  # as it was before: the step keeps what it had when a flag is down
            name = variant.info.finite_names[int(np.argmin(flags))]
            raise_anomaly(
                name,
                batch,
                micro_step,
                type(self.module).__name__,
                self.module,
                params=state.params,
                variables=state.variables,
            )
