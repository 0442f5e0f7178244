"""Epochs of a `fit`, and passes of something else between them, in pairs of alternating order in one process."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from _harness import aa_spread, orders, ratio_of_medians

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


class Clock:
    """Times the epochs of a `fit` and runs the other side's passes between them, the order turned round every pair.

    An epoch lasts from the end of the one before to a metric of this one on the host.

    Args:
        other: Makes one pass and returns its seconds per step.
        pairs: How many pairs.
        steps: Steps in an epoch of `fit`.
    """

    def __init__(self, other: Callable[[], float], pairs: int, steps: int) -> None:
        self.other_pass, self.steps, self.pairs = other, steps, pairs
        self.fit: list[float] = []
        self.other: list[float] = []
        # How many passes follow each epoch: from "fit, other, other, fit, fit, other, ...".
        self.passes = [0] * pairs
        epoch = -1
        for side in [side for order in orders(pairs) for side in order]:
            if side == 0:
                epoch += 1
            else:
                self.passes[epoch] += 1
        self.epoch = -WARM_UP
        self.started = 0.0

    @property
    def epochs(self) -> int:
        """How many epochs `fit` has to run."""
        return self.pairs + WARM_UP

    def epoch_ended(self) -> None:
        """Called at the end of each epoch, when its metric was read."""
        if self.epoch >= 0:
            self.fit.append((time.perf_counter() - self.started) / self.steps)
            self.other += [self.other_pass() for _ in range(self.passes[self.epoch])]
        else:
            self.other_pass()
        self.epoch += 1
        self.started = time.perf_counter()

    @property
    def ratio(self) -> float:
        """The median of `fit` by that of the other side."""
        return ratio_of_medians(self.fit, self.other)

    @property
    def spread(self) -> float:
        """The larger A/A spread of the two sides."""
        return max(aa_spread(self.fit), aa_spread(self.other))

    def numbers(self) -> dict[str, Any]:
        """All measurements, in microseconds per step."""
        import statistics

        return {
            "steps_per_epoch": self.steps,
            "pairs": self.pairs,
            "fit_us": 1e6 * statistics.median(self.fit),
            "other_us": 1e6 * statistics.median(self.other),
            "ratio": self.ratio,
            "aa_spread_fit": aa_spread(self.fit),
            "aa_spread_other": aa_spread(self.other),
            "fit_us_each": [round(1e6 * value, 2) for value in self.fit],
            "other_us_each": [round(1e6 * value, 2) for value in self.other],
        }


@contextlib.contextmanager
def quiet() -> Iterator[str]:
    """Sends bars, messages and warnings to the null device; yields a folder for loggers."""
    levels = {name: logging.getLogger(name).level for name in ("jaxlightning", "lightning.pytorch")}
    for name in levels:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            open(os.devnull, "w") as null,
            contextlib.redirect_stdout(null),
            contextlib.redirect_stderr(null),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield folder
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def fit_interleaved(module: Any, batches: Any, clock: Clock, metric: str | None, **flags: Any) -> None:
    """Runs our `fit` with the clock in it, with its bar and its CSVLogger on.

    Args:
        module: A LightningModule that logs `metric`.
        batches: The training loader.
        clock: Times it.
        metric: Read at the end of each epoch, so that its last step is done; None when the module logs nothing, so that
            the state of the last step is waited for.
        **flags: Further flags of the Trainer.
    """
    import jaxlightning as jl

    class Callback(jl.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            if metric is None:
                pl_module._engine.block_until_ready()
            else:
                float(trainer.callback_metrics[metric])
            clock.epoch_ended()

    with quiet() as folder:
        trainer = jl.Trainer(
            **{
                "max_epochs": clock.epochs,
                "logger": jl.loggers.CSVLogger(folder, name="ours"),
                "callbacks": [Callback()],
                "enable_checkpointing": False,
                "enable_model_summary": False,
                "default_root_dir": folder,
                **flags,
            }
        )
        trainer.fit(module, batches)


def lightning_interleaved(module: Any, batches: Any, clock: Clock, metric: str, **flags: Any) -> None:
    """The same in PyTorch Lightning, with its bar and CSVLogger."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import TQDMProgressBar
    from lightning.pytorch.loggers import CSVLogger

    class Callback(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            float(trainer.callback_metrics[metric])
            clock.epoch_ended()

    with quiet() as folder:
        trainer = pl.Trainer(
            **{
                "max_epochs": clock.epochs,
                "accelerator": "cpu",
                "logger": CSVLogger(folder, name="lightning"),
                "callbacks": [Callback(), TQDMProgressBar()],
                "enable_checkpointing": False,
                "enable_model_summary": False,
                "default_root_dir": folder,
                **flags,
            }
        )
        trainer.fit(module, batches)
