"""Manual optimization as people write it: adversarial networks, several optimizers, accumulation by hand, closures."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.verbatim import Beside, check

import jaxlightning as pl

pytestmark = [pytest.mark.slow]

RNG = np.random.RandomState(0)
REAL = RNG.randn(32, 6)
NOISE = RNG.randn(32, 3)


class MLP(nn.Module):
    """Two layers, as torch.nn.Sequential(Linear, Tanh, Linear)."""

    features: int
    hidden: int = 8

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = jnp.tanh(nn.Dense(self.hidden)(x))
        return nn.Dense(self.features)(x)


def torch_mlp(inputs: int, features: int, hidden: int = 8) -> Any:
    import torch

    return torch.nn.Sequential(torch.nn.Linear(inputs, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, features))


GAN_LAYERS = {
    "generator.Dense_0": "generator.0",
    "generator.Dense_1": "generator.2",
    "critic.Dense_0": "critic.0",
    "critic.Dense_1": "critic.2",
}


class GAN(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = MLP(6)
        self.critic = MLP(1)

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        real, noise = batch
        opt_g, opt_d = self.optimizers()
        fake = self.generator(noise)
        loss_g = jax.nn.softplus(-self.critic(fake)).mean()
        opt_g.zero_grad()
        self.manual_backward(loss_g)
        opt_g.step()
        loss_d = jax.nn.softplus(-self.critic(real)).mean()
        loss_d += jax.nn.softplus(self.critic(jax.lax.stop_gradient(fake))).mean()
        opt_d.zero_grad()
        self.manual_backward(loss_d)
        opt_d.step()
        self.log_dict({"g": loss_g, "d": loss_d}, prog_bar=True)
        return None

    def configure_optimizers(self) -> Any:
        return [
            {"optimizer": optax.adam(1e-2, b1=0.5), "params": self.generator},
            {"optimizer": optax.adam(1e-2, b1=0.5), "params": [self.critic]},
        ]


def torch_gan() -> Any:
    import lightning.pytorch as lightning
    import torch
    from torch.nn.functional import softplus

    class Theirs(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.generator = torch_mlp(3, 6)
            self.critic = torch_mlp(6, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            real, noise = batch
            opt_g, opt_d = self.optimizers()
            fake = self.generator(noise)
            loss_g = softplus(-self.critic(fake)).mean()
            opt_g.zero_grad()
            self.manual_backward(loss_g)
            opt_g.step()
            loss_d = softplus(-self.critic(real)).mean()
            loss_d = loss_d + softplus(self.critic(fake.detach())).mean()
            opt_d.zero_grad()
            self.manual_backward(loss_d)
            opt_d.step()
            self.log_dict({"g": loss_g, "d": loss_d}, prog_bar=True)
            return None

        def configure_optimizers(self) -> Any:
            return [
                torch.optim.Adam(self.generator.parameters(), lr=1e-2, betas=(0.5, 0.999)),
                torch.optim.Adam(self.critic.parameters(), lr=1e-2, betas=(0.5, 0.999)),
            ]

    return Theirs()


@pytest.mark.lightning
def test_a_gan() -> None:
    out = check(GAN, (REAL, NOISE), beside=Beside(torch_gan, GAN_LAYERS))
    assert out.trainer.global_step == 48  # 24 batches in three epochs, two optimizers
