"""The engine of a run: owns the state and the compiled variants of a module's steps, and calls them.

What owns what: `core` has the pure functions, `binding` the networks, `variants` the compiled calls and their
compilation. The engine itself is a chain of classes, each of which adds one topic: `engine_state` the carried state and
its views, `engine_optimizers` optimizer states and gradients, `engine_attributes` arrays on the module,
`engine_checkpoint` saving and restoring, `engine_logs` logged values, `engine_steps` the variants,
`engine_evaluation` and `engine_training` the steps, and this file what a trainer asks of all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxlightning.compile.binding import Binding
from jaxlightning.compile.compiled_step import CompiledStep
from jaxlightning.compile.core import TrainOptions
from jaxlightning.compile.engine_training import EngineTraining
from jaxlightning.compile.fused_step import Fusion
from jaxlightning.compile.host_values import HostEnvironment
from jaxlightning.compile.networks import LinenNetwork, NetworkInfo
from jaxlightning.compile.outputs import is_array
from jaxlightning.compile.owners import owners_of
from jaxlightning.compile.paths import plain
from jaxlightning.compile.precision import Precision
from jaxlightning.compile.repeated_step import RepeatedStep
from jaxlightning.compile.step_output import StepOutput
from jaxlightning.compile.variants import Variants
from jaxlightning.optim._nonfinite import check_mode
from jaxlightning.utilities.exceptions import MisconfigurationException
from jaxlightning.utilities.host_memory import HostCopies

__all__ = ["Engine", "StepOutput"]


class Engine(EngineTraining):
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
        variants = Variants(strategy, jit=jit, log_compiles=log_compiles, owner=type(module).__name__, checks=checkify)
        binding = Binding(module, self, jit=jit)
        binding.precision = precision if precision is not None else binding.precision
        binding.on_nonfinite = check_mode(on_nonfinite)
        super().__init__(module, binding, strategy, variants)
        self.jit = jit
        self.seed = seed
        self.detect_anomaly = detect_anomaly
        self.fusion: Fusion | None = None
        self._repeated: RepeatedStep | None = None
        self._seed32 = int(np.array(seed % (1 << 32), np.uint32).view(np.int32))

    # --- life ---------------------------------------------------------------------------------------------------

    began_with_weights = False
    """Whether the module had weights before this engine: trained, loaded or created by another one."""

    def attach(self) -> None:
        """Wraps the module's networks and takes over the variables of NNX modules."""
        self._take_over()
        self.module.__dict__["_engine"] = self
        self.binding.attach()
        self.adopt_returned()
        self.adopt_parameters()
        self._adopt_nnx()
        if any("_copied_weights" in owner.__dict__ for owner in self.binding.owners.values()):
            from jaxlightning.module_copies import take_copied_weights

            take_copied_weights(self)
            self.began_with_weights = True
        self._dirty = True

    def _take_over(self) -> None:
        """Lets engines that the module, or a module on it, had before hand over what they hold of it.

        The same module may have been trained alone and be a part of this one now, or the other way round.
        """
        last = self.module.__dict__.get("_engine")
        for prefix, owner in owners_of(self.module).items():
            before = owner.__dict__.get("_engine")
            if before is None or before is self:
                continue
            before.release_attributes(owner)
            # Pure functions of one module with several seeds begin each with weights of their own.
            fresh = self.effect_facts.pure and before.effect_facts.pure and not before.began_with_weights
            if fresh:
                continue
            if (not prefix or before is not last) and "_copied_weights" not in owner.__dict__:
                from jaxlightning.module_copies import weights_of

                found = weights_of(owner, before)
                if found["params"] or found["variables"]:
                    owner.__dict__["_copied_weights"] = found

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
            handle.bind(
                get_state=functools.partial(self.opt_state_live, handle),
                get_skipped=self.skipped_updates if self.binding.skips_updates else None,
                **self.manual.words(handle),
            )
        self._forget(keep_evaluation=True)
        if self.variants.reports is not None:
            self.variants.reports.optimizers_changed()

    def zero_grad(self) -> None:
        """Forgets accumulated gradients."""
        self.manual.zero_grad()
        super().zero_grad()

    def state_dict(self, copies: HostCopies | None = None) -> dict[str, Any]:
        """As `EngineCheckpoint.state_dict`; of a module that optimizes by itself only gradients that are there."""
        sections = super().state_dict(copies)
        if not self.module.automatic_optimization:
            sections["gradients"] = self.manual.held(sections["gradients"])
        return sections

    def load_manual_gradients(self, gradients: Mapping[str, Any]) -> None:
        """Restores the gradients that optimizers of a module that optimizes by itself hold."""
        self.manual.load(plain(gradients))

    def copy_network(self, network: LinenNetwork, memo: dict[int, Any]) -> LinenNetwork:
        """See `Binding.copy_network`."""
        return self.binding.copy_network(network, memo)

    def block_until_ready(self) -> None:
        """Waits until the last dispatched step is done."""
        jax.block_until_ready(self._leaves)  # type: ignore[no-untyped-call]

    # --- runs of batches between which the host changes nothing ------------------------------------------------------

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

    def fused_variant(
        self,
        base: CompiledStep,
        stacked: list[Any],
        integers: Any,
        unroll: int,
        counted: bool,
        env: HostEnvironment | None = None,
    ) -> CompiledStep:
        """The variant that does what `base` does for several batches in one call.

        Args:
            base: The variant for one batch, of `repeated_step`.
            stacked: Leaves of the batches, stacked along a new first axis.
            integers: Integer inputs of the steps, int32 `[steps, 5]`, or `[steps + 1, 5]` when they are counted.
            unroll: Steps that are written out.
            counted: Whether a call says how many of the steps run.
            env: Numbers of the host at the first of the steps, None for a step that knows none.
        """
        clip, outputs = self._plain_choice or ((None, None), False)
        clipping = (clip[1] or "norm") if clip[0] else None
        options = TrainOptions(False, True, True, clipping, outputs, self.detect_anomaly)
        return self.variants.fused(
            self, options, self._table("train"), base.treedef, stacked, integers, unroll, counted, env
        )

    def output_of(self, variant: CompiledStep, values: Any, states: Any, outputs: Any) -> StepOutput:
        """What a call of a variant gave, as the loops take it."""
        info = variant.info
        return StepOutput(info.plan, values, states, info.skipped, info.outputs, outputs)

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
