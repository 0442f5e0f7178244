"""Where the microseconds of a step go, from the bare compiled call to a whole `fit`; each line adds something.

The model is the MLP 32-64-10 of `overhead.py`, batch 32, Adam, one logged value. All lines are measured in turn, one
pass each, and the medians are shown with the difference to the line before.

Example:
    python benchmarks/step_profile.py --json benchmarks/results/step_profile.json
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from _harness import Report, use_the_cpu
from _interleave import Batches, quiet

use_the_cpu()

import jaxlightning as jl  # noqa: E402
from jaxlightning.loops.stream import BatchStream  # noqa: E402
from overhead import LitMLP, hand_written, make_batches  # noqa: E402


class Ends(jl.Callback):
    """Notes when each epoch ends, with its last step done."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        float(trainer.callback_metrics["loss_0"])
        self.times.append(time.perf_counter())


def fit_epochs(batches: list[Any], epochs: int, **flags: Any) -> Iterator[float]:
    """Yield the seconds per step of each epoch of a `fit`, its first two left out."""
    ends = Ends()
    with quiet() as folder:
        if flags.pop("csv", False):
            flags["logger"] = jl.loggers.CSVLogger(folder)
        trainer = jl.Trainer(
            **{
                "max_epochs": epochs + 2, "logger": False, "enable_progress_bar": False, "enable_checkpointing": False,
                "enable_model_summary": False, "callbacks": [ends], "default_root_dir": folder,
                "log_every_n_steps": 10**9, **flags,
            }
        )  # fmt: skip
        trainer.fit(LitMLP(), Batches(batches))
    for before, after in itertools.pairwise(ends.times[1:]):
        yield (after - before) / len(batches)


def warm_engine(batches: list[Any]) -> tuple[Any, Any]:
    """Return an engine whose training step is compiled and may be repeated, and the loaders of its run."""
    with quiet() as folder:
        trainer = jl.Trainer(
            max_steps=3, logger=False, enable_progress_bar=False, enable_checkpointing=False,
            enable_model_summary=False, default_root_dir=folder,
        )  # fmt: skip
        trainer.fit(LitMLP(), Batches(batches))
    trainer._engine.train_batch(batches[0], 0, 0, 3, 3, (None, "norm"), False)
    return trainer._engine, trainer.fit_loop.feed.inner


def timed(call: Callable[[], None], engine: Any, steps: int) -> float:
    """Return the seconds per step of a pass."""
    start = time.perf_counter()
    call()
    engine.block_until_ready()
    return (time.perf_counter() - start) / steps


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--passes", type=int, default=15, help="passes of each line (%(default)s)")
    parser.add_argument("--steps", type=int, default=2000, help="steps in a pass (%(default)s)")
    parser.add_argument("--json", type=Path, default=None, metavar="PATH", help="write the result there")
    args = parser.parse_args()
    batches = make_batches(args.steps)
    engine, loaders = warm_engine(batches)
    step = engine.repeated_step((None, "norm"), False)
    if step is None:
        raise RuntimeError("The step of this model can be repeated; this is a mistake in jaxlightning, please report.")
    rows = step.integers(0, 0, 0, 0, args.steps)
    flat = [list(batch) for batch in batches]

    def bare() -> None:
        call, floats, leaves = step.variant.call, engine.floats, engine._leaves
        for arrays, integers in zip(flat, rows, strict=True):
            leaves, *_ = call(leaves, arrays, integers, floats)
        engine._leaves = leaves

    def wrapped() -> None:
        for batch, integers in zip(batches, rows, strict=True):
            step(batch, integers)

    def fetched() -> None:
        stream = BatchStream(loaders)
        stream.start(bare=True)
        for integers in rows:
            step(stream.fetch(), integers)
        stream.close()

    direct = {"the compiled call alone": bare, "+ checks of the batch": wrapped, "+ reading the loader": fetched}
    runs: dict[str, Iterator[float]] = {
        "+ counters and stop requests (fit without log, bar, logger)": fit_epochs(batches, args.passes),
        "+ a log point every 50 steps, CSVLogger": fit_epochs(batches, args.passes, log_every_n_steps=50, csv=True),
        "+ the progress bar": fit_epochs(
            batches, args.passes, log_every_n_steps=50, csv=True, enable_progress_bar=True
        ),
    }
    found: dict[str, list[float]] = {name: [] for name in ("hand-written loop", *direct, *runs)}
    hand = hand_written(batches)
    hand()
    for _ in range(args.passes):
        found["hand-written loop"].append(hand())
        for name, call in direct.items():
            found[name].append(timed(call, engine, args.steps))
    for name, run in runs.items():
        found[name] += list(run)
    report = Report("step_profile", args.json)
    before = None
    table = []
    for name, values in found.items():
        median = 1e6 * statistics.median(values)
        difference = None if before is None or name in ("hand-written loop", next(iter(direct))) else median - before
        table.append({"name": name, "us": median, "difference_us": difference})
        report.check(name, median, None, unit="us per step")
        before = median
    report.result["table"] = table
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
