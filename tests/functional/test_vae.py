"""A class-conditional VAE with an explicit key and (loss, mse, kl): the same losses through `fit` and on a module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxlightning
from jaxlightning import LightningModule, Trainer
from jaxlightning.functional._fit import _Batches as Batches

KL_WEIGHT, EPOCHS, N = 0.1, 2, 5
QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "enable_checkpointing": False}
TX = optax.adam(1e-3)


class FeedForward(nn.Module):
    sizes: tuple[int, ...]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for size in self.sizes[:-1]:
            x = nn.relu(nn.Dense(size)(x))
        return nn.Dense(self.sizes[-1])(x)


class VAE(nn.Module):
    latent: int = 4

    def setup(self) -> None:
        self.encoder = FeedForward((16, 8))
        self.decoder = FeedForward((16, 12))
        self.moments = nn.Dense(2 * self.latent)
        self.label = nn.Dense(self.latent)

    def __call__(self, x: jax.Array, c: jax.Array, key: jax.Array) -> Any:
        mean, logvar = jnp.split(self.moments(self.encoder(x)), 2, axis=-1)
        z = mean + jnp.exp(logvar / 2) * jax.random.normal(key, mean.shape)
        return self.decoder(z + self.label(c)), mean, logvar


MODEL = VAE()


def vae_loss(outputs: Any, x: Any) -> Any:
    recon, mean, logvar = outputs
    mse = jnp.mean(optax.l2_loss(recon, x))
    kl = -0.5 * jnp.mean(1 + logvar - mean**2 - jnp.exp(logvar))
    return mse + KL_WEIGHT * kl, (mse, kl)


def create_train_step(model: Any, optimizer: Any) -> Any:
    @jax.jit
    def train_step(params: Any, opt_state: Any, batch: Any, key: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            x, c = batch
            return vae_loss(model.apply({"params": params}, x, jax.nn.one_hot(c, 10), key), x)

        (loss, (mse, kl)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss, mse, kl

    return train_step


@pytest.fixture(scope="module")
def batches() -> list[Any]:
    rng = np.random.default_rng(0)
    return [(rng.random((16, 12), np.float32), rng.integers(0, 10, 16)) for _ in range(N)]


class Record(jaxlightning.Callback):
    def __init__(self) -> None:
        self.seen: list[tuple[float, ...]] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        self.seen.append(tuple(float(outputs[name]) for name in ("loss", "mse", "kl")))


def test_the_vae_has_the_same_losses_through_fit_and_on_a_module(batches: list[Any], tmp_path: Path) -> None:
    x, c = batches[0]
    params = MODEL.init(jax.random.key(1), x, jax.nn.one_hot(c, 10), jax.random.key(2))["params"]
    key = jax.random.PRNGKey(0)
    keys, chain = [], key
    for _ in range(EPOCHS * N):
        chain, subkey = jax.random.split(chain)
        keys.append(subkey)

    by_hand = []
    step, p, opt = create_train_step(MODEL, TX), params, TX.init(params)
    for i in range(EPOCHS * N):
        p, opt, *losses = step(p, opt, batches[i % N], keys[i])
        by_hand.append(tuple(map(float, losses)))

    through_fit = Record()
    got = jaxlightning.fit(
        params, batches, train_step=step, optimizer=TX, key=key, num_epochs=EPOCHS, loss_names=("mse", "kl"),
        callbacks=through_fit, default_root_dir=tmp_path, **QUIET,
    )  # fmt: skip
    assert through_fit.seen == by_hand
    jax.tree.map(np.testing.assert_array_equal, got, p)

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = MODEL
            self.keys = jnp.stack(keys)

        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            x, c = batch
            key = jax.lax.dynamic_index_in_dim(self.keys, jnp.asarray(self.global_step), keepdims=False)
            loss, (mse, kl) = vae_loss(self.net(x, jax.nn.one_hot(c, 10), key), x)
            self.log_dict({"mse": mse, "kl": kl})
            return {"loss": loss, "mse": mse, "kl": kl}

        def configure_optimizers(self) -> Any:
            return TX

    on_module = Record()
    trainer = Trainer(max_epochs=EPOCHS, callbacks=on_module, default_root_dir=tmp_path, **QUIET)
    module = Module().init(batches[0])
    module._require_engine().params = {"net": params}
    trainer.fit(module, Batches(batches))
    np.testing.assert_allclose(on_module.seen, by_hand, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), trainer.state.params["net"], p)
