"""Training batches between which no hook, logger, callback or validation has anything to do.

Most batches of an epoch are like that. They run here with the step and the few counters that others can see while they
run; the other counters follow at the end of each stretch. A log point ends no stretch when only our own loggers listen:
what it sends waits in the queue. `TrainingEpochLoop` runs all other batches, among them the last of each epoch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jaxlightning.callbacks._registry import runs_user_code
from jaxlightning.compile.repeated_step import RepeatedStep
from jaxlightning.loops.stream import END, BatchStream, LoaderError
from jaxlightning.loops.validation_schedule import simple_interval

if TYPE_CHECKING:
    from jaxlightning.compile.fused_step import Fusion
    from jaxlightning.loops.training_epoch_loop import TrainingEpochLoop
    from jaxlightning.metrics._results import ResultCollection

__all__ = ["QuietBatches"]

_MISSES = 8
"""After so many stretches that ended before their first batch, each batch of the epoch goes the ordinary way."""

_LONGEST = 4096
"""Batches in a stretch, for the sake of the table of their integers."""

_HOOKS = ("on_train_batch_start", "on_train_batch_end")
Limit = Callable[[Any], tuple[float, float]]


def _limits(trainer: Any) -> list[Limit] | None:
    """How long each callback with batch hooks has nothing to do in them; None when one may always have."""
    limits: list[Limit] = []
    hooks = trainer._hooks
    if any(hooks.module(name) is not None for name in _HOOKS):
        return None
    for callback in trainer.callbacks:
        if any(runs_user_code(callback, name) for name in _HOOKS):
            return None
    for name in _HOOKS:
        for hook in hooks.callbacks(name):
            limit = getattr(getattr(hook, "__self__", None), "quiet_batches", None)
            if limit is None:
                return None
            if limit not in limits:
                limits.append(limit)
    return limits


class QuietBatches:
    """Runs stretches of quiet batches of one epoch.

    Args:
        loop: The epoch loop, whose counters it keeps.
        stream: Hands out the batches.
        limits: For each callback with batch hooks: how many batches, and until which `time.monotonic()`, it is quiet.
        clip: Clip value and algorithm of the run.
    """

    def __init__(
        self, loop: TrainingEpochLoop, stream: BatchStream, limits: list[Limit], clip: tuple[float | None, str]
    ) -> None:
        trainer = loop.trainer
        self._loop = loop
        self._trainer = trainer
        self._stream = stream
        self._connector = trainer._logger_connector
        self._queue = self._connector._queue
        self._late = self._connector.may_be_late()
        # How many batches from one log point to the next; 0 when log points go the ordinary way, or there are none.
        self._logs_every = 0
        self._limits = limits
        self._clip = clip
        self._validate_every = simple_interval(trainer) if loop._should_check_val_epoch() else 0
        self._max_batches = trainer.fit_loop.max_batches
        self._epoch = trainer.current_epoch
        self._deadline = math.inf
        self._last: Any = None
        self._misses = 0
        # Of the present stretch: its step, what training logged, and the optimizer steps that were booked.
        self._step: Any = None
        self._results: Any = None
        self._booked = 0

    @classmethod
    def of(cls, loop: TrainingEpochLoop, stream: BatchStream, clip: tuple[float | None, str]) -> QuietBatches | None:
        """What runs the quiet batches of an epoch; None when each of its batches may need the whole loop.

        Args:
            loop: The epoch loop at the start of the epoch.
            stream: Its batches.
            clip: Clip value and algorithm.
        """
        trainer = loop.trainer
        if (
            stream.length is None  # the next batch has to be read before the last one is known
            or trainer.accumulate_grad_batches != 1
            or trainer.fast_dev_run
            or trainer._active_profiler is not None
            or loop._split is not None
            or trainer._data_connector.transfer() is not None
            or (loop._should_check_val_epoch() and not simple_interval(trainer))
            or any(config.interval == "step" for config in trainer.lr_scheduler_configs)
        ):
            return None
        limits = _limits(trainer)
        return None if limits is None else cls(loop, stream, limits, clip)

    def room(self) -> int:
        """For how many coming batches nothing is due."""
        if self._misses >= _MISSES:
            return 0
        loop, trainer = self._loop, self._trainer
        ready = loop.batch_progress.current.ready
        room = self._max_batches - ready - 1
        if loop.max_steps != -1:
            room = min(room, loop.max_steps - loop.global_step - 1)
        every = trainer.log_every_n_steps
        self._logs_every = every if self._late else 0
        if every and not self._late:
            room = min(room, every - loop._batches_that_stepped % every - 1)
        if self._validate_every:
            room = min(room, self._validate_every - ready % self._validate_every - 1)
        self._deadline = math.inf
        for limit in self._limits:
            batches, deadline = limit(trainer)
            room, self._deadline = min(room, batches), min(self._deadline, deadline)
        return min(int(room), _LONGEST)

    def run(self, room: int, results: ResultCollection) -> None:
        """Run up to `room` batches; fewer when somebody asks to stop or a batch differs from those before.

        Batches that were read and did not run go back to the stream.

        Args:
            room: From `room`.
            results: What training logged in this epoch.
        """
        loop, trainer = self._loop, self._trainer
        engine = trainer._engine
        step = engine.repeated_step(self._clip, False)
        if step is None:
            return
        batches, optimizer = loop.batch_progress, loop.automatic_optimization.optim_progress.optimizer
        total, current = batches.total, batches.current
        step_total, step_current = optimizer.step.total, optimizer.step.current
        integers = step.integers(current.ready, self._epoch, step_total.completed, total.ready, room)
        fusion = engine.fusion
        layout = results.step_layout()
        if layout is not None and layout.is_empty and not step.uses_host_numbers:
            self._logs_every = 0  # a step that decides by a number may log something at its next batch
        before, done = current.ready, step_total.completed
        self._step, self._results, self._booked = step, results, done
        try:
            if fusion is not None and fusion.takes(step):
                self._fused(step, fusion, integers, batches, optimizer.step)
            else:
                self._singly(step, integers, batches, optimizer.step)
        finally:
            # Also after an exception in the loader or the step: what ran is counted, as in the ordinary loop.
            begun, ran = current.ready - before, step_total.completed - done
            for counter in (total, current):
                counter.started += begun
                counter.processed += ran
                counter.completed += ran
            for counter in (step_total, step_current):
                counter.ready += begun
            for counter in (optimizer.zero_grad.total, optimizer.zero_grad.current):
                counter.ready += ran
                counter.started += ran
                counter.completed += ran
            self._misses = 0 if ran else self._misses + 1
            self._book()

    def _book(self) -> None:
        """Count the batches since the last time on the loggers' axis, and take what they logged."""
        done = self._loop.automatic_optimization.optim_progress.optimizer.step.total.completed
        count, self._booked = done - self._booked, done
        if count:
            self._loop._batches_that_stepped += count
            self._results.on_step_outputs(self._last, self._step.finish(count), count)

    def _until_log_point(self) -> int:
        """How many batches there are up to and with the next log point; more than in a stretch if none comes."""
        every = self._logs_every
        return every - self._loop._batches_that_stepped % every if every else _LONGEST + 1

    def _log_point(self) -> None:
        self._book()
        self._connector.send_late(self._results, self._loop._batches_that_stepped - 1, self._epoch)

    def _singly(self, step: RepeatedStep, integers: Any, batches: Any, steps: Any) -> bool:
        """Run batches one by one; whether all of them ran."""
        total, current, step_total, step_current = batches.total, batches.current, steps.total, steps.current
        queue, until_log = self._queue, self._until_log_point()
        trainer, fetch, deadline, clock = self._trainer, self._stream.fetch, self._deadline, time.monotonic
        signals = trainer._signal_connector
        # The call itself stands here for the commonest batch: each function on the way to it costs microseconds when
        # a dataset's Python has run since the last one.
        engine, call, floats, kind = step.bare
        soonest = min(deadline, queue.due)
        for row in integers:
            if signals.pending or trainer.should_stop:
                return False
            if (now := clock()) >= soonest:
                if now >= deadline:
                    return False
                queue.flush_ready(now)  # while the step before runs
                soonest = min(deadline, queue.due)
            batch = fetch()
            if batch is END or engine._dirty:  # the loader's own code may have changed the module
                self._stream.returned.append(batch)
                return False
            total.ready += 1
            current.ready += 1
            if type(batch) is kind:
                try:
                    result = call(engine._leaves, batch, row, floats)
                except TypeError:  # another shape or kind of leaf; nothing was consumed
                    ran = False
                else:
                    engine._leaves, step._last, ran = result[0], result, True
            else:
                ran = step(batch, row)
            if not ran:
                total.ready -= 1
                current.ready -= 1
                self._stream.returned.append(batch)
                return False
            step_total.completed += 1
            step_current.completed += 1
            self._last = batch
            until_log -= 1
            if not until_log:
                self._log_point()
                until_log, soonest = self._logs_every, min(deadline, queue.due)
        return True

    def _fused(self, step: RepeatedStep, fusion: Fusion, integers: Any, batches: Any, steps: Any) -> None:
        """Run batches in calls of several, up to each log point; those too few for a call before it, one by one."""
        start = 0
        while start < len(integers):
            stop = min(start + self._until_log_point(), len(integers))
            while fusion.takes(step):
                end = min(start + fusion.steps, stop)
                if end - start < fusion.fewest(step):
                    break
                if not self._together(step, fusion, integers[start:end], batches, steps):
                    return
                start = end
            self._book()
            if start < stop:
                if not self._singly(step, integers[start:stop], batches, steps):
                    return
                start = stop
            elif self._until_log_point() == self._logs_every:
                self._log_point()

    def _together(self, step: RepeatedStep, fusion: Fusion, integers: Any, batches: Any, steps: Any) -> bool:
        """Run as many batches as one call takes; whether they ran."""
        total, current, step_total, step_current = batches.total, batches.current, steps.total, steps.current
        trainer, fetch, size = self._trainer, self._stream.fetch, len(integers)
        signals = trainer._signal_connector
        waiting: list[Any] = []
        rest: list[Any] = []
        for _ in range(size):
            if signals.pending or trainer.should_stop or time.monotonic() >= self._deadline:
                break
            try:
                batch = fetch()
            except Exception as error:
                rest = [LoaderError(error)]  # after the batches that it gave before
                break
            if batch is END or not step.still_valid:
                rest = [batch]
                break
            waiting.append(batch)
            # The loader sees the counters that it would see with one step at a time.
            total.ready += 1
            current.ready += 1
            step_total.completed += 1
            step_current.completed += 1
        if waiting:  # a call that is compiled now takes the weights of epoch means from these batches
            self._results.start_batch(waiting[0], None)
        ran = 0
        try:
            if len(waiting) == size:
                ran = fusion.run(step, waiting, integers)
        finally:  # also when the step cannot be compiled for several batches
            for counter in (total, current):
                counter.ready -= len(waiting) - ran
            for counter in (step_total, step_current):
                counter.completed -= len(waiting) - ran
        if ran:
            self._last = waiting[ran - 1]
        if ran < size:
            self._stream.returned.extend([*waiting[ran:], *rest])
            return False
        if (now := time.monotonic()) >= self._queue.due:
            self._queue.flush_ready(now)
        return True
