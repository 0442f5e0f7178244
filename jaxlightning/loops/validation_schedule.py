"""When validation runs within a training epoch: by batches, fractions of the epoch, time, or because of a stop."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxlightning.loops.training_epoch_loop import TrainingEpochLoop
    from jaxlightning.trainer import Trainer


def simple_interval(trainer: Trainer) -> int:
    """Return n when validation is due after every n-th batch of the epoch and nothing else decides, else 0."""
    if trainer._val_check_time_interval is not None or trainer.check_val_every_n_epoch is None:
        return 0
    every = trainer.val_check_batch
    return 0 if every is None or every == math.inf else int(every)


def validation_due(loop: TrainingEpochLoop) -> bool:
    """Tell whether validation is due after the present batch, in an epoch that allows it.

    Args:
        loop: The epoch loop, whose counters include the batch.
    """
    trainer = loop.trainer
    last, every = loop.batch_progress.is_last_batch, trainer.val_check_batch
    if last and every == math.inf:
        return True
    if trainer.should_stop and trainer.fit_loop._can_stop_early:
        return True
    interval = trainer._val_check_time_interval
    if interval is not None:
        # The device may lag behind; without waiting the clock would measure dispatches.
        trainer._engine.block_until_ready()
        return bool(time.monotonic() - trainer._last_val_time >= interval)
    if every is None or every == math.inf:
        limit = trainer.limit_train_batches
        return (loop.batch_idx + 1) % limit == 0 if isinstance(limit, int) else last
    index = loop.total_batch_idx if trainer.check_val_every_n_epoch is None else loop.batch_idx
    return bool((index + 1) % every == 0)


def due_at_early_end(trainer: Trainer) -> bool:
    """Tell whether the validation that belongs to the epoch's end is due when a loader ends before its length says."""
    if trainer._val_check_time_interval is not None:
        return False
    if isinstance(trainer.val_check_interval, float) and trainer.val_check_interval == 1.0:
        return True
    return (
        trainer.check_val_every_n_epoch is not None and (trainer.val_check_batch or 0) >= trainer.num_training_batches
    )
