"""The part of the log connector that faces the loggers and the progress bar."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from jaxlightning.metrics._dictionaries import MetricDictionaries
from jaxlightning.metrics._emission import Emission, EmissionQueue, may_be_late
from jaxlightning.metrics._refs import Ref, Snapshot

__all__ = ["Sender"]


class Sender:
    """Sends metrics to the loggers of a trainer, at once or a little late.

    Args:
        trainer: The trainer.

    Attributes:
        late_emission: Whether metrics of batches may reach the loggers a little late; None finds out at the first batch
            whether some host code that runs per batch could see the difference.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.late_emission: bool | None = None
        self._public = MetricDictionaries()
        self._queue = EmissionQueue(self._send, self._public.show)

    @property
    def should_update_logs(self) -> bool:
        """Whether the step that is under way is one whose metrics go to the loggers."""
        trainer = self._trainer
        every = trainer.log_every_n_steps
        if every == 0:
            return False
        # + 1: it may be asked before the step is taken, for example in `on_train_batch_start`.
        return (trainer.fit_loop.epoch_loop._batches_that_stepped + 1) % every == 0 or bool(trainer.should_stop)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Send metrics to every logger.

        Args:
            metrics: Numbers, or arrays with one element.
            step: The step; None takes a metric named "step", or else the number of batches that stepped, and adds the
                epoch.
        """
        if not self._trainer.loggers or not metrics:
            return
        values = {
            name: Ref(Snapshot(value.reshape(())), None) if isinstance(value, jax.Array) else value
            for name, value in metrics.items()
        }
        self._public.logged.update(values)
        self._queue.flush()
        self._emit(values, {}, step, late=False)

    def flush(self) -> None:
        """Send everything that waits for its values."""
        self._queue.flush()

    def _emit(
        self,
        metrics: Mapping[str, Any],
        bar: Mapping[str, Any],
        step: int | None,
        *,
        late: bool,
        axis: int | None = None,
    ) -> None:
        trainer = self._trainer
        if getattr(trainer, "progress_bar_callback", None) is None:
            bar = {}
        if not metrics and not bar:
            return
        self._queue.push(
            Emission(
                metrics=metrics,
                bar=bar,
                step=step,
                axis=trainer.fit_loop.epoch_loop._batches_that_stepped if axis is None else axis,
                epoch=trainer.current_epoch,
            ),
            late=late,
        )

    def _send(self, rows: list[tuple[dict[str, Any], int | None]]) -> None:
        for logger in self._trainer.loggers:
            for metrics, step in rows:
                logger.log_metrics(metrics=metrics, step=step)
            logger.save()

    def may_be_late(self) -> bool:
        """Whether nobody but our own code could notice that loggers get metrics of a batch a little late."""
        if self.late_emission is None:
            self.late_emission = may_be_late(self._trainer)
        return self.late_emission
