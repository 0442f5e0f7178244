"""Steps that log at some batches only: the same rows whether or not the batches run without the loop."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxlightning as pl

DATA = np.random.RandomState(0).randn(48, 3).astype(np.float32)


class Sparse(pl.LightningModule):
    """Logs when its number of steps says so."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.net = nn.Dense(1)
        self.when, self.count = when, 0

    def training_step(self, batch: Any, batch_idx: int) -> jax.Array:
        loss = jnp.mean(self.net(batch) ** 2)
        self.count += 1
        if self.when == "odd" and self.count % 2 == 0:
            self.log("a", loss, prog_bar=True, on_step=True, on_epoch=True)
        elif (self.when == "late" and self.count > 5) or (self.when == "early" and self.count < 5):
            self.log("a", loss, on_step=True)
        elif self.when == "epoch":
            self.log("a", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.when != "never":
            self.log("v", jnp.mean(self.net(batch)))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.01)


class Watching(pl.Callback):
    """A hook of the user's, so that each batch goes through the whole loop."""

    def on_train_batch_end(self, *_: Any) -> None:
        pass


def rows(folder: Path, when: str, **flags: Any) -> tuple[list[dict[str, str]], dict[str, float]]:
    trainer = pl.Trainer(
        **{
            "max_epochs": 3, "logger": pl.loggers.CSVLogger(folder), "log_every_n_steps": 2, "accelerator": "cpu",
            "devices": 1, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
            "default_root_dir": folder, **flags,
        }
    )  # fmt: skip
    pl.seed_everything(1)
    trainer.fit(Sparse(when), pl.ArrayLoader(DATA, batch_size=4), pl.ArrayLoader(DATA, batch_size=16))
    found = list(folder.rglob("metrics.csv"))
    if not found:
        return [], {key: float(value) for key, value in trainer.callback_metrics.items()}
    with open(found[0]) as file:
        return list(csv.DictReader(file)), {key: float(value) for key, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize(
    ("when", "flags"),
    [
        *((when, {}) for when in ("never", "odd", "late", "early", "epoch")),
        ("odd", {"steps_per_dispatch": 3}),
        ("odd", {"log_every_n_steps": 1}),
        ("late", {"log_every_n_steps": 5}),
        ("early", {"steps_per_dispatch": 3}),
    ],
)
def test_rows_do_not_depend_on_who_runs_the_batches(tmp_path: Path, when: str, flags: dict[str, Any]) -> None:
    every = {key: value for key, value in flags.items() if key != "steps_per_dispatch"}
    want, metrics = rows(tmp_path / "watched", when, callbacks=[Watching()], **every)
    got, seen = rows(tmp_path / "quiet", when, **flags)
    assert [row.keys() for row in got] == [row.keys() for row in want]
    assert seen == pytest.approx(metrics, rel=1e-5)  # a fused step may round another way
    for ours, theirs in zip(got, want, strict=True):
        assert {k: float(v) for k, v in ours.items() if v} == pytest.approx(
            {k: float(v) for k, v in theirs.items() if v}, rel=1e-5
        )
    assert bool(want) == (when != "never")
