"""One compiled variant of a step, and what people may ask of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxlightning.compile.guards import VariantGroup
from jaxlightning.compile.run_step import StepInfo

__all__ = ["CompiledStep"]


class CompiledStep:
    """One compiled variant of a step.

    Attributes:
        kind: `"train"`, `"validate"`, ...
        info: What its trace found (logged keys, outputs, attributes read).
        call: The compiled function on flat leaves.
        seconds: How long tracing and compiling took.
        group: The variants of the same step for other numbers of the host.
    """

    def __init__(
        self,
        kind: str,
        call: Callable[..., Any],
        info: StepInfo,
        treedef: Any,
        positions: Any,
        seconds: float,
        stages: Any,
    ) -> None:
        self.kind = kind
        self.call = call
        self.info = info
        self.treedef = treedef
        self.positions = positions
        self.seconds = seconds
        self.group: VariantGroup[CompiledStep] | None = None
        self._traced, self._lowered, self._compiled = stages

    @property
    def plain(self) -> bool:
        """Whether a batch needs nothing on the host but the call itself."""
        # Host leaves have to be taken out of every batch, so such a variant stays on the long way too.
        return self.positions is None and not self.info.needs_host

    @property
    def repeatable(self) -> bool:
        """Whether all that the host does for a batch is to compute with numbers of its own."""
        info = self.info
        if self._compiled is None:
            return False  # an eager step may look at anything of the trainer's, so that has to be up to date
        alone = self.positions is None and info.effects is None and not info.skipped and not info.plan.states
        alone = alone and not info.reshapes
        return alone and (not info.needs_host or (info.host is not None and not info.host.looks_back))

    def _have(self, stage: Any) -> Any:
        if stage is None:
            raise RuntimeError("`Trainer(jit=False)` runs the step eagerly: there is no jaxpr and no compiled text.")
        return stage

    @property
    def plan(self) -> Any:
        """The keys that this variant logs."""
        return self.info.plan

    @property
    def jaxpr(self) -> Any:
        """The closed jaxpr of the step."""
        return self._have(self._traced).jaxpr

    def lower(self) -> Any:
        """The `jax.stages.Lowered` of the step."""
        return self._have(self._lowered)

    def as_text(self) -> str:
        """The optimised HLO of the step."""
        return str(self._have(self._compiled).as_text())

    @property
    def memory(self) -> Any:
        """XLA's memory analysis of the step, None where the backend has none."""
        return self._have(self._compiled).memory_analysis()

    def cost_analysis(self) -> Any:
        """XLA's cost analysis of the step (floating-point operations and the like)."""
        return self._have(self._compiled).cost_analysis()
