"""How the cost of a step grows with logged values, parameters, callbacks, epochs and validation loaders.

- `logs`: the MLP of `overhead.py` with 1, 10 and 100 logged values, all in pairs with the same hand-written loop.
- `callbacks`: with 0 and 50 callbacks that override no batch hook; 50 that override one is shown too.
- `leaves`: a step on n parameters of four numbers each, `fit` beside the hand-written loop; the cost of one leaf is the
  slope between the fewest and the most.
- `epochs`: many short epochs in one `fit`; the last third must take no longer than the first.
- `loaders`: validation over 1 to 8 loaders of the same length; each further one must cost no more than the first.

Example:
    python benchmarks/scaling.py --json benchmarks/results/scaling.json
    python benchmarks/scaling.py --leaves 10,1000,5000
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _harness import Report, aa_spread, use_the_cpu
from _interleave import Batches, Clock, fit_interleaved, quiet

use_the_cpu()

import jax  # noqa: E402  (the platform has to be chosen first)
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import linen as nn  # noqa: E402

import jaxlightning as jl  # noqa: E402
from overhead import LitMLP, hand_written, make_batches  # noqa: E402

PARTS = ("logs", "callbacks", "leaves", "epochs", "loaders")


class NoOp(jl.Callback):
    """Overrides nothing that is called per batch."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        pass


class PerBatch(jl.Callback):
    """Does nothing after every batch."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass


def against_first(report: Report, name: str, clocks: dict[Any, Clock], limit: float) -> None:
    """Compare the last of some runs with the first, each by its own hand-written passes."""
    report.result[name] = {str(n): clock.numbers() for n, clock in clocks.items()}
    (few, first), *_, (many, last) = clocks.items()
    spread = max(first.spread, last.spread)
    report.check(f"step with {many} {name} / with {few}", last.ratio / first.ratio, limit, spread)


def logs(report: Report, pairs: int, steps: int) -> None:
    """Compare numbers of logged values."""
    clocks = {}
    for number in (1, 10, 100):
        batches = make_batches(steps)
        clocks[number] = Clock(hand_written(batches), pairs, steps)
        fit_interleaved(LitMLP(number), Batches(batches), clocks[number], "loss_0")
    against_first(report, "logs", clocks, 1.15)


def with_callbacks(pairs: int, steps: int, callbacks: list[jl.Callback]) -> Clock:
    """Run with further callbacks."""
    batches = make_batches(steps)
    clock = Clock(hand_written(batches), pairs, steps)

    class Last(jl.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            float(trainer.callback_metrics["loss_0"])
            clock.epoch_ended()

    fit_interleaved(LitMLP(), Batches(batches), clock, "loss_0", callbacks=[*callbacks, Last()])
    return clock


def callbacks(report: Report, pairs: int, steps: int) -> None:
    """Compare numbers of callbacks."""
    none, many = with_callbacks(pairs, steps, []), with_callbacks(pairs, steps, [NoOp() for _ in range(50)])
    against_first(report, "no-op callbacks", {0: none, 50: many}, 1.05)
    busy = with_callbacks(pairs, steps, [PerBatch() for _ in range(50)])
    report.check("step with 50 callbacks that override on_train_batch_end / with 0", busy.ratio / none.ratio, None)


class Leaves(nn.Module):
    number: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        total = jnp.zeros(())
        for i in range(self.number):
            total += (self.param(f"p{i}", nn.initializers.ones, (4,)) * x).sum()
        return total


class LitLeaves(jl.LightningModule):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.net = Leaves(number)

    def training_step(self, batch: Any, batch_idx: int) -> jax.Array:
        loss = self.net(batch[0])
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(1e-3)


def leaves_pass(number: int, batches: list[Any]) -> Callable[[], float]:
    """Return a pass of the hand-written loop over `number` parameters."""
    net, optimizer = Leaves(number), optax.sgd(1e-3)
    params = jax.jit(net.init)(jax.random.key(0), batches[0][0])
    opt_state = optimizer.init(params)

    def step(params: Any, opt_state: Any, x: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(lambda p: net.apply(p, x))(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    jitted = jax.jit(step, donate_argnums=(0, 1))

    def one_pass() -> float:
        nonlocal params, opt_state
        start = time.perf_counter()
        for (x,) in batches:
            params, opt_state, loss = jitted(params, opt_state, x)
        loss.block_until_ready()
        return (time.perf_counter() - start) / len(batches)

    return one_pass


def leaves(report: Report, pairs: int, steps: int, numbers: list[int]) -> None:
    """Compare the cost of a leaf."""
    batches = [(np.ones(4, np.float32),)] * steps
    clocks = {}
    for number in numbers:
        clocks[number] = Clock(leaves_pass(number, batches), pairs, steps)
        fit_interleaved(LitLeaves(number), Batches(batches), clocks[number], "loss")
    report.result["leaves"] = {str(n): clock.numbers() for n, clock in clocks.items()}
    few, many = clocks[numbers[0]], clocks[numbers[-1]]

    def slope(side: str) -> float:
        medians = [statistics.median(getattr(clock, side)) for clock in (few, many)]
        return (medians[1] - medians[0]) / (numbers[-1] - numbers[0])

    report.check("fit, one leaf", 1e9 * slope("fit"), None, unit="ns per step")
    report.check("hand-written, one leaf", 1e9 * slope("other"), None, unit="ns per step")
    report.check("one leaf, fit / hand-written", slope("fit") / slope("other"), 1.0, many.spread)


def epochs(report: Report, number: int) -> None:
    """Compare late epochs with early ones, each as a multiple of a hand-written pass right after it."""
    batches = make_batches(20)
    one_pass = hand_written(batches)
    took: list[float] = []
    multiples: list[float] = []

    class Ends(jl.Callback):
        started = 0.0

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            float(trainer.callback_metrics["loss_0"])
            took.append(time.perf_counter() - self.started)
            multiples.append(took[-1] / one_pass())
            self.started = time.perf_counter()

    with quiet() as folder:
        trainer = jl.Trainer(
            max_epochs=number + 5, logger=jl.loggers.CSVLogger(folder), callbacks=[Ends()], enable_checkpointing=False,
            default_root_dir=folder, log_every_n_steps=10,
        )  # fmt: skip
        trainer.fit(LitMLP(), Batches(batches))
    del took[:5], multiples[:5]
    third = len(multiples) // 3
    early, late = multiples[:third], multiples[-third:]
    report.result["epoch_seconds"] = took
    ratio = statistics.median(late) / statistics.median(early)
    report.check("late epoch / early epoch", ratio, 1.0, max(aa_spread(early), aa_spread(late), 0.05))


class Validated(LitMLP):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y = batch
        self.log("val_loss", optax.softmax_cross_entropy_with_integer_labels(self.net(x), y).mean())


def loaders(report: Report, pairs: int, steps: int) -> None:
    """Compare numbers of validation loaders."""
    batches = make_batches(steps)
    took: dict[int, list[float]] = {1: [], 2: [], 4: [], 8: []}
    with quiet() as folder:
        trainer = jl.Trainer(
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=folder,
        )  # fmt: skip
        module = Validated()
        for pair in range(pairs + 1):
            for number in took if pair % 2 else reversed(took):
                start = time.perf_counter()
                trainer.validate(module, [Batches(batches) for _ in range(number)], verbose=False)
                if pair:  # the first compiles
                    took[number].append(time.perf_counter() - start)
    report.result["validation_seconds"] = took
    one, eight = statistics.median(took[1]), statistics.median(took[8])
    spread = max(aa_spread(took[1]), aa_spread(took[8]))
    report.check("each further validation loader / the first", (eight - one) / 7 / one, 1.0, spread)


def main() -> int:
    """Print the ratios; return 1 when a limit is missed by more than the A/A spread."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=15, help="pairs of each comparison (%(default)s)")
    parser.add_argument("--steps", type=int, default=1000, help="steps in an epoch (%(default)s)")
    parser.add_argument("--leaves", default="10,100,1000", help="numbers of parameters (%(default)s)")
    parser.add_argument("--only", default=",".join(PARTS), help="comparisons, with commas (%(default)s)")
    parser.add_argument("--json", type=Path, default=None, metavar="PATH", help="write the result there")
    args = parser.parse_args()
    parts = args.only.split(",")
    if args.pairs < 4 or not set(parts) <= set(PARTS):
        parser.error(f"at least 4 pairs are needed, and comparisons of {', '.join(PARTS)}")
    report = Report("scaling", args.json)
    if "logs" in parts:
        logs(report, args.pairs, args.steps)
    if "callbacks" in parts:
        callbacks(report, args.pairs, args.steps)
    if "leaves" in parts:
        leaves(report, args.pairs, max(20, args.steps // 10), [int(word) for word in args.leaves.split(",")])
    if "epochs" in parts:
        epochs(report, max(12, args.steps // 5))
    if "loaders" in parts:
        loaders(report, args.pairs, max(20, args.steps // 5))
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
