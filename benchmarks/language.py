"""A small transformer in `fit` beside a hand-written loop: 4 layers, width 128, 128 tokens, batch 16, AdamW.

Both sides read the same prebuilt numpy batches of random tokens; `fit` logs one value, with its bar and CSVLogger.
PyTorch Lightning and Keras on JAX train a model of the same form in pairs with the same loop.

Example:
    python benchmarks/language.py --json benchmarks/results/language.json
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _harness import Report, use_the_cpu
from _interleave import Batches, Clock, fit_interleaved, lightning_interleaved, quiet

use_the_cpu()
os.environ.setdefault("KERAS_BACKEND", "jax")

import jax  # noqa: E402  (the platform has to be chosen first)
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import linen as nn  # noqa: E402

import jaxlightning as jl  # noqa: E402

LAYERS, WIDTH, HEADS, TOKENS, BATCH, VOCABULARY = 4, 128, 4, 128, 16, 256


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        mask = nn.make_causal_mask(tokens)
        x = nn.Embed(VOCABULARY, WIDTH)(tokens) + self.param("positions", nn.initializers.normal(0.02), (TOKENS, WIDTH))
        for _ in range(LAYERS):
            x = x + nn.MultiHeadDotProductAttention(HEADS)(nn.LayerNorm()(x), mask=mask)
            x = x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))
        return nn.Dense(VOCABULARY)(nn.LayerNorm()(x))


def loss_of(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the mean cross-entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


class LitTransformer(jl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Transformer()

    def training_step(self, batch: Any, batch_idx: int) -> jax.Array:
        tokens, targets = batch
        loss = loss_of(self.net(tokens), targets)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adamw(3e-4)


def make_batches(steps: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return `steps` batches of int32 tokens and next tokens, each (16, 128)."""
    rng = np.random.default_rng(0)
    text = rng.integers(0, VOCABULARY, (steps, BATCH, TOKENS + 1)).astype(np.int32)
    return [(np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:])) for rows in text]


def hand_written(batches: list[Any]) -> Callable[[], float]:
    """Return a pass of the hand-written loop."""
    net, optimizer = Transformer(), optax.adamw(3e-4)
    params = jax.jit(net.init)(jax.random.key(0), batches[0][0])
    opt_state = optimizer.init(params)

    def step(params: Any, opt_state: Any, tokens: jax.Array, targets: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(lambda p: loss_of(net.apply(p, tokens), targets))(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    jitted = jax.jit(step, donate_argnums=(0, 1))

    def one_pass() -> float:
        nonlocal params, opt_state
        start = time.perf_counter()
        for tokens, targets in batches:
            params, opt_state, loss = jitted(params, opt_state, tokens, targets)
        loss.block_until_ready()
        return (time.perf_counter() - start) / len(batches)

    return one_pass


def run_lightning(batches: list[Any], clock: Clock) -> None:
    """Pair PyTorch Lightning with the hand-written loop."""
    import lightning.pytorch as pl
    import torch

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
            self.positions = torch.nn.Parameter(0.02 * torch.randn(TOKENS, WIDTH))
            layer = torch.nn.TransformerEncoderLayer(
                WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            self.layers = torch.nn.TransformerEncoder(
                layer, LAYERS, norm=torch.nn.LayerNorm(WIDTH), enable_nested_tensor=False
            )
            self.head = torch.nn.Linear(WIDTH, VOCABULARY)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            tokens, targets = batch
            mask = torch.nn.Transformer.generate_square_subsequent_mask(TOKENS)
            logits = self.head(self.layers(self.embed(tokens) + self.positions, mask=mask, is_causal=True))
            loss = torch.nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), targets.reshape(-1))
            self.log("loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=3e-4)

    tensors = [tuple(torch.from_numpy(part).long() for part in batch) for batch in batches]
    lightning_interleaved(Module(), Batches(tensors), clock, "loss")


def run_keras(batches: list[Any], clock: Clock) -> None:
    """Pair Keras on JAX with the hand-written loop."""
    import keras

    class Callback(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            float(logs["loss"])
            clock.epoch_ended()

    tokens = keras.Input((TOKENS,), dtype="int32")
    positions = keras.layers.Embedding(TOKENS, WIDTH)(jnp.arange(TOKENS)[None])
    x = keras.layers.Embedding(VOCABULARY, WIDTH)(tokens) + positions
    for _ in range(LAYERS):
        y = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(y, y, use_causal_mask=True)
        y = keras.layers.Dense(4 * WIDTH, activation="gelu")(keras.layers.LayerNormalization()(x))
        x = x + keras.layers.Dense(WIDTH)(y)
    model = keras.Model(tokens, keras.layers.Dense(VOCABULARY)(keras.layers.LayerNormalization()(x)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.AdamW(3e-4), loss=loss, jit_compile=True)
    inputs, targets = (np.concatenate(column) for column in zip(*batches, strict=True))
    with quiet():
        model.fit(
            inputs, targets, batch_size=BATCH, epochs=clock.epochs, shuffle=False, verbose=0, callbacks=[Callback()]
        )


def main() -> int:
    """Print the ratios; return 1 when the limit is missed by more than the A/A spread."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=15, help="pairs of fit and hand-written loop (%(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="steps in an epoch (%(default)s)")
    parser.add_argument("--peers", type=int, default=4, help="pairs with each peer, 0 for none (%(default)s)")
    parser.add_argument("--json", type=Path, default=None, metavar="PATH", help="write the result there")
    args = parser.parse_args()
    batches = make_batches(args.steps)
    one_pass = hand_written(batches)
    report = Report("language", args.json)
    clock = Clock(one_pass, args.pairs, args.steps)
    fit_interleaved(LitTransformer(), Batches(batches), clock, "loss", log_every_n_steps=4)
    report.result["fit"] = clock.numbers()
    report.check("fit", 1e3 * statistics.median(clock.fit), None, unit="ms per step")
    report.check("fit / hand-written", clock.ratio, 1.05, clock.spread)
    for name, package, run in (
        ("Lightning", "lightning", run_lightning),
        ("Keras on JAX", "keras", run_keras),
    ):
        if args.peers and importlib.util.find_spec(package) is not None:
            peer = Clock(one_pass, args.peers, args.steps)
            run(batches, peer)
            report.result[package] = peer.numbers()
            report.check(f"{name} / fit", peer.ratio / clock.ratio, None)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
