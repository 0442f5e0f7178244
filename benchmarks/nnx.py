"""An NNX model in `fit` beside the loop that NNX's documentation shows, `nnx.jit` over (model, optimizer).

The model is the MLP 32-64-10 of `overhead.py` with batch 32 and Adam; `fit` logs one value, with bar and CSVLogger. The
hand-written side with split and merged state, which is what remains without NNX's bookkeeping, is shown beside it.

Example:
    python benchmarks/nnx.py --json benchmarks/results/nnx.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _harness import Report, use_the_cpu
from _interleave import Batches, Clock, fit_interleaved

use_the_cpu()

import jax  # noqa: E402  (the platform has to be chosen first)
import optax  # noqa: E402
from flax import nnx  # noqa: E402

import jaxlightning as jl  # noqa: E402
from overhead import CLASSES, FEATURES, HIDDEN, make_batches  # noqa: E402


class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(FEATURES, HIDDEN, rngs=rngs)
        self.out = nnx.Linear(HIDDEN, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(nnx.relu(self.hidden(x)))


class LitMLP(jl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = MLP(nnx.Rngs(0))

    def training_step(self, batch: Any, batch_idx: int) -> jax.Array:
        x, y = batch
        loss = optax.softmax_cross_entropy_with_integer_labels(self.net(x), y).mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(1e-3)


def loss_of(model: MLP, x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the mean cross-entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()


def nnx_loop(batches: list[Any]) -> Callable[[], float]:
    """Return a pass of the documented loop: `nnx.jit`, `nnx.value_and_grad`, `nnx.Optimizer`."""
    model = MLP(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model: MLP, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(loss_of)(model, x, y)
        optimizer.update(model, grads)
        return loss

    def one_pass() -> float:
        start = time.perf_counter()
        for x, y in batches:
            loss = step(model, optimizer, x, y)
        loss.block_until_ready()
        return (time.perf_counter() - start) / len(batches)

    return one_pass


def split_loop(batches: list[Any]) -> Callable[[], float]:
    """Return a pass of a donated `jax.jit` step on the split state."""
    graph, params = nnx.split(MLP(nnx.Rngs(0)))
    transform = optax.adam(1e-3)
    opt_state = transform.init(params)

    def step(params: Any, opt_state: Any, x: jax.Array, y: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(lambda p: loss_of(nnx.merge(graph, p), x, y))(params)
        updates, opt_state = transform.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    jitted = jax.jit(step, donate_argnums=(0, 1))

    def one_pass() -> float:
        nonlocal params, opt_state
        start = time.perf_counter()
        for x, y in batches:
            params, opt_state, loss = jitted(params, opt_state, x, y)
        loss.block_until_ready()
        return (time.perf_counter() - start) / len(batches)

    return one_pass


def main() -> int:
    """Print the ratios; return 1 when the limit is missed by more than the A/A spread."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=16, help="pairs (%(default)s)")
    parser.add_argument("--steps", type=int, default=2000, help="steps in an epoch of ours (%(default)s)")
    parser.add_argument("--json", type=Path, default=None, metavar="PATH", help="write the result there")
    args = parser.parse_args()
    batches = make_batches(args.steps)
    clock = Clock(nnx_loop(batches[: max(50, args.steps // 10)]), args.pairs, args.steps)
    fit_interleaved(LitMLP(), Batches(batches), clock, "loss")
    report = Report("nnx", args.json)
    report.result["fit"] = clock.numbers()
    report.check("fit", 1e6 * statistics.median(clock.fit), None, unit="us per step")
    report.check("nnx.jit loop", 1e6 * statistics.median(clock.other), None, unit="us per step")
    split = split_loop(batches)
    split()
    report.check("jit on split state", 1e6 * statistics.median(split() for _ in range(args.pairs)), None, unit="us")
    report.check("nnx.jit loop / fit", 1 / clock.ratio, 7.0, clock.spread, at_least=True)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
