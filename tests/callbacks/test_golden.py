"""The built-in callbacks in our Trainer, against what Lightning's did in its own (golden traces)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.tracing import RecordingLogger, TinyModule, golden

import jaxlightning as pl
from jaxlightning.callbacks import (
    BasePredictionWriter,
    Callback,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ProgressBar,
    Timer,
    TQDMProgressBar,
)
from jaxlightning.loggers import CSVLogger
from jaxlightning.optim import SGD, Adam, lr_scheduler
from jaxlightning.utilities.exceptions import MisconfigurationException

QUIET: dict[str, Any] = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}


def _plain(value: Any) -> Any:
    """The form of values in the golden files."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, (float, np.floating)):
        return "inf" if value == float("inf") else round(float(value), 6)
    return value


# learning rates


def _groups(module: Any, **second: Any) -> list[dict[str, Any]]:
    return [{"params": "layer/kernel"}, {"params": "layer/bias", **second}]


def _with_scheduler(optimizers: list[Any], *scheduled: Any, **options: Any) -> Any:
    return optimizers, [{"scheduler": lr_scheduler.StepLR(each, 1), **options} for each in scheduled]


def _single(make: Callable[..., Any], **options: Any) -> Callable[[Any], Any]:
    def configure(module: Any) -> Any:
        optimizer = make(module.parameters(), lr=0.1)
        return _with_scheduler([optimizer], optimizer, **options)

    return configure


CONFIGURATIONS: dict[str, Callable[[Any], Any]] = {
    "single_no_sched": lambda m: SGD(m.parameters(), lr=0.1),
    "single_sched": _single(Adam),
    "custom_name": _single(SGD, name="mylr"),
    "param_groups": lambda m: SGD(_groups(m, lr=0.5), lr=0.1),
    "param_groups_named": lambda m: SGD(
        [{"params": "layer/kernel", "name": "head"}, {"params": "layer/bias", "name": "tail"}], lr=0.1
    ),
    "param_group_single_named": lambda m: SGD([{"params": m.parameters(), "name": "only"}], lr=0.1),
    "duplicate_group_names": lambda m: SGD(
        [{"params": "layer/kernel", "name": "a"}, {"params": "layer/bias", "name": "a"}], lr=0.1
    ),
}


def _two(first: Any, second: Any, *scheduled: int) -> Callable[[Any], Any]:
    def configure(module: Any) -> Any:
        optimizers = [first("layer/kernel", lr=0.1), second("layer/bias", lr=0.1)]
        return _with_scheduler(optimizers, *(optimizers[i] for i in scheduled))

    return configure


MANUAL: dict[str, Callable[[Any], Any]] = {
    "two_same": _two(SGD, SGD),
    "two_diff": _two(SGD, Adam),
    "two_same_sched_one": _two(SGD, SGD, 0),
    "two_same_sched_both": _two(SGD, SGD, 0, 1),
}


def _check_two_optimizers(configured: Any, expected: dict[str, Any]) -> None:
    """Play a fit's hooks by hand: several optimizers need manual optimization, which has its own tests."""
    optimizers, schedulers = configured
    calls: list[Any] = []
    logger = SimpleNamespace(log_metrics=lambda metrics, step: calls.append([step, _plain(metrics)]))
    metrics: dict[str, Any] = {}
    epoch_loop = SimpleNamespace(_batches_that_stepped=0)
    trainer: Any = SimpleNamespace(
        optimizers=optimizers,
        lr_scheduler_configs=[SimpleNamespace(**each, interval="epoch", name=None) for each in schedulers],
        loggers=[logger],
        fit_loop=SimpleNamespace(epoch_loop=epoch_loop),
        _logger_connector=SimpleNamespace(
            should_update_logs=True, flush=lambda: None, update_callback_metrics=metrics.update
        ),
    )
    monitor = LearningRateMonitor()
    monitor.on_train_start(trainer)
    for _ in range(2):
        monitor.on_train_epoch_start(trainer)
        for _ in range(2):
            monitor.on_train_batch_start(trainer)
            epoch_loop._batches_that_stepped += 1
    # the recorded model takes no optimizer step of its own, and manual optimization steps no scheduler
    assert {"lrs": _plain(monitor.lrs), "calls": calls} == {key: expected[key] for key in ("lrs", "calls")}
    assert sorted(metrics) == expected["callback_metrics"]


@pytest.mark.parametrize("name", golden("lr_monitor"))
@pytest.mark.catalogue("LM01", adaptation="optax transformations are named by the user or by their factory")
@pytest.mark.catalogue("LM02", adaptation="read from the optimizer's host side")
@pytest.mark.catalogue("LM06", adaptation="rates are read from the host, not from the optimizer's state")
def test_the_learning_rates_of_lightning_are_logged(name: str) -> None:
    expected = golden("lr_monitor")[name]
    base, _, options = name.partition("+")
    if base in MANUAL:
        _check_two_optimizers(MANUAL[base](None), expected)
        return

    class Model(TinyModule):
        def configure_optimizers(self) -> Any:
            return CONFIGURATIONS[base](self)

    events: list[dict[str, Any]] = []
    monitor = LearningRateMonitor(**({"log_momentum": True, "log_weight_decay": True} if options else {}))
    trainer = pl.Trainer(
        **QUIET,
        max_epochs=2,
        logger=RecordingLogger(events),
        enable_checkpointing=False,
        callbacks=[monitor],
        log_every_n_steps=1,
        limit_train_batches=2,
        limit_val_batches=0,
    )
    if isinstance(expected, str):
        with pytest.raises(MisconfigurationException) as caught:
            trainer.fit(Model())
        assert f"MisconfigurationException: {caught.value}" == expected
        return
    trainer.fit(Model())
    calls = [[event["step"], _plain(event["metrics"])] for event in events if event["hook"] == "log_metrics"]
    assert {
        "lrs": _plain(monitor.lrs),
        "momentum": monitor.last_momentum_values,
        "wd": monitor.last_weight_decay_values,
        "calls": calls,
        "callback_metrics": sorted(trainer.callback_metrics),
    } == expected


# progress bars


def _recording_bar(events: list[dict[str, Any]]) -> ProgressBar:
    class Bar(ProgressBar):
        def disable(self) -> None: ...

        def enable(self) -> None: ...

    def make(hook: str) -> Any:
        def record(self: Any, trainer: Any, module: Any, *args: Any, **kwargs: Any) -> None:
            if "validation_batch" in hook:
                self.has_dataloader_changed(args[-1] if len(args) > 3 else 0)
            events.append(
                {
                    "hook": hook,
                    "metrics": _plain(self.get_metrics(trainer, module)),
                    "total_train_batches": _plain(self.total_train_batches),
                    "total_val_batches": _plain(self.total_val_batches),
                }
            )

        return record

    hooks = (
        "on_train_start on_train_epoch_start on_train_batch_end on_validation_batch_end on_validation_end "
        "on_train_epoch_end on_train_end"
    )
    return type("Recording", (Bar,), {hook: make(hook) for hook in hooks.split()})()


class _Logging(TinyModule):
    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        self.log("loss", batch_idx * 1.0, prog_bar=True)
        self.log("e", batch_idx * 1.0, prog_bar=True, on_step=True, on_epoch=True)
        return self._loss(batch)

    def validation_step(self, batch: Any, batch_idx: Any) -> None:
        self.log("vl", batch_idx * 1.0, prog_bar=True)


@pytest.mark.parametrize("name", ["csv_v3", "csv_longstr", "none", "two"])
@pytest.mark.catalogue("PB02", "PB04")
def test_a_bar_gets_the_metrics_of_lightning_in_every_hook(name: str, tmp_path: Path) -> None:
    loggers: dict[str, Any] = {
        "csv_v3": lambda: CSVLogger(tmp_path, version=3),
        "csv_longstr": lambda: CSVLogger(tmp_path, version="abcdefgh"),
        "none": lambda: False,
        "two": lambda: [CSVLogger(tmp_path, version=1), CSVLogger(tmp_path, name="b", version=2)],
    }
    events: list[dict[str, Any]] = []
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=loggers[name](),
        enable_checkpointing=False,
        enable_model_summary=False,
        max_epochs=2,
        callbacks=[_recording_bar(events)],
        log_every_n_steps=1,
    )
    trainer.fit(_Logging())
    expected = golden("progress_bar")["get_metrics"][name]
    assert (events if name == "csv_v3" else events[0]["metrics"]) == expected


@pytest.mark.catalogue("PB05")
@pytest.mark.catalogue("PB03", adaptation="numbers on a bar are those of the last log point")
def test_the_tqdm_bar_shows_what_lightnings_shows(tmp_path: Path) -> None:
    """PB03: the values on our bar are those of the last log point, so the third batch shows the second one's."""
    seen: list[list[Any]] = []

    class Bar(TQDMProgressBar):
        def _note(self, word: str, bar: Any, *more: Any) -> None:
            seen.append([word, bar.desc, bar.n, bar.total, *more])

        def on_train_batch_end(self, *args: Any) -> None:
            super().on_train_batch_end(*args)
            self._note("train", self.train_progress_bar, self.train_progress_bar.postfix)

        def on_validation_batch_end(self, *args: Any) -> None:
            super().on_validation_batch_end(*args)
            self._note("val", self.val_progress_bar)

        def on_test_batch_end(self, *args: Any) -> None:
            super().on_test_batch_end(*args)
            self._note("test", self.test_progress_bar)

        def on_predict_batch_end(self, *args: Any) -> None:
            super().on_predict_batch_end(*args)
            self._note("predict", self.predict_progress_bar)

    class Model(TinyModule):
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            self.log("loss", 0.123456, prog_bar=True)
            return self._loss(batch)

    trainer = pl.Trainer(
        accelerator="cpu",
        logger=CSVLogger(tmp_path),
        enable_checkpointing=False,
        enable_model_summary=False,
        max_epochs=1,
        log_every_n_steps=1,
        callbacks=[Bar()],
    )
    model = Model()
    trainer.fit(model)
    trainer.test(model, verbose=False)
    trainer.predict(model)
    expected = golden("progress_bar")["tqdm"]
    first = [each[0] for each in expected].index("train")
    assert seen[first][4] == "v_num=0"  # nothing has been fetched before the first log point
    seen[first][4] = expected[first][4]
    assert seen == expected


# flags


class _Flags(TinyModule):
    def __init__(self, es: float | None = None) -> None:
        super().__init__(n_train=20, n_val=8)
        self.es = es

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        self.log("train_loss", 1.0, on_step=True, on_epoch=True)
        return self._loss(batch)

    def validation_step(self, batch: Any, batch_idx: Any) -> None:
        self.log("val_loss", 1.0 if self.es is None else self.es)


class _Recorder(Callback):
    def __init__(self) -> None:
        self.epochs: list[int] = []
        self.validations: list[dict[str, int]] = []
        self.steps: list[int] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.epochs.append(trainer.current_epoch)
        self.steps.append(trainer.global_step)

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            at = {"epoch": trainer.current_epoch, "batch_idx": trainer.fit_loop.batch_idx}
            self.validations.append({**at, "global_step": trainer.global_step, "batches": 4})


def _stop(monitor: str = "val_loss", **options: Any) -> Callable[[], Any]:
    return lambda: EarlyStopping(monitor, **options)


FLAGS: dict[str, tuple[Callable[[], Any] | None, dict[str, Any], float | None]] = {
    "min_epochs_3_early_stop": (_stop(patience=1), {"max_epochs": 8, "min_epochs": 3}, None),
    "early_stop_patience1": (_stop(patience=1), {"max_epochs": 8}, None),
    "early_stop_patience0": (_stop(patience=0), {"max_epochs": 8}, None),
    "min_steps_35_early_stop": (_stop(patience=1), {"max_epochs": 8, "min_steps": 35}, None),
    "min_epochs_3_min_steps_25": (_stop(patience=1), {"max_epochs": 8, "min_epochs": 3, "min_steps": 25}, None),
    "early_stop_val_check_0.5": (_stop(patience=1), {"max_epochs": 8, "val_check_interval": 0.5}, None),
    "early_stop_train_metric": (_stop("train_loss_epoch", patience=2), {"max_epochs": 8, "limit_val_batches": 0}, None),
    "early_stop_check_val_2": (_stop(patience=1), {"max_epochs": 12, "check_val_every_n_epoch": 2}, None),
    "early_stop_nan": (_stop(patience=5), {"max_epochs": 8}, float("nan")),
    "early_stop_threshold": (_stop(patience=5, stopping_threshold=2.0), {"max_epochs": 8}, None),
    "early_stop_missing_strict": (_stop("nope"), {"max_epochs": 3}, None),
    "early_stop_missing_not_strict": (_stop("nope", strict=False), {"max_epochs": 2}, None),
    "accumulation_scheduler": (lambda: GradientAccumulationScheduler({0: 1, 1: 4, 3: 2}), {"max_epochs": 5}, None),
    "timer_zero": (lambda: Timer(timedelta(0)), {"max_epochs": 3}, None),
    "max_time_large": (None, {"max_time": {"hours": 1}, "max_epochs": 1}, None),
    "max_time_only_sets_max_epochs": (None, {"max_time": "00:00:00:00"}, None),
}


@pytest.mark.parametrize("name", FLAGS)
def test_runs_end_where_lightnings_end(name: str) -> None:
    make, flags, value = FLAGS[name]
    expected = golden("flags")[name]
    recorder = _Recorder()
    mine = [] if make is None else [make()]
    trainer = pl.Trainer(**QUIET, logger=False, enable_checkpointing=False, callbacks=[recorder, *mine], **flags)
    if "exception" in expected:
        with pytest.raises(RuntimeError) as caught:
            trainer.fit(_Flags(value))
        assert {"type": "RuntimeError", "message": str(caught.value)} == expected["exception"]
        return
    trainer.fit(_Flags(value))
    found: dict[str, Any] = {
        "global_step": trainer.global_step,
        "current_epoch": trainer.current_epoch,
        "callback_metrics": sorted(trainer.callback_metrics),
        "should_stop": trainer.should_stop,
        "is_last_batch": trainer.is_last_batch,
        "train_batches_per_epoch": [recorder.epochs.count(epoch) for epoch in sorted(set(recorder.epochs))],
        "validations": recorder.validations,
        "global_step_after_each_batch_first12": recorder.steps[:12],
    }
    for callback in mine:
        if isinstance(callback, EarlyStopping):
            found["early_stopping"] = {
                "stopped_epoch": callback.stopped_epoch,
                "wait_count": callback.wait_count,
                "reason": callback.stopping_reason.name,
                "best": round(float(callback.best_score), 6),
            }
    assert found == {key: expected[key] for key in found}


# prediction writers


class _Writer(BasePredictionWriter):
    def __init__(self, interval: Any) -> None:
        super().__init__(interval)
        self.events: list[Any] = []

    def write_on_batch_end(
        self, trainer: Any, module: Any, prediction: Any, indices: Any, batch: Any, *at: int
    ) -> None:
        self.events.append(["batch", float(prediction), list(indices), *at])

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        self.events.append(["epoch", _numbers(predictions), indices])


def _numbers(tree: Any) -> Any:
    return [_numbers(each) for each in tree] if isinstance(tree, list) else None if tree is None else float(tree)


class _Sums(pl.LightningModule):
    def predict_step(self, batch: Any, batch_idx: Any, dataloader_idx: Any = 0) -> Any:
        return batch.sum()


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("returned", ["None", "True", "False"])
@pytest.mark.parametrize("loaders", ["single", "list1", "two"])
def test_writers_get_the_predictions_and_indices_of_lightning(loaders: str, returned: str) -> None:
    from torch.utils.data import DataLoader

    expected = golden("dataloaders")["predict"][f"{loaders}|return_predictions={returned}"]

    def numbers(start: int, stop: int) -> Any:
        return DataLoader(np.arange(start, stop), batch_size=2)  # type: ignore[arg-type]

    data = {"single": numbers(0, 5), "list1": [numbers(0, 5)], "two": [numbers(0, 5), numbers(10, 12)]}[loaders]
    batch, epoch = _Writer("batch"), _Writer("epoch")
    trainer = pl.Trainer(**QUIET, logger=False, enable_checkpointing=False, callbacks=[batch, epoch])
    result = trainer.predict(_Sums(), data, return_predictions={"None": None, "True": True, "False": False}[returned])
    assert (None if result is None else _numbers(result)) == expected["returned"]
    assert batch.events == expected["writer_batch"]
    assert epoch.events == expected["writer_epoch"]


def test_a_loader_that_does_not_tell_its_indices_gives_empty_ones_with_a_warning() -> None:
    writer = _Writer("batch_and_epoch")
    trainer = pl.Trainer(**QUIET, logger=False, enable_checkpointing=False, callbacks=[writer])

    def rows() -> Any:
        yield from (np.ones(2, np.float32), np.ones(2, np.float32))

    class Rows:
        def __iter__(self) -> Any:
            return rows()

    with pytest.warns(UserWarning, match="indices"):
        trainer.predict(_Sums(), Rows())
    assert [event[2] for event in writer.events[:2]] == [[], []]


# Lightning's plain callbacks


@pytest.mark.lightning
def test_a_plain_callback_of_lightning_runs_in_our_trainer() -> None:
    from lightning.pytorch import Callback as Theirs

    events: list[Any] = []

    class Mine(Theirs):  # type: ignore[misc]
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            events.append((trainer.current_epoch, trainer.global_step, float(trainer.callback_metrics["val_loss"])))

        def state_dict(self) -> dict[str, Any]:
            return {"events": len(events)}

    trainer = pl.Trainer(**QUIET, logger=False, enable_checkpointing=False, max_epochs=2, callbacks=[Mine()])
    trainer.fit(_Flags())
    assert events == [(0, 10, 1.0), (1, 20, 1.0)]


@pytest.mark.lightning
def test_a_prediction_writer_of_lightning_gets_the_indices_too() -> None:
    from lightning.pytorch.callbacks import BasePredictionWriter as Theirs

    events: list[Any] = []

    class Writer(Theirs):  # type: ignore[misc]
        def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, indices: Any, *args: Any) -> None:
            events.append((float(prediction), indices))

        def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
            events.append((_numbers(predictions), indices))

    trainer = pl.Trainer(
        **QUIET, logger=False, enable_checkpointing=False, callbacks=[Writer(write_interval="batch_and_epoch")]
    )
    trainer.predict(_Sums(), pl.ArrayLoader(np.arange(3.0, dtype=np.float32), batch_size=2))
    assert events == [(1.0, [0, 1]), (2.0, [2]), ([1.0, 2.0], [[[0, 1], [2]]])]
