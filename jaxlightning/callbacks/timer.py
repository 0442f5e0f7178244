"""Measure how long the stages of a run take, and stop training when its time is up."""

from __future__ import annotations

import math
import re
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from jaxlightning.callbacks.callback import Callback
from jaxlightning.utilities.exceptions import MisconfigurationException
from jaxlightning.utilities.rank_zero import rank_zero_info
from jaxlightning.utilities.states import RunningStage

if TYPE_CHECKING:
    from jaxlightning.module import JaxLightningModule
    from jaxlightning.trainer import Trainer

_INTERVALS = ("epoch", "step")
# The device may be this share of the remaining time behind the clock that is looked at.
_TOLERATED_LAG = 0.01
_MOST_STEPS_AHEAD = 1000


class Timer(Callback):
    """Keep the time of training, validation and test, and stop training after a given duration.

    Steps are dispatched ahead of the device. So that the limit holds for work done, not for work queued, the clock is
    read after waiting for the step's result; how often it waits follows from how long it had to wait, so that the lag
    stays below one percent of the time that is left.

    Args:
        duration: How long training may take: `"DD:HH:MM:SS"`, a `timedelta`, or the keyword arguments of one as a
            dictionary. None measures only.
        interval: `"step"` looks at the clock after every batch, `"epoch"` at the end of every epoch.
        verbose: Whether to log (level INFO) that the time is up.

    Raises:
        MisconfigurationException: A string of another format, or another interval.
    """

    def __init__(
        self,
        duration: str | timedelta | dict[str, int] | None = None,
        interval: str = "step",
        verbose: bool = True,
    ) -> None:
        super().__init__()
        if interval not in _INTERVALS:
            raise MisconfigurationException(
                f"Unsupported parameter value `Timer(interval={interval})`. "
                f"Possible choices are: {', '.join(_INTERVALS)}"
            )
        self._duration = _seconds(duration)
        self._interval = str(interval)
        self._verbose = verbose
        self._start_time: dict[str, float | None] = {stage.value: None for stage in RunningStage}
        self._end_time: dict[str, float | None] = {stage.value: None for stage in RunningStage}
        self._offset = 0.0
        self._wait_every = 1
        self._steps_since_wait = 0

    # public clock

    def start_time(self, stage: str = "train") -> float | None:
        """Return when a stage began, in seconds of `time.monotonic`, or None."""
        return self._start_time[RunningStage(stage).value]

    def end_time(self, stage: str = "train") -> float | None:
        """Return when a stage ended, in seconds of `time.monotonic`, or None."""
        return self._end_time[RunningStage(stage).value]

    def time_elapsed(self, stage: str = "train") -> float:
        """Return how long a stage has taken, in seconds; for training the time before a resume is counted in."""
        start = self.start_time(stage)
        offset = self._offset if RunningStage(stage) is RunningStage.TRAINING else 0.0
        if start is None:
            return offset
        end = self.end_time(stage)
        return (time.monotonic() if end is None else end) - start + offset

    def time_remaining(self, stage: str = "train") -> float | None:
        """Return how much of the duration a stage has left, in seconds, or None without a duration."""
        if self._duration is None:
            return None
        return self._duration - self.time_elapsed(stage)

    # hooks

    def on_fit_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Look at the clock once after a checkpoint was restored: its time may be used up already."""
        self._wait_every, self._steps_since_wait = 1, 0
        if self._duration is not None:
            self._check_time_remaining(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        """Start the clock of training."""
        self._start(RunningStage.TRAINING)

    def on_train_end(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        """Stop the clock of training."""
        self._end_time["train"] = time.monotonic()

    def on_validation_start(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        """Start the clock of validation."""
        self._start(RunningStage.VALIDATING)

    def on_validation_end(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        """Stop the clock of validation."""
        self._end_time["validate"] = time.monotonic()

    def on_test_start(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        """Start the clock of testing."""
        self._start(RunningStage.TESTING)

    def on_test_end(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        """Stop the clock of testing."""
        self._end_time["test"] = time.monotonic()

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Look at the clock, with `interval="step"`."""
        if self._duration is None or self._interval != "step":
            return
        self._wait_for_device(trainer)
        self._check_time_remaining(trainer)

    def quiet_batches(self, trainer: Trainer) -> tuple[float, float]:
        """For how many batches, and until which `time.monotonic()`, nobody has to look at the clock."""
        return (math.inf if self._duration is None or self._interval != "step" else 0), math.inf

    def on_train_epoch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Look at the clock, with `interval="epoch"`."""
        if self._duration is not None and self._interval == "epoch":
            self._check_time_remaining(trainer)

    # state

    def state_dict(self) -> dict[str, Any]:
        """Return the seconds each stage has taken."""
        return {"time_elapsed": {stage.value: self.time_elapsed(stage.value) for stage in RunningStage}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Count the training time of the checkpoint as elapsed."""
        self._offset = state_dict.get("time_elapsed", {}).get("train", 0.0)

    # details

    def _start(self, stage: RunningStage) -> None:
        self._start_time[stage.value] = time.monotonic()

    def _wait_for_device(self, trainer: Trainer) -> None:
        self._steps_since_wait += 1
        wait = getattr(trainer._engine, "block_until_ready", None)
        if wait is None or self._steps_since_wait < self._wait_every:
            return
        begin = time.monotonic()
        wait()
        lag_per_step = max((time.monotonic() - begin) / self._steps_since_wait, 1e-9)
        allowed = _TOLERATED_LAG * max(self.time_remaining() or 0.0, 0.0)
        self._wait_every = max(1, min(int(allowed / lag_per_step), _MOST_STEPS_AHEAD))
        self._steps_since_wait = 0

    def _check_time_remaining(self, trainer: Trainer) -> None:
        if self._duration is None:
            return
        should_stop = self.time_elapsed() >= self._duration
        broadcast = getattr(trainer.strategy, "broadcast", None)
        if broadcast is not None:  # the clocks of several processes differ; the first one's decides
            should_stop = bool(broadcast(should_stop))
        if not should_stop:
            return
        trainer.should_stop = True
        if self._verbose:
            elapsed = timedelta(seconds=int(self.time_elapsed()))
            rank_zero_info(f"Time limit reached. Elapsed time is {elapsed}. Signaling Trainer to stop.")


def _seconds(duration: str | timedelta | dict[str, int] | None) -> float | None:
    """Turn what `Timer` accepts as a duration into seconds."""
    if duration is None:
        return None
    if isinstance(duration, str):
        match = re.fullmatch(r"(\d+):(\d\d):(\d\d):(\d\d)", duration.strip())
        if match is None:
            raise MisconfigurationException(
                f"`Timer(duration={duration!r})` is not a valid duration. Expected a string in the format DD:HH:MM:SS."
            )
        days, hours, minutes, seconds = map(int, match.groups())
        duration = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    elif isinstance(duration, dict):
        duration = timedelta(**duration)
    return duration.total_seconds()
