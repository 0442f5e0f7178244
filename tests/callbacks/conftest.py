"""A stand-in for the Trainer: the attributes that callbacks read, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest


def _fake_trainer(**changes: Any) -> SimpleNamespace:
    metrics: dict[str, Any] = {}
    connector = SimpleNamespace(
        should_update_logs=True,
        progress_bar_cached={},
        flush=lambda: None,
        update_callback_metrics=metrics.update,
    )
    trainer = SimpleNamespace(
        state=SimpleNamespace(fn="fit", stage="train"),
        strategy=SimpleNamespace(),
        callback_metrics=metrics,
        progress_bar_metrics={},
        _logger_connector=connector,
        _engine=SimpleNamespace(),
        callbacks=[],
        loggers=[],
        optimizers=[],
        lr_scheduler_configs=[],
        progress_bar_callback=None,
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(_batches_that_stepped=0)),
        predict_loop=SimpleNamespace(current_batch_indices=[], epoch_batch_indices=[], predictions=[]),
        sanity_checking=False,
        fast_dev_run=False,
        should_stop=False,
        is_global_zero=True,
        enable_validation=True,
        global_rank=0,
        world_size=1,
        current_epoch=0,
        global_step=0,
        min_epochs=None,
        min_steps=None,
        max_epochs=1,
        max_steps=-1,
        val_check_interval=1.0,
        check_val_every_n_epoch=1,
        accumulate_grad_batches=1,
        num_training_batches=3,
        num_val_batches=[2],
        num_sanity_val_batches=[2],
        num_test_batches=[2],
        num_predict_batches=[2],
    )
    for name, value in changes.items():
        setattr(trainer, name, value)
    return trainer


@pytest.fixture
def make_trainer() -> Callable[..., Any]:
    """Return the maker of stand-ins; keyword arguments set or add attributes."""
    return _fake_trainer
