"""What was logged so far in a checkpoint: the sums of the running epoch, and the values that callbacks see."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxlightning.loggers import logger_positions

if TYPE_CHECKING:
    from jaxlightning.trainer import Trainer


def collect(trainer: Trainer) -> dict[str, Any]:
    """Return the metrics of a training that is under way; one read of the device.

    Args:
        trainer: The trainer.
    """
    connector = trainer._logger_connector
    return {
        "train": connector.state_dict(),
        "public": connector.public_state_dict(),
        "loggers": trainer._checkpoint_connector.noted("loggers") or logger_positions(trainer.loggers),
        # Whether each plateau scheduler has counted the present value of its metric already.
        "plateau_seen": [
            config.monitor is not None
            and trainer._plateau_seen.get(id(config)) == connector.metric_version(config.monitor)
            for config in trainer.lr_scheduler_configs
        ],
    }


def restore(trainer: Trainer, metrics: dict[str, Any]) -> None:
    """Continue the metrics of an interrupted training.

    Args:
        trainer: The trainer, its loops restored.
        metrics: What `collect` returned.
    """
    connector = trainer._logger_connector
    connector.load_public_state_dict(metrics["public"])
    unsent = trainer.fit_loop.finishes_epoch and trainer._checkpoint_connector.continues_records
    if trainer.fit_loop.continues_epoch or unsent:
        connector.load_state_dict(metrics["train"])
    for config, seen in zip(trainer.lr_scheduler_configs, metrics["plateau_seen"], strict=False):
        if seen:
            trainer._plateau_seen[id(config)] = connector.metric_version(config.monitor)
