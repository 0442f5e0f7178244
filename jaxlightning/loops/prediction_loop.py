"""Prediction: one pass over one or several loaders, keeping on the host what the step returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxlightning.loops.base import Loop, no_stray_stop_iteration
from jaxlightning.loops.call import call_callback_hooks, call_lightning_module_hook
from jaxlightning.loops.checks import verify_dataloader_idx
from jaxlightning.loops.data import Feed, LoaderSource, make_feed
from jaxlightning.loops.modes import ModuleMode
from jaxlightning.loops.progress import BatchProgress
from jaxlightning.loops.stream import BatchStream
from jaxlightning.utilities.states import RunningStage, TrainerFn

if TYPE_CHECKING:
    from jaxlightning.trainer import Trainer


class PredictionLoop(Loop):
    """Runs a prediction.

    Args:
        trainer: The trainer.
    """

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self.epoch_batch_indices: list[list[list[int]]] = []
        self.current_batch_indices: list[int] = []
        self.batch_progress = BatchProgress()
        self.max_batches: list[int | float] = []
        self.return_predictions = True
        self.data_source = LoaderSource("predict_dataloader")
        self.feed: Feed | None = None
        self._stream: BatchStream | None = None
        self._predictions: list[list[Any]] = []
        self._mode = ModuleMode()

    @property
    def num_dataloaders(self) -> int:
        """How many loaders there are."""
        return 0 if self.feed is None else len(self.feed.sources)

    @property
    def predictions(self) -> list[Any]:
        """What was predicted so far: per batch with one loader, per loader and batch with several."""
        if not self._predictions:
            return self._predictions
        return self._predictions[0] if self.num_dataloaders == 1 else self._predictions

    def run(self) -> list[Any] | None:
        """Run the prediction.

        Returns:
            The predictions on the host, or None when there is nothing to run or none are wanted.
        """
        self.setup_data()
        if sum(self.max_batches) == 0:
            return None
        self._reset()
        self._start()
        with no_stray_stop_iteration(self.trainer.lightning_module):
            self._run_batches()
        return self._end()

    # --- data

    def setup_data(self) -> None:
        """Request the loaders."""
        trainer = self.trainer
        if trainer.limit_predict_batches == 0:
            return
        self.release_data()
        self.feed = make_feed(
            trainer,
            self.data_source,
            TrainerFn.PREDICTING,
            RunningStage.PREDICTING,
            trainer.limit_predict_batches,
            "sequential",
        )
        self.max_batches = self.feed.lengths

    def release_data(self) -> None:
        """Let go of the loaders, their iterators and workers."""
        self._close_stream()
        if self.feed is not None:
            self.feed.close()
            self.feed = None
        self.max_batches = []

    def _close_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _reset(self) -> None:
        self.batch_progress.reset_on_run()
        feed = self.feed
        if feed is None:
            raise RuntimeError("There are no prediction loaders; this is a mistake in jaxlightning, please report it.")
        if feed.combined.mode != "sequential":
            raise ValueError('`trainer.predict()` only supports the `CombinedLoader(mode="sequential")` mode.')
        feed.set_limits(self.max_batches)
        profiler = self.trainer._active_profiler
        around = None if profiler is None else lambda: profiler.profile("[_PredictionLoop].predict_next")
        self._stream = BatchStream(feed.inner, around)
        self._stream.start()
        self.epoch_batch_indices = [[] for _ in feed.sources]
        self._predictions = [[] for _ in feed.sources]

    # --- the pass

    def _start(self) -> None:
        trainer = self.trainer
        verify_dataloader_idx(
            ("predict_step", "on_predict_batch_start", "on_predict_batch_end"),
            self.num_dataloaders > 1,
            RunningStage.PREDICTING,
            trainer.lightning_module,
        )
        self._mode.capture(trainer.lightning_module, trainer._engine)
        call_lightning_module_hook(trainer, "on_predict_model_eval")
        trainer._engine.sync_modes()
        trainer._engine.check_constants()
        for name in ("on_predict_start", "on_predict_epoch_start"):
            call_callback_hooks(trainer, name)
            call_lightning_module_hook(trainer, name)

    def _run_batches(self) -> None:
        trainer, feed, stream = self.trainer, self.feed, self._stream
        if feed is None or stream is None:
            return
        module, engine, connector, signals = (
            trainer.lightning_module,
            trainer._engine,
            trainer._logger_connector,
            trainer._signal_connector,
        )
        transfer = trainer._data_connector.transfer()
        several = len(feed.sources) > 1
        on_epoch, on_batch = self._writers()
        keep = self.return_predictions or on_epoch
        progress = self.batch_progress
        epoch, global_step = trainer.current_epoch, trainer.global_step
        # Moved to the host one batch late: the copy of one batch overlaps the computation of the next.
        waiting: tuple[int, Any] | None = None
        for (batch, batch_idx, dataloader_idx), last in stream:
            progress.is_last_batch = last
            if transfer is not None:
                batch = transfer(batch, dataloader_idx)
            progress.increment_ready()
            if on_epoch or on_batch:
                self._note_indices(dataloader_idx, on_epoch)
            index = dataloader_idx if several else None
            extra = (dataloader_idx,) if several else ()
            connector.on_batch_start("predict", batch, index, batch_idx)
            call_callback_hooks(trainer, "on_predict_batch_start", batch, batch_idx, *extra)
            call_lightning_module_hook(trainer, "on_predict_batch_start", batch, batch_idx, *extra)
            progress.increment_started()
            vars(module)["_current_fx_name"] = "predict_step"
            out = engine.predict_step(
                batch, batch_idx=batch_idx, dataloader_idx=index, current_epoch=epoch, global_step=global_step
            )
            vars(module)["_current_fx_name"] = None
            prediction = out.outputs
            if prediction is None:
                trainer._warnings.warn("predict returned None if it was on purpose, ignore this warning...")
            progress.increment_processed()
            call_callback_hooks(trainer, "on_predict_batch_end", prediction, batch, batch_idx, *extra)
            call_lightning_module_hook(trainer, "on_predict_batch_end", prediction, batch, batch_idx, *extra)
            progress.increment_completed()
            if keep:
                _start_copy(prediction)
                self._keep(waiting)
                waiting = (dataloader_idx, prediction)
            if signals.pending and not last:
                signals.check()
        self._keep(waiting)

    def _keep(self, item: tuple[int, Any] | None) -> None:
        if item is not None:
            self._predictions[item[0]].append(to_host(item[1]))

    def _writers(self) -> tuple[bool, bool]:
        """Whether a prediction writer wants its data at the end, and whether one wants it at every batch."""
        from jaxlightning.callbacks._foreign import is_prediction_writer

        writers = [each for each in self.trainer.callbacks if is_prediction_writer(each)]
        return any(each.interval.on_epoch for each in writers), any(each.interval.on_batch for each in writers)

    def _note_indices(self, dataloader_idx: int, on_epoch: bool) -> None:
        feed = self.feed
        indices = None if feed is None else feed.sources[dataloader_idx].last_batch_indices
        if not indices:
            name = "" if feed is None else type(feed.combined.flattened[dataloader_idx]).__name__
            self.trainer._warnings.warn(f"Couldn't infer the batch indices fetched from your dataloader: `{name}`")
            self.current_batch_indices = []
            return
        self.current_batch_indices = list(indices)
        if on_epoch:
            self.epoch_batch_indices[dataloader_idx].append(list(indices))

    def _end(self) -> list[Any] | None:
        trainer = self.trainer
        call_callback_hooks(trainer, "on_predict_epoch_end")
        call_lightning_module_hook(trainer, "on_predict_epoch_end")
        results = self.predictions if self.return_predictions else None
        if not self.return_predictions:
            self._predictions = []
        self.epoch_batch_indices = []
        call_callback_hooks(trainer, "on_predict_end")
        call_lightning_module_hook(trainer, "on_predict_end")
        self._mode.restore(trainer.lightning_module, trainer._engine)
        self._close_stream()
        return results

    def teardown(self) -> None:
        """Stop iterating; the loaders stay, `trainer.predict_dataloaders` shows them."""
        self._close_stream()


def _start_copy(tree: Any) -> None:
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array):
            leaf.copy_to_host_async()


def to_host(tree: Any) -> Any:
    """Return the tree with numpy arrays in place of device arrays; other leaves stay."""
    return jax.tree.map(lambda leaf: np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf, tree)
