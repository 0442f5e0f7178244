"""One training epoch: the batch loop, and everything that may happen between two batches.

Owns the batch and optimizer counters, accumulation windows, the moment of validation within an epoch and the moments at
which learning-rate schedulers step. `FitLoop` owns epochs, limits and loaders.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from jaxlightning.loops.base import Loop
from jaxlightning.loops.call import call_lightning_module_hook
from jaxlightning.loops.evaluation_loop import EvaluationLoop
from jaxlightning.loops.lr_schedulers import update_lr_schedulers
from jaxlightning.loops.manual_step import ManualOptimization, ManualStep
from jaxlightning.loops.optimizer_step import SplitStep, needs_split
from jaxlightning.loops.progress import BatchProgress, OptimizationProgress, Progress, ReadyCompleted
from jaxlightning.loops.quiet_batches import QuietBatches
from jaxlightning.loops.stream import END, BatchStream, LoaderError
from jaxlightning.loops.validation_schedule import due_at_early_end, simple_interval, validation_due
from jaxlightning.utilities.exceptions import MisconfigurationException
from jaxlightning.utilities.states import RunningStage, TrainerFn

if TYPE_CHECKING:
    from jaxlightning.trainer import Trainer


class AutomaticOptimization(Loop):
    """Counters of automatic optimization."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self.optim_progress = OptimizationProgress()


class TrainingEpochLoop(Loop):
    """Runs the batches of one epoch.

    Args:
        trainer: The trainer.
        min_steps: Optimizer steps before an early stop is allowed.
        max_steps: Optimizer steps after which training ends, -1 for no limit.

    Raises:
        MisconfigurationException: For `max_steps` below -1.
    """

    def __init__(self, trainer: Trainer, min_steps: int | None = None, max_steps: int = -1) -> None:
        super().__init__(trainer)
        if max_steps < -1:
            raise MisconfigurationException(
                f"`max_steps` must be a non-negative integer or -1 (infinite steps). You passed in {max_steps}."
            )
        self.min_steps = min_steps
        self.max_steps = max_steps
        self.batch_progress = BatchProgress()
        self.scheduler_progress = Progress.of(ReadyCompleted)
        self.automatic_optimization = AutomaticOptimization(trainer)
        self.manual_optimization = ManualOptimization(trainer)
        self.val_loop = EvaluationLoop(trainer, TrainerFn.FITTING, RunningStage.VALIDATING, verbose=False)
        self._batches_that_stepped = 0
        # Where the tail of a batch stands: None, "validation" (running) or "validated". Saved, so that a resume
        # neither repeats nor loses a validation.
        self._phase: str | None = None
        self._window_count = 0
        self._split: SplitStep | None = None

    # --- what others read

    @property
    def total_batch_idx(self) -> int:
        """Index of the present batch over the whole run."""
        return int(self.batch_progress.total.ready) - 1

    @property
    def batch_idx(self) -> int:
        """Index of the present batch in this epoch."""
        return int(self.batch_progress.current.ready) - 1

    @property
    def global_step(self) -> int:
        """Completed optimizer steps over the whole run."""
        module = self.trainer.lightning_module
        if module is None or module.automatic_optimization:
            return self.automatic_optimization.optim_progress.optimizer_steps
        return int(self.manual_optimization.optim_step_progress.total.completed)

    @property
    def next_axis_value(self) -> int:
        """The first value on the loggers' axis that a resumed run writes (or writes again)."""
        return self._batches_that_stepped + int(self._phase is not None)

    def _num_ready_batches_reached(self) -> bool:
        progress = self.batch_progress
        return progress.is_last_batch or progress.current.ready == self.trainer.fit_loop.max_batches

    def _should_accumulate(self) -> bool:
        """Whether the present batch only adds to the gradients."""
        reached = self.batch_progress.current.ready % self.trainer.accumulate_grad_batches == 0
        return not reached and not self._num_ready_batches_reached()

    def _steps_reached(self) -> bool:
        return self.max_steps != -1 and self.global_step >= self.max_steps

    def _should_check_val_epoch(self) -> bool:
        """Whether validation may run in this epoch at all."""
        trainer = self.trainer
        every = trainer.check_val_every_n_epoch
        return trainer.enable_validation and (every is None or (trainer.current_epoch + 1) % every == 0)

    # --- the epoch

    def begin(self) -> None:
        """Set the counters of a new epoch to zero."""
        self.batch_progress.reset_on_run()
        self.scheduler_progress.reset_on_run()
        self.automatic_optimization.optim_progress.reset_on_run()
        # It counts the batches of all validations within one epoch.
        self.val_loop.batch_progress.total.reset()
        self._window_count = 0
        self._phase = None

    def resume(self) -> None:
        """Continue an epoch whose counters were loaded: forget a batch that failed, finish the tail of one that ran."""
        progress = self.batch_progress
        current = progress.current
        phase = self._phase
        unsent = current.processed == current.ready and current.completed == current.processed - 1
        if unsent:
            # Saved in `on_train_batch_end`: what is left of this batch is its row for the loggers, and its tail.
            progress.increment_completed()
            phase = None
        tail = unsent or phase is not None
        if phase == "validation":
            self.val_loop.forget_pass()
        progress.reset_on_restart()
        self.scheduler_progress.reset_on_restart()
        self.automatic_optimization.optim_progress.reset_on_restart()
        accumulate = self.trainer.accumulate_grad_batches
        self._window_count = 0 if not self._should_accumulate() else current.ready % accumulate
        if unsent and self.trainer._checkpoint_connector.continues_records:
            self.trainer._logger_connector.update_train_step_metrics()
        if tail:
            stepped = not self._should_accumulate()
            due = phase == "validation" or (phase is None and self._should_check_val_epoch() and validation_due(self))
            self._tail(validate=due, updated=stepped, stepped=stepped)

    def run(self, stream: BatchStream) -> None:
        """Run the batches from where the counters stand.

        Args:
            stream: Hands out bare batches.
        """
        trainer = self.trainer
        module = trainer.lightning_module
        engine, hooks, connector, signals = (
            trainer._engine,
            trainer._hooks,
            trainer._logger_connector,
            trainer._signal_connector,
        )
        start_callbacks, start_module = hooks.callbacks("on_train_batch_start"), hooks.module("on_train_batch_start")
        end_callbacks, end_module = hooks.callbacks("on_train_batch_end"), hooks.module("on_train_batch_end")
        want_outputs = hooks.wants_outputs("on_train_batch_end")
        transfer = trainer._data_connector.transfer()
        optimizer = self.automatic_optimization.optim_progress.optimizer
        manual = None if module.automatic_optimization else ManualStep(trainer, self.manual_optimization)
        split = self._split = SplitStep(trainer, optimizer) if manual is None and needs_split(trainer) else None
        progress, total, current = self.batch_progress, self.batch_progress.total, self.batch_progress.current
        step_total, step_current = optimizer.step.total, optimizer.step.current
        if manual is not None:
            step_total = manual.progress.total
        zero_total, zero_current = optimizer.zero_grad.total, optimizer.zero_grad.current
        has_schedulers = bool(trainer.lr_scheduler_configs)
        val_epoch = self._should_check_val_epoch()
        simple_val = simple_interval(trainer)
        epoch = trainer.current_epoch
        max_batches = trainer.fit_loop.max_batches
        clip = (trainer.gradient_clip_val or None, str(trainer.gradient_clip_algorithm or "norm"))
        profile = trainer._active_profiler
        train_step, train_batch = engine.train_step, engine.train_batch
        fetch, sized, queue = stream.fetch, stream.length is not None, connector._queue
        update_metrics, every_batch = connector.update_train_step_metrics, bool(trainer.fast_dev_run)
        if trainer._nonfinite_watch is not None:
            update_metrics = trainer._nonfinite_watch.after(update_metrics)
        # Entered anew after each validation; between two batches of one epoch nobody else takes its place.
        results = None
        quiet = QuietBatches.of(self, stream, clip)
        host_code = want_outputs or hooks.wants_outputs("on_train_batch_start")
        returned = stream.returned
        # The name that `self.log` sees; hooks change it and put it back. See `call._enter` for the way it is written.
        space = vars(module)
        space["_current_fx_name"] = "training_step"
        while True:
            if progress.is_last_batch or current.ready == max_batches:
                break
            if -1 < self.max_steps <= step_total.completed:
                break
            # Batches that came back were read before the stop, so they run before it.
            if trainer.should_stop and not returned and self._may_stop():
                break
            if signals.pending:
                signals.check()
            if quiet is not None and results is not None and not returned and (room := quiet.room()) > 0:
                quiet.run(room, results)
                if trainer.should_stop or signals.pending:
                    continue
            if sized:
                batch = returned.popleft() if returned else fetch()
                if type(batch) is LoaderError:
                    raise batch.error
                if batch is END:
                    self._on_early_end(val_epoch)
                    break
                batch_idx = current.ready
                progress.is_last_batch = batch_idx + 1 >= max_batches
            else:
                batch = stream.ahead
                if batch is END:
                    if current.ready == 0:
                        self._warn_empty()
                    break
                stream.ahead = fetch()
                batch_idx = current.ready
                progress.is_last_batch = stream.ahead is END
            if transfer is not None:
                batch = transfer(batch, 0)
            total.ready += 1
            current.ready += 1
            if results is None:
                results = connector._enter("train")
            results.start_batch(batch, None)
            outputs: Any = None
            if batch is None:
                apply = not self._should_accumulate()  # for the logger's axis; there is no update
                stepped = False
                trainer._warnings.warn("train_dataloader yielded None. If this was on purpose, ignore this warning...")
            else:
                if start_callbacks or start_module is not None:
                    if start_module is not None:
                        connector.before_skippable_batch()
                    space["_current_fx_name"] = "on_train_batch_start"
                    for hook in start_callbacks:
                        hook(trainer, module, batch, batch_idx)
                    response = None if start_module is None else start_module(batch, batch_idx)
                    space["_current_fx_name"] = "training_step"
                    if response == -1:
                        self._skip_rest_of_epoch()
                        break
                total.started += 1
                current.started += 1
                if host_code:
                    engine.host_code_ran()
                accumulate = trainer.accumulate_grad_batches
                if accumulate == 1:
                    window_start = apply = True
                    window_count = 1
                else:
                    window_start = self._window_count == 0 or batch_idx % accumulate == 0
                    window_count = self._window_count = 1 if window_start else self._window_count + 1
                    apply = current.ready % accumulate == 0 or progress.is_last_batch or current.ready == max_batches
                    if apply:
                        self._window_count = 0
                if manual is not None:
                    apply = False  # the step itself says when an optimizer steps
                if apply:
                    step_total.ready += 1
                    step_current.ready += 1
                if manual is not None:
                    out = manual.run(batch, batch_idx, epoch, total.ready - 1, want_outputs)
                elif split is None:
                    if profile is not None:
                        profile.start("run_training_batch")
                    out = (
                        train_batch(batch, batch_idx, epoch, step_total.completed, total.ready - 1, clip, want_outputs)
                        if accumulate == 1
                        else train_step(
                            batch,
                            batch_idx=batch_idx,
                            current_epoch=epoch,
                            global_step=step_total.completed,
                            micro_step=total.ready - 1,
                            accumulate=accumulate,
                            window_start=window_start,
                            apply=apply,
                            window_count=window_count,
                            clip=clip,
                            want_outputs=want_outputs,
                        )
                    )
                    if profile is not None:
                        profile.stop("run_training_batch")
                    if window_start:
                        zero_total.ready += 1
                        zero_total.started += 1
                        zero_total.completed += 1
                        zero_current.ready += 1
                        zero_current.started += 1
                        zero_current.completed += 1
                    if out.skipped:
                        trainer._warnings.warn(
                            "`training_step` returned `None`. If this was on purpose, ignore this warning..."
                        )
                else:
                    out = split.run(
                        batch,
                        batch_idx,
                        window_start=window_start,
                        apply=apply,
                        window_count=window_count,
                        accumulate=accumulate,
                        counters={
                            "current_epoch": epoch,
                            "global_step": step_total.completed,
                            "micro_step": total.ready - 1,
                        },
                    )
                if apply:
                    step_total.completed += 1
                    step_current.completed += 1
                stepped = apply
                apply = apply or manual is not None  # every batch counts on the loggers' axis
                results.on_step_output(out)
                if queue._waiting:
                    queue.flush_ready()
                outputs = {} if out.skipped else out.outputs
            total.processed += 1
            current.processed += 1
            if has_schedulers:
                self._update_lr_schedulers(stepped, plateau=False)
            if end_callbacks or end_module is not None:
                space["_current_fx_name"] = "on_train_batch_end"
                for hook in end_callbacks:
                    hook(trainer, module, outputs, batch, batch_idx)
                if end_module is not None:
                    end_module(outputs, batch, batch_idx)
                space["_current_fx_name"] = "training_step"
            total.completed += 1
            current.completed += 1
            every = trainer.log_every_n_steps
            if every_batch or trainer.should_stop or (every and (self._batches_that_stepped + 1) % every == 0):
                update_metrics()
            if val_epoch and (
                current.ready % simple_val == 0 or (trainer.should_stop and trainer.fit_loop._can_stop_early)
                if simple_val
                else validation_due(self)
            ):
                out = outputs = None  # validation may need the room
                self._tail(validate=True, updated=stepped, stepped=apply)
                space["_current_fx_name"] = "training_step"
                results = None
            elif has_schedulers or trainer.should_stop:
                self._tail(validate=False, updated=stepped, stepped=apply)
            elif apply:
                self._batches_that_stepped += 1
        space["_current_fx_name"] = None

    # --- between two batches

    def _tail(self, *, validate: bool, updated: bool, stepped: bool) -> None:
        """Do what is left of a batch after its metrics went out.

        Args:
            validate: Whether to run validation.
            updated: Whether the batch ended in an optimizer step.
            stepped: Whether it counts on the loggers' axis.
        """
        trainer = self.trainer
        if validate:
            self._validate()
        # Those that watch a metric come after the validation that may have given it.
        self._update_lr_schedulers(updated, plateau=True)
        if stepped:
            self._batches_that_stepped += 1
        self._phase = None
        if trainer.should_stop:
            for logger in trainer.loggers:
                logger.save()

    def _validate(self) -> None:
        trainer = self.trainer
        trainer._logger_connector.flush()
        trainer._checkpoint_connector.before_evaluation()
        self._phase = "validation"
        trainer.validating = True
        if not self._should_accumulate():
            call_lightning_module_hook(trainer, "on_validation_model_zero_grad")
        self.val_loop.run()
        trainer.training = True
        trainer._last_val_time = time.monotonic()

    def _may_stop(self) -> bool:
        """Whether a requested stop may happen now; says once that it has to wait."""
        fit_loop = self.trainer.fit_loop
        allowed: bool = fit_loop._can_stop_early
        if not allowed:
            self.trainer._warnings.info(
                f"Trainer was signaled to stop but the required `min_epochs={fit_loop.min_epochs!r}` or"
                f" `min_steps={self.min_steps!r}` has not been met. Training will continue..."
            )
        return allowed

    def _update_lr_schedulers(self, updated: bool, *, plateau: bool) -> None:
        """Step the schedulers with interval "step" after an update, those with "epoch" after the last batch."""
        trainer = self.trainer
        if not trainer.lr_scheduler_configs or not trainer.lightning_module.automatic_optimization:
            return
        if updated:
            update_lr_schedulers(trainer, self.scheduler_progress, "step", plateau=plateau, position=self.global_step)
        if not plateau and self._num_ready_batches_reached():
            self.update_epoch_schedulers(plateau=False)

    def update_epoch_schedulers(self, *, plateau: bool) -> None:
        """Step the schedulers whose interval is the epoch."""
        trainer = self.trainer
        if trainer.lr_scheduler_configs and trainer.lightning_module.automatic_optimization:
            update_lr_schedulers(
                trainer, self.scheduler_progress, "epoch", plateau=plateau, position=trainer.current_epoch + 1
            )

    def _skip_rest_of_epoch(self) -> None:
        """`on_train_batch_start` returned -1: no step, no end hook, no validation; epoch schedulers still move."""
        self.batch_progress.is_last_batch = True
        self.batch_progress.increment_processed()
        self.trainer._logger_connector.skip_batch()
        self._update_lr_schedulers(False, plateau=False)

    def _on_early_end(self, val_epoch: bool) -> None:
        """A loader ended before its stated length: its last batch is the epoch's last, with all that follows."""
        progress, trainer = self.batch_progress, self.trainer
        if progress.current.ready == 0:
            self._warn_empty()
            return
        validated = val_epoch and validation_due(self)
        progress.is_last_batch = True
        flush = self._window_count > 0
        if flush:
            step = self.automatic_optimization.optim_progress.optimizer.step
            step.increment_ready()
            split = self._split or SplitStep(trainer, self.automatic_optimization.optim_progress.optimizer)
            split.flush(self.batch_idx, self._window_count, trainer.accumulate_grad_batches)
            step.increment_completed()
            self._window_count = 0
        self._update_lr_schedulers(flush, plateau=False)
        due = val_epoch and not validated and due_at_early_end(trainer)
        if not flush:  # the last batch was counted already, but its validation shares its place on the loggers' axis
            self._batches_that_stepped -= 1
        self._tail(validate=due, updated=flush, stepped=True)

    def _warn_empty(self) -> None:
        self.trainer._warnings.warn(
            f"The train dataloader gave no batch in epoch {self.trainer.current_epoch}. An iterator or a generator can"
            " be used up only once: pass something that can be iterated anew in every epoch."
        )

    # --- saving

    def on_save_checkpoint(self) -> dict[str, Any]:
        """Keep the loggers' axis, and where the tail of the present batch stands."""
        state: dict[str, Any] = {"_batches_that_stepped": self._batches_that_stepped}
        if self._phase is not None:
            state["phase"] = self._phase
        return state

    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        """Take back what `on_save_checkpoint` kept."""
        self._batches_that_stepped = int(state_dict.get("_batches_that_stepped", 0))
        self._phase = state_dict.get("phase")

    def teardown(self) -> None:
        """Release what the run held."""
        self._split = None
        self.val_loop.teardown()
