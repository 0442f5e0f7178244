"""A torch loader that draws its order from a generator of its own, in a run that is resumed between two epochs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import optax
import pytest

import jaxlightning as pl

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def _no_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSSIBLE_USER_WARNINGS", "off")


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Dense(1)

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        return jnp.square(self.net(batch[0])).mean()

    def configure_optimizers(self) -> Any:
        return optax.sgd(0.01)


class Firsts(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        self.seen.append(float(batch[1][0]))


def order(epochs: int, root: Path, saves: str = "", ckpt_path: Path | None = None) -> list[float]:
    """The first label of every batch; with `saves` a checkpoint at the end of the run, or of its last epoch."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    data = TensorDataset(torch.arange(24.0).reshape(8, 3), torch.arange(8.0))
    loader = DataLoader(data, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(3))
    firsts = Firsts()
    saving = pl.callbacks.ModelCheckpoint(
        root, filename="stop", save_on_train_epoch_end=True, save_top_k=1 if saves == "epoch" else 0
    )
    trainer = pl.Trainer(
        max_epochs=epochs, default_root_dir=root, callbacks=[firsts, saving], logger=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), loader, ckpt_path=ckpt_path)
    if saves == "run":
        trainer.save_checkpoint(root / "stop.ckpt")
    return firsts.seen


@pytest.mark.parametrize("saves", ["epoch", "run"])
def test_its_order_goes_on_where_it_was(saves: str, tmp_path: Path) -> None:
    whole = order(4, tmp_path)
    assert len(set(map(tuple, (whole[i : i + 4] for i in range(0, 16, 4))))) > 1
    stopped = order(2, tmp_path, saves)
    assert stopped + order(4, tmp_path, ckpt_path=tmp_path / "stop.ckpt") == whole


@pytest.mark.lightning
def test_the_order_of_epochs_is_lightnings(tmp_path: Path) -> None:
    """Lightning counts batches too, so that torch's RandomSampler never draws the permutation after the last."""
    import lightning.pytorch as lightning
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    class Theirs(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(3, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.01)

    seen: list[float] = []

    class Watch(lightning.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
            seen.append(float(batch[1][0]))

    data = TensorDataset(torch.arange(24.0).reshape(8, 3), torch.arange(8.0))
    loader = DataLoader(data, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(3))
    trainer = lightning.Trainer(
        max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=Watch(), default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(Theirs(), loader)
    assert order(3, tmp_path) == seen
