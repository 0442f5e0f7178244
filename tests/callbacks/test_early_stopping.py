from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxlightning.callbacks import EarlyStopping, EarlyStoppingReason
from jaxlightning.utilities.exceptions import MisconfigurationException

MakeTrainer = Callable[..., Any]


def _check(stopper: EarlyStopping, trainer: Any, value: float, epoch: int) -> None:
    trainer.current_epoch = epoch
    trainer.callback_metrics = {"val_loss": np.float32(value)}
    stopper.on_train_epoch_end(trainer, None)  # type: ignore[arg-type]


def _run(stopper: EarlyStopping, trainer: Any, values: list[float]) -> int:
    """Feed one value per epoch; return how many epochs were run."""
    stopper.setup(trainer, None, "fit")  # type: ignore[arg-type]
    for epoch, value in enumerate(values):
        _check(stopper, trainer, value, epoch)
        if trainer.should_stop:
            return epoch + 1
    return len(values)


@pytest.mark.lightning
@pytest.mark.parametrize("seed", range(60))
@pytest.mark.catalogue("ES03", "ES04", "ES05")
@pytest.mark.catalogue("ES12", adaptation="one read per check; the comparison is on the host")
def test_decides_as_lightning_does(seed: int, make_trainer: MakeTrainer) -> None:
    import torch
    from lightning.pytorch.callbacks import EarlyStopping as Theirs
    from lightning.pytorch.trainer.states import TrainerFn

    rng = random.Random(seed)
    options: dict[str, Any] = {
        "min_delta": rng.choice([0.0, 0.05, 0.5]),
        "patience": rng.randrange(4),
        "mode": rng.choice(["min", "max"]),
        "check_finite": rng.random() < 0.7,
        "stopping_threshold": rng.choice([None, 0.2, 0.8]),
        "divergence_threshold": rng.choice([None, 0.1, 0.95]),
    }
    values = [rng.choice([rng.random(), rng.random(), 0.5, float("nan")]) for _ in range(12)]
    ours, theirs = EarlyStopping("val_loss", **options), Theirs("val_loss", **options)
    our_trainer = make_trainer()
    their_trainer = make_trainer(
        state=SimpleNamespace(fn=TrainerFn.FITTING),
        strategy=SimpleNamespace(reduce_boolean_decision=lambda decision, all: decision),
    )
    ours.setup(our_trainer, None, "fit")  # type: ignore[arg-type]
    theirs.setup(their_trainer, None, "fit")
    for epoch, value in enumerate(values):
        _check(ours, our_trainer, value, epoch)
        their_trainer.current_epoch = epoch
        their_trainer.callback_metrics = {"val_loss": torch.tensor(value)}
        theirs.on_train_epoch_end(their_trainer, None)
        assert our_trainer.should_stop == their_trainer.should_stop
        mine, other = ours.state_dict(), theirs.state_dict()
        message, other_message = mine.pop("stopping_reason_message"), other.pop("stopping_reason_message")
        assert (message is None) == (other_message is None)
        np.testing.assert_equal(mine, {**other, "best_score": other["best_score"].item()})
        if our_trainer.should_stop:
            break


def test_stops_when_patience_is_used_up(make_trainer: MakeTrainer) -> None:
    stopper = EarlyStopping("val_loss", patience=2)
    assert _run(stopper, make_trainer(), [1.0] * 10) == 3
    assert stopper.stopping_reason is EarlyStoppingReason.PATIENCE_EXHAUSTED
    assert stopper.stopped_epoch == 2
    assert "did not improve" in (stopper.stopping_reason_message or "")


@pytest.mark.parametrize(
    ("options", "values", "reason"),
    [
        ({}, [float("nan")], EarlyStoppingReason.NON_FINITE_METRIC),
        ({"stopping_threshold": 0.5}, [0.4], EarlyStoppingReason.STOPPING_THRESHOLD),
        ({"divergence_threshold": 5.0}, [9.0], EarlyStoppingReason.DIVERGENCE_THRESHOLD),
        ({"check_finite": False, "patience": 1}, [float("inf")], EarlyStoppingReason.PATIENCE_EXHAUSTED),
    ],
)
def test_names_its_reason(
    options: dict[str, Any], values: list[float], reason: EarlyStoppingReason, make_trainer: MakeTrainer
) -> None:
    stopper = EarlyStopping("val_loss", **options)
    trainer = make_trainer()
    _run(stopper, trainer, values)
    assert trainer.should_stop
    assert stopper.stopping_reason is reason


def test_a_metric_that_recovers_before_min_epochs_does_not_stop_the_run(make_trainer: MakeTrainer) -> None:
    """Lightning keeps the decision of an early epoch: pytorch-lightning#19966."""
    stopper = EarlyStopping("val_loss", patience=2)
    values = [1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.7, 0.6]
    assert _run(stopper, make_trainer(min_epochs=6), values) == len(values)
    assert stopper.stopping_reason is EarlyStoppingReason.NOT_STOPPED
    assert stopper.stopped_epoch == 0


def test_min_epochs_postpones_the_stop_and_counting_goes_on(make_trainer: MakeTrainer) -> None:
    stopper = EarlyStopping("val_loss", patience=1)
    assert _run(stopper, make_trainer(min_epochs=3), [1.0] * 8) == 3
    assert stopper.wait_count == 2
    assert stopper.stopped_epoch == 2


def test_min_steps_postpones_the_stop_to_the_very_step(make_trainer: MakeTrainer) -> None:
    stopper = EarlyStopping("val_loss", patience=1)
    trainer = make_trainer(min_steps=35)
    stopper.setup(trainer, None, "fit")  # type: ignore[arg-type]
    steps = 0
    for epoch in range(8):
        trainer.current_epoch = epoch
        for batch_idx in range(10):
            steps += 1
            trainer.global_step = steps
            stopper.on_train_batch_end(trainer, None, None, None, batch_idx)  # type: ignore[arg-type]
            if trainer.should_stop:
                break
        if trainer.should_stop:
            break
        _check(stopper, trainer, 1.0, epoch)
    assert steps == 35


def test_does_nothing_in_sanity_check_in_other_verbs_and_in_fast_dev_run(make_trainer: MakeTrainer) -> None:
    for changes in ({"sanity_checking": True}, {"state": SimpleNamespace(fn="validate")}, {"fast_dev_run": True}):
        trainer = make_trainer(**changes)
        stopper = EarlyStopping("missing")
        stopper.setup(trainer, None, "fit")  # type: ignore[arg-type]
        stopper.on_train_epoch_end(trainer, None)  # type: ignore[arg-type]
        stopper._check_on_train_epoch_end = False
        stopper.on_validation_end(trainer, None)  # type: ignore[arg-type]
        assert not trainer.should_stop


@pytest.mark.parametrize(
    ("changes", "given", "expected"),
    [
        ({}, None, True),
        ({"val_check_interval": 0.5}, None, False),
        ({"check_val_every_n_epoch": 2}, None, False),
        ({"val_check_interval": 0.5}, True, True),
        ({}, False, False),
    ],
)
def test_checks_after_validation_unless_there_is_one_per_epoch(
    changes: dict[str, Any], given: bool | None, expected: bool, make_trainer: MakeTrainer
) -> None:
    stopper = EarlyStopping("val_loss", check_on_train_epoch_end=given)
    stopper.setup(make_trainer(**changes), None, "fit")  # type: ignore[arg-type]
    assert stopper._check_on_train_epoch_end is expected


def test_a_missing_metric_lists_those_that_are_there(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(callback_metrics={"a": 1.0, "b": 2.0})
    with pytest.raises(RuntimeError, match=r"`val_los` which is not available.*`a`, `b`"):
        EarlyStopping("val_los")._run_early_stopping_check(trainer)
    EarlyStopping("val_los", strict=False)._run_early_stopping_check(trainer)
    with pytest.warns(RuntimeWarning, match="`val_los`"):
        EarlyStopping("val_los", strict=False, verbose=True)._run_early_stopping_check(trainer)
    assert not trainer.should_stop


def test_another_mode_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match="`mode` can be min, max, got auto"):
        EarlyStopping("val_loss", mode="auto")


def test_one_element_arrays_are_squeezed(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(callback_metrics={"val_loss": np.ones((1,), np.float32)})
    stopper = EarlyStopping("val_loss")
    stopper._run_early_stopping_check(trainer)
    assert np.ndim(stopper.best_score) == 0


def test_the_state_is_json_and_brings_patience_back(make_trainer: MakeTrainer) -> None:
    stopper = EarlyStopping("val_loss", patience=7)
    _run(stopper, make_trainer(), [0.1, 0.3])
    state = json.loads(json.dumps(stopper.state_dict()))
    other = EarlyStopping("val_loss", patience=3)
    other.load_state_dict(state)
    assert other.state_dict() == stopper.state_dict()
    assert other.patience == 7
    assert stopper.state_key == "EarlyStopping{'monitor': 'val_loss', 'mode': 'min'}"


def test_verbose_messages_are_info_records(make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="jaxlightning"):
        _run(EarlyStopping("val_loss", patience=1, verbose=True), make_trainer(), [1.0, 0.5, 0.6])
        trainer = make_trainer(world_size=2, global_rank=1)
        _run(EarlyStopping("val_loss", verbose=True, log_rank_zero_only=True), trainer, [1.0])
    assert caplog.messages == [
        "Metric val_loss improved. New best score: 1.000",
        "Metric val_loss improved by 0.500 >= min_delta = 0.0. New best score: 0.500",
        "Monitored metric val_loss did not improve in the last 1 records. Best score: 0.500. "
        "Signaling Trainer to stop.",
    ]
