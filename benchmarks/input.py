"""How many images per second a loader gives: plainly, read by jaxlightning, and in a whole fit beside Lightning.

The loader is the one that people have: torchvision's Fashion-MNIST with ToTensor and Normalize in a shuffled DataLoader
of batch 128, unchanged on all sides (random images of the same form where the files are not on this machine). Three
comparisons, each in interleaved pairs of alternating order in one process:

- `input`: a pass over the loader, plain against `as_source`, nothing else. Limit: 50 times.
- `tensors`: the same for a DataLoader over a `TensorDataset` of the normalised images. Limit: 5 times.
- `fit`: an MLP 784-128-10 with Adam and one logged value, trained by Lightning and by jaxlightning from the same
  loader, from epoch end to epoch end, without the start of either. Limit: 10 times.

Example:
    python benchmarks/input.py --pairs 9 --json benchmarks/results/input.json
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _harness import aa_spread, orders, use_the_cpu, write_json

use_the_cpu()
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import jax  # noqa: E402  (the platform has to be chosen first)
import lightning.pytorch as pl  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
import torch  # noqa: E402
from flax import linen as nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402
from torchvision import transforms  # noqa: E402
from torchvision.datasets import FashionMNIST  # noqa: E402

import jaxlightning as jl  # noqa: E402
from _data import MEAN, STD, find_fashion_mnist  # noqa: E402
from jaxlightning.adapters import as_source  # noqa: E402

BATCH, HIDDEN, CLASSES = 128, 128, 10
LIMITS = {"input": 50.0, "tensors": 5.0, "fit": 10.0}


def images(data: Path | None) -> tuple[Any, str]:
    """Return Fashion-MNIST's training set and what it is."""
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((MEAN,), (STD,))])
    home = find_fashion_mnist(data)
    if home is not None:
        return FashionMNIST(home, train=True, transform=transform), "Fashion-MNIST"
    made = FashionMNIST.__new__(FashionMNIST)  # the constructor wants the files
    rng = np.random.default_rng(0)
    made.data = torch.from_numpy(rng.integers(0, 256, (60_000, 28, 28), dtype=np.uint8))
    made.targets = torch.from_numpy(rng.integers(0, CLASSES, 60_000))
    made.transform, made.target_transform = transform, None
    return made, "random images of Fashion-MNIST's form"


def rate(batches: Any, count: int) -> float:
    """Read `count` batches and return images per second."""
    iterator = iter(batches)
    next(iterator)  # what a pass costs once (the permutation, the look at the transforms) is not what a batch costs
    start = time.perf_counter()
    seen = sum(len(batch[1]) for batch in itertools.islice(iterator, count))
    seconds = time.perf_counter() - start
    close = getattr(iterator, "close", None)
    if callable(close):
        close()
    return seen / seconds


def compare_input(loader: Any, pairs: int, plain_batches: int, our_batches: int) -> dict[str, Any]:
    """Read a loader plainly and by a source in turn."""
    source = as_source(loader, vectorize=True)  # raises where the fast path is not taken
    sides: list[Callable[[], float]] = [lambda: rate(loader, plain_batches), lambda: rate(source, our_batches)]
    for side in sides:
        side()
    found: list[list[float]] = [[], []]
    for order in orders(pairs):
        for side in order:
            found[side].append(sides[side]())
    source.close()
    return row(plain=found[0], ours=found[1])


def row(**sides: list[float]) -> dict[str, Any]:
    """Summarise two sides, in images per second; the first is what the second is compared with."""
    (base_name, base), (our_name, ours) = sides.items()
    return {
        f"{base_name}_images_per_s": round(statistics.median(base)),
        f"{our_name}_images_per_s": round(statistics.median(ours)),
        "ratio": statistics.median(ours) / statistics.median(base),
        f"aa_spread_{base_name}": aa_spread(base),
        f"aa_spread_{our_name}": aa_spread(ours),
        f"{base_name}_each": [round(value) for value in base],
        f"{our_name}_each": [round(value) for value in ours],
    }


# the whole fit


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(CLASSES)(nn.relu(nn.Dense(HIDDEN)(x.reshape(x.shape[0], -1))))


class Ours(jl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = MLP()

    def training_step(self, batch: Any, batch_idx: int) -> jax.Array:
        x, y = batch
        loss = optax.softmax_cross_entropy_with_integer_labels(self.net(x), y).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(1e-3)


class Theirs(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(784, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, CLASSES)
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class TheirEpoch(pl.Callback):
    """Times the one epoch of a Lightning fit, from its start hook to its end hook."""

    def __init__(self) -> None:
        self.started = 0.0
        self.seconds = 0.0

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.started = time.perf_counter()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        float(trainer.callback_metrics["loss"])
        self.seconds = time.perf_counter() - self.started


class Pairs(jl.Callback):
    """Times the epochs of our fit and runs Lightning's between them, the order turned round every pair."""

    def __init__(self, loader: Any, pairs: int, their_batches: int, our_batches: int, folder: str) -> None:
        self.loader, self.their_batches, self.our_batches, self.folder = loader, their_batches, our_batches, folder
        self.ours: list[float] = []
        self.theirs: list[float] = []
        sides = [side for order in orders(pairs) for side in order]
        self.theirs_after = [0] * pairs
        epoch = -1
        for side in sides:
            epoch += side == 0
            self.theirs_after[max(epoch, 0)] += side == 1
        self.epoch = -2  # two epochs to warm up
        self.started = 0.0
        self.module = Theirs()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        float(trainer.callback_metrics["loss"])  # waits for the last step
        if self.epoch >= 0:
            self.ours.append(self.our_batches * BATCH / (time.perf_counter() - self.started))
            self.theirs += [self.one_epoch(self.their_batches) for _ in range(self.theirs_after[self.epoch])]
        else:
            self.one_epoch(5)
        self.epoch += 1
        self.started = time.perf_counter()

    def one_epoch(self, batches: int) -> float:
        clock = TheirEpoch()
        trainer = pl.Trainer(
            max_epochs=1, limit_train_batches=batches, accelerator="cpu", callbacks=[clock], logger=False,
            enable_checkpointing=False, enable_model_summary=False, enable_progress_bar=False,
            default_root_dir=self.folder,
        )  # fmt: skip
        trainer.fit(self.module, self.loader)
        return batches * BATCH / clock.seconds


def compare_fit(loader: Any, pairs: int, their_batches: int, our_batches: int) -> dict[str, Any]:
    """Train the MLP by both from one loader."""
    our_batches = min(our_batches, len(loader))
    with (
        tempfile.TemporaryDirectory() as folder,
        open(os.devnull, "w") as null,
        contextlib.redirect_stdout(null),
        contextlib.redirect_stderr(null),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # advice about workers, on both sides
        clock = Pairs(loader, pairs, their_batches, our_batches, folder)
        trainer = jl.Trainer(
            max_epochs=pairs + 2, limit_train_batches=our_batches, callbacks=[clock], logger=False,
            enable_checkpointing=False, enable_model_summary=False, enable_progress_bar=False,
            default_root_dir=folder,
        )  # fmt: skip
        trainer.fit(Ours(), loader)
    return row(lightning=clock.theirs, ours=clock.ours)


def main() -> int:
    """Print the three ratios; return 1 when one is below its limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=9, help="pairs of each comparison (%(default)s)")
    parser.add_argument("--plain-batches", type=int, default=40, help="batches of the slow sides (%(default)s)")
    parser.add_argument("--our-batches", type=int, default=400, help="batches of ours (%(default)s)")
    parser.add_argument("--limit-factor", type=float, default=1.0, help="multiplies the limits (%(default)s)")
    parser.add_argument("--data", type=Path, default=None, metavar="DIR", help="folder to look for Fashion-MNIST in")
    parser.add_argument("--json", type=Path, default=None, metavar="PATH", help="write the result there")
    args = parser.parse_args()
    if args.pairs < 4:
        parser.error("at least 4 pairs are needed")

    dataset, name = images(args.data)
    loader = DataLoader(dataset, batch_size=BATCH, shuffle=True)
    x = (dataset.data[:, None].float() / 255 - MEAN) / STD
    tensors = DataLoader(TensorDataset(x, dataset.targets), batch_size=BATCH, shuffle=True)
    torch.manual_seed(0)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    result: dict[str, Any] = {
        "benchmark": "input",
        "data": name,
        "batch": BATCH,
        "limits": LIMITS,
        "input": compare_input(loader, args.pairs, args.plain_batches, args.our_batches),
        "tensors": compare_input(tensors, args.pairs, args.our_batches, args.our_batches),
        "fit": compare_fit(loader, args.pairs, args.plain_batches, args.our_batches),
    }
    failed = False
    for part, limit in LIMITS.items():
        found = result[part]
        (base, slow), (_, fast), *_ = found.items()
        passed = found["ratio"] >= limit * args.limit_factor
        failed |= not passed
        print(
            f"{part}: {base.removesuffix('_images_per_s')} {slow:,} images/s, ours {fast:,}: "
            f"{found['ratio']:.1f} times (limit {limit * args.limit_factor:g}: {'met' if passed else 'NOT met'})"
        )
    write_json(args.json, result)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
