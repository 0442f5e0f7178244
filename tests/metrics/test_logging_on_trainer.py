"""The recorded runs of Lightning again, on the real trainer, engine and loggers."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

import flax.linen as nn
import numpy as np
import pytest

import jaxlightning as pl
from jaxlightning.callbacks import Callback, LearningRateMonitor
from jaxlightning.loggers import CSVLogger, Logger, TensorBoardLogger

pytestmark = pytest.mark.usefixtures("compiled_once")

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def loader(samples: int) -> pl.ArrayLoader:
    return pl.ArrayLoader((np.random.default_rng(0).normal(size=(samples, 4)).astype(np.float32),), batch_size=2)


class Recorder(Logger):
    """Keeps what a logger is given."""

    name, version = "rec", 0

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert all(type(value) in (int, float) for value in metrics.values())
        self.calls.append({"step": step, "metrics": {k: _round(v) for k, v in metrics.items()}})

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None: ...


def _round(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _round(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_round(item) for item in value]
    if isinstance(value, np.generic | np.ndarray):
        value = value.item()
    return round(value, 6) if isinstance(value, float) else value


class Tiny(pl.LightningModule):
    def __init__(self, n_train: int = 6, n_val: int = 4, loaders: int = 1) -> None:
        super().__init__()
        self.layer = nn.Dense(2)
        self.sizes, self.loaders = (n_train, n_val), loaders

    def loss(self, batch: Any) -> Any:
        return (self.layer(batch[0]) ** 2).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        optimizer = pl.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": pl.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5), "interval": "epoch"}]

    def train_dataloader(self) -> Any:
        return loader(self.sizes[0])

    def val_dataloader(self) -> Any:
        return loader(self.sizes[1]) if self.loaders == 1 else [loader(self.sizes[1]) for _ in range(self.loaders)]

    def test_dataloader(self) -> Any:
        return loader(3)


class LogModule(Tiny):
    def __init__(self, n_train: int = 5, loaders: int = 1) -> None:
        super().__init__(n_train, 3, loaders)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        v = 10.0 * self.current_epoch + batch_idx
        self.log("tr_default", v)
        self.log("tr_step", v, on_step=True, on_epoch=False)
        self.log("tr_epoch", v, on_step=False, on_epoch=True)
        self.log("tr_both", v, on_step=True, on_epoch=True, prog_bar=True)
        self.log("tr_sum", v, on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("tr_max", v, on_step=False, on_epoch=True, reduce_fx="max")
        self.log("tr_nolog", v, logger=False, on_epoch=True)
        self.log("tr_bs1", v, on_step=False, on_epoch=True, batch_size=1)
        return self.loss(batch)

    def on_train_epoch_end(self) -> None:
        self.log("tr_end", float(self.current_epoch))

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        v = 100.0 * self.current_epoch + batch_idx + 0.5 + 1000 * dataloader_idx
        self.log("va_default", v)
        self.log("va_step", v, on_step=True, on_epoch=False)
        self.log("va_both", v, on_step=True, on_epoch=True, prog_bar=True)

    def on_validation_epoch_end(self) -> None:
        self.log("va_end", float(self.current_epoch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("te_default", batch_idx + 0.25)
        self.log("te_both", batch_idx + 0.25, on_step=True, on_epoch=True)


class ValOnly(LogModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def on_train_epoch_end(self) -> None: ...


class StepKey(Tiny):
    def __init__(self, n_train: int = 4, loaders: int = 1) -> None:
        super().__init__(4, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("x", 1.0)
        self.log("step", 100.0 + batch_idx)
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("vx", 2.0)
        self.log("step", 7.0)
        self.log("epoch", 55.0)


RUNS: dict[str, dict[str, Any]] = {
    "base_log2": {},
    "log1": {"log_every_n_steps": 1},
    "log2_accumulate2": {"accumulate_grad_batches": 2},
    "log2_accumulate2_4batches": {"accumulate_grad_batches": 2, "n_train": 8},
    "log50_default": {"log_every_n_steps": 50},
    "log0": {"log_every_n_steps": 0},
    "val_check_interval_0.5": {"val_check_interval": 0.5, "n_train": 8, "log_every_n_steps": 1},
    "check_val_every_2": {"check_val_every_n_epoch": 2},
    "max_steps_4": {"max_epochs": None, "max_steps": 4, "log_every_n_steps": 1},
    "two_val_loaders": {"loaders": 2, "log_every_n_steps": 1},
    "lr_monitor_auto": {"callback": LearningRateMonitor, "log_every_n_steps": 1},
    "lr_monitor_step": {"callback": lambda: LearningRateMonitor("step")},
    "lr_monitor_epoch": {"callback": lambda: LearningRateMonitor("epoch"), "log_every_n_steps": 1},
    "fit_validate_test": {"log_every_n_steps": 1},
    "prefix_name_version": {
        "csv": {"name": "exp", "version": "v1", "prefix": "p"},
        "log_every_n_steps": 1,
        "max_epochs": 1,
    },
    "name_none": {"csv": {"name": None}, "log_every_n_steps": 1, "max_epochs": 1},
    "val_only": {"module": ValOnly, "log_every_n_steps": 1},
    "step_epoch_keys": {"module": StepKey, "log_every_n_steps": 1},
    "fast_dev_run": {"fast_dev_run": 2},
}


def _files(directory: Path) -> list[str]:
    return sorted(
        str(Path(root, file).relative_to(directory)) for root, _, files in os.walk(directory) for file in files
    )


def _numbers(text: str | None) -> list[dict[str, float]] | None:
    if text is None:
        return None
    return [{k: _round(float(v)) for k, v in row.items() if v} for row in csv.DictReader(text.splitlines())]


@pytest.mark.filterwarnings("ignore:The number of training batches")
@pytest.mark.parametrize("recorded", [True, False], ids=["with_recorder", "csv_alone"])
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.catalogue(
    "LG12",
    "LG13",
    "LG14",
    "LG30",
    "LG31",
    "LG32",
    "LG33",
    "LG34",
    "LG38",
    "LG39",
    "LG42",
    "LG44",
    "LO03",
    "LO09",
    "LM03",
    "LM04",
)
@pytest.mark.catalogue("LG15", "LG58", adaptation="values are fetched together, once per log point")
@pytest.mark.catalogue("LG17", adaptation="sum and weight of each key are kept on the device")
@pytest.mark.catalogue("LG35", adaptation="the value of `step` is fetched with the others")
@pytest.mark.catalogue(
    "LG37", adaptation="each validation step's values are sent with Lightning's step numbers, in order"
)
@pytest.mark.catalogue("LP24", adaptation="metric sums and gradients are state that an evaluation step does not touch")
@pytest.mark.catalogue("DL20", adaptation="a ragged last batch is one more compilation, weighted by its true size")
def test_the_recorded_runs_give_the_same_logs(fake: Any, tmp_path: Path, name: str, recorded: bool) -> None:
    """Beside another logger values are sent at once; the CSV logger alone may get them one step late."""
    expected = fake.golden("csv_logging")[name]
    flags = {"max_epochs": 2, "log_every_n_steps": 2, **RUNS[name]}
    module = flags.pop("module", LogModule)(n_train=flags.pop("n_train", 5), loaders=flags.pop("loaders", 1))
    callback = flags.pop("callback", None)
    csv_logger, recorder = CSVLogger(tmp_path, **flags.pop("csv", {})), Recorder()
    trainer = pl.Trainer(
        default_root_dir=tmp_path,
        logger=[csv_logger, recorder] if recorded else csv_logger,
        enable_checkpointing=False,
        callbacks=[callback()] if callback else [],
        **QUIET,
        **flags,
    )
    for verb, after in expected["after"].items():
        returned = getattr(trainer, verb)(module, **({} if verb == "fit" else {"verbose": False}))
        assert _round(returned) == after["returned"]
        assert _round(dict(trainer.callback_metrics)) == after["callback_metrics"]
        assert _round(dict(trainer.logged_metrics)) == after["logged_metrics"]
        assert _round(dict(trainer.progress_bar_metrics)) == after["progress_bar_metrics"]
        assert (trainer.global_step, trainer.current_epoch) == (after["global_step"], after["current_epoch"])
    if recorded:
        assert recorder.calls == expected["log_metrics_calls"]
    files = _files(tmp_path)
    assert files == expected["files"]
    text = (tmp_path / files[0]).read_text() if files else None
    assert (text.splitlines()[0] if text else None) == expected["header"]
    assert _numbers(text) == _numbers(expected["raw"])


@pytest.mark.catalogue("LG26", "LG27", "LG40")
@pytest.mark.catalogue("LG28", "TA07", adaptation="values are fetched when somebody reads the dictionary")
def test_the_dictionaries_show_in_every_hook_what_lightning_shows(fake: Any, tmp_path: Path) -> None:
    expected = fake.golden("metrics_visibility")
    seen: list[dict[str, Any]] = []

    class Module(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            v = batch_idx + 10.0 * self.current_epoch
            self.log("ts", v, prog_bar=True)
            self.log("te", v, on_step=False, on_epoch=True, prog_bar=True)
            self.log("tb", v, on_step=True, on_epoch=True, prog_bar=True)
            return self.loss(batch)

        def on_train_epoch_end(self) -> None:
            self.log("tend", 9.0, prog_bar=True)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            v = batch_idx + 100.0
            self.log("vs", v, on_step=True, on_epoch=False, prog_bar=True)
            self.log("ve", v, prog_bar=True)
            self.log("vb", v, on_step=True, on_epoch=True, prog_bar=True)

    def views(trainer: Any) -> dict[str, Any]:
        return {
            "callback": _round(dict(trainer.callback_metrics)),
            "logged": _round(dict(trainer.logged_metrics)),
            "pbar": _round(dict(trainer.progress_bar_metrics)),
        }

    def looking(hook: str) -> Any:
        def look(self: Any, trainer: Any, module: Any, *args: Any, **kwargs: Any) -> None:
            seen.append(
                {"hook": hook, "stage": str(trainer.state.stage), "epoch": trainer.current_epoch, **views(trainer)}
            )

        return look

    watch = type("Watch", (Callback,), {hook: looking(hook) for hook in {e["hook"] for e in expected["per_hook"]}})
    trainer = pl.Trainer(
        default_root_dir=tmp_path,
        logger=False,
        enable_checkpointing=False,
        max_epochs=2,
        callbacks=[watch()],
        log_every_n_steps=1,
        **QUIET,
    )
    module = Module()
    trainer.fit(module)
    assert views(trainer) == expected["after"]["fit"]
    trainer.validate(module, verbose=False)
    assert views(trainer) == expected["after"]["validate"]
    assert seen == expected["per_hook"]


@pytest.mark.filterwarnings("ignore:The number of training batches")
@pytest.mark.catalogue("LO06", "LO07")
def test_tensorboard_gets_the_recorded_scalars_and_files(fake: Any, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    expected = fake.golden("logger_layout")["tensorboard_default"]

    class HP(LogModule):
        def __init__(self, n_val_loaders: int = 1, lr: float = 0.1, n_train: int = 5) -> None:
            super().__init__(n_train=n_train)
            self.save_hyperparameters()

    trees = []
    for flags in ({"max_epochs": 2, "log_every_n_steps": 2}, {"max_epochs": 1}):
        trainer = pl.Trainer(default_root_dir=tmp_path, enable_checkpointing=False, **flags, **QUIET)
        trainer.fit(HP())
        assert type(trainer.logger) is TensorBoardLogger
        trees.append([file.split("tfevents")[0] for file in _files(tmp_path)])
        if len(trees) == 1:
            events = EventAccumulator(trainer.logger.log_dir)
            events.Reload()
            got = {t: [[e.step, round(e.value, 5)] for e in events.Scalars(t)] for t in events.Tags()["scalars"]}
            assert got == expected["scalars"]
            assert Path(trainer.logger.log_dir, "hparams.yaml").read_text() == expected["hparams_yaml"]
            assert str(Path(trainer.log_dir).relative_to(tmp_path)) == expected["trainer_log_dir"]
    for tree, golden in zip(
        trees, (expected["files_after_first_fit"], expected["files_after_second_trainer"]), strict=True
    ):
        assert tree == [file.split("tfevents")[0] for file in golden if not file.endswith(".ckpt")]


@pytest.mark.parametrize("loaders", ["single", "two"])
def test_evaluations_return_the_recorded_results(fake: Any, tmp_path: Path, loaders: str) -> None:
    expected = fake.golden("dataloaders")["evaluate"][f"{loaders}|c=False"]

    class Module(Tiny):
        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("a", batch[0][0, 0])
            self.log(
                "b", float(batch_idx) if isinstance(batch_idx, int) else batch_idx * 1.0, on_step=True, on_epoch=True
            )
            self.log("s", 1.0, on_step=True, on_epoch=False)

        def on_test_epoch_end(self) -> None:
            self.log("end", 9.0)

    trainer = pl.Trainer(default_root_dir=tmp_path, logger=False, enable_checkpointing=False, **QUIET)
    data = {"single": loader(5), "two": [loader(5), loader(2)]}[loaders]
    results = trainer.test(Module(), data, verbose=False)
    assert [list(result) for result in results] == [list(result) for result in expected["returned"]]
    key = "b_epoch" if loaders == "single" else "b_epoch/dataloader_idx_0"
    assert results[0][key] == expected["returned"][0][key]
    assert list(trainer.callback_metrics) == list(expected["callback_metrics"])
    assert list(trainer.logged_metrics) == list(expected["logged_metrics"])


@pytest.mark.filterwarnings("ignore:The number of training batches")
def test_a_resumed_run_goes_on_in_its_files(tmp_path: Path) -> None:
    """LO05 in DIFFERENCES; TensorBoard hides what comes again."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def trainer(directory: Path, epochs: int) -> pl.Trainer:
        loggers = [CSVLogger(directory, version=0), TensorBoardLogger(directory, name="tb", version=0)]
        flags = {"max_epochs": epochs, "log_every_n_steps": 1, "num_sanity_val_steps": 0, **QUIET}
        return pl.Trainer(default_root_dir=directory, logger=loggers, enable_checkpointing=False, **flags)

    def rows(directory: Path) -> Any:
        return _numbers((directory / "lightning_logs/version_0/metrics.csv").read_text())

    def scalars(directory: Path) -> Any:
        events = EventAccumulator(str(directory / "tb/version_0"))
        events.Reload()
        return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}

    class Module(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("loss", self.current_epoch * 10.0 + batch_idx, on_step=True, on_epoch=True)
            return self.loss(batch)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", self.current_epoch * 10.0)

    straight, broken = tmp_path / "straight", tmp_path / "broken"
    trainer(straight, 3).fit(Module())
    first = trainer(broken, 1)
    first.fit(Module())
    first.save_checkpoint(broken / "last.ckpt")
    lost = trainer(broken, 2)
    lost.fit(Module(), ckpt_path=broken / "last.ckpt")  # this second epoch will be run again
    assert rows(broken) == rows(straight)[: len(rows(straight)) // 3 * 2]
    trainer(broken, 3).fit(Module(), ckpt_path=broken / "last.ckpt")
    assert rows(broken) == rows(straight)
    assert scalars(broken) == scalars(straight)


@pytest.mark.lightning
@pytest.mark.filterwarnings("ignore:The number of training batches")
def test_loggers_of_lightning_record_the_same(tmp_path: Path) -> None:
    from lightning.pytorch import loggers as theirs
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    pairs = (
        (CSVLogger(tmp_path / "a"), theirs.CSVLogger(tmp_path / "b")),
        (TensorBoardLogger(tmp_path / "a", name="tb"), theirs.TensorBoardLogger(tmp_path / "b", name="tb")),
    )
    for logger in [logger for pair in zip(*pairs, strict=True) for logger in pair]:
        flags = {"max_epochs": 2, "log_every_n_steps": 2, "enable_checkpointing": False, **QUIET}
        trainer = pl.Trainer(default_root_dir=tmp_path, logger=logger, **flags)
        trainer.fit(LogModule())
        assert trainer.logger is logger
    ours_csv, theirs_csv = (Path(logger.log_dir, "metrics.csv").read_text() for logger in pairs[0])
    assert ours_csv == theirs_csv
    read = []
    for logger in pairs[1]:
        events = EventAccumulator(logger.log_dir)
        events.Reload()
        read.append({tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]})
    assert read[0] == read[1]
