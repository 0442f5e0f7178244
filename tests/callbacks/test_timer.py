from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from jaxlightning.callbacks import Timer
from jaxlightning.utilities.exceptions import MisconfigurationException

MakeTrainer = Callable[..., Any]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that moves when `now` is set."""
    state = SimpleNamespace(now=0.0)
    monkeypatch.setattr(time, "monotonic", lambda: state.now)
    return state


@pytest.mark.parametrize(
    ("duration", "seconds"),
    [
        ("00:00:00:22", 22.0),
        ("1:12:03:04", 129784.0),
        (" 100:00:00:00 ", 8640000.0),
        (timedelta(minutes=2), 120.0),
        ({"weeks": 1, "hours": 2}, 612000.0),
        (None, None),
    ],
)
def test_reads_every_kind_of_duration(duration: Any, seconds: float | None) -> None:
    assert Timer(duration).time_remaining() == seconds


@pytest.mark.parametrize("text", ["1:2", "6:00:00", "60 minutes", "00:00:00:000"])
def test_refuses_another_format(text: str) -> None:
    with pytest.raises(
        MisconfigurationException, match=r"is not a valid duration\. Expected a string in the format DD"
    ):
        Timer(text)


def test_refuses_another_interval() -> None:
    with pytest.raises(MisconfigurationException, match=r"Timer\(interval=x\)`. Possible choices are: epoch, step"):
        Timer(interval="x")


def test_stops_when_the_time_is_up(
    make_trainer: MakeTrainer, clock: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, timer = make_trainer(), Timer("00:00:00:10")
    timer.on_fit_start(trainer)
    timer.on_train_start(trainer, None)  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO, logger="jaxlightning"):
        for clock.now in (1.0, 9.5):
            timer.on_train_batch_end(trainer)
            assert not trainer.should_stop
        clock.now = 10.0
        timer.on_train_epoch_end(trainer)
        assert not trainer.should_stop
        timer.on_train_batch_end(trainer)
    assert trainer.should_stop
    assert caplog.messages == ["Time limit reached. Elapsed time is 0:00:10. Signaling Trainer to stop."]


def test_the_epoch_interval_looks_at_the_end_of_epochs_only(make_trainer: MakeTrainer, clock: SimpleNamespace) -> None:
    trainer, timer = make_trainer(), Timer(timedelta(seconds=5), interval="epoch", verbose=False)
    timer.on_train_start(trainer, None)  # type: ignore[arg-type]
    clock.now = 6.0
    timer.on_train_batch_end(trainer)
    assert not trainer.should_stop
    timer.on_train_epoch_end(trainer)
    assert trainer.should_stop


def test_a_duration_of_zero_stops_before_the_first_batch(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    Timer(timedelta(0)).on_fit_start(trainer)
    assert trainer.should_stop


def test_keeps_the_time_of_each_stage(make_trainer: MakeTrainer, clock: SimpleNamespace) -> None:
    trainer, timer = make_trainer(), Timer("00:00:01:00")
    for stage, start, end in (("train", 1.0, 5.0), ("validate", 2.0, 3.0), ("test", 10.0, 30.0)):
        hook = {"train": "train", "validate": "validation", "test": "test"}[stage]
        clock.now = start
        getattr(timer, f"on_{hook}_start")(trainer, None)
        clock.now = end
        getattr(timer, f"on_{hook}_end")(trainer, None)
        assert (timer.start_time(stage), timer.end_time(stage)) == (start, end)
        assert timer.time_elapsed(stage) == end - start
        assert timer.time_remaining(stage) == 60 - (end - start)
    assert timer.time_elapsed("sanity_check") == 0
    with pytest.raises(ValueError, match="training"):
        timer.time_elapsed("training")


def test_a_resumed_run_counts_the_time_before(make_trainer: MakeTrainer, clock: SimpleNamespace) -> None:
    trainer, timer = make_trainer(), Timer("00:00:00:10")
    timer.on_train_start(trainer, None)  # type: ignore[arg-type]
    clock.now = 7.0
    timer.on_train_end(trainer, None)  # type: ignore[arg-type]
    state = timer.state_dict()
    assert state["time_elapsed"]["train"] == 7.0
    resumed = Timer("00:00:00:10")
    resumed.load_state_dict(state)
    assert resumed.time_remaining() == 3.0
    resumed.load_state_dict({"time_elapsed": {"train": 11.0}})
    resumed.on_fit_start(trainer)
    assert trainer.should_stop


@pytest.mark.catalogue("TM02", adaptation="the step is waited for now and then, before the clock is read")
def test_waits_for_the_device_often_enough_to_keep_the_lag_small(
    make_trainer: MakeTrainer, clock: SimpleNamespace
) -> None:
    """The host dispatches in no time, the device needs 10 ms per step: the queue must not outgrow the limit."""
    queued = 0
    longest = 0

    def wait() -> None:
        nonlocal queued, longest
        longest = max(longest, queued)
        clock.now += 0.01 * queued
        queued = 0

    trainer = make_trainer(_engine=SimpleNamespace(block_until_ready=wait))
    timer = Timer(timedelta(seconds=20), verbose=False)
    timer.on_fit_start(trainer)
    timer.on_train_start(trainer, None)  # type: ignore[arg-type]
    steps = 0
    while not trainer.should_stop:
        steps += 1
        queued += 1
        timer.on_train_batch_end(trainer)
    assert steps == pytest.approx(2000, rel=0.01)
    assert longest > 1, "it waits at every step although there is plenty of time"
    assert clock.now < 20.2


def test_without_a_duration_the_device_is_never_waited_for(make_trainer: MakeTrainer) -> None:
    def wait() -> None:
        raise AssertionError

    Timer().on_train_batch_end(make_trainer(_engine=SimpleNamespace(block_until_ready=wait)))
