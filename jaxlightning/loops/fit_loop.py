"""The training loop: epochs, when to stop, the train loader, and how an interrupted run continues."""

from __future__ import annotations

import numbers
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from jaxlightning.loops.base import Loop, no_stray_stop_iteration
from jaxlightning.loops.call import call_callback_hooks, call_lightning_module_hook, is_overridden
from jaxlightning.loops.data import Feed, LoaderSource, make_feed
from jaxlightning.loops.progress import Progress
from jaxlightning.loops.stream import BatchStream
from jaxlightning.loops.training_epoch_loop import TrainingEpochLoop
from jaxlightning.utilities.combined_loader import SUPPORTED_MODES
from jaxlightning.utilities.exceptions import MisconfigurationException
from jaxlightning.utilities.rank_zero import rank_zero_debug, rank_zero_info, rank_zero_warn
from jaxlightning.utilities.states import RunningStage, TrainerFn
from jaxlightning.utilities.warnings import PossibleUserWarning

if TYPE_CHECKING:
    from jaxlightning.trainer import Trainer

_INF = float("inf")


class FitLoop(Loop):
    """Runs training epochs until a limit is reached.

    Args:
        trainer: The trainer.
        min_epochs: Epochs before an early stop is allowed.
        max_epochs: Epochs after which training ends, -1 for no limit, None until `fit` decides.
        min_steps: Optimizer steps before an early stop is allowed.
        max_steps: Optimizer steps after which training ends, -1 for no limit.

    Raises:
        MisconfigurationException: For a limit below -1.
    """

    def __init__(
        self,
        trainer: Trainer,
        min_epochs: int | None = None,
        max_epochs: int | None = None,
        min_steps: int | None = None,
        max_steps: int = -1,
    ) -> None:
        super().__init__(trainer)
        if max_epochs is not None and (not isinstance(max_epochs, numbers.Integral) or max_epochs < -1):
            raise MisconfigurationException(
                f"`max_epochs` must be a non-negative integer or -1. You passed in {max_epochs!r}."
            )
        self.min_epochs = min_epochs
        self.max_epochs: int | None = None if max_epochs is None else int(max_epochs)
        self.epoch_loop = TrainingEpochLoop(trainer, min_steps, max_steps)
        self.epoch_progress = Progress()
        self.max_batches: int | float = _INF
        self.data_source = LoaderSource("train_dataloader")
        self.feed: Feed | None = None
        self._stream: BatchStream | None = None
        self._stream_is_fresh = False
        self._last_reload_epoch: float = -_INF
        self._loader_states: list[dict[str, Any]] = []
        self._loaded_reload_epoch: int | None = None
        self.in_epochs = False  # whether training is under way, so that no other run may begin with its module
        self.was_stopping = False  # whether the loaded run had been asked to stop

    # --- what others read

    @property
    def total_batch_idx(self) -> int:
        """Index of the present batch over the whole run."""
        return self.epoch_loop.total_batch_idx

    @property
    def batch_idx(self) -> int:
        """Index of the present batch in its epoch."""
        return self.epoch_loop.batch_idx

    @property
    def min_steps(self) -> int | None:
        """Optimizer steps before an early stop is allowed."""
        return self.epoch_loop.min_steps

    @property
    def max_steps(self) -> int:
        """Optimizer steps after which training ends, -1 for no limit."""
        return self.epoch_loop.max_steps

    @property
    def _can_stop_early(self) -> bool:
        epochs_met = not self.min_epochs or self.epoch_progress.current.processed >= self.min_epochs
        steps_met = not self.min_steps or self.epoch_loop.global_step >= self.min_steps
        return epochs_met and steps_met

    def _should_accumulate(self) -> bool:
        return self.epoch_loop._should_accumulate()

    @property
    def continues_epoch(self) -> bool:
        """Whether the loaded state stands inside an epoch, so that the run continues it."""
        return self.restarting and (self._epoch_unfinished() or self._stopped_by_steps())

    def _epoch_unfinished(self) -> bool:
        current = self.epoch_progress.current
        return bool(current.started == current.ready and current.processed == current.ready - 1)

    @property
    def finishes_epoch(self) -> bool:
        """Whether the loaded state was saved in `on_train_epoch_end`: all that is left of its epoch comes after it."""
        current = self.epoch_progress.current
        ended = current.ready == current.started == current.processed == current.completed + 1
        return bool(self.restarting and ended and not self._stopped_by_steps())

    def _stopped_by_steps(self) -> bool:
        """A step limit ended the epoch early, and the run is counted in steps: it goes on where it stopped."""
        progress, batches = self.epoch_progress.current, self.epoch_loop.batch_progress
        return bool(
            self.max_steps != -1
            and progress.processed == progress.ready == progress.completed + 1
            and batches.current.ready > 0
            and not batches.is_last_batch
        )

    @property
    def done(self) -> bool:
        """Whether training is over; says why."""
        if self.max_batches == 0:
            rank_zero_info("`Trainer.fit` stopped: No training batches.")
            return True
        if self.epoch_loop._steps_reached():
            rank_zero_info(f"`Trainer.fit` stopped: `max_steps={self.max_steps!r}` reached.")
            return True
        current = self.epoch_progress.current
        if self.max_epochs is not None and self.max_epochs != -1 and current.processed >= self.max_epochs:
            # A checkpoint is saved before `completed` moves; here the epoch counts as complete.
            current.completed = current.processed
            rank_zero_info(f"`Trainer.fit` stopped: `max_epochs={self.max_epochs!r}` reached.")
            return True
        if self.trainer.should_stop and self._can_stop_early:
            rank_zero_debug("`Trainer.fit` stopped: `trainer.should_stop` was set.")
            return True
        return False

    # --- running

    def run(self) -> None:
        """Train."""
        self.setup_data()
        if self.finishes_epoch:
            self._finish_epoch(send=self.trainer._checkpoint_connector.continues_records)
        if self.done or self.trainer.limit_train_batches == 0:
            return
        continues = self._settle_loaded_state()
        self._on_run_start()
        self.in_epochs = True
        try:
            while not self.done:
                self._run_epoch(continues)
                continues = False
        finally:
            self.in_epochs = False
        call_callback_hooks(self.trainer, "on_train_end")
        call_lightning_module_hook(self.trainer, "on_train_end")

    def _settle_loaded_state(self) -> bool:
        """Bring loaded counters into the form of a running loop; return whether an epoch is continued."""
        continues = self.continues_epoch
        current, total = self.epoch_progress.current, self.epoch_progress.total
        if continues:
            # An epoch that a step limit ended was counted as processed; it is not.
            current.processed, total.processed = current.completed, total.completed
        else:
            if self.restarting and current.started == current.ready - 1:  # failed in on_train_epoch_start
                self.epoch_progress.reset_on_restart()
            current.completed = current.processed
            total.completed = total.processed
        self.restarting = False
        return continues

    def _on_run_start(self) -> None:
        trainer = self.trainer
        val_loop = self.epoch_loop.val_loop
        if self.epoch_loop._should_check_val_epoch() and trainer.val_dataloaders is None:
            # The bar wants to know how long validation is.
            trainer.validating = True
            val_loop.setup_data()
            trainer.training = True
        self._warn_about_eval_mode()
        call_callback_hooks(trainer, "on_train_start")
        call_lightning_module_hook(trainer, "on_train_start")

    def _run_epoch(self, continues: bool) -> None:
        trainer, epoch_loop, connector = self.trainer, self.epoch_loop, self.trainer._logger_connector
        self.setup_data()
        feed, stream = self.feed, self._stream
        if feed is None or stream is None:
            raise RuntimeError("The train dataloader is gone; this is a mistake in jaxlightning, please report it.")
        if not self._stream_is_fresh:  # a fresh one was told when it was made
            feed.set_epoch(self.epoch_progress.current.processed)
        trainer._engine.check_constants()
        if continues:
            epoch_loop.resume()
        else:
            connector.on_epoch_start("train")
            self.epoch_progress.increment_ready()
            call_callback_hooks(trainer, "on_train_epoch_start")
            call_lightning_module_hook(trainer, "on_train_epoch_start")
            self.epoch_progress.increment_started()
            epoch_loop.begin()
        if feed.combined.mode == "sequential":
            raise ValueError(
                '`_FitLoop` does not support the `CombinedLoader(mode="sequential")` mode. The available modes are:'
                f" {[mode for mode in SUPPORTED_MODES if mode != 'sequential']}"
            )
        if not self._stream_is_fresh:
            stream.start(bare=True)
        self._stream_is_fresh = False
        if feed.resident is not None:
            feed.resident.settle()
        profiler = trainer._active_profiler
        timed = nullcontext() if profiler is None else profiler.profile("run_training_epoch")
        with timed, no_stray_stop_iteration(trainer.lightning_module):
            epoch_loop.run(stream)
        self._end_epoch()

    def _end_epoch(self) -> None:
        trainer, connector = self.trainer, self.trainer._logger_connector
        connector.epoch_end_reached("train")
        if trainer._nonfinite_watch is not None:
            trainer._nonfinite_watch.finish()
        self.epoch_progress.increment_processed()
        # Callbacks that watch a metric run last: it may be logged in the module's hook.
        call_callback_hooks(trainer, "on_train_epoch_end", monitoring_callbacks=False)
        call_lightning_module_hook(trainer, "on_train_epoch_end")
        call_callback_hooks(trainer, "on_train_epoch_end", monitoring_callbacks=True)
        self._finish_epoch()
        if trainer._signal_connector.pending:
            trainer._signal_connector.check()

    def _finish_epoch(self, *, send: bool = True) -> None:
        """Do what comes after the hooks of an epoch's end.

        Args:
            send: Whether the loggers get the epoch's values.
        """
        epoch_loop = self.epoch_loop
        if epoch_loop._num_ready_batches_reached():
            epoch_loop.update_epoch_schedulers(plateau=True)
        if send:
            # Epoch metrics share the axis value of the last batch, which has been counted already.
            epoch_loop._batches_that_stepped -= 1
            self.trainer._logger_connector.update_train_epoch_metrics()
            epoch_loop._batches_that_stepped += 1
        self.epoch_progress.increment_completed()

    def _warn_about_eval_mode(self) -> None:
        networks = getattr(self.trainer._engine, "networks", None)
        modes = [info.name for info in networks() if info.mode == "eval"] if callable(networks) else []
        if modes:
            rank_zero_warn(
                f"Found {len(modes)} module(s) in eval mode at the start of training. This may lead to unexpected"
                f" behavior during training. If this is intentional, you can ignore this warning. ({', '.join(modes)})",
                category=PossibleUserWarning,
            )

    # --- data

    @property
    def _should_reload(self) -> bool:
        every = self.trainer.reload_dataloaders_every_n_epochs
        return bool(every and self.trainer.current_epoch - self._last_reload_epoch >= every)

    def setup_data(self) -> None:
        """Request the train loaders, unless those at hand are still good, and start iterating.

        Raises:
            ValueError: When `val_check_interval` is longer than the epoch.
            MisconfigurationException: For a fraction of an unknown length.
        """
        trainer = self.trainer
        if self.feed is not None and not self._should_reload:
            return
        if trainer.limit_train_batches == 0 or not is_overridden("training_step", trainer.lightning_module):
            return
        self.release_data()
        feed = make_feed(
            trainer,
            self.data_source,
            TrainerFn.FITTING,
            RunningStage.TRAINING,
            trainer.limit_train_batches,
            "max_size_cycle",
        )
        feed.set_limits(feed.lengths)
        self.feed = feed
        self.max_batches = feed.inner.total() if feed.sources else 0
        fetched = 0
        # Before iterating begins: on a resume the order of the present epoch is wanted, not that of the first.
        progress = self.epoch_progress.current
        feed.set_epoch(progress.completed if self.continues_epoch else progress.processed)
        if self.continues_epoch:
            fetched = self.epoch_loop.batch_progress.current.ready
            if self._loader_states:
                feed.load_state_dicts(self._loader_states)
        else:
            feed.load_streams(self._loader_states)
        self._loader_states = []
        profiler = trainer._active_profiler
        action = "[_TrainingEpochLoop].train_dataloader_next"
        around = None if profiler is None else lambda: profiler.profile(action)
        self._stream = BatchStream(feed.inner, around)
        if feed.combined.mode != "sequential":  # refused later, after the hooks that Lightning calls first
            self._stream.start(bare=True, fetched=fetched)
            if self.continues_epoch and self.epoch_loop.batch_progress.current.processed >= self.max_batches:
                # Nothing is left of this epoch. Asking once lets the loader skip what was read and put its random
                # streams back, which it does with the first item.
                self._stream.fetch()
        self._stream_is_fresh = True
        if self.max_batches == 0:
            return
        self._last_reload_epoch = trainer.current_epoch
        if self._loaded_reload_epoch is not None:  # the next reload comes when it would have come
            self._last_reload_epoch, self._loaded_reload_epoch = self._loaded_reload_epoch, None
            coming = progress.processed
            every = trainer.reload_dataloaders_every_n_epochs
            if every and not self.continues_epoch and coming - self._last_reload_epoch >= every:
                self._last_reload_epoch = coming  # it is due before the next batch: these loaders are the new ones
        self._settle_validation_interval()
        if trainer.loggers and self.max_batches < trainer.log_every_n_steps and not trainer.fast_dev_run:
            rank_zero_warn(
                f"The number of training batches ({self.max_batches}) is smaller than the logging interval"
                f" Trainer(log_every_n_steps={trainer.log_every_n_steps}). Set a lower value for log_every_n_steps if"
                " you want to see logs for the training epoch.",
                category=PossibleUserWarning,
            )

    def _settle_validation_interval(self) -> None:
        """Turn `val_check_interval` into a number of batches, now that the epoch's length is known."""
        trainer, batches = self.trainer, self.max_batches
        interval = trainer.val_check_interval
        if trainer._val_check_time_interval is not None:
            trainer.val_check_batch = None
            trainer._last_val_time = time.monotonic()
        elif isinstance(interval, int):
            trainer.val_check_batch = interval
            if interval > batches and trainer.check_val_every_n_epoch is not None and trainer.limit_val_batches > 0:
                raise ValueError(
                    f" `val_check_interval` ({interval}) must be less than or equal to the number of the training"
                    f" batches ({batches}). If you want to disable validation set `limit_val_batches` to 0.0 instead."
                    " If you want to validate based on the total training batches, set `check_val_every_n_epoch=None`."
                )
        elif batches != _INF:
            trainer.val_check_batch = max(1, int(batches * interval))
        elif interval == 1.0:
            trainer.val_check_batch = _INF
        else:
            raise MisconfigurationException(
                "When using an IterableDataset for `train_dataloader`, `Trainer(val_check_interval)` must be time"
                " based, `1.0` or an int. An int k specifies checking validation every k training batches."
            )

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

    def teardown(self) -> None:
        """Stop iterating; the loaders stay, `trainer.train_dataloader` shows them."""
        self._close_stream()
        self.epoch_loop.teardown()

    # --- saving

    def on_save_checkpoint(self) -> dict[str, Any]:
        """Keep where the loaders stand."""
        states = [] if self.feed is None else self.feed.state_dicts()
        handed_out = self._batches_in_flight()
        if handed_out:
            states = [_rewound(state, handed_out) for state in states]
        state: dict[str, Any] = {"combined_loader": states} if any(states) else {}
        if self.trainer.should_stop:
            state["should_stop"] = True
        moments = {key: callback.moments() for key, callback in self._saving_callbacks().items()}
        if moments:
            state["checkpoint_moments"] = moments
        if self.trainer.reload_dataloaders_every_n_epochs and self._last_reload_epoch > -_INF:
            state["last_reload_epoch"] = int(self._last_reload_epoch)
        return state

    def _batches_in_flight(self) -> int:
        """Batches that the loaders gave and that no step has used: one that failed, one that was read ahead."""
        current, stream = self.epoch_loop.batch_progress.current, self._stream
        if stream is None or not self._epoch_unfinished():
            return 0
        return int(current.ready - current.processed) + stream.unused()

    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        """Take back what `on_save_checkpoint` kept."""
        self._loader_states = state_dict.get("combined_loader", [])
        self.was_stopping = bool(state_dict.get("should_stop", False))
        self._loaded_reload_epoch = state_dict.get("last_reload_epoch")
        callbacks = self._saving_callbacks()
        for key, moments in state_dict.get("checkpoint_moments", {}).items():
            if key in callbacks:
                callbacks[key].load_moments(self.trainer, moments)

    def _saving_callbacks(self) -> dict[str, Any]:
        return {each.state_key: each for each in self.trainer.callbacks if callable(getattr(each, "moments", None))}


def _rewound(state: dict[str, Any], batches: int) -> dict[str, Any]:
    """The position of a loader some batches earlier, where the position is a number of batches."""
    if state.get("batch", 0) < batches:
        return state
    state = {**state, "batch": state["batch"] - batches}
    if "start" in state:  # torch: with the start of the pass known, skipping at the sampler is exact
        state.pop("loader", None)
    return state
