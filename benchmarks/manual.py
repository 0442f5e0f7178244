"""What a manual step costs beside one written by hand: a GAN and a WGAN-GP, batch normalisation and dropout in both.

Ours is `training_step` with `self.manual_backward(...)` and `opt.step()`, compiled; by hand is the pure step that one
would write with Flax and optax, donated and compiled ahead of time. Both make the same arrays from the same batches.
A pair is `--steps` steps of each side, timed to the last loss; the order is turned round in every pair.

Example:
    python benchmarks/manual.py --pairs 200 --json benchmarks/results/manual.json
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _harness import Report, aa_spread, orders, ratio_of_medians, use_the_cpu

use_the_cpu()

import jax  # noqa: E402  (the platform has to be chosen first)
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import linen as nn  # noqa: E402

import jaxlightning as pl  # noqa: E402

PIXELS, NOISE, HIDDEN, BATCH = 256, 32, 256, 64
RATE = 1e-4


class Generator(nn.Module):
    @nn.compact
    def __call__(self, z: Any, train: bool = True) -> Any:
        for _ in range(2):
            z = nn.BatchNorm(use_running_average=not train)(nn.Dense(HIDDEN)(z))
            z = nn.Dropout(0.1, deterministic=not train)(nn.relu(z))
        return jnp.tanh(nn.Dense(PIXELS)(z))


class Critic(nn.Module):
    @nn.compact
    def __call__(self, x: Any, train: bool = True) -> Any:
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(HIDDEN)(x))
        x = nn.Dropout(0.1, deterministic=not train)(jnp.tanh(x))
        return nn.Dense(1)(jnp.tanh(nn.Dense(HIDDEN)(x)))


def length(slope: Any) -> Any:
    return jnp.sqrt((slope**2).sum(axis=1) + 1e-12)


class Adversarial(pl.LightningModule):
    def __init__(self, wasserstein: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = Generator(), Critic()
        self.wasserstein = wasserstein

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        real, noise = batch
        opt_g, opt_d = self.optimizers()
        fake = self.generator(noise)
        score = self.critic(fake)
        loss_g = -score.mean() if self.wasserstein else jax.nn.softplus(-score).mean()
        opt_g.zero_grad()
        self.manual_backward(loss_g)
        opt_g.step()
        fake = jax.lax.stop_gradient(fake)
        if self.wasserstein:
            loss_d = self.critic(fake).mean() - self.critic(real).mean()
            slope = jax.grad(lambda x: self.critic(x).sum())(0.5 * (real + fake))
            loss_d = loss_d + 10 * ((length(slope) - 1) ** 2).mean()
        else:
            loss_d = jax.nn.softplus(self.critic(fake)).mean() + jax.nn.softplus(-self.critic(real)).mean()
        opt_d.zero_grad()
        self.manual_backward(loss_d)
        opt_d.step()
        return loss_d

    def configure_optimizers(self) -> Any:
        return [
            {"optimizer": optax.adam(RATE), "params": self.generator},
            {"optimizer": optax.adam(RATE), "params": self.critic},
        ]


def written_by_hand(wasserstein: bool, real: Any, noise: Any) -> tuple[Any, Any]:
    """The compiled step, and its first state."""
    generator, critic, tx = Generator(), Critic(), optax.adam(RATE)
    key = jax.random.key(0)
    made_g = generator.init({"params": key, "dropout": key}, noise)
    made_d = critic.init({"params": key, "dropout": key}, real)

    def call(network: Any, params: Any, stats: Any, x: Any, key: Any) -> Any:
        variables = {"params": params, "batch_stats": stats}
        out, updated = network.apply(variables, x, mutable=["batch_stats"], rngs={"dropout": key})
        return out, updated["batch_stats"]

    def step(state: Any, real: Any, noise: Any, number: Any) -> Any:
        g, d, stats_g, stats_d, opt_g, opt_d = state
        keys = jax.random.split(jax.random.fold_in(jax.random.key(0), number), 5)

        def loss_g(g: Any) -> Any:
            fake, new_g = call(generator, g, stats_g, noise, keys[0])
            score, new_d = call(critic, d, stats_d, fake, keys[1])
            return -score.mean() if wasserstein else jax.nn.softplus(-score).mean(), (fake, new_g, new_d)

        (_, (fake, stats_g, stats)), grads = jax.value_and_grad(loss_g, has_aux=True)(g)
        updates, opt_g = tx.update(grads, opt_g, g)
        g = optax.apply_updates(g, updates)

        def loss_d(d: Any) -> Any:
            on_fake, s = call(critic, d, stats, fake, keys[2])
            on_real, s = call(critic, d, s, real, keys[3])
            if not wasserstein:
                return jax.nn.softplus(on_fake).mean() + jax.nn.softplus(-on_real).mean(), s

            def inner(x: Any) -> Any:
                out, updated = call(critic, d, s, x, keys[4])
                return out.sum(), updated

            slope, s_new = jax.grad(inner, has_aux=True)(0.5 * (real + fake))
            return on_fake.mean() - on_real.mean() + 10 * ((length(slope) - 1) ** 2).mean(), s_new

        (loss, stats_d), grads = jax.value_and_grad(loss_d, has_aux=True)(d)
        updates, opt_d = tx.update(grads, opt_d, d)
        return (g, optax.apply_updates(d, updates), stats_g, stats_d, opt_g, opt_d), loss

    g, d = made_g["params"], made_d["params"]
    state = (g, d, made_g["batch_stats"], made_d["batch_stats"], tx.init(g), tx.init(d))
    return jax.jit(step, donate_argnums=0).lower(state, real, noise, np.int32(0)).compile(), state


def measure(wasserstein: bool, pairs: int, steps: int) -> dict[str, float]:
    rng = np.random.default_rng(0)
    real = rng.standard_normal((BATCH, PIXELS)).astype(np.float32)
    noise = rng.standard_normal((BATCH, NOISE)).astype(np.float32)
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    module = Adversarial(wasserstein)
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_epochs=1, enable_model_summary=False, **quiet)
    trainer.fit(module, pl.ArrayLoader((real, noise), batch_size=BATCH))
    engine = module._engine
    compiled, state = written_by_hand(wasserstein, real, noise)
    batch, number = (real, noise), 0

    def ours() -> Any:
        nonlocal number
        for _ in range(steps):
            number += 1
            out = engine.manual.run(batch, batch_idx=number, global_step=2 * number, micro_step=number)
        engine.block_until_ready()
        return out

    def by_hand() -> Any:
        nonlocal state, number
        for _ in range(steps):
            number += 1
            state, loss = compiled(state, real, noise, np.int32(number))
        return loss.block_until_ready()

    sides: tuple[Callable[[], Any], ...] = (ours, by_hand)
    times: tuple[list[float], list[float]] = ([], [])
    for side in sides:
        side()
    for order in orders(pairs):
        for side in order:
            start = time.perf_counter()
            sides[side]()
            times[side].append((time.perf_counter() - start) / steps)
    flops = engine.compiled["train"].cost_analysis()["flops"] / compiled.cost_analysis()["flops"]
    return {
        "time_ratio": ratio_of_medians(times[0], times[1]),
        "aa_spread": max(aa_spread(times[0]), aa_spread(times[1])),
        "flop_ratio": flops,
        "ours_us": 1e6 * sorted(times[0])[len(times[0]) // 2],
        "by_hand_us": 1e6 * sorted(times[1])[len(times[1]) // 2],
        "compiled": float(engine.trace_counts["train"]),
    }


def main() -> int:
    """Print the ratios; return 1 when a limit is missed by more than the A/A spread."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=200, help="interleaved pairs, at least 4 (%(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="steps of a side in one pair (%(default)s)")
    parser.add_argument("--json", type=Path, default=None, metavar="PATH", help="write the result there")
    options = parser.parse_args()
    report = Report("manual", options.json)
    for name, wasserstein in (("GAN", False), ("WGAN-GP", True)):
        row = measure(wasserstein, options.pairs, options.steps)
        report.result[name] = row
        report.check(f"{name}: compiled manual step / by hand, time", row["time_ratio"], 1.05, row["aa_spread"])
        report.check(f"{name}: compiled manual step / by hand, floating-point operations", row["flop_ratio"], 1.01)
        report.check(f"{name}: compilations", row["compiled"], 1.0)
        report.check(f"{name}, ours", row["ours_us"], None, unit="us")
        report.check(f"{name}, by hand", row["by_hand_us"], None, unit="us")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
