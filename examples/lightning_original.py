"""The CNN of fashion_mnist_linen.py in PyTorch Lightning: where MIGRATION.md starts, and the peer of compare.py.

Example:
    python examples/lightning_original.py --epochs 5
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn

import _data


class CNN(nn.Sequential):
    """Two convolutions, each with stride 2 and BatchNorm, and two dense layers."""

    def __init__(self, dropout: float = 0.4) -> None:
        super().__init__(
            nn.Conv2d(1, 32, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(7 * 7 * 64, 256),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(256, 10),
        )


class LitCNN(pl.LightningModule):
    """The classifier."""

    def __init__(self, lr: float = 2e-3, dropout: float = 0.4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = CNN(dropout=dropout)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def evaluate(self, batch: Any, stage: str) -> None:
        images, labels = batch
        logits = self.net(images)
        loss = F.cross_entropy(logits, labels)
        accuracy = (logits.argmax(-1) == labels).float().mean()
        self.log_dict({f"{stage}_loss": loss, f"{stage}_acc": accuracy}, prog_bar=True)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluate(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluate(batch, "test")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main(argv: Sequence[str] | None = None) -> float:
    """Train, test, and return the test accuracy."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    _data.add_arguments(parser)
    args = parser.parse_args(argv)
    train_loader, val_loader, test_loader = _data.torch_loaders(args)

    pl.seed_everything(args.seed)
    trainer = pl.Trainer(
        max_epochs=args.epochs,
        accelerator="cpu",
        default_root_dir=args.output,
        enable_progress_bar=not args.quiet,
        enable_model_summary=not args.quiet,
    )
    model = LitCNN()
    trainer.fit(model, train_loader, val_loader)
    (results,) = trainer.test(model, test_loader, verbose=False)
    print(f"test_acc={results['test_acc']:.4f}")
    return float(results["test_acc"])


if __name__ == "__main__":
    main()
