"""Sending metrics to loggers: at once, or a little late so that neither the host nor the device waits for the other.

A host that waits for the step it has just started lets the device's queue run dry; on a CPU it takes about sixteen
steps until both are at full speed again, many times what the logging costs. So values that may be late are collected,
and sent together once the device is past them.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxlightning.metrics._refs import Ref, Snapshot, fetch, on_cpu, to_scalar

__all__ = ["Emission", "EmissionQueue", "StepEmission", "StepLayout", "may_be_late"]

# Host code in one of these runs while batches go by, and could see that a logger has not got its values yet.
_BATCH_HOOKS = (
    *(f"on_{stage}_batch_{end}" for stage in ("train", "validation", "test") for end in ("start", "end")),
    *("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"),
    *("optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "backward", "lr_scheduler_step"),
    *("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"),
)

# A validation epoch may log at every batch: this bounds what waits, at one small array per batch.
_MAX_WAITING = 64

# Seconds for which values that may be late are collected.
_COLLECT = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Emission:
    """One call of `log_metrics` that is due.

    Attributes:
        metrics: What the loggers get; values are numbers or `Ref`s.
        bar: What the progress bar learns at the same moment.
        step: The step; None takes a metric named "step", or else `axis`, and adds the epoch.
        axis: Number of batches that stepped when the emission became due.
        epoch: The epoch at that moment.
    """

    metrics: Mapping[str, Any]
    bar: Mapping[str, Any]
    step: int | None
    axis: int
    epoch: int

    def snapshots(self) -> list[Snapshot]:
        """The arrays that the values are in, each once."""
        values = [*self.metrics.values(), *self.bar.values()]
        return list(dict.fromkeys(value.snapshot for value in values if type(value) is Ref))

    @property
    def has_row(self) -> bool:
        """Whether there is something for the loggers."""
        return bool(self.metrics)

    def bar_values(self) -> dict[str, Any]:
        """What the bar shows, once the arrays were fetched."""
        return _scalars(self.bar)

    def row(self) -> tuple[dict[str, Any], int | None]:
        """What the loggers get and its step, once the arrays were fetched."""
        metrics = _scalars(self.metrics)
        if self.step is not None:
            return metrics, self.step
        return _on_axis(metrics, self.axis, self.epoch)


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Where the step values of a stage lie in the vector that its compiled step returns.

    Attributes:
        log: The place of each name that loggers get.
        bar: The place of each name that the bar gets.
    """

    log: Mapping[str, int]
    bar: Mapping[str, int]

    @property
    def is_empty(self) -> bool:
        """Whether nobody gets anything."""
        return not (self.log or self.bar)


@dataclass(frozen=True, slots=True)
class StepEmission:
    """The `Emission` of a step whose values all lie in one vector: it costs the same for one value as for a hundred.

    Attributes:
        layout: Names and places.
        values: The vector.
        axis: As in `Emission`.
        epoch: As in `Emission`.
    """

    layout: StepLayout
    values: Snapshot
    axis: int
    epoch: int

    def snapshots(self) -> list[Snapshot]:
        """The one vector."""
        return [self.values]

    @property
    def has_row(self) -> bool:
        """As in `Emission`."""
        return bool(self.layout.log)

    def bar_values(self) -> dict[str, Any]:
        """As in `Emission`."""
        return self._named(self.layout.bar)

    def row(self) -> tuple[dict[str, Any], int | None]:
        """As in `Emission`."""
        return _on_axis(self._named(self.layout.log), self.axis, self.epoch)

    def _named(self, places: Mapping[str, int]) -> dict[str, Any]:
        numbers = self.values.numbers()
        return {name: numbers[place] for name, place in places.items()}


class EmissionQueue:
    """Emissions in the order in which they became due.

    Args:
        send: Gives finished dictionaries and their steps to every logger.
        show: Gives new values to the progress bar.
    """

    def __init__(
        self, send: Callable[[list[tuple[dict[str, Any], int | None]]], None], show: Callable[[dict[str, float]], None]
    ) -> None:
        self._send = send
        self._show = show
        # Each with the arrays that its values are in and the moment when it became due.
        self._waiting: deque[tuple[Emission | StepEmission, list[Snapshot], float]] = deque()
        # Whether copies to the host are worth starting early; on a CPU there is nothing to copy. None: not known yet.
        self._starts_copies: bool | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def due(self) -> float:
        """The `time.monotonic()` from which on `flush_ready` may have something to do."""
        return self._waiting[0][2] + _COLLECT if self._waiting else math.inf

    def push(self, emission: Emission | StepEmission, *, late: bool) -> None:
        """Add an emission.

        Args:
            emission: What is due.
            late: Whether it may wait for `flush_ready` or `flush`.
        """
        snapshots = emission.snapshots()
        self._waiting.append((emission, snapshots, time.monotonic()))
        if not late:
            self.flush()
            return
        if self._starts_copies is not False:
            for snapshot in snapshots:
                if self._starts_copies is None:
                    self._starts_copies = not on_cpu(snapshot)
                snapshot.start_fetch()
        if len(self._waiting) >= _MAX_WAITING:
            self._send_first(_MAX_WAITING // 2)

    def flush_ready(self, now: float | None = None) -> None:
        """Send what the device has computed, if the first of it has waited for a twentieth of a second.

        Args:
            now: `time.monotonic()`, if it is known.
        """
        if (time.monotonic() if now is None else now) < self.due:
            return
        ready = 0
        for _, snapshots, _ in self._waiting:
            if not all(snapshot.ready for snapshot in snapshots):
                break
            ready += 1
        if ready:
            self._send_first(ready)

    def flush(self) -> None:
        """Send everything that waits, fetched with one device read."""
        if self._waiting:
            self._send_first(len(self._waiting))

    def _send_first(self, count: int) -> None:
        due = [self._waiting.popleft() for _ in range(count)]
        fetch(snapshot for _, snapshots, _ in due for snapshot in snapshots)
        rows = []
        for emission, _, _ in due:
            if shown := emission.bar_values():
                self._show(shown)
            if emission.has_row:
                rows.append(emission.row())
        if rows:
            self._send(rows)

    def drop(self) -> None:
        """Forget what waits."""
        self._waiting.clear()


def _scalars(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: to_scalar(value.value() if type(value) is Ref else value) for name, value in values.items()}


def _on_axis(metrics: dict[str, Any], axis: int, epoch: int) -> tuple[dict[str, Any], int | None]:
    # A metric of this name is the user's own axis; the epoch is then none of our business.
    own = metrics.pop("step", None)
    if own is not None:
        return metrics, int(own)
    metrics.setdefault("epoch", epoch)
    return metrics, axis


def may_be_late(trainer: Any) -> bool:
    """Whether nobody but our own code could notice that loggers get metrics of a batch a little late.

    Args:
        trainer: The trainer, whose hook table knows who runs code of the user's.
    """
    hooks = getattr(trainer, "_hooks", None)
    if hooks is None or not all(type(logger).__module__.startswith("jaxlightning.") for logger in trainer.loggers):
        return False
    return not any(hooks.wants_outputs(name) for name in _BATCH_HOOKS)
