"""The engine of a run: owns the state and the compiled variants of a module's steps, and calls them.

What owns what: `core` has the pure functions, `binding` the networks, `variants` the compiled calls and their
compilation, this file the state that is carried from step to step and what the trainer asks of it. State that others
read or write between steps (parameters, checkpoints) is in `engine_state`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxlightning.compile import batch as batches
from jaxlightning.compile.binding import Binding
from jaxlightning.compile.core import EvalOptions, TrainOptions
from jaxlightning.compile.creation import create_variables, verify_restored
from jaxlightning.compile.engine_logs import EngineLogs
from jaxlightning.compile.facts import EffectFacts
from jaxlightning.compile.fused_step import Fusion
from jaxlightning.compile.host_values import HostEnvironment
from jaxlightning.compile.log_plan import LogPlan
from jaxlightning.compile.manual_engine import ManualSteps
from jaxlightning.compile.networks import LinenNetwork, NetworkInfo
from jaxlightning.compile.outputs import is_array
from jaxlightning.compile.packing import SlotTable, float_dtype
from jaxlightning.compile.paths import plain
from jaxlightning.compile.precision import Precision
from jaxlightning.compile.repeated_step import RepeatedStep
from jaxlightning.compile.run_step import StepInfo
from jaxlightning.compile.trace import Scalars, Trace
from jaxlightning.compile.variants import CompiledStep, Variants
from jaxlightning.optim._nonfinite import check_mode
from jaxlightning.utilities.exceptions import MisconfigurationException

__all__ = ["Engine", "StepOutput"]


def _joined(lead: tuple[float, ...], lists: list[list[float]]) -> tuple[float, ...]:
    return (*lead, *(value for values in lists for value in values))


class StepOutput:
    """What one step gave back; arrays are still being computed.

    Attributes:
        plan: The keys that the variant logs.
        values: Step values, shape [capacity]; `values[slot]` belongs to the key with that slot.
        states: States of the metric objects that the step called, one for each of `plan.states`.
        skipped: Whether `training_step` returned None.
        manual: What a step with manual optimization did to optimizers and schedulers, None in automatic optimization.
    """

    __slots__ = ("_arrays", "_tree", "manual", "plan", "skipped", "states", "values")

    def __init__(self, plan: LogPlan, values: Any, states: Any, skipped: bool, tree: Any, arrays: Any) -> None:
        self.plan = plan
        self.values = values
        self.states = states
        self.skipped = skipped
        self._tree = tree
        self._arrays = arrays
        self.manual: Any = None

    @property
    def outputs(self) -> Any:
        """The user's return value with device arrays (training: `{"loss": loss/N, ...}`), None when not asked for."""
        return None if self._tree is None else self._tree.rebuild(self._arrays)


class Engine(EngineLogs):
    """Compiles and runs the steps of one module.

    Args:
        module: The user's module.
        strategy: Devices and shardings; made when None.
        jit: Whether steps are compiled; False runs the same code eagerly.
        seed: Seed of parameters and random keys, 0 to 2**32 - 1.
        log_compiles: Whether every compilation is reported at INFO.
        detect_anomaly: Whether a non-finite loss or gradient raises, at the price of one read per step.
        precision: The policy of dtypes; None for "32-true".
        on_nonfinite: What becomes of an update that is not finite: None, "raise", "skip" or "warn".
        checkify: Kinds of run-time checks that compiled steps carry (see `checks.parse_checks`).
    """

    def __init__(
        self,
        module: Any,
        *,
        strategy: Any = None,
        jit: bool = True,
        seed: int = 0,
        log_compiles: bool = False,
        detect_anomaly: bool = False,
        precision: Precision | None = None,
        on_nonfinite: str | None = None,
        checkify: tuple[str, ...] = (),
    ) -> None:
        if strategy is None:
            from jaxlightning.parallel import make_strategy

            strategy = make_strategy()
        self.variants = Variants(
            strategy, jit=jit, log_compiles=log_compiles, owner=type(module).__name__, checks=checkify
        )
        self._eval_acc: dict[str, Any] = {}
        self._hot: dict[Any, CompiledStep] = {}
        self._hot_eval: dict[Any, CompiledStep] = {}
        binding = Binding(module, self, jit=jit)
        binding.precision = precision if precision is not None else binding.precision
        binding.on_nonfinite = check_mode(on_nonfinite)
        super().__init__(binding, strategy)
        self.module = module
        self.jit = jit
        self.seed = seed
        self.detect_anomaly = detect_anomaly
        self.effect_facts = EffectFacts()
        self.fusion: Fusion | None = None
        self.tables: dict[str, SlotTable] = {}
        self.on_variables_created: list[Callable[[], None]] = []
        self._dirty = False
        self._plain: CompiledStep | None = None
        self._repeatable: CompiledStep | None = None
        self._repeated: RepeatedStep | None = None
        self._plain_choice: tuple[Any, bool] | None = None
        self._hyper_lists: list[list[float]] = []
        self._floats: Any = None
        self._floats_of: tuple[float, ...] = ()
        self._floats_changed = False
        self._seed32 = int(np.array(seed % (1 << 32), np.uint32).view(np.int32))
        self._outside_calls = 0
        self.manual = ManualSteps(self)

    # --- life ---------------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Wraps the module's networks and takes over the variables of NNX modules."""
        self.module.__dict__["_engine"] = self
        self.binding.attach()
        self.adopt_parameters()
        self._adopt_nnx()
        self._dirty = True

    def detach(self) -> None:
        """Writes current values into the user's NNX objects; compiled steps stay for the next run."""
        self.refresh_nnx()

    def set_optimizers(self, handles: list[Any] | None) -> None:
        """Sets the optimizers of a training run; their states are made afresh.

        Raises:
            MisconfigurationException: If a parameter belongs to two optimizers.
        """
        self.binding.optimizers = list(handles or [])
        self.manual.reset()
        self.reset_optimizer_states()
        for handle in self.binding.optimizers:
            handle.bind(get_state=functools.partial(self.opt_state_live, handle), **self.manual.words(handle))
            handle._get_skipped = self.skipped_updates if self.binding.skips_updates else None
        self._forget(keep_evaluation=True)
        if self.variants.reports is not None:
            self.variants.reports.optimizers_changed()

    def zero_grad(self) -> None:
        """Forgets accumulated gradients."""
        self.manual.zero_grad()
        super().zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """As `EngineState.state_dict`; of a module that optimizes by itself only gradients that are there."""
        sections = super().state_dict()
        if not self.module.automatic_optimization:
            sections["gradients"] = self.manual.held(sections["gradients"])
        return sections

    def load_manual_gradients(self, gradients: Mapping[str, Any]) -> None:
        """Restores the gradients that optimizers of a module that optimizes by itself hold."""
        self.manual.load(plain(gradients))

    def modes_changed(self) -> None:
        """Called when a network or the module changes between training and evaluation mode."""
        self._plain = self._repeatable = None
        self._hot.clear()
        self._hot_eval.clear()

    sync_modes = modes_changed

    def mark_dirty(self) -> None:
        """Called when an attribute of the module was set outside a step."""
        self._dirty = True

    def number_values(self) -> dict[str, Any]:
        """The numbers on the module that steps change, for a checkpoint: `{"self.count": 7}`."""
        values = {}
        for key, why in self.effect_facts.host.numbers.items():
            if why in ("written", "made"):
                owner, name = self._number(key)
                value = None if owner is None else owner.__dict__.get(name)
                if isinstance(value, bool | int | float | np.generic):
                    values[key] = value.item() if isinstance(value, np.generic) else value
        return values

    def load_numbers(self, values: dict[str, Any]) -> None:
        """Restores what `number_values` gave, before or after steps were traced.

        Args:
            values: By name; those of modules that are not here are left out.
        """
        for key, value in values.items():
            owner, name = self._number(key)
            if owner is not None:
                owner.__dict__[name] = value
        self._dirty = True

    def _number(self, key: str) -> tuple[Any, str]:
        prefix, _, name = key.removeprefix("self.").rpartition(".")
        return self.binding.owners.get(f"{prefix}." if prefix else ""), name

    def host_code_ran(self) -> None:
        """Called after hooks of the user's: they may have changed what a step reads, without any assignment to see."""
        if self.variants.hidden_reads:
            self._dirty = True

    def check_constants(self) -> None:
        """Drops compiled steps for which an attribute that they read has another value now."""
        self._dirty = False
        if self._exposed:
            self.adopt_exposed()
        if self._nnx_exposed:
            self._adopt_nnx()
        if self.jit and self.variants.drop_changed(self):
            self._plain = self._repeatable = None
            self._hot.clear()
            self._hot_eval.clear()

    def _forget(self, keep_evaluation: bool = False) -> None:
        self.variants.clear(keep_evaluation)
        self._plain = self._repeatable = None
        self._hot.clear()
        self._hot_eval.clear()

    # --- training -----------------------------------------------------------------------------------------------

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

    def repeated_step(self, clip: tuple[float | None, str | None], want_outputs: bool) -> RepeatedStep | None:
        """The step of the batch before, for batches between which the host changes nothing; None if there is none.

        Args:
            clip: As in `train_batch`.
            want_outputs: As in `train_batch`.
        """
        variant = self._plain or self._repeatable
        if (
            variant is None
            or not variant.repeatable
            or self._dirty
            or self._nnx_exposed
            or self.detect_anomaly
            or self._plain_choice != (clip, want_outputs)
            or any(
                handle.host_hyper() is not known
                for handle, known in zip(self.binding.optimizers, self._hyper_lists, strict=True)
            )
        ):
            return None
        known = self._repeated
        if known is None or known.variant is not variant or not known.fits(self._floats):
            known = self._repeated = RepeatedStep(self, variant)
        return known

    def fused_variant(self, base: CompiledStep, stacked: list[Any], integers: Any, unroll: int) -> CompiledStep:
        """The variant that does what `base` does for several batches in one call.

        Args:
            base: The variant for one batch, of `repeated_step`.
            stacked: Leaves of the batches, stacked along a new first axis.
            integers: Integer inputs of the steps, int32 `[steps, 5]`.
            unroll: Steps that are written out.
        """
        clip, outputs = self._plain_choice or ((None, None), False)
        clipping = (clip[1] or "norm") if clip[0] else None
        options = TrainOptions(False, True, True, clipping, outputs, self.detect_anomaly)
        return self.variants.fused(self, options, self._table("train"), base.treedef, stacked, integers, unroll)

    def output_of(self, variant: CompiledStep, values: Any, states: Any, outputs: Any) -> StepOutput:
        """What a call of a variant gave, as the loops take it."""
        info = variant.info
        return StepOutput(info.plan, values, states, info.skipped, info.outputs, outputs)

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
                self.manual.set_floats(variant.info.manual, hyper)
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
                self.manual.set_floats(variant.info.manual, hyper)
            self._leaves, values, states, outputs, finite, effects = variant.call(
                self._leaves, arrays, ints, self._floats, *host
            )
        self._nnx_stale = True
        if finite is not None:
            self._raise_anomaly(finite, variant, micro_step, batch)
        if variant.info.needs_host:
            self._after_call(variant.info, effects, env)
        if variant.info.host is not None and env is not None:
            variant.info.host.finish(env)
        out = StepOutput(variant.info.plan, values, states, variant.info.skipped, variant.info.outputs, outputs)
        out.manual = variant.info.manual
        return out

    def _real_rows(self, arrays: Any) -> Any:
        """What a step gives to lists, dictionaries and loggers, without rows of padding; here there are none."""
        return arrays

    def environment(self, batch_idx: int, current_epoch: int, global_step: int) -> HostEnvironment:
        """The numbers of the host in one step."""
        return HostEnvironment(
            self.effect_facts.host.sources, batch_idx=batch_idx, current_epoch=current_epoch, global_step=global_step
        )

    def _choose(self, latest: CompiledStep, env: HostEnvironment) -> tuple[CompiledStep | None, tuple[Any, ...]]:
        """The variant for these numbers beside the one that ran last, and its computed inputs; None: to be compiled."""
        self.variants.moment += 1
        variant = None if latest.group is None else latest.group.find(env)
        if variant is None or variant.info.host is None:
            return variant, ()
        return variant, variant.info.host.inputs(env)

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

    def _after_call(self, info: StepInfo, effects: tuple[Any, ...], env: HostEnvironment | None) -> None:
        """Does on the host what a step wants done after it."""
        if info.treedef_after is not None:
            self._restructure(info.treedef_after)
            self.modes_changed()  # forgets which variant was used last
        if info.effects is not None:
            info.effects(effects, env, self._real_rows)

    # --- evaluation ---------------------------------------------------------------------------------------------

    def eval_step(
        self,
        stage: str,
        batch: Any,
        *,
        batch_idx: int,
        dataloader_idx: int | None = None,
        current_epoch: int = 0,
        global_step: int = 0,
        want_outputs: bool = False,
    ) -> StepOutput:
        """Runs one evaluation batch; `stage` is `"validate"`, `"test"`, `"sanity_check"` or `"predict"`."""
        leaves, treedef = jax.tree_util.tree_flatten(batch)
        arrays, positions = batches.split(leaves)
        if self._dirty or self._nnx_exposed:
            self.check_constants()
        ints = np.array((self._seed32, batch_idx, batch_idx, current_epoch, global_step), np.int32)
        flags = (stage, dataloader_idx, want_outputs)
        state = self.evaluation_leaves()
        acc = self._eval_acc.get(stage)
        variant, env = self._hot_eval.get(flags), None
        host: tuple[Any, ...] = ()
        if variant is not None and variant.info.host is not None:
            env = self.environment(batch_idx, current_epoch, global_step)
            variant, host = self._choose(variant, env)
        if variant is not None and variant.treedef == treedef and variant.positions == positions:
            try:
                self._eval_acc[stage], values, states, outputs, effects = variant.call(state, acc, arrays, ints, *host)
            except TypeError:
                variant = None
        else:
            variant = None
        if variant is None:
            self.ensure_created(stage, batch, Scalars.of([int(i) for i in ints[1:]], dataloader_idx))
            state = self.evaluation_leaves()
            table = self._table(stage)
            env = self.environment(batch_idx, current_epoch, global_step)
            variant = self.variants.evaluate(
                self,
                EvalOptions(stage, dataloader_idx, want_outputs),
                table,
                batch,
                arrays,
                treedef,
                positions,
                ints,
                env,
            )
            state = self.evaluation_leaves()  # the trace may have found more of it
            self._hot_eval[flags] = variant
            host = () if variant.info.host is None else variant.info.host.inputs(env)
            self._eval_acc[stage], values, states, outputs, effects = variant.call(
                state, self._eval_acc[stage], arrays, ints, *host
            )
        if variant.info.needs_host:
            self._after_call(variant.info, effects, env)
        if variant.info.host is not None and env is not None:
            variant.info.host.finish(env)
        return StepOutput(variant.info.plan, values, states, False, variant.info.outputs, outputs)

    def predict_step(
        self,
        batch: Any,
        *,
        batch_idx: int,
        dataloader_idx: int | None = None,
        current_epoch: int = 0,
        global_step: int = 0,
    ) -> StepOutput:
        """Runs one prediction batch."""
        return self.eval_step(
            "predict", batch, batch_idx=batch_idx, dataloader_idx=dataloader_idx, current_epoch=current_epoch,
            global_step=global_step, want_outputs=True,
        )  # fmt: skip

    # --- creation and calls outside a step -------------------------------------------------------------------------

    def ensure_created(self, stage: str, batch: Any, scalars: Scalars) -> None:
        """Creates the variables of linen networks that the step of `stage` calls and that have none."""
        if self._unverified:
            self._unverified -= verify_restored(self, stage, batch, scalars, self._unverified, strict=self._strict_load)
        if self.binding.missing(self.params_live):
            self._take(create_variables(self, stage, batch, scalars))

    def create_from_example(self) -> None:
        """Creates variables from the module's `example_input_array` by calling `forward` with it."""
        example = self.module.example_input_array
        if example is None or not self.binding.missing(self.params_live):
            return
        self._take(create_variables(self, "predict", example, Scalars(0, 0, 0, 0), forward=True))

    def _take(self, created: tuple[Any, Any]) -> None:
        params, variables = created
        if params is not None:
            self.take_created(params, variables)
            self._forget()
            for callback in self.on_variables_created:
                callback()

    def outside_trace(self) -> Trace:
        """A trace for calling networks outside a step, on the current variables."""
        self._outside_calls += 1
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self.seed), 0x6F757473), self._outside_calls)
        zero = Scalars(0, 0, 0, 0)
        return Trace(
            kind="predict", key=key, scalars=zero, params=dict(self.params_live), variables=dict(self.variables_live)
        )

    def copy_network(self, network: LinenNetwork, memo: dict[int, Any]) -> LinenNetwork:
        """See `Binding.copy_network`."""
        return self.binding.copy_network(network, memo)

    def block_until_ready(self) -> None:
        """Waits until the last dispatched step is done."""
        jax.block_until_ready(self._leaves)  # type: ignore[no-untyped-call]

    # --- what is there ----------------------------------------------------------------------------------------------

    @property
    def has_variables(self) -> bool:
        """Whether every network has its variables."""
        return not self.binding.missing(self.params_live)

    def networks(self) -> list[NetworkInfo]:
        """One entry per network, for summaries."""
        params, variables, modes = self.params_live, self.variables_live, self.binding.modes()
        infos = []
        for name in self.binding.names:
            linen = self.binding.linen.get(name)
            if linen is not None:
                kind = str(getattr(linen._module, "type_name", type(linen._module).__name__))
            elif name in self.binding.raw:
                kind = "Parameter"
            else:
                kind = type(self.binding.nnx.modules[name]).__name__  # type: ignore[union-attr]
            own = params.get(name)
            infos.append(
                NetworkInfo(
                    name=name,
                    type_name=kind,
                    params={"": own} if is_array(own) else own,
                    variables=variables.get(name),
                    mode="train" if modes.get(name, True) else "eval",
                )
            )
        return infos

    @property
    def trace_counts(self) -> dict[str, int]:
        """How often the step of each kind was compiled."""
        return self.variants.counts

    @property
    def compiled(self) -> dict[str, CompiledStep]:
        """The most recent compiled step of each kind."""
        return self.variants.latest

    def require_single_optimizer(self) -> None:
        """Automatic optimization updates with one optimizer.

        Raises:
            MisconfigurationException: If there are several.
        """
        if len(self.binding.optimizers) > 1:
            raise MisconfigurationException(
                "Training with multiple optimizers is only supported with manual optimization. Set "
                "`self.automatic_optimization = False` in the module's `__init__`."
            )
