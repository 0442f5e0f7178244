"""Training batches between which no hook, logger, callback or validation has anything to do.

Most batches of an epoch are like that: nothing is due before the next log point. They run here with the step and the
few counters that others can see while they run; the other counters follow at the end of each stretch.
`TrainingEpochLoop` runs all other batches, among them the last of each epoch.
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
        self._queue = trainer._logger_connector._queue
        self._limits = limits
        self._clip = clip
        self._validate_every = simple_interval(trainer) if loop._should_check_val_epoch() else 0
        self._max_batches = trainer.fit_loop.max_batches
        self._epoch = trainer.current_epoch
        self._deadline = math.inf
        self._last: Any = None
        self._misses = 0

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
        if every:
            room = min(room, every - loop._batches_that_stepped % every - 1)
        if self._validate_every:
            room = min(room, self._validate_every - ready % self._validate_every - 1)
        self._deadline = math.inf
        for limit in self._limits:
            batches, deadline = limit(trainer)
            room, self._deadline = min(room, batches), min(self._deadline, deadline)
        return int(room)

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
        before, done = current.ready, step_total.completed
        try:
            fuses = fusion is not None and fusion.active and not step.uses_host_numbers
            if fusion is not None and fuses and room >= fusion.steps:
                self._fused(step, fusion, integers, batches, optimizer.step, results)
            else:
                self._singly(step, integers, batches, optimizer.step)
        finally:
            # Also after an exception in the loader or the step: what ran is counted, as in the ordinary loop.
            begun, done = current.ready - before, step_total.completed - done
            for counter in (total, current):
                counter.started += begun
                counter.processed += done
                counter.completed += done
            for counter in (step_total, step_current):
                counter.ready += begun
            for counter in (optimizer.zero_grad.total, optimizer.zero_grad.current):
                counter.ready += done
                counter.started += done
                counter.completed += done
            loop._batches_that_stepped += done
            self._misses = 0 if done else self._misses + 1
            if done:
                results.on_step_outputs(self._last, step.finish(done), done)

    def _singly(self, step: RepeatedStep, integers: Any, batches: Any, steps: Any) -> None:
        total, current, step_total, step_current = batches.total, batches.current, steps.total, steps.current
        queue = self._queue
        due = bool(queue)
        trainer, fetch, deadline, clock = self._trainer, self._stream.fetch, self._deadline, time.monotonic
        signals = trainer._signal_connector
        for row in integers:
            if signals.pending or trainer.should_stop or clock() >= deadline:
                return
            batch = fetch()
            if batch is END or not step.still_valid:  # the loader's own code may have changed the module
                self._stream.returned.append(batch)
                return
            total.ready += 1
            current.ready += 1
            if not step(batch, row):
                total.ready -= 1
                current.ready -= 1
                self._stream.returned.append(batch)
                return
            step_total.completed += 1
            step_current.completed += 1
            self._last = batch
            if due:  # metrics of the step before go to the loggers while this one runs
                due = False
                queue.flush()

    def _fused(
        self, step: RepeatedStep, fusion: Fusion, integers: Any, batches: Any, steps: Any, results: ResultCollection
    ) -> None:
        total, current, step_total, step_current = batches.total, batches.current, steps.total, steps.current
        trainer, fetch, size = self._trainer, self._stream.fetch, fusion.steps
        signals = trainer._signal_connector
        for start in range(0, len(integers) - size + 1, size):
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
                results.start_batch(waiting[0], None)
            if len(waiting) < size or not fusion.run(step, waiting, integers[start : start + size]):
                for counter in (total, current):
                    counter.ready -= len(waiting)
                for counter in (step_total, step_current):
                    counter.completed -= len(waiting)
                self._stream.returned.extend([*waiting, *rest])
                return
            self._last = waiting[-1]
            if self._queue:
                self._queue.flush()
            if not fusion.active:
                return
