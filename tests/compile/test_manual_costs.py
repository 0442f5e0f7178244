"""Manual optimization in a compiled step has the operations of a step written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.verbatim import QUIET

import jaxlightning as pl

FLAGS: dict[str, Any] = {**QUIET, "max_epochs": 1}


class Blocks(nn.Module):
    """A generator with a scan, a cond, batch normalisation and dropout, as asked."""

    kind: str

    @nn.compact
    def __call__(self, z: Any, train: bool = True) -> Any:
        x = nn.Dense(16)(z)
        if self.kind == "batch norm and dropout":
            x = nn.BatchNorm(use_running_average=not train)(x)
            x = nn.Dropout(0.2, deterministic=not train)(jax.nn.relu(x))
        elif self.kind == "lstm":
            cell = nn.OptimizedLSTMCell(16)
            scan = nn.RNN(cell)
            x = scan(jnp.broadcast_to(x[:, None], (x.shape[0], 6, 16))).mean(axis=1)
        else:
            w = self.param("w", nn.initializers.lecun_normal(), (16, 16))
            x = jax.lax.cond(x.sum() > 0, lambda v: jnp.tanh(v @ w), lambda v: jnp.sin(v @ w), x)
        return nn.Dense(5)(x)


class Critic(nn.Module):
    @nn.compact
    def __call__(self, x: Any, train: bool = True) -> Any:
        x = nn.Dense(16)(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        x = nn.Dropout(0.2, deterministic=not train)(jnp.tanh(x))
        return nn.Dense(1)(x)


def penalty(critic: Callable[[Any], Any], real: Any, fake: Any) -> Any:
    between = 0.5 * (real + fake)
    slope = jax.grad(lambda x: critic(x).sum())(between)
    return ((jnp.sqrt((slope**2).sum(axis=1) + 1e-12) - 1) ** 2).mean()


class Costly(pl.LightningModule):
    """A GAN, or a Wasserstein GAN with gradient penalty."""

    def __init__(self, kind: str, wasserstein: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = Blocks(kind)
        self.critic = Critic()
        self.wasserstein = wasserstein

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        real, noise = batch
        opt_g, opt_d = self.optimizers()
        fake = self.generator(noise)
        opt_g.zero_grad()
        score = self.critic(fake)
        self.manual_backward(-score.mean() if self.wasserstein else jax.nn.softplus(-score).mean())
        opt_g.step()
        fake = jax.lax.stop_gradient(fake)
        opt_d.zero_grad()
        if self.wasserstein:
            loss_d = self.critic(fake).mean() - self.critic(real).mean() + 10 * penalty(self.critic, real, fake)
        else:
            loss_d = jax.nn.softplus(-self.critic(real)).mean() + jax.nn.softplus(self.critic(fake)).mean()
        self.manual_backward(loss_d)
        opt_d.step()

    def configure_optimizers(self) -> Any:
        return [
            {"optimizer": optax.adam(1e-3), "params": self.generator},
            {"optimizer": optax.adam(1e-3), "params": self.critic},
        ]


def by_hand(kind: str, wasserstein: bool, real: Any, noise: Any) -> Any:
    """The same step as one would write it with Flax and optax; compiled."""
    generator, critic, tx = Blocks(kind), Critic(), optax.adam(1e-3)
    key = jax.random.key(0)
    made_g = generator.init({"params": key, "dropout": key}, noise)
    made_d = critic.init({"params": key, "dropout": key}, real)
    rest_g = {name: value for name, value in made_g.items() if name != "params"}

    def call(network: Any, params: Any, rest: Any, x: Any, key: Any) -> Any:
        return network.apply({"params": params, **rest}, x, mutable=list(rest), rngs={"dropout": key})

    def step(state: Any, real: Any, noise: Any, seed: Any, number: Any) -> Any:
        g, d, rest_g, rest_d, opt_g, opt_d = state
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), number), 6)

        def loss_g(g: Any) -> Any:
            fake, new_g = call(generator, g, rest_g, noise, keys[0])
            score, new_d = call(critic, d, rest_d, fake, keys[1])
            return -score.mean() if wasserstein else jax.nn.softplus(-score).mean(), (fake, new_g, new_d)

        (_, (fake, rest_g, rest_d)), grads = jax.value_and_grad(loss_g, has_aux=True)(g)
        updates, opt_g = tx.update(grads, opt_g, g)
        g = optax.apply_updates(g, updates)
        fake = jax.lax.stop_gradient(fake)

        def loss_d(d: Any) -> Any:
            if wasserstein:
                on_fake, rest = call(critic, d, rest_d, fake, keys[2])
                on_real, rest = call(critic, d, rest, real, keys[3])

                def inner(x: Any) -> Any:
                    out, updated = call(critic, d, rest, x, keys[4])
                    return out.sum(), updated

                slope, rest = jax.grad(inner, has_aux=True)(0.5 * (real + fake))
                norms = jnp.sqrt((slope**2).sum(axis=1) + 1e-12)
                return on_fake.mean() - on_real.mean() + 10 * ((norms - 1) ** 2).mean(), rest
            on_real, rest = call(critic, d, rest_d, real, keys[2])
            on_fake, rest = call(critic, d, rest, fake, keys[3])
            return jax.nn.softplus(-on_real).mean() + jax.nn.softplus(on_fake).mean(), rest

        (_, rest_d), grads = jax.value_and_grad(loss_d, has_aux=True)(d)
        updates, opt_d = tx.update(grads, opt_d, d)
        return g, optax.apply_updates(d, updates), rest_g, rest_d, opt_g, opt_d

    state = (
        made_g["params"],
        made_d["params"],
        rest_g,
        {"batch_stats": made_d["batch_stats"]},
        tx.init(made_g["params"]),
        tx.init(made_d["params"]),
    )
    return jax.jit(step, donate_argnums=0).lower(state, real, noise, 0, 0).compile()


@pytest.mark.slow
@pytest.mark.parametrize("wasserstein", [False, True], ids=["gan", "wgan-gp"])
@pytest.mark.parametrize("kind", ["batch norm and dropout", "lstm", "cond"])
def test_a_manual_step_has_the_operations_of_one_written_by_hand(kind: str, wasserstein: bool) -> None:
    rng = np.random.RandomState(0)
    real, noise = rng.randn(64, 5).astype(np.float32), rng.randn(64, 3).astype(np.float32)
    module = Costly(kind, wasserstein)
    pl.Trainer(**FLAGS).fit(module, pl.ArrayLoader((real, noise), batch_size=64))
    ours = module._engine.compiled["train"].cost_analysis()["flops"]
    theirs = by_hand(kind, wasserstein, real, noise).cost_analysis()["flops"]
    assert ours / theirs < 1.01
