"""A tiny module whose metrics follow a script, and a datamodule, for the tests of checkpoints."""

from __future__ import annotations

import warnings
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

import jaxlightning as pl
from jaxlightning.optim import SGD
from jaxlightning.optim.lr_scheduler import StepLR
from support.golden import read

LOSSES = [10.0, 9.0, 2.8, 5.0, 2.5, 7.0, 1.0, 3.0]
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def golden(name: str) -> Any:
    return read(name)


def loader(samples: int, **options: Any) -> pl.ArrayLoader:
    data = np.random.RandomState(0).randn(samples, 4).astype(np.float32)
    return pl.ArrayLoader((data,), batch_size=2, **options)


class Scripted(pl.LightningModule):
    """One dense layer; val_loss follows a script, one entry per validation run."""

    losses = LOSSES

    def __init__(self, n_train: int = 6, n_val: int = 2) -> None:
        super().__init__()
        self.layer = nn.Dense(2)
        self.n_train, self.n_val = n_train, n_val
        self.runs = 0

    def loss(self, batch: Any) -> Any:
        return jnp.mean(self.layer(batch[0]) ** 2)

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        self.log("train_loss", 10.0 * self.current_epoch + batch_idx, on_step=True, on_epoch=True)
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: Any) -> None:
        self.loss(batch)

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.log("val_loss", self.losses[self.runs % len(self.losses)])
            self.log("val/acc", 0.5 + 0.01 * self.runs)
            self.runs += 1

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return loader(self.n_train)

    def val_dataloader(self) -> Any:
        return loader(self.n_val)


class Failing(Scripted):
    """Raises before the second batch of the second epoch."""

    at = (1, 1)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if (self.current_epoch, batch_idx) == self.at:
            raise RuntimeError("boom")


def trainer(root: Any, **options: Any) -> pl.Trainer:
    return pl.Trainer(**{"default_root_dir": root, "logger": False, **QUIET, **options})


class WithHparams(Scripted):
    """Keeps its arguments; a momentum and a scheduler are states to save."""

    def __init__(self, n_train: int = 6, a: int = 1, b: str = "x") -> None:
        super().__init__(n_train)
        self.save_hyperparameters()

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.1, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 1), "interval": "epoch"}}


class DM(pl.LightningDataModule):
    """Keeps its argument, and what state it was given."""

    def __init__(self, z: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.loaded: Any = None

    def train_dataloader(self) -> Any:
        return loader(6)

    def val_dataloader(self) -> Any:
        return loader(4)

    def state_dict(self) -> dict[str, Any]:
        return {"pos": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = state_dict


def quiet_fit(t: pl.Trainer, *args: Any, **kwargs: Any) -> pl.Trainer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        t.fit(*args, **kwargs)
    return t
