"""A class-conditional variational autoencoder: two losses logged apart, sample images to TensorBoard.

Example:
    python examples/vae.py --epochs 5
    tensorboard --logdir example_output
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import _data
import jaxlightning as jl

CLASSES = 10


class Encoder(nn.Module):
    """From an image and its label to the mean and log variance of the latent code."""

    latent: int

    @nn.compact
    def __call__(self, images: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Take images (n, 28, 28, 1) and labels (n,); return two arrays (n, latent)."""
        flat = images.reshape(images.shape[0], -1)
        x = jnp.concatenate([flat, jax.nn.one_hot(labels, CLASSES)], axis=-1)
        x = nn.relu(nn.Dense(256)(x))
        return nn.Dense(self.latent, name="mean")(x), nn.Dense(self.latent, name="logvar")(x)


class Decoder(nn.Module):
    """From a latent code and a label to the logits of the pixels."""

    @nn.compact
    def __call__(self, code: jax.Array, labels: jax.Array) -> jax.Array:
        """Take codes (n, latent) and labels (n,); return logits (n, 28, 28, 1)."""
        x = jnp.concatenate([code, jax.nn.one_hot(labels, CLASSES)], axis=-1)
        x = nn.relu(nn.Dense(256)(x))
        return nn.Dense(28 * 28)(x).reshape(-1, 28, 28, 1)


class ConditionalVAE(jl.LightningModule):
    """The model: reconstruction and KL divergence are summed over pixels and codes, averaged over images, in nats."""

    def __init__(self, latent: int = 16, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.encoder = Encoder(latent)
        self.decoder = Decoder()

    def losses(self, batch: Any) -> tuple[jax.Array, jax.Array]:
        images, labels = batch
        mean, logvar = self.encoder(images, labels)
        noise = jax.random.normal(self.next_rng(), mean.shape)
        logits = self.decoder(mean + jnp.exp(0.5 * logvar) * noise, labels)
        reconstruction = optax.sigmoid_binary_cross_entropy(logits, images).sum(axis=(1, 2, 3)).mean()
        # KL divergence of N(mean, var) from N(0, 1), Kingma and Welling 2014, appendix B.
        divergence = 0.5 * (mean**2 + jnp.exp(logvar) - 1.0 - logvar).sum(axis=-1).mean()
        return reconstruction, divergence

    def training_step(self, batch: Any, batch_idx: int) -> jax.Array:
        reconstruction, divergence = self.losses(batch)
        self.log("train_reconstruction", reconstruction, prog_bar=True)
        self.log("train_kl", divergence, prog_bar=True)
        return reconstruction + divergence

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        reconstruction, divergence = self.losses(batch)
        self.log_dict({"val_reconstruction": reconstruction, "val_kl": divergence})
        self.log("val_loss", reconstruction + divergence, prog_bar=True)

    def on_validation_epoch_end(self) -> None:
        if self.trainer.sanity_checking:
            return
        labels = np.arange(CLASSES)
        code = jax.random.normal(jax.random.key(0), (CLASSES, self.hparams.latent))
        pictures = jax.nn.sigmoid(self.decoder(code, labels))
        self.logger.experiment.add_images("samples", np.asarray(pictures), self.global_step, dataformats="NHWC")

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(self.hparams.lr)


def main(argv: Sequence[str] | None = None) -> float:
    """Train, and return the validation loss in nats per image."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    _data.add_arguments(parser)
    args = parser.parse_args(argv)

    images = _data.load_images(args.data, args.limit)
    train_part, val_part = _data.split(len(images.train_x))
    pixels, labels = images.train_x[..., None].astype(np.float32) / 255.0, images.train_y.astype(np.int32)
    train_loader = jl.ArrayLoader(
        pixels[train_part], labels[train_part], batch_size=args.batch_size, shuffle=True, drop_last=True, seed=args.seed
    )
    val_loader = jl.ArrayLoader(pixels[val_part], labels[val_part], batch_size=_data.EVAL_BATCH)

    jl.seed_everything(args.seed)
    trainer = jl.Trainer(
        max_epochs=args.epochs,
        default_root_dir=args.output,
        enable_progress_bar=not args.quiet,
        enable_model_summary=not args.quiet,
    )
    trainer.fit(ConditionalVAE(), train_loader, val_loader)
    loss = float(trainer.callback_metrics["val_loss"])
    print(f"val_loss={loss:.2f}")
    return loss


if __name__ == "__main__":
    main()
