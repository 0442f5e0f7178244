"""LightningDataModule, ours and Lightning's, and callbacks of Lightning's in our Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tracing import RecordingLogger, TinyModule, loader

import jaxlightning as pl

pytestmark = pytest.mark.filterwarnings("ignore::jaxlightning.utilities.warnings.PossibleUserWarning")

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "logger": False,
    "enable_checkpointing": False,
    "max_epochs": 1,
}


class Data(pl.LightningDataModule):
    def __init__(self, size: int = 8, note: str = "x") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.size = size
        self.loaded: Any = None

    def train_dataloader(self) -> Any:
        return loader(self.size)

    def val_dataloader(self) -> Any:
        return loader(4)

    def state_dict(self) -> dict[str, Any]:
        return {"size": self.size}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = state_dict


def test_a_datamodule_as_the_first_data_argument_is_taken_as_one() -> None:
    data = Data()
    trainer = pl.Trainer(**QUIET)
    trainer.fit(TinyModule(), data)
    assert trainer.datamodule is data
    assert data.trainer is trainer
    assert trainer.global_step == 4


def test_state_and_hyper_parameters_travel_in_the_checkpoint(tmp_path: Path) -> None:
    trainer = pl.Trainer(**QUIET)
    trainer.fit(TinyModule(), datamodule=Data(size=6))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    fresh = Data()
    pl.Trainer(**{**QUIET, "max_epochs": 2}).fit(TinyModule(), datamodule=fresh, ckpt_path=tmp_path / "a.ckpt")
    assert fresh.loaded == {"size": 6}
    rebuilt = Data.load_from_checkpoint(tmp_path / "a.ckpt")
    assert dict(rebuilt.hparams) == {"size": 6, "note": "x"}
    assert dict(Data.load_from_checkpoint(tmp_path / "a.ckpt", note="y").hparams) == {"size": 6, "note": "y"}


def test_hyper_parameters_of_both_are_logged_together_and_must_agree() -> None:
    class Model(TinyModule):
        def __init__(self, lr: float = 0.1, note: str = "x") -> None:
            super().__init__(lr=lr)
            self.save_hyperparameters()

    calls: list[dict[str, Any]] = []
    pl.Trainer(**{**QUIET, "logger": RecordingLogger(calls), "log_every_n_steps": 1}).fit(Model(), datamodule=Data())
    logged = [each["params"] for each in calls if each["hook"] == "log_hyperparams"]
    assert logged == [{"lr": 0.1, "note": "x", "size": 8}]
    with pytest.raises(RuntimeError, match="Error while merging hparams"):
        pl.Trainer(**{**QUIET, "logger": RecordingLogger([])}).fit(Model(note="z"), datamodule=Data())


def test_from_datasets_makes_only_the_hooks_that_have_data() -> None:
    rows = np.arange(20, dtype=np.float32).reshape(5, 4)
    data = pl.LightningDataModule.from_datasets((rows,), test_dataset=(rows,), batch_size=2)
    train, test = data.train_dataloader(), data.test_dataloader()
    assert (len(train), len(test)) == (3, 3)
    assert train.shuffle
    assert not test.shuffle
    trainer = pl.Trainer(**QUIET)
    trainer.fit(TinyModule(), datamodule=data)
    assert trainer.global_step == 3
    assert not trainer.enable_validation


@pytest.mark.torch
def test_from_datasets_gives_torch_datasets_to_a_torch_loader() -> None:
    import torch

    rows = torch.utils.data.TensorDataset(torch.zeros(5, 4))
    data = pl.LightningDataModule.from_datasets(rows, [rows, rows], batch_size=2)
    assert isinstance(data.train_dataloader().sampler, torch.utils.data.RandomSampler)
    assert [type(each) for each in data.val_dataloader()] == [torch.utils.data.DataLoader] * 2


def test_batch_size_and_workers_reach_an_init_that_takes_them() -> None:
    class Sized(pl.LightningDataModule):
        def __init__(self, batch_size: int, extra: str = "") -> None:
            super().__init__()
            self.batch_size, self.extra = batch_size, extra

    data = Sized.from_datasets((np.zeros((4, 4), np.float32),), batch_size=2, extra="e")
    assert (data.batch_size, data.extra) == (2, "e")


def test_a_datamodule_describes_itself() -> None:
    text = str(Data(size=6))
    assert "{Train dataloader: size=" in text
    assert "{Predict dataloader: None}" in text


@pytest.mark.lightning
@pytest.mark.torch
def test_a_datamodule_of_lightning_works_as_it_is() -> None:
    import lightning.pytorch as theirs
    import torch

    class Torch(theirs.LightningDataModule):
        def setup(self, stage: str) -> None:
            self.stage = stage

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(6, 4)), batch_size=2)

    data = Torch()
    trainer = pl.Trainer(limit_val_batches=0, **QUIET)
    trainer.fit(TinyModule(), datamodule=data)
    assert trainer.global_step == 3
    assert data.stage == "fit"
    assert data.trainer is trainer


@pytest.mark.lightning
@pytest.mark.torch
def test_a_plain_callback_of_lightning_works_as_it_is() -> None:
    import lightning.pytorch as theirs

    class Count(theirs.Callback):
        def __init__(self) -> None:
            self.events: list[Any] = []

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.events.append((trainer.global_step, batch_idx, float(outputs["loss"]) >= 0))

        def on_train_end(self, trainer: Any, module: Any) -> None:
            self.events.append("end")

    count = Count()
    pl.Trainer(callbacks=[count], limit_val_batches=0, **QUIET).fit(TinyModule())
    assert count.events == [(1, 0, True), (2, 1, True), (3, 2, True), "end"]


def test_several_devices_join_consecutive_batches_of_the_loader() -> None:
    shapes: list[Any] = []

    class Watch(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            shapes.append(batch[0].shape)

    flags = {**QUIET, "devices": 4, "strategy": "ddp"}
    trainer = pl.Trainer(callbacks=[Watch()], **flags)
    trainer.fit(TinyModule(), loader(18), loader(4))
    # Nine batches of two: two full groups of four, and one that is left.
    assert shapes == [(8, 4), (8, 4), (2, 4)]
    assert (trainer.num_training_batches, trainer.num_devices, trainer.global_step) == (3, 4, 3)


@pytest.mark.parametrize("interval", ["00:00:00:00", {"seconds": 0}])
def test_validation_may_be_due_by_time(interval: Any) -> None:
    """TF19."""
    events: list[Any] = []

    class Watch(pl.Callback):
        def on_validation_start(self, trainer: Any, module: Any) -> None:
            events.append(trainer.fit_loop.batch_idx)

    trainer = pl.Trainer(val_check_interval=interval, num_sanity_val_steps=0, callbacks=[Watch()], **QUIET)
    trainer.fit(TinyModule(), loader(6), loader(2))
    assert events == [0, 1, 2]
    assert trainer.val_check_batch is None


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"max_epochs": 1}, "`max_epochs=1` reached"),
        ({"max_steps": 2}, "`max_steps=2` reached"),
        ({"max_epochs": 1, "limit_train_batches": 2}, "`max_epochs=1` reached"),
    ],
)
def test_the_reason_for_stopping_is_told(flags: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture) -> None:
    """LP10."""
    with caplog.at_level("INFO", logger="jaxlightning"):
        pl.Trainer(**{**QUIET, **flags}).fit(TinyModule())
    assert [each for each in caplog.messages if words in each]


def test_a_failing_validation_closes_the_loader_of_training_too() -> None:
    closed: list[str] = []

    class Watched:
        def __init__(self, name: str) -> None:
            self.name = name

        def __len__(self) -> int:
            return 3

        def __iter__(self) -> Any:
            try:
                for _ in range(3):
                    yield (np.zeros((2, 4), np.float32),)
            finally:
                closed.append(self.name)

    class Model(TinyModule):
        def on_validation_batch_start(self, batch: Any, batch_idx: int) -> None:
            raise RuntimeError("no")

    trainer = pl.Trainer(val_check_interval=1, num_sanity_val_steps=0, **QUIET)
    with pytest.raises(RuntimeError, match="no"):
        trainer.fit(Model(), Watched("train"), Watched("val"))
    assert sorted(closed) == ["train", "val"]
