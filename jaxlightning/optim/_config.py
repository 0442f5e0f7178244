"""What `configure_optimizers` comes to: the optimizers and the settings of their schedulers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jaxlightning.optim._handle import OptimizerHandle


@dataclass
class LRSchedulerConfig:
    """One scheduler and when to step it.

    Attributes:
        scheduler: The scheduler.
        name: What LearningRateMonitor calls it; None takes the optimizer's name.
        interval: `"epoch"` or `"step"`.
        frequency: Step at every n-th epoch, or at every n-th optimizer step of the run.
        reduce_on_plateau: Whether `step` takes the monitored metric.
        monitor: The metric's name.
        strict: Whether a missing metric is an error (otherwise a warning).
    """

    scheduler: Any
    name: str | None = None
    interval: str = "epoch"
    frequency: int = 1
    reduce_on_plateau: bool = False
    monitor: str | None = None
    strict: bool = True


@dataclass(frozen=True, kw_only=True)
class OptimizerSetup:
    """The parsed return value of `configure_optimizers`.

    Attributes:
        optimizers: The handles, in the order in which they were returned; empty if there is no optimizer.
        schedulers: The schedulers with their settings.
    """

    optimizers: list[OptimizerHandle] = field(default_factory=list)
    schedulers: list[LRSchedulerConfig] = field(default_factory=list)
