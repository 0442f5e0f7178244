"""What `fit` costs per step beside a hand-written JAX loop, on a model so small that nothing hides the difference.

The model is an MLP 32-64-10, batch 32, Adam. Hand-written is what a careful person writes: one donated `jax.jit` step
on (parameters, optax state) over prebuilt numpy batches, no `float()`, no log. `fit` gets the same batches, logs
`--logs` values with `self.log`, and has its progress bar and its CSVLogger on (the bar writes to the null device).
A pair is one epoch of `fit`, timed from the end of the epoch before to a metric of this epoch on the host, and one pass
of the hand-written loop, timed to its last loss. `--lightning` runs the same epochs through PyTorch Lightning.

Example:
    python benchmarks/overhead.py --pairs 15 --json benchmarks/results/overhead.json
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from _harness import aa_spread, orders, ratio_of_medians, use_the_cpu, write_json

use_the_cpu()

import jax  # noqa: E402  (the platform has to be chosen first)
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import linen as nn  # noqa: E402

import jaxlightning as jl  # noqa: E402

FEATURES, HIDDEN, CLASSES, BATCH = 32, 64, 10, 32
WARM_UP = 2
"""Epochs before the first pair: compilation, and the caches of the host."""


class Batches:
    """Prebuilt batches: an iterable with a length, which hands out the same objects in every epoch."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(CLASSES)(nn.relu(nn.Dense(HIDDEN)(x)))


class LitMLP(jl.LightningModule):
    def __init__(self, logs: int) -> None:
        super().__init__()
        self.net = MLP()
        self.logs = logs

    def training_step(self, batch: Any, batch_idx: int) -> jax.Array:
        x, y = batch
        loss = optax.softmax_cross_entropy_with_integer_labels(self.net(x), y).mean()
        for i in range(self.logs):
            self.log(f"loss_{i}", loss * (i + 1), prog_bar=i == 0)
        return loss

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(1e-3)


def make_batches(steps: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return `steps` batches of float32 features (32, 32) and int32 labels (32,)."""
    rng = np.random.default_rng(0)
    return [
        (rng.normal(size=(BATCH, FEATURES)).astype(np.float32), rng.integers(0, CLASSES, BATCH).astype(np.int32))
        for _ in range(steps)
    ]


def hand_written(batches: list[Any]) -> Callable[[], float]:
    """Return a function that makes one pass over the batches and returns the seconds per step."""
    net, optimizer = MLP(), optax.adam(1e-3)
    params = net.init(jax.random.key(0), batches[0][0])
    opt_state = optimizer.init(params)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, opt_state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any, jax.Array]:
        def loss_of(params: Any) -> jax.Array:
            return optax.softmax_cross_entropy_with_integer_labels(net.apply(params, x), y).mean()

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    def one_pass() -> float:
        nonlocal params, opt_state
        start = time.perf_counter()
        for x, y in batches:
            params, opt_state, loss = step(params, opt_state, x, y)
        loss.block_until_ready()
        return (time.perf_counter() - start) / len(batches)

    return one_pass


class Clock:
    """Times the epochs of a `fit` and runs the hand-written passes between them, the order turned round every pair."""

    def __init__(self, one_pass: Callable[[], float], pairs: int, steps: int) -> None:
        self.one_pass, self.steps = one_pass, steps
        self.fit: list[float] = []
        self.hand: list[float] = []
        # How many hand-written passes follow each epoch: from "fit, hand, hand, fit, fit, hand, ...".
        sides = [side for order in orders(pairs) for side in order]
        self.passes = [0] * pairs
        epoch = -1
        for side in sides:
            if side == 0:
                epoch += 1
            else:
                self.passes[epoch] += 1
        self.epoch = -WARM_UP
        self.started = 0.0

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        float(trainer.callback_metrics["loss_0"])  # waits for the last step
        if self.epoch >= 0:
            self.fit.append((time.perf_counter() - self.started) / self.steps)
            self.hand += [self.one_pass() for _ in range(self.passes[self.epoch])]
        else:
            self.one_pass()
        self.epoch += 1
        self.started = time.perf_counter()


def run_ours(
    steps_per_dispatch: int | str, clock: Clock, batches: list[Any], pairs: int, logs: int, folder: str
) -> None:
    """Run `fit` with the clock in it."""

    class Callback(jl.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            clock.on_train_epoch_end(trainer, pl_module)

    trainer = jl.Trainer(
        max_epochs=pairs + WARM_UP,
        logger=jl.loggers.CSVLogger(folder, name="ours"),
        callbacks=[Callback()],
        enable_checkpointing=False,
        enable_model_summary=False,
        default_root_dir=folder,
        steps_per_dispatch=steps_per_dispatch,
    )
    trainer.fit(LitMLP(logs), Batches(batches))


def run_lightning(clock: Clock, batches: list[Any], pairs: int, logs: int, folder: str) -> None:
    """Run the same in PyTorch Lightning."""
    import lightning.pytorch as pl
    import torch
    from lightning.pytorch.callbacks import TQDMProgressBar
    from lightning.pytorch.loggers import CSVLogger

    class Callback(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            clock.on_train_epoch_end(trainer, pl_module)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(
                torch.nn.Linear(FEATURES, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, CLASSES)
            )

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            loss = torch.nn.functional.cross_entropy(self.net(x), y)
            for i in range(logs):
                self.log(f"loss_{i}", loss * (i + 1), prog_bar=i == 0)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=1e-3)

    trainer = pl.Trainer(
        max_epochs=pairs + WARM_UP,
        accelerator="cpu",
        logger=CSVLogger(folder, name="lightning"),
        callbacks=[Callback(), TQDMProgressBar()],
        enable_checkpointing=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    tensors = [(torch.from_numpy(x), torch.from_numpy(y).long()) for x, y in batches]
    trainer.fit(Module(), Batches(tensors))


def compare(run: Callable[..., None], args: argparse.Namespace, steps: int, pairs: int) -> dict[str, Any]:
    """Time one framework against the hand-written loop.

    Returns:
        Medians in microseconds per step, their ratio, the A/A spread of each side, and every measurement.
    """
    batches = make_batches(steps)
    clock = Clock(hand_written(batches), pairs, steps)
    with (
        tempfile.TemporaryDirectory() as folder,
        open(os.devnull, "w") as null,
        contextlib.redirect_stdout(null),
        contextlib.redirect_stderr(null),
    ):
        run(clock, batches, pairs, args.logs, folder)
    return {
        "steps_per_epoch": steps,
        "pairs": pairs,
        "fit_us": 1e6 * statistics.median(clock.fit),
        "hand_written_us": 1e6 * statistics.median(clock.hand),
        "ratio": ratio_of_medians(clock.fit, clock.hand),
        "aa_spread_hand_written": aa_spread(clock.hand),
        "aa_spread_fit": aa_spread(clock.fit),
        "fit_us_each": [round(1e6 * value, 2) for value in clock.fit],
        "hand_written_us_each": [round(1e6 * value, 2) for value in clock.hand],
    }


def report(name: str, row: dict[str, Any]) -> None:
    """Print one line."""
    print(
        f"{name}: {row['fit_us']:.1f} us per step, hand-written {row['hand_written_us']:.1f} us, "
        f"ratio of medians {row['ratio']:.3f} over {row['pairs']} pairs, A/A spread {row['aa_spread_hand_written']:.3f}"
    )


def main() -> int:
    """Print the ratio; return 1 when it is above the limit plus the A/A spread of the run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=16, help="pairs of fit and hand-written loop (%(default)s)")
    parser.add_argument("--steps", type=int, default=2000, help="steps in an epoch (%(default)s)")
    parser.add_argument("--logs", type=int, default=1, help="values that the step logs (%(default)s)")
    parser.add_argument("--limit", type=float, default=1.25, help="highest ratio of medians (%(default)s)")
    parser.add_argument(
        "--steps-per-dispatch",
        default="1",
        metavar="K",
        help="batches in one compiled call of fit, or auto (%(default)s)",
    )
    parser.add_argument("--lightning", action="store_true", help="time PyTorch Lightning too, with fewer steps")
    parser.add_argument("--json", type=Path, default=None, metavar="PATH", help="write the result there")
    args = parser.parse_args()
    if args.pairs < 4 or args.logs < 1:
        parser.error("at least 4 pairs and 1 log are needed")

    dispatch = args.steps_per_dispatch if args.steps_per_dispatch == "auto" else int(args.steps_per_dispatch)
    ours = compare(partial(run_ours, dispatch), args, args.steps, args.pairs)
    report("fit", ours)
    result = {
        "benchmark": "overhead",
        "logs": args.logs,
        "steps_per_dispatch": dispatch,
        "limit": args.limit,
        "fit": ours,
    }
    if args.lightning:
        result["lightning"] = compare(run_lightning, args, max(100, args.steps // 10), args.pairs)
        report("Lightning", result["lightning"])
    spread = ours["aa_spread_hand_written"]
    passed = ours["ratio"] <= args.limit + spread
    result["passed"] = passed
    print(f"limit {args.limit} + spread {spread:.3f}: {'passed' if passed else 'FAILED'}")
    write_json(args.json, result)
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
