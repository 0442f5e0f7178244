"""Stop after any batch, resume in fresh objects: everything that follows equals the uninterrupted run, bit for bit."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.checkpoints import QUIET
from support.tracing import RecordingLogger

import jaxlightning as pl
from jaxlightning.callbacks import EarlyStopping, ModelCheckpoint
from jaxlightning.optim import SGD, Adam
from jaxlightning.optim.lr_scheduler import StepLR

X = np.random.RandomState(0).randn(16, 6).astype(np.float32)
Y = np.random.RandomState(1).randint(0, 3, 16)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        x = nn.Dense(8)(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        x = nn.Dropout(0.3, deterministic=not train)(nn.relu(x))
        return nn.Dense(3)(x)


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def _loss(self, batch: Any) -> Any:
        logits = jax.nn.log_softmax(self.net(batch[0]))
        return -jnp.mean(jnp.take_along_axis(logits, batch[1][:, None], 1))

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        loss = self._loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("peak", jnp.max(batch[0]), on_epoch=True, reduce_fx="max")
        return loss

    def validation_step(self, batch: Any, batch_idx: Any) -> None:
        self.log("vl", self._loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = Adam(self.parameters(), lr=0.05)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 2, 0.5), "interval": "step"}}


class Momentum(Classifier):
    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.1, momentum=0.9)


class HostLog(pl.Callback):
    """Logs from the host; before the callback that saves, for what runs after a save belongs to no checkpoint."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        module.log("host", float(batch_idx), on_step=False, on_epoch=True)


class SaveEverywhere(pl.Callback):
    """Saves after every batch, and notes how far the logger had come."""

    def __init__(self, root: Path, calls: list[Any]) -> None:
        self.root, self.calls, self.logged = root, calls, {}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        name = f"{trainer.fit_loop.total_batch_idx}.ckpt"
        trainer.save_checkpoint(self.root / name)
        self.logged[name] = len(self.calls)


def loaders(shuffle: bool = True) -> tuple[Any, Any]:
    train = pl.ArrayLoader((X, Y), batch_size=4, shuffle=shuffle)
    return train, pl.ArrayLoader((X[:6], Y[:6]), batch_size=2)


def run(root: Path, module: Any, flags: dict[str, Any], ckpt_path: Any = None, save: bool = False) -> Any:
    calls: list[dict[str, Any]] = []
    logger = RecordingLogger(calls)
    saving = SaveEverywhere(root, calls)
    callbacks = [
        EarlyStopping("vl", patience=10),
        ModelCheckpoint(root / "top", monitor="vl", save_top_k=2, filename="{epoch}-{step}-{vl:.6f}"),
        HostLog(),
        *([saving] if save else []),
    ]
    t = pl.Trainer(
        default_root_dir=root,
        logger=logger,
        log_every_n_steps=1,
        callbacks=callbacks,
        **QUIET,
        **{"max_epochs": 2, **flags},
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Checkpoint directory")
        warnings.filterwarnings("ignore", message="The dirpath has changed")
        warnings.filterwarnings("ignore", message="Be aware that when using `ckpt_path`")
        t.fit(module, *loaders(), ckpt_path=ckpt_path)
    metrics = [(e["step"], e["metrics"]) for e in calls if e["hook"] == "log_metrics"]
    engine = module._engine
    final = {
        "params": engine.params,
        "variables": engine.variables,
        "optimizer_states": engine.state_dict()["optimizer_states"],
        "stopping": callbacks[0].state_dict(),
        "global_step": t.global_step,
        "callback_metrics": {k: float(v) for k, v in t.callback_metrics.items()},
    }
    return metrics, final, saving


def differs(a: Any, b: Any) -> bool:
    leaves_a, structure_a = jax.tree_util.tree_flatten(a)
    leaves_b, structure_b = jax.tree_util.tree_flatten(b)
    return structure_a != structure_b or any(
        np.asarray(x).tobytes() != np.asarray(y).tobytes() for x, y in zip(leaves_a, leaves_b, strict=True)
    )


CASES: dict[str, tuple[type[Classifier], dict[str, Any]]] = {
    "plain": (Classifier, {}),
    "accumulate 3": (Momentum, {"accumulate_grad_batches": 3}),
    "validation inside the epoch": (Classifier, {"val_check_interval": 2}),
    "validation over epochs": (Classifier, {"val_check_interval": 3, "check_val_every_n_epoch": None}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_stop_of_two_epochs_continues_exactly(case, tmp_path):
    cls, flags = CASES[case]
    (tmp_path / "first").mkdir()
    metrics, final, saving = run(tmp_path / "first", cls(), flags, save=True)
    assert len(saving.logged) == 8
    problems = []
    for name in saving.logged:
        resumed, after, _ = run(tmp_path / name, cls(), flags, ckpt_path=tmp_path / "first" / name)
        wanted = {**final, "metrics": metrics[-len(resumed) :] if resumed else []}
        problems += [
            f"{name}: {key}" for key, value in {**after, "metrics": resumed}.items() if differs(value, wanted[key])
        ]
    assert not problems
