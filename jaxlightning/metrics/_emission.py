"""Sending metrics to loggers: at once, or one step late so that the device never waits for the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxlightning.metrics._refs import Ref, fetch, on_cpu, to_scalar

__all__ = ["Emission", "EmissionQueue", "may_be_late"]

# Host code in one of these runs while batches go by, and could see that a logger has not got its values yet.
_BATCH_HOOKS = (
    *(f"on_{stage}_batch_{end}" for stage in ("train", "validation", "test") for end in ("start", "end")),
    *("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"),
    *("optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "backward", "lr_scheduler_step"),
    *("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"),
)

# A validation epoch may log at every batch: this bounds what waits, at one small array per batch.
_MAX_WAITING = 64


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


class EmissionQueue:
    """Emissions in the order in which they became due.

    Args:
        send: Gives one finished dictionary and its step to every logger.
        show: Gives new values to the progress bar.
    """

    def __init__(
        self, send: Callable[[dict[str, Any], int | None], None], show: Callable[[dict[str, float]], None]
    ) -> None:
        self._send = send
        self._show = show
        self._waiting: list[Emission] = []
        # Whether copies to the host are worth starting early; on a CPU there is nothing to copy. None: not known yet.
        self._starts_copies: bool | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, emission: Emission, *, late: bool) -> None:
        """Add an emission.

        Args:
            emission: What is due.
            late: Whether it may wait for `flush`.
        """
        self._waiting.append(emission)
        if not late or len(self._waiting) >= _MAX_WAITING:
            self.flush()
        elif self._starts_copies is not False:
            for values in (emission.metrics, emission.bar):
                for value in values.values():
                    if type(value) is Ref:
                        if self._starts_copies is None:
                            self._starts_copies = not on_cpu(value.snapshot)
                        value.snapshot.start_fetch()

    def flush(self) -> None:
        """Send everything that waits, fetched with one device read."""
        if not self._waiting:
            return
        due, self._waiting = self._waiting, []
        fetch(
            value.snapshot
            for emission in due
            for values in (emission.metrics, emission.bar)
            for value in values.values()
            if type(value) is Ref
        )
        for emission in due:
            if emission.bar:
                self._show(_scalars(emission.bar))
            if emission.metrics:
                self._send(*_with_step(emission))

    def drop(self) -> None:
        """Forget what waits."""
        self._waiting.clear()


def _scalars(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: to_scalar(value.value() if type(value) is Ref else value) for name, value in values.items()}


def _with_step(emission: Emission) -> tuple[dict[str, Any], int | None]:
    metrics = _scalars(emission.metrics)
    if emission.step is not None:
        return metrics, emission.step
    # A metric of this name is the user's own axis; the epoch is then none of our business.
    own = metrics.pop("step", None)
    if own is not None:
        return metrics, int(own)
    metrics.setdefault("epoch", emission.epoch)
    return metrics, emission.axis


def may_be_late(trainer: Any) -> bool:
    """Whether nobody but our own code could notice that loggers get metrics of a batch one step late.

    Args:
        trainer: The trainer, whose hook table knows who runs code of the user's.
    """
    hooks = getattr(trainer, "_hooks", None)
    if hooks is None or not all(type(logger).__module__.startswith("jaxlightning.") for logger in trainer.loggers):
        return False
    return not any(hooks.wants_outputs(name) for name in _BATCH_HOOKS)
