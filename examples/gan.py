"""A generative adversarial network with manual optimization: two optimizers, sample images to TensorBoard.

Example:
    python examples/gan.py --epochs 20
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

LATENT = 32


class Generator(nn.Module):
    """From noise to images."""

    @nn.compact
    def __call__(self, noise: jax.Array, train: bool = True) -> jax.Array:
        """Take noise (n, latent); return images (n, 28, 28, 1) with values between 0 and 1."""
        x = noise
        for features in (128, 256):
            x = nn.BatchNorm(use_running_average=not train)(nn.Dense(features)(x))
            x = nn.leaky_relu(x, 0.2)
        return nn.sigmoid(nn.Dense(28 * 28)(x)).reshape(-1, 28, 28, 1)


class Discriminator(nn.Module):
    """From images to the logit of being real."""

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = True) -> jax.Array:
        """Take images (n, 28, 28, 1); return logits (n,)."""
        x = images.reshape(images.shape[0], -1)
        for features in (256, 128):
            x = nn.leaky_relu(nn.Dense(features)(x), 0.2)
            x = nn.Dropout(0.3, deterministic=not train)(x)
        return nn.Dense(1)(x)[:, 0]


class GAN(jl.LightningModule):
    """The adversarial game, as one writes it for PyTorch Lightning."""

    def __init__(self, lr: float = 2e-4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = Generator()
        self.discriminator = Discriminator()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        (images,) = batch
        opt_g, opt_d = self.optimizers()
        fakes = self.generator(jax.random.normal(self.next_rng(), (images.shape[0], LATENT)))

        # The generator wants its images to be taken for real ones.
        loss_g = jax.nn.softplus(-self.discriminator(fakes)).mean()
        opt_g.zero_grad()
        self.manual_backward(loss_g)
        opt_g.step()

        # The discriminator wants to tell them apart.
        on_real = jax.nn.softplus(-self.discriminator(images)).mean()
        on_fake = jax.nn.softplus(self.discriminator(jax.lax.stop_gradient(fakes))).mean()
        loss_d = on_real + on_fake
        opt_d.zero_grad()
        self.manual_backward(loss_d)
        opt_d.step()
        self.log_dict({"loss_g": loss_g, "loss_d": loss_d}, prog_bar=True)

    def on_train_epoch_end(self) -> None:
        noise = jax.random.normal(jax.random.key(0), (16, LATENT))
        self.generator.eval()
        pictures = np.asarray(self.generator(noise))
        self.generator.train()
        self.logger.experiment.add_images("samples", pictures, self.global_step, dataformats="NHWC")

    def configure_optimizers(self) -> Any:
        return [
            {"optimizer": optax.adam(self.hparams.lr, b1=0.5), "params": self.generator},
            {"optimizer": optax.adam(self.hparams.lr, b1=0.5), "params": self.discriminator},
        ]


def main(argv: Sequence[str] | None = None) -> tuple[float, float]:
    """Train, and return the last losses of generator and discriminator."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    _data.add_arguments(parser)
    args = parser.parse_args(argv)

    images = _data.load_images(args.data, args.limit)
    pixels = jnp.asarray(images.train_x[..., None], jnp.float32) / 255.0
    loader = jl.ArrayLoader(
        (np.asarray(pixels),), batch_size=args.batch_size, shuffle=True, drop_last=True, seed=args.seed
    )

    jl.seed_everything(args.seed)
    trainer = jl.Trainer(
        max_epochs=args.epochs,
        default_root_dir=args.output,
        log_every_n_steps=5,
        enable_progress_bar=not args.quiet,
        enable_model_summary=not args.quiet,
    )
    trainer.fit(GAN(), loader)
    losses = tuple(float(trainer.callback_metrics[name]) for name in ("loss_g", "loss_d"))
    print(f"loss_g={losses[0]:.3f} loss_d={losses[1]:.3f}")
    return losses[0], losses[1]


if __name__ == "__main__":
    main()
