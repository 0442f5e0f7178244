"""Schedules inside a loss as people write them: a VAE with KL warm-up, scheduled sampling; beside PyTorch Lightning."""

from __future__ import annotations

import math
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest
from support.verbatim import Beside, check

import jaxlightning as pl

pytestmark = [pytest.mark.slow, pytest.mark.lightning]

RNG = np.random.RandomState(0)


class Dense(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(self.features)(x)


def linear(inputs: int, outputs: int) -> Any:
    import torch

    return torch.nn.Sequential(torch.nn.Linear(inputs, outputs))


def beside(step: Any, shapes: dict[str, tuple[int, int]]) -> Beside:
    """The same step in Lightning; each network is one layer."""

    def make() -> Any:
        import lightning.pytorch as lightning
        import torch

        class Theirs(lightning.LightningModule):
            training_step = step

            def __init__(self) -> None:
                super().__init__()
                for name, (inputs, outputs) in shapes.items():
                    setattr(self, name, linear(inputs, outputs))

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.05)

        return Theirs()

    return Beside(make, {f"{name}.Dense_0": f"{name}.0" for name in shapes})


def ours(step: Any, shapes: dict[str, tuple[int, int]]) -> Any:
    class Ours(pl.LightningModule):
        training_step = step

        def __init__(self) -> None:
            super().__init__()
            for name, (_, outputs) in shapes.items():
                setattr(self, name, Dense(outputs))

        def configure_optimizers(self) -> Any:
            return pl.optim.SGD(self.parameters(), lr=0.05)

    return Ours


def library(x: Any) -> Any:
    """`jnp` for arrays of JAX, `torch` for tensors."""
    if type(x).__module__.startswith("torch"):
        import torch

        return torch
    return jnp


def vae_step(self: Any, batch: Any, batch_idx: Any) -> Any:
    x, noise = batch
    np_like = library(x)
    hidden = np_like.tanh(self.encoder(x))
    mean, log_var = self.mean(hidden), self.log_var(hidden)
    z = mean + np_like.exp(0.5 * log_var) * noise
    reconstruction = ((self.decoder(z) - x) ** 2).sum(1).mean()
    kl = (-0.5 * (1 + log_var - mean**2 - np_like.exp(log_var)).sum(1)).mean()
    beta = min(1.0, self.current_epoch / 2)
    self.log_dict({"reconstruction": reconstruction, "kl": kl, "beta": beta})
    return reconstruction + beta * kl


def test_a_vae_with_kl_warm_up_by_the_epoch() -> None:
    shapes = {"encoder": (6, 8), "mean": (8, 3), "log_var": (8, 3), "decoder": (3, 6)}
    data = (RNG.randn(32, 6), RNG.randn(32, 3))
    out = check(ours(vae_step, shapes), data, beside=beside(vae_step, shapes))
    assert [row["beta"] for row in out.logged[::8]] == [0, 0.5, 1]
    assert out.module._engine.trace_counts["train"] == 2  # `min` decides once more when the warm-up is over


def sampling_step(self: Any, batch: Any, batch_idx: Any) -> Any:
    """Each next input is the true one with a probability that falls with the step, else what was predicted."""
    sequence, coins = batch
    np_like = library(sequence)
    epsilon = 5 / (5 + math.exp(self.global_step / 5))
    given, state, loss = sequence[:, 0], 0.0, 0.0
    for t in range(1, 5):
        state = np_like.tanh(self.cell(given) + state)
        predicted = self.head(state)
        loss = loss + ((predicted - sequence[:, t]) ** 2).mean()
        given = np_like.where(coins[:, t, None] < epsilon, sequence[:, t], predicted)
    self.log("epsilon", epsilon)
    self.log("loss", loss)
    return loss


def test_scheduled_sampling_by_the_step() -> None:
    shapes = {"cell": (2, 4), "head": (4, 2)}
    data = (RNG.randn(32, 5, 2), RNG.rand(32, 5))
    out = check(ours(sampling_step, shapes), data, beside=beside(sampling_step, shapes))
    assert out.logged[-1]["epsilon"] < 0.5 * out.logged[0]["epsilon"]
    assert out.module._engine.trace_counts["train"] == 1
