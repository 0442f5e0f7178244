"""When learning-rate schedulers step: after the update and before `on_train_batch_end`, or, when they watch a metric,
after the validation that gives it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxlightning.loops.call import call_lightning_module_hook
from jaxlightning.utilities.exceptions import MisconfigurationException
from jaxlightning.utilities.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from jaxlightning.loops.progress import Progress
    from jaxlightning.trainer import Trainer


def update_lr_schedulers(trainer: Trainer, progress: Progress, interval: str, *, plateau: bool, position: int) -> None:
    """Step the schedulers that are due.

    Args:
        trainer: The trainer.
        progress: Counts the steps of schedulers.
        interval: `"step"` or `"epoch"`.
        plateau: Whether those that watch a metric are meant, or the others.
        position: Optimizer steps over the whole run, or epochs, that are complete now; `frequency` divides it.

    Raises:
        MisconfigurationException: When a strict scheduler's metric is missing.
    """
    for config in trainer.lr_scheduler_configs:
        if config.interval != interval or bool(config.reduce_on_plateau) is not plateau:
            continue
        if position % config.frequency != 0:
            continue
        value = None
        if plateau:
            value = _monitored(trainer, config)
            if value is None:
                continue
        progress.increment_ready()
        call_lightning_module_hook(trainer, "lr_scheduler_step", config.scheduler, value)
        progress.increment_completed()


def _monitored(trainer: Trainer, config: Any) -> Any:
    """Return the metric that a plateau scheduler watches, None when there is no new value of it."""
    metrics = trainer.callback_metrics
    if config.monitor not in metrics:
        if config.strict:
            raise MisconfigurationException(
                f"ReduceLROnPlateau conditioned on metric {config.monitor} which is not available. Available metrics"
                f" are: {list(metrics)}. Condition can be set using `monitor` key in lr scheduler dict"
            )
        rank_zero_warn(
            f"ReduceLROnPlateau conditioned on metric {config.monitor} which is not available but strict is set to"
            " `False`. Skipping learning rate update.",
            category=RuntimeWarning,
        )
        return None
    version = getattr(trainer._logger_connector, "metric_version", None)
    if version is not None:
        # The same number a second time is no news: a plateau is counted in measurements, not in steps.
        now = version(config.monitor)
        if trainer._plateau_seen.get(id(config)) == now:
            return None
        trainer._plateau_seen[id(config)] = now
    return metrics[config.monitor]
