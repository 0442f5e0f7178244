"""What every compiled step of an engine needs: its variant, the variables that it calls, the host's part in it.

`engine_evaluation` and `engine_training` add the steps themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from jaxlightning.compile.binding import Binding
from jaxlightning.compile.compiled_step import CompiledStep
from jaxlightning.compile.creation import create_variables, verify_restored
from jaxlightning.compile.engine_logs import EngineLogs
from jaxlightning.compile.facts import EffectFacts
from jaxlightning.compile.host_values import HostEnvironment
from jaxlightning.compile.packing import SlotTable
from jaxlightning.compile.resident import on_host
from jaxlightning.compile.run_step import StepInfo
from jaxlightning.compile.trace import Scalars, Trace
from jaxlightning.compile.variants import Variants

if TYPE_CHECKING:
    from jaxlightning.compile.manual_engine import ManualSteps

__all__ = ["EngineSteps"]


class EngineSteps(EngineLogs):
    """Adds the compiled variants of the steps, and which of them ran last.

    Args:
        module: The user's module.
        binding: Its networks and optimizers.
        strategy: Places arrays on devices.
        variants: Compiles its steps.

    Attributes:
        on_variables_created: Called whenever networks got their variables.
        batch_leaves: Leaves of the batch of the step that runs, where some of them stay on the host; else None.
    """

    jit: bool
    seed: int
    manual: ManualSteps

    def __init__(self, module: Any, binding: Binding, strategy: Any, variants: Variants) -> None:
        self.module = module
        self.variants = variants
        self.effect_facts = EffectFacts()
        self.tables: dict[str, SlotTable] = {}
        self.batch_leaves: list[Any] | None = None
        self.on_variables_created: list[Callable[[], None]] = []
        self._eval_acc: dict[str, Any] = {}
        self._dirty = False
        self._outside_calls = 0
        # By static choices, the variant that ran last: what a step looks at first.
        self._hot: dict[Any, CompiledStep] = {}
        self._hot_eval: dict[Any, CompiledStep] = {}
        # The last training variant, where nothing but the call itself was to be done for it (see `train_batch`).
        self._plain: CompiledStep | None = None
        self._repeatable: CompiledStep | None = None
        super().__init__(binding, strategy)

    # --- which variant ------------------------------------------------------------------------------------------

    def modes_changed(self) -> None:
        """Called when a network or the module changes between training and evaluation mode."""
        self._plain = self._repeatable = None
        self._hot.clear()
        self._hot_eval.clear()

    sync_modes = modes_changed

    def mark_dirty(self) -> None:
        """Called when an attribute of the module was set outside a step."""
        self._dirty = True

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

    def _real_rows(self, arrays: Any) -> Any:
        """What a step gives to lists, dictionaries and loggers, without rows of padding; here there are none."""
        return arrays

    def _after_call(self, info: StepInfo, effects: tuple[Any, ...], env: HostEnvironment | None) -> None:
        """Does on the host what a step wants done after it."""
        if info.treedef_after is not None:
            self._restructure(info.treedef_after)
            self.modes_changed()  # forgets which variant was used last
        if info.effects is not None:
            info.effects(effects, env, self._real_rows, self.batch_leaves)

    # --- creation, and calls outside a step -----------------------------------------------------------------------

    def ensure_created(self, stage: str, batch: Any, scalars: Scalars) -> None:
        """Creates the variables of linen networks that the step of `stage` calls and that have none."""
        batch = on_host(batch) if self._unverified or self.binding.missing(self.params_live) else batch
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
