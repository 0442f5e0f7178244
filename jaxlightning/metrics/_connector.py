"""The trainer's side of `self.log`: where values go, when they are reduced, and when loggers and callbacks see them.

What owns what: the loops say where the run is (`on_batch_start`, `epoch_end_reached`, ...); `ResultCollection` holds
what a stage logged; `EmissionQueue` sends to the loggers; this file joins them and keeps the three public dictionaries.
Values of the three dictionaries are fetched when somebody reads one of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxlightning.compile.trace import current_trace
from jaxlightning.metrics._emission import EmissionQueue, StepEmission
from jaxlightning.metrics._entries import Owner, StepValues
from jaxlightning.metrics._logging import log_in_trace, resolve_call, step_value, warn_barebones
from jaxlightning.metrics._objects import PASSED, refuse_torchmetrics
from jaxlightning.metrics._refs import resolve_in_place, to_scalar
from jaxlightning.metrics._results import ResultCollection
from jaxlightning.metrics._sending import Sender
from jaxlightning.metrics._values import check_loggable
from jaxlightning.metrics.nnx_metric import adopt_nnx_metrics
from jaxlightning.utilities.exceptions import MisconfigurationException
from jaxlightning.utilities.warnings import WarningCache

__all__ = ["LoggerConnector"]

_EVALUATIONS = ("validate", "test", "sanity_check")


class LoggerConnector(Sender):
    """Receives every `self.log` of a trainer and feeds loggers, callbacks and the progress bar.

    Args:
        trainer: The trainer that owns it.

    Attributes:
        eval_results: What `validate` and `test` return: for each loader its epoch metrics as Python floats.
    """

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self._owner = Owner(trainer)
        self.eval_results: list[dict[str, float]] = []
        self._collections: dict[str, ResultCollection] = {}
        self._stage: str | None = None
        self._outputs: list[dict[str, Any]] = []
        self._warnings = WarningCache()

    # --- Calls of self.log ---

    def log(self, module: Any, name: str, value: Any, **options: Any) -> None:
        """Take one call of `self.log`; options are those of `LightningModule.log`.

        Raises:
            MisconfigurationException: If nothing may be logged here, or not like this.
            ValueError: If the value cannot be logged.
        """
        check_loggable(name, value)
        if self._trainer.barebones:
            warn_barebones(name)
            return
        results = self._current_results()
        if results is None:
            if log_in_trace(current_trace(), name, value, options, self._warnings):
                return
            raise MisconfigurationException(
                f"You are trying to `self.log({name!r}, ...)` but the loop's result collection is not registered yet. "
                "Prediction has no metrics, and outside of `fit`, `validate` and `test` there is no loop that could "
                "keep them."
            )
        call = resolve_call(
            name,
            value,
            options,
            fx=getattr(module, "_current_fx_name", None),
            results=results,
            has_logger=bool(_loggers(self._trainer)),
            warnings=self._warnings,
            module=module,
        )
        if call.trace is None:
            results.log_host(call.meta, call.value, 1 if call.weight is None else call.weight)
            return
        results.register(call.meta)
        if call.meta.metric is None:
            call.trace.add_log(call.meta, call.value, call.weight)
            return
        call.trace.add_log(call.meta, step_value(call), None)
        if call.meta.metric == PASSED:
            call.trace.add_log(dataclasses.replace(call.meta, reduce_fx="state"), call.value, None)

    # --- Where the run is ---

    def begin_run(self, fn: Any = None) -> None:
        """A run starts: nothing is logged yet.

        Args:
            fn: What the trainer is about to do; only for symmetry with the loops, every run starts empty.

        Raises:
            MisconfigurationException: If the module holds objects of torchmetrics.
        """
        if self._trainer.lightning_module is not None:
            refuse_torchmetrics(self._trainer.lightning_module)
            adopt_nnx_metrics(self._trainer.lightning_module)
        self._queue.drop()
        for stage, results in self._collections.items():
            results.reset()
            self._owner.reset_accumulators(stage)
        self._collections.clear()
        self._warnings.clear()
        self.late_emission = None
        self.reset_metrics()

    def on_epoch_start(self, stage: str) -> None:
        """An epoch or an evaluation starts; what training logged so far stays visible during a validation."""
        self._enter(stage)

    def on_batch_start(self, stage: str, batch: Any, dataloader_idx: int | None, batch_idx: int) -> None:
        """A batch starts.

        Args:
            stage: `"train"`, `"validate"`, `"test"` or `"sanity_check"`.
            batch: The host batch; its batch size may be asked for.
            dataloader_idx: Index of the loader, None if there is only one.
            batch_idx: Index of the batch.
        """
        results = self._enter(stage)
        if dataloader_idx != results.dataloader_idx and results.first_batch is not None:
            self._store_outputs(results)
        results.start_batch(batch, dataloader_idx)

    def on_step_output(self, stage: str, out: StepValues) -> None:
        """Take the output of a compiled step; metrics of earlier steps that are there are sent now, while it runs."""
        self._enter(stage).on_step_output(out)
        if self._queue:
            self._queue.flush_ready()

    def before_skippable_batch(self) -> None:
        """The next train batch may turn out to be skipped: what was logged up to here counts in any case."""
        self._public.update(self._enter("train").new_step_items())

    def skip_batch(self) -> None:
        """The train batch is skipped: what its start hooks logged gives no step values."""
        self._enter("train").new_step_items()

    def epoch_end_reached(self, stage: str) -> None:
        """The last batch of an epoch is done: from now on epoch values count."""
        results = self._enter(stage)
        self._queue.flush()
        if results.training:
            self._public.update(results.new_step_items())
            results.first_batch = None
        else:
            self._store_outputs(results)
            results.dataloader_idx = None

    # --- Train ---

    def update_train_step_metrics(self) -> None:
        """After `on_train_batch_end`: send the step values if this is a step to log at."""
        trainer = self._trainer
        if not (self.should_update_logs or trainer.fast_dev_run):
            return
        if trainer.fit_loop._should_accumulate() and trainer.lightning_module.automatic_optimization:
            return
        items = self._enter("train").step_items()
        self._emit(items.log if trainer.loggers else {}, items.bar, None, late=self.may_be_late())

    def send_late(self, results: ResultCollection, axis: int, epoch: int) -> None:
        """Send the step values of a train batch at a log point; only if `may_be_late`.

        Args:
            results: What training logged.
            axis: Number of batches that stepped before this one.
            epoch: The epoch.
        """
        trainer = self._trainer
        layout, values = results.step_layout(), results.latest()
        if layout is not None and layout.is_empty:
            return
        if layout is None or values is None:
            items = results.step_items()
            self._emit(items.log if trainer.loggers else {}, items.bar, None, late=True, axis=axis)
        elif (layout.log and trainer.loggers) or (layout.bar and trainer.progress_bar_callback is not None):
            self._queue.push(StepEmission(layout, values, axis, epoch), late=True)

    def update_train_epoch_metrics(self) -> None:
        """At the end of a train epoch: send the epoch values, then start over for the next epoch."""
        results = self._enter("train")
        results.first_batch = None
        items = results.items()
        self._public.update(items)
        self._emit(items.log if self._trainer.loggers else {}, items.bar, None, late=False)
        results.reset()

    # --- Evaluation ---

    def update_eval_step_metrics(self, step: int) -> None:
        """After a batch of an evaluation: send its step values.

        Args:
            step: Batches of this loader seen before this one.
        """
        results = self._current_results()
        if results is None or results.stage == "sanity_check" or not results.step_log or not self._trainer.loggers:
            return
        items = results.step_items()
        if items.log:
            self._emit(items.log, items.bar, step, late=self.may_be_late())

    def update_eval_epoch_metrics(self) -> None:
        """After `on_*_epoch_end`: send the epoch values of all loaders in one call, and set `eval_results`."""
        results = self._current_results()
        if results is None or results.training:
            raise RuntimeError("The epoch metrics of an evaluation were asked for outside of one.")
        results.first_batch = None
        items = results.items()
        self._public.update(items)
        outputs, self._outputs = self._outputs, []
        if results.stage == "sanity_check":
            self.eval_results = [{} for _ in outputs]
            return
        everything: dict[str, Any] = {}
        for output in reversed(outputs):
            everything.update(output)
        everything.update(items.log)
        self._public.show(items.bar)
        if self._trainer.loggers and everything:
            self._emit(everything, {}, None, late=False)
        self.eval_results = [
            {name: to_scalar(value) for name, value in {**output, **items.log}.items()} for output in outputs
        ]

    def _store_outputs(self, results: ResultCollection) -> None:
        """Keep the epoch values of the loader that just ended; the next loader has keys of its own."""
        self._queue.flush()
        self._public.update(results.new_step_items())
        results.first_batch = None
        if results.stage == "sanity_check":
            self._outputs.append({})
            return
        items = results.items()
        self._public.update(items)
        self._public.show(items.bar)
        self._outputs.append(dict(items.log))

    def reset_results(self, stage: str) -> None:
        """Forget what a stage logged; its last values stay in the three dictionaries."""
        self._queue.flush()
        results = self._collections.get(stage)
        if results is not None:
            results.reset()
        if stage in _EVALUATIONS:
            self._outputs = []

    def reset_metrics(self) -> None:
        """Empty the three dictionaries."""
        self._public.clear()

    # --- The three dictionaries ---

    @property
    def callback_metrics(self) -> dict[str, Any]:
        """Metrics for callbacks, as NumPy scalars; the dictionary itself, so that callbacks may add to it."""
        return self._read(self._public.callback, "callback")

    @property
    def logged_metrics(self) -> dict[str, Any]:
        """What was sent or would be sent to loggers, as NumPy scalars."""
        return self._read(self._public.logged, "log")

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """What the progress bar shows, as Python floats."""
        self._read(self._public.bar, "bar")
        return self._public.resolve_bar()

    @property
    def progress_bar_cached(self) -> dict[str, float]:
        """Values for the progress bar that are known without reading the device."""
        return self._public.known_bar

    def _read(self, metrics: dict[str, Any], view: str) -> dict[str, Any]:
        results = self._current_results()
        if results is not None:
            metrics.update(getattr(results.items(), view))
        resolve_in_place(metrics)
        return metrics

    def update_callback_metrics(self, values: Mapping[str, Any]) -> None:
        """Add host values to `callback_metrics` without fetching the step values that are on the device.

        As with a read of `callback_metrics`, what is logged at this moment becomes part of it.
        """
        results = self._current_results()
        if results is not None:
            self._public.callback.update(results.items().callback)
        self._public.update_callback(values)

    def metric_version(self, name: str) -> Any:
        """What tells one measurement of a callback metric from the next.

        Args:
            name: Key in `callback_metrics`.

        Returns:
            Something that equals an earlier answer if and only if the metric was not logged again since.
        """
        results = self._current_results()
        if results is not None:
            items = results.items()
            if name in items.versions:
                return items.versions[name]
        return self._public.version(name)

    def is_logged_by(self, stage: str, name: str) -> bool:
        """Whether a stage logs a metric under this name (with any of its suffixes), as far as is known by now."""
        results = self._collections.get(stage)
        return results is not None and results.has_name(name)

    # --- Collections ---

    def _current_results(self) -> ResultCollection | None:
        """The collection of the stage in which the trainer is; None while predicting or without a stage."""
        stage = getattr(self._trainer.state.stage, "value", self._trainer.state.stage)
        if stage is None or stage == "predict" or stage == "tune":
            return None
        return self._enter(str(stage))

    def _enter(self, stage: str) -> ResultCollection:
        results = self._collections.get(stage)
        if stage != self._stage:
            before = self._collections.get(self._stage) if self._stage is not None else None
            self._stage = stage
            if before is not None and before.training and before.first_batch is not None:
                # The step values of training stay visible, and below what the validation logs.
                self._queue.flush()
                self._public.update(before.new_step_items())
        if results is None:
            results = ResultCollection(stage, self._owner)
            self._collections[stage] = results
        return results

    # --- Checkpoints ---

    def state_dict(self) -> list[dict[str, Any]]:
        """What training logged in the epoch that is under way, as plain values; fetched from the device."""
        results = self._collections.get("train")
        return [] if results is None else results.state_dict()

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """Continue the metrics of an interrupted train epoch; after `begin_run`.

        Args:
            state: What `state_dict` gave.
        """
        self._collections.pop("train", None)
        results = self._enter("train")
        results.load_state_dict(state)

    def public_state_dict(self) -> dict[str, dict[str, Any]]:
        """The three dictionaries, as plain values; fetched from the device."""
        return self._public.state_dict()

    def load_public_state_dict(self, state: dict[str, dict[str, Any]]) -> None:
        """Show the values of an interrupted run until newer ones come."""
        self._public.load_state_dict(state)

    # --- The end ---

    def teardown(self) -> None:
        """End of a run: send what waits, and hold no device array any longer."""
        self._queue.flush()
        for results in self._collections.values():
            if results.training and results.first_batch is not None:
                self._public.update(results.new_step_items())
            results.batch = None
        self._public.resolve()

    def __getstate__(self) -> dict[str, Any]:
        self.teardown()
        return {**self.__dict__, "_collections": {}, "_owner": None, "_queue": None, "_stage": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._owner = Owner(self._trainer)
        self._queue = EmissionQueue(self._send, self._public.show)


def _loggers(trainer: Any) -> Any:
    """The loggers, past the property that takes a read in a step for the user's, by which the step would decide."""
    found = vars(trainer).get("_loggers")
    return trainer.loggers if found is None else found
