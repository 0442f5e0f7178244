"""What `fit` costs per step beside a hand-written JAX loop, on a model so small that nothing hides the difference.

The model is an MLP 32-64-10, batch 32, Adam. Hand-written is what a careful person writes: one donated `jax.jit` step
on (parameters, optax state) over prebuilt numpy batches, no `float()`, no log; the flat ahead-of-time call is shown
beside it as the limit. `fit` gets the same batches, logs values with `self.log`, and has its progress bar and its
CSVLogger on (the bar writes to the null device). A pair is one epoch of `fit` and one pass of the hand-written loop.
PyTorch Lightning (bar and CSVLogger on) and Keras on JAX (arrays in memory, no bar: its fastest documented way) are
each paired with the same hand-written loop, and the ratios are divided.

Example:
    python benchmarks/overhead.py --json benchmarks/results/overhead.json
    python benchmarks/overhead.py --only fit,fused --pairs 30
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from _harness import Report, ratio_of_medians, use_the_cpu
from _interleave import Batches, Clock, fit_interleaved, lightning_interleaved, quiet

use_the_cpu()
os.environ.setdefault("KERAS_BACKEND", "jax")

import jax  # noqa: E402  (the platform has to be chosen first)
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import linen as nn  # noqa: E402

import jaxlightning as jl  # noqa: E402

FEATURES, HIDDEN, CLASSES, BATCH = 32, 64, 10, 32
FUSED = 50
"""Steps in one call of the fused comparison: what `steps_per_dispatch="auto"` tries with a log point every 50 steps."""

PARTS = ("fit", "ten_logs", "fused", "lightning", "keras")


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(CLASSES)(nn.relu(nn.Dense(HIDDEN)(x)))


class LitMLP(jl.LightningModule):
    def __init__(self, logs: int = 1) -> None:
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


def hand_step(batch: Any) -> tuple[Callable[..., Any], Any]:
    """Return the hand-written step, not compiled, and its first state."""
    net, optimizer = MLP(), optax.adam(1e-3)
    params = net.init(jax.random.key(0), batch[0])

    def step(params: Any, opt_state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any, jax.Array]:
        def loss_of(params: Any) -> jax.Array:
            return optax.softmax_cross_entropy_with_integer_labels(net.apply(params, x), y).mean()

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step, (params, optimizer.init(params))


def hand_scanned(batches: list[Any], steps: int) -> Callable[[], float]:
    """Return a pass in calls of several steps over batches that are stacked beforehand: what fusing can give here.

    Args:
        batches: Of `make_batches`.
        steps: Steps in a call.
    """
    step, (params, opt_state) = hand_step(batches[0])
    stacked = [
        tuple(np.stack(leaves) for leaves in zip(*batches[start : start + steps], strict=True))
        for start in range(0, len(batches) - steps + 1, steps)
    ]

    def many(carry: Any, x: jax.Array, y: jax.Array) -> Any:
        return jax.lax.scan(lambda carry, batch: (step(*carry[:2], *batch), None), carry, (x, y))[0]

    call, carry = jax.jit(many, donate_argnums=0), (params, opt_state, jax.numpy.zeros(()))

    def one_pass() -> float:
        nonlocal carry
        start = time.perf_counter()
        for x, y in stacked:
            carry = call(carry, x, y)
        carry[2].block_until_ready()
        return (time.perf_counter() - start) / (len(stacked) * steps)

    return one_pass


def hand_written(batches: list[Any], *, flat: bool = False) -> Callable[[], float]:
    """Return a function that makes one pass over the batches and returns the seconds per step.

    Args:
        batches: Of `make_batches`.
        flat: Whether the state is a flat tuple of leaves in an ahead-of-time compiled call: the least that JAX allows.
    """
    step, state = hand_step(batches[0])

    if flat:
        leaves, treedef = jax.tree.flatten(state)

        def on_leaves(leaves: Any, x: jax.Array, y: jax.Array) -> Any:
            *state, loss = step(*jax.tree.unflatten(treedef, leaves), x, y)
            return jax.tree.leaves(tuple(state)), loss

        call = jax.jit(on_leaves, donate_argnums=0).lower(leaves, *batches[0]).compile()

        def one_pass() -> float:
            nonlocal leaves
            start = time.perf_counter()
            for x, y in batches:
                leaves, loss = call(leaves, x, y)
            loss.block_until_ready()
            return (time.perf_counter() - start) / len(batches)

        return one_pass

    jitted = partial(jax.jit, donate_argnums=(0, 1))(step)
    params, opt_state = state

    def one_pass() -> float:
        nonlocal params, opt_state
        start = time.perf_counter()
        for x, y in batches:
            params, opt_state, loss = jitted(params, opt_state, x, y)
        loss.block_until_ready()
        return (time.perf_counter() - start) / len(batches)

    return one_pass


def run_ours(pairs: int, steps: int, logs: int, steps_per_dispatch: int | str = 1) -> Clock:
    """Pair our `fit` with the hand-written loop."""
    batches = make_batches(steps)
    clock = Clock(hand_written(batches), pairs, steps)
    fit_interleaved(LitMLP(logs), Batches(batches), clock, "loss_0", steps_per_dispatch=steps_per_dispatch)
    return clock


def run_lightning(pairs: int, steps: int, logs: int) -> Clock:
    """Pair PyTorch Lightning with the hand-written loop."""
    import lightning.pytorch as pl
    import torch

    torch.set_num_threads(1)  # the fastest for so small a model

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

    batches = make_batches(steps)
    tensors = [(torch.from_numpy(x), torch.from_numpy(y).long()) for x, y in batches]
    clock = Clock(hand_written(batches), pairs, steps)
    lightning_interleaved(Module(), Batches(tensors), clock, "loss_0")
    return clock


def run_keras(pairs: int, steps: int, steps_per_execution: int = 1) -> Clock:
    """Pair Keras on JAX with the hand-written loop; it logs its loss once per epoch."""
    import keras

    batches = make_batches(steps)
    clock = Clock(hand_written(batches), pairs, steps)

    class Callback(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            float(logs["loss"])
            clock.epoch_ended()

    model = keras.Sequential(
        [keras.Input((FEATURES,)), keras.layers.Dense(HIDDEN, activation="relu"), keras.layers.Dense(CLASSES)]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=True,
        steps_per_execution=steps_per_execution,
    )
    x, y = (np.concatenate(column) for column in zip(*batches, strict=True))
    with quiet():
        model.fit(x, y, batch_size=BATCH, epochs=clock.epochs, shuffle=False, verbose=0, callbacks=[Callback()])
    return clock


def show(report: Report, name: str, clock: Clock) -> None:
    """Keep and print the medians of one comparison."""
    numbers = report.result[name] = clock.numbers()
    print(
        f"{name}: {numbers['fit_us']:.1f} us per step, hand-written {numbers['other_us']:.1f} us, "
        f"ratio of medians {clock.ratio:.3f} over {clock.pairs} pairs"
    )


def main() -> int:
    """Print the ratios; return 1 when one is beyond its limit and the A/A spread of the run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=16, help="pairs of each comparison (%(default)s)")
    parser.add_argument("--steps", type=int, default=2000, help="steps in an epoch of ours (%(default)s)")
    parser.add_argument("--only", default=",".join(PARTS), help="comparisons, with commas (%(default)s)")
    parser.add_argument("--json", type=Path, default=None, metavar="PATH", help="write the result there")
    args = parser.parse_args()
    parts = args.only.split(",")
    if args.pairs < 4 or not set(parts) <= set(PARTS):
        parser.error(f"at least 4 pairs are needed, and comparisons of {', '.join(PARTS)}")

    pairs, steps = args.pairs, args.steps
    few, some = max(50, steps // 20), max(50, steps // 4)  # for the slow ones
    report = Report("overhead", args.json)
    one = run_ours(pairs, steps, 1)
    show(report, "fit", one)
    report.check("fit / hand-written, one log, bar and CSV", one.ratio, 1.08, one.spread)
    batches = make_batches(steps)
    flat = hand_written(batches, flat=True)
    report.result["flat_ahead_of_time_us"] = 1e6 * statistics.median(flat() for _ in range(pairs))
    report.check("flat ahead-of-time call", report.result["flat_ahead_of_time_us"], None, unit="us")
    ten = None
    if "ten_logs" in parts or "lightning" in parts:
        ten = run_ours(pairs, steps, 10)
        show(report, "ten_logs", ten)
        report.check("fit / hand-written, ten logs", ten.ratio, 1.12, ten.spread)
    fused = None
    if "fused" in parts:
        fused = run_ours(pairs, steps, 1, FUSED)
        show(report, "fused", fused)
        report.check(f"fit / hand-written, {FUSED} steps per dispatch", fused.ratio, 0.45, fused.spread)
        scanned, single = hand_scanned(batches, FUSED), hand_written(batches)
        both = [(scanned(), single()) for _ in range(pairs + 1)][1:]  # the first compiles
        ratio = ratio_of_medians([one for one, _ in both], [other for _, other in both])
        report.check(f"a scan of {FUSED} steps by hand / hand-written", ratio, None)
    if "lightning" in parts:
        if importlib.util.find_spec("lightning") is None:
            report.result["lightning"] = "not installed"
        else:
            for name, logs, ours, limit in (("one log", 1, one, 10.0), ("ten logs", 10, ten, 30.0)):
                theirs = run_lightning(pairs, few, logs)
                show(report, f"lightning, {name}", theirs)
                report.check(
                    f"Lightning / fit, {name}", theirs.ratio / ours.ratio, limit, max(theirs.spread, ours.spread),
                    at_least=True,
                )  # fmt: skip
    if "keras" in parts:
        if importlib.util.find_spec("keras") is None:
            report.result["keras"] = "not installed"
        else:
            theirs = run_keras(pairs, some)
            show(report, "keras", theirs)
            spread = max(theirs.spread, one.spread)
            report.check("Keras on JAX / fit", theirs.ratio / one.ratio, 1.8, spread, at_least=True)
            if fused is not None:
                theirs = run_keras(pairs, some - some % FUSED, FUSED)
                show(report, "keras_fused", theirs)
                report.check(f"Keras on JAX / fit, {FUSED} steps per dispatch", theirs.ratio / fused.ratio, None)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
