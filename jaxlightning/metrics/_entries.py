"""The parts of a result collection: one logged key, the views of all keys, and how two sums become one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from jaxlightning.compile.log_plan import LogKey, LogMeta, LogPlan
from jaxlightning.metrics._host_value import HostValue
from jaxlightning.metrics._objects import find_metric
from jaxlightning.metrics.metric import Metric

__all__ = ["Entry", "Items", "KnownPlans", "Owner", "StepValues", "combined", "reduced", "storage_key"]


class StepValues(Protocol):
    """What a compiled step hands over.

    Attributes:
        plan: Which keys it logged, and which metric states it returns.
        values: The step values of the keys in one vector.
        states: The metric states.
    """

    plan: LogPlan
    values: Any
    states: Any


@dataclass(slots=True)
class Entry:
    """One logged key of a stage.

    Attributes:
        meta: The options of its first call.
        active: Whether something was logged since the last reset.
        slot: Its place in the packed vectors, None if no compiled step logged it since the last reset.
        host: What host code logged under it, or None.
        host_calls: How often host code logged it in this run.
        metric: The metric object on the module whose value it is, or None.
        passed: The merged value of metric objects that were passed to `self.log`, such as clu's.
    """

    meta: LogMeta
    active: bool = False
    slot: int | None = None
    host: HostValue | None = None
    host_calls: int = 0
    metric: Metric | None = None
    passed: Any = None

    def names(self, on_step: bool) -> tuple[str, str]:
        """The key as the user gave it and as the loggers see it, both with the dataloader suffix where there is one."""
        meta = self.meta
        forked = f"_{'step' if on_step else 'epoch'}" if meta.on_step and meta.on_epoch else ""
        suffix = ""
        if meta.add_dataloader_idx and meta.dataloader_idx is not None:
            suffix = f"/dataloader_idx_{meta.dataloader_idx}"
        return f"{meta.name}{suffix}", f"{meta.name}{forked}{suffix}"

    def reset(self) -> None:
        """Forget the values."""
        self.active = False
        self.slot = self.passed = None
        if self.host is not None:
            self.host.reset()
        if self.metric is not None:
            self.metric.reset()


@dataclass(slots=True)
class Items:
    """The three views of what is logged at a moment; values are numbers or `Ref`s.

    Attributes:
        callback: For callbacks (`trainer.callback_metrics`).
        log: For loggers.
        bar: For the progress bar.
        versions: For every name in `callback` what tells this measurement from the next.
    """

    callback: dict[str, Any] = field(default_factory=dict)
    log: dict[str, Any] = field(default_factory=dict)
    bar: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)


class Owner:
    """What a collection asks of the trainer: the engine's accumulators, and the metric objects on the module.

    Args:
        trainer: The trainer.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def read_accumulators(self, stage: str) -> np.ndarray[Any, Any]:
        """The accumulators of a stage, shape [2, capacity]; one device read."""
        return np.asarray(self._trainer.lightning_module._engine.read_accumulators(stage))

    def reset_accumulators(self, stage: str) -> None:
        """Put them back to their neutral values."""
        engine = getattr(self._trainer.lightning_module, "_engine", None)
        if engine is not None:
            engine.reset_accumulators(stage)

    def preload_accumulators(self, stage: str, rows: list[tuple[LogMeta, Any, Any]]) -> list[int]:
        """Start them from saved sums and weights; returns the slots of the keys."""
        slots: list[int] = self._trainer.lightning_module._engine.preload_accumulators(stage, rows)
        return slots

    def find_metric(self, path: str) -> Metric:
        """The metric object at a path on the module."""
        return find_metric(self._trainer.lightning_module, path)


class KnownPlans:
    """One object for all equal plans, found by identity first: comparing plans looks at every key.

    Compiled variants hand over the same few objects again and again; an eager step makes a new, equal one each time.
    """

    def __init__(self) -> None:
        self._by_value: dict[LogPlan, LogPlan] = {}
        self._by_id: dict[int, tuple[LogPlan, LogPlan]] = {}

    def canonical(self, plan: LogPlan) -> LogPlan:
        """The one object for a plan."""
        found = self._by_id.get(id(plan))
        if found is not None:
            return found[1]
        known = self._by_value.setdefault(plan, plan)
        if len(self._by_id) >= 64:
            self._by_id.clear()
        self._by_id[id(plan)] = (plan, known)  # holds the plan, so that its id stays its own
        return known


def storage_key(meta: LogMeta) -> LogKey:
    """What makes two calls the same metric; without the suffix all loaders share one."""
    return (meta.fx, meta.name, meta.dataloader_idx if meta.add_dataloader_idx else None)


def combined(reduction: str, rows: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    """One `(total, weight)` from those of device and host; `(None, 0)` if there are none."""
    if not rows:
        return None, 0
    total, weight = rows[0]
    for other, more in rows[1:]:
        weight = weight + more
        if reduction in ("mean", "sum"):
            total = total + other
        else:
            total = (np.minimum if reduction == "min" else np.maximum)(total, other)
    return total, weight


def reduced(reduction: str, rows: list[tuple[Any, Any]]) -> Any:
    """The epoch value from the sums of device and host; None if there are none."""
    total, weight = combined(reduction, rows)
    if total is None or reduction != "mean":
        return total
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.divide(total, weight, dtype=total.dtype if isinstance(total, np.generic) else None)
