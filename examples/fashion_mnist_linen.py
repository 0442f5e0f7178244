"""A CNN with BatchNorm and Dropout on an unchanged torchvision DataLoader, the network written in flax.linen.

Example:
    python examples/fashion_mnist_linen.py --epochs 5
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import _data
import jaxlightning as jl


class CNN(nn.Module):
    """Two convolutions, each with stride 2 and BatchNorm, and two dense layers."""

    dropout: float = 0.4

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """Return logits (n, 10) for images (n, 28, 28, 1)."""
        for features in (32, 64):
            x = nn.Conv(features, (3, 3), strides=2, padding=1, use_bias=False)(x)
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
            x = nn.relu(x)
        x = x.reshape(x.shape[0], -1)
        x = nn.relu(nn.Dense(256)(x))
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        return nn.Dense(10)(x)


class LitCNN(jl.LightningModule):
    """The classifier."""

    def __init__(self, lr: float = 2e-3, dropout: float = 0.4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = CNN(dropout=dropout)

    def training_step(self, batch: Any, batch_idx: int) -> jax.Array:
        images, labels = batch
        loss = optax.softmax_cross_entropy_with_integer_labels(self.net(images), labels).mean()
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def evaluate(self, batch: Any, stage: str) -> None:
        images, labels = batch
        logits = self.net(images)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        accuracy = jnp.mean(logits.argmax(-1) == labels)
        self.log_dict({f"{stage}_loss": loss, f"{stage}_acc": accuracy}, prog_bar=True)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluate(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluate(batch, "test")

    def predict_step(self, batch: Any, batch_idx: int) -> jax.Array:
        images, _ = batch
        return self.net(images).argmax(-1)

    def configure_optimizers(self) -> optax.GradientTransformation:
        steps = self.trainer.estimated_stepping_batches
        return optax.adam(optax.cosine_decay_schedule(self.hparams.lr, steps))


def main(argv: Sequence[str] | None = None) -> float:
    """Train, test, and return the test accuracy."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    _data.add_arguments(parser)
    args = parser.parse_args(argv)
    train_loader, val_loader, test_loader = _data.torch_loaders(args)

    jl.seed_everything(args.seed)
    trainer = jl.Trainer(
        max_epochs=args.epochs,
        channels_last=True,  # torchvision's NCHW images become the NHWC that flax.linen.Conv reads
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
