"""Validation and testing: one pass over one or several loaders, with its hooks and its results.

Owns the evaluation loaders, the eval-mode switch around the pass and the list of results; the metrics themselves are
the logger connector's.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from jaxlightning.loops.base import Loop, no_stray_stop_iteration
from jaxlightning.loops.call import call_callback_hooks, call_lightning_module_hook, is_overridden
from jaxlightning.loops.checks import verify_dataloader_idx
from jaxlightning.loops.data import Feed, LoaderSource, make_feed
from jaxlightning.loops.modes import ModuleMode
from jaxlightning.loops.progress import BatchProgress
from jaxlightning.loops.stream import BatchStream
from jaxlightning.metrics import print_results
from jaxlightning.utilities.states import RunningStage, TrainerFn

if TYPE_CHECKING:
    from jaxlightning.trainer import Trainer


class EvaluationLoop(Loop):
    """Runs an evaluation.

    Args:
        trainer: The trainer.
        fn: The verb that it serves.
        stage: Validating or testing.
        verbose: Whether to print the results at the end.
    """

    def __init__(self, trainer: Trainer, fn: TrainerFn, stage: RunningStage, *, verbose: bool = True) -> None:
        super().__init__(trainer)
        self.verbose = verbose
        self.batch_progress = BatchProgress()
        self._fn = fn
        self._stage = stage
        self._word = "test" if stage == RunningStage.TESTING else "validation"
        self._max_batches: list[int | float] = []
        self.data_source = LoaderSource(f"{stage.dataloader_prefix}_dataloader")
        self.feed: Feed | None = None
        self._stream: BatchStream | None = None
        # Batches of each loader over the run: the loggers' axis of what is logged per batch.
        self._seen_batches: defaultdict[int, int] = defaultdict(int)
        self._seen_at_start: dict[int, int] = {}
        self._loaded_seen: dict[int, int] = {}
        self._last_reload_epoch = -float("inf")
        self._mode = ModuleMode()

    @property
    def num_dataloaders(self) -> int:
        """How many loaders there are."""
        return 0 if self.feed is None else len(self.feed.sources)

    @property
    def max_batches(self) -> list[int | float]:
        """The most batches of each loader; fewer in the sanity check."""
        if not self.trainer.sanity_checking:
            return self._max_batches
        return [min(self.trainer.num_sanity_val_steps, batches) for batches in self._max_batches]

    @property
    def skip(self) -> bool:
        """Whether there is nothing to run."""
        return self.feed is None or sum(self.max_batches) == 0

    @property
    def _should_reload(self) -> bool:
        every = self.trainer.reload_dataloaders_every_n_epochs
        return bool(every and self.trainer.current_epoch - self._last_reload_epoch >= every)

    def run(self) -> list[dict[str, float]]:
        """Run the evaluation.

        Returns:
            The logged epoch values of each loader, as Python floats; empty when there is nothing to run.
        """
        self.setup_data()
        if self.skip:
            return []
        self._reset()
        self._start()
        with no_stray_stop_iteration(self.trainer.lightning_module):
            self._run_batches()
        return self._end()

    # --- data

    def setup_data(self) -> None:
        """Request the loaders, unless those at hand are still good."""
        trainer, fitting = self.trainer, self._fn == TrainerFn.FITTING
        if self.feed is not None and fitting and not self._should_reload:
            return
        limit = trainer.limit_test_batches if self._stage == RunningStage.TESTING else trainer.limit_val_batches
        if limit == 0 or not is_overridden(f"{self._word}_step", trainer.lightning_module):
            return
        if fitting and (not trainer.sanity_checking or trainer.fit_loop.epoch_loop._should_check_val_epoch()):
            # What the sanity check loaded is not loaded again in the first epoch.
            self._last_reload_epoch = trainer.current_epoch
        self.release_data()
        self.feed = make_feed(trainer, self.data_source, self._fn, self._stage, limit, "sequential")
        self._max_batches = self.feed.lengths
        self._seen_batches.clear()
        self._seen_batches.update(self._loaded_seen)
        self._loaded_seen = {}

    def release_data(self) -> None:
        """Let go of the loaders, their iterators and workers."""
        self._close_stream()
        if self.feed is not None:
            self.feed.close()
            self.feed = None

    def _close_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _reset(self) -> None:
        trainer, feed = self.trainer, self.feed
        if feed is None:
            raise RuntimeError("There are no evaluation loaders; this is a mistake in jaxlightning, please report it.")
        self.batch_progress.reset_on_run()
        self._seen_at_start = dict(self._seen_batches)
        if trainer.state.fn == TrainerFn.FITTING:
            feed.set_epoch(trainer.fit_loop.epoch_progress.current.processed)
        feed.set_limits(self.max_batches)
        profiler = trainer._active_profiler
        action = f"[_EvaluationLoop].{self._stage.dataloader_prefix}_next"
        around = None if profiler is None else lambda: profiler.profile(action)
        self._stream = BatchStream(feed.inner, around)
        self._stream.start()

    # --- the pass

    def _start(self) -> None:
        trainer, word = self.trainer, self._word
        feed = self.feed
        several = feed is not None and feed.combined.mode == "sequential" and self.num_dataloaders > 1
        verify_dataloader_idx(
            (f"{word}_step", f"on_{word}_batch_start", f"on_{word}_batch_end"),
            several,
            self._stage,
            trainer.lightning_module,
        )
        self._mode.capture(trainer.lightning_module, trainer._engine)
        call_lightning_module_hook(trainer, f"on_{word}_model_eval")
        trainer._engine.sync_modes()
        trainer._engine.check_constants()
        trainer._logger_connector.on_epoch_start(str(trainer.state.stage))
        for event in ("start", "epoch_start"):
            call_callback_hooks(trainer, f"on_{word}_{event}")
            call_lightning_module_hook(trainer, f"on_{word}_{event}")

    def _run_batches(self) -> None:
        trainer, word = self.trainer, self._word
        module, engine, connector, hooks = (
            trainer.lightning_module,
            trainer._engine,
            trainer._logger_connector,
            trainer._hooks,
        )
        start_name, end_name = f"on_{word}_batch_start", f"on_{word}_batch_end"
        start_callbacks, start_module = hooks.callbacks(start_name), hooks.module(start_name)
        end_callbacks, end_module = hooks.callbacks(end_name), hooks.module(end_name)
        want_outputs = hooks.wants_outputs(end_name)
        transfer = trainer._data_connector.transfer()
        stream, feed, signals = self._stream, self.feed, trainer._signal_connector
        if stream is None or feed is None:
            return
        several = feed.combined.mode == "sequential" and len(feed.sources) > 1
        stage = str(trainer.state.stage)
        sanity = trainer.sanity_checking
        progress, total, current = self.batch_progress, self.batch_progress.total, self.batch_progress.current
        epoch, global_step = trainer.current_epoch, trainer.global_step
        eval_step, seen = engine.eval_step, self._seen_batches
        space = vars(module)
        step_name = f"{word}_step"
        host_code = trainer._hooks.wants_outputs(start_name) or trainer._hooks.wants_outputs(end_name)
        space["_current_fx_name"] = step_name
        for (batch, batch_idx, dataloader_idx), last in stream:
            progress.is_last_batch = last
            index = dataloader_idx if several else None
            if transfer is not None:
                batch = transfer(batch, dataloader_idx)
            total.ready += 1
            current.ready += 1
            connector.on_batch_start(stage, batch, index, batch_idx)
            extra = (dataloader_idx,) if several else ()
            if start_callbacks or start_module is not None:
                space["_current_fx_name"] = start_name
                for hook in start_callbacks:
                    hook(trainer, module, batch, batch_idx, *extra)
                if start_module is not None:
                    start_module(batch, batch_idx, *extra)
                space["_current_fx_name"] = step_name
            total.started += 1
            current.started += 1
            if host_code:
                engine.host_code_ran()
            out = eval_step(
                stage,
                batch,
                batch_idx=batch_idx,
                dataloader_idx=index,
                current_epoch=epoch,
                global_step=global_step,
                want_outputs=want_outputs,
            )
            connector.on_step_output(stage, out)
            total.processed += 1
            current.processed += 1
            if end_callbacks or end_module is not None:
                space["_current_fx_name"] = end_name
                for hook in end_callbacks:
                    hook(trainer, module, out.outputs, batch, batch_idx, *extra)
                if end_module is not None:
                    end_module(out.outputs, batch, batch_idx, *extra)
                space["_current_fx_name"] = step_name
            total.completed += 1
            current.completed += 1
            if not sanity:
                connector.update_eval_step_metrics(seen[dataloader_idx])
                seen[dataloader_idx] += 1
            if signals.pending and not last:
                signals.check()
        space["_current_fx_name"] = None

    def _end(self) -> list[dict[str, float]]:
        trainer, word, connector = self.trainer, self._word, self.trainer._logger_connector
        stage = str(trainer.state.stage)
        connector.epoch_end_reached(stage)
        call_callback_hooks(trainer, f"on_{word}_epoch_end")
        call_lightning_module_hook(trainer, f"on_{word}_epoch_end")
        connector.update_eval_epoch_metrics()
        results: list[dict[str, float]] = connector.eval_results
        if self._fn == TrainerFn.FITTING and not trainer.sanity_checking:
            trainer.fit_loop.epoch_loop._phase = "validated"
        call_callback_hooks(trainer, f"on_{word}_end")
        call_lightning_module_hook(trainer, f"on_{word}_end")
        connector.reset_results(stage)
        self._restore_mode()
        self._close_stream()
        if self.verbose and trainer.is_global_zero:
            print_results(results, self._stage.value)
        trainer._last_val_time = time.monotonic()
        return results

    def _restore_mode(self) -> None:
        trainer, name = self.trainer, f"on_{self._word}_model_train"
        if is_overridden(name, trainer.lightning_module):
            call_lightning_module_hook(trainer, name)
            trainer._engine.sync_modes()
        else:
            self._mode.restore(trainer.lightning_module, trainer._engine)

    def teardown(self) -> None:
        """Stop iterating; the loaders stay, `trainer.val_dataloaders` shows them."""
        self._close_stream()

    # --- saving

    def forget_pass(self) -> None:
        """Take back the batches of a pass that was interrupted; it runs again from its beginning."""
        for item in fields(self.batch_progress.total):
            left = getattr(self.batch_progress.total, item.name) - getattr(self.batch_progress.current, item.name)
            setattr(self.batch_progress.total, item.name, left)
        self.batch_progress.current.reset()

    def on_save_checkpoint(self) -> dict[str, Any]:
        """Keep the loggers' axis of what is logged per batch; within a pass that of its beginning."""
        if self._fn != TrainerFn.FITTING:
            return {}
        running = self.trainer.fit_loop.epoch_loop._phase == "validation"
        seen = self._seen_at_start if running else self._seen_batches
        return {"seen_batches": {str(index): count for index, count in seen.items()}} if seen else {}

    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        """Take back what `on_save_checkpoint` kept."""
        self._loaded_seen = {int(index): int(count) for index, count in state_dict.get("seen_batches", {}).items()}
