"""A CNN with BatchNorm on Fashion-MNIST, read from an unchanged torchvision DataLoader (ToTensor, Normalize, shuffled).

- `plumbing`: what `fit` with the fast path off (`vectorize=False`) adds per batch to plain iteration with an empty
  step. The time inside the loader's own `__next__` is taken off on both sides, since it is a hundred times as long as
  what is looked for. The hand-written side converts with `.numpy()` and calls the same empty compiled step.
- `wait`: with the fast path on, the part of an epoch in which the device waits for input; the time that the host spends
  in the loader is printed beside it.
- `fit`: epochs of `fit` with the fast path beside a hand-written loop over prebuilt numpy batches of the same numbers.
- PyTorch Lightning trains the same network from the same loader, in pairs with the same loop.

Example:
    python benchmarks/vision.py --json benchmarks/results/vision.json
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from _harness import Report, aa_spread, use_the_cpu
from _interleave import Clock, fit_interleaved, lightning_interleaved

use_the_cpu()
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import jax  # noqa: E402  (the platform has to be chosen first)
import optax  # noqa: E402
import torch  # noqa: E402
from flax import linen as nn  # noqa: E402
from torch.utils.data import DataLoader, dataloader  # noqa: E402
from torchvision import transforms  # noqa: E402
from torchvision.datasets import FakeData, FashionMNIST  # noqa: E402

import jaxlightning as jl  # noqa: E402
from _data import MEAN, STD, find_fashion_mnist  # noqa: E402

BATCH, CLASSES = 128, 10
PLUMBING_LIMIT_US, WAIT_LIMIT = 30.0, 0.02


def loader(images: int, data: Path | None) -> tuple[DataLoader[Any], str]:
    """Return a shuffled loader of some images, and what they are."""
    home = find_fashion_mnist(data)
    normalize = transforms.Normalize((MEAN,), (STD,))
    if home is not None:
        found = FashionMNIST(home, train=True, transform=transforms.Compose([transforms.ToTensor(), normalize]))
        found.data, found.targets = found.data[:images], found.targets[:images]
        return DataLoader(found, batch_size=BATCH, shuffle=True, drop_last=True), "Fashion-MNIST"
    grey = transforms.Compose([transforms.Grayscale(), transforms.ToTensor(), normalize])
    return DataLoader(FakeData(images, (1, 28, 28), CLASSES, grey), BATCH, shuffle=True, drop_last=True), "FakeData"


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        x = x.transpose(0, 2, 3, 1)
        for features in (16, 32):
            x = nn.Conv(features, (3, 3), strides=2)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
        return nn.Dense(CLASSES)(x.mean((1, 2)))


class LitCNN(jl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = CNN()

    def training_step(self, batch: Any, batch_idx: int) -> jax.Array:
        x, y = batch
        loss = optax.softmax_cross_entropy_with_integer_labels(self.net(x), y).mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(1e-3)


class Scalar(nn.Module):
    @nn.compact
    def __call__(self) -> jax.Array:
        return self.param("w", nn.initializers.ones, ())


class Empty(jl.LightningModule):
    """A step that looks at nothing of its batch and logs nothing, as the hand-written one."""

    logs = False

    def __init__(self) -> None:
        super().__init__()
        self.net = Scalar()

    def training_step(self, batch: Any, batch_idx: int) -> jax.Array:
        loss = self.net()
        if self.logs:
            self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


class EmptyWithLog(Empty):
    """The same step with an epoch's mean."""

    logs = True


@contextlib.contextmanager
def time_in_loaders() -> Iterator[list[float]]:
    """Add up the seconds inside the iterators of torch DataLoaders, in the first item of the list."""
    total = [0.0]
    plain = dataloader._BaseDataLoaderIter.__next__

    def timed(self: Any) -> Any:
        start = time.perf_counter()
        try:
            return plain(self)
        finally:
            total[0] += time.perf_counter() - start

    dataloader._BaseDataLoaderIter.__next__ = timed  # type: ignore[method-assign]
    try:
        yield total
    finally:
        dataloader._BaseDataLoaderIter.__next__ = plain  # type: ignore[method-assign]


def empty_pass(batches: DataLoader[Any]) -> Callable[[], float]:
    """Return a pass of plain iteration with an empty compiled step."""
    w = jax.numpy.ones(())
    step = jax.jit(lambda w, x, y: (w - 0.1, w), donate_argnums=0)

    def one_pass() -> float:
        nonlocal w
        start = time.perf_counter()
        for x, y in batches:
            w, loss = step(w, x.numpy(), y.numpy())
        loss.block_until_ready()
        return (time.perf_counter() - start) / len(batches)

    return one_pass


def plumbing(report: Report, batches: DataLoader[Any], module: Empty, pairs: int) -> None:
    """Measure what `fit` adds per batch with the fast path off, with its bar and its CSVLogger on."""
    with time_in_loaders() as total:
        plain_pass = empty_pass(batches)

        class Net(Clock):
            """Takes the loader's own time off both sides."""

            def epoch_ended(self) -> None:
                if self.epoch >= 0:
                    self.started += total[0]
                super().epoch_ended()
                total[0] = 0.0
                self.started = time.perf_counter()

        def other() -> float:
            total[0] = 0.0
            return plain_pass() - total[0] / len(batches)

        clock = Net(other, pairs, len(batches))
        fit_interleaved(module, batches, clock, "loss" if module.logs else None, vectorize=False)
    report.result["plumbing with a log" if module.logs else "plumbing"] = clock.numbers()
    added = statistics.median(clock.fit) - statistics.median(clock.other)
    spread_us = 1e6 * max(aa_spread(side) * statistics.median(side) for side in (clock.fit, clock.other))
    if module.logs:
        report.check("the same with an epoch's mean to log, for information", 1e6 * added, None, unit="us per batch")
        return
    report.check(
        "added to plain iteration, fast path off", 1e6 * added, PLUMBING_LIMIT_US, spread_us / PLUMBING_LIMIT_US,
        unit="us per batch",
    )  # fmt: skip


def wait(report: Report, batches: DataLoader[Any], epochs: int) -> None:
    """Measure which part of an epoch training waits for its next batch, with the fast path on.

    While the host makes a batch, the device works on the step before. Only the time in which that step is done
    already is waiting; a batch during which it ends counts in full.
    """
    from _interleave import quiet
    from jaxlightning.adapters._source import BatchIterator

    module = LitCNN()
    waited, fetched, shares, hidden = [0.0], [0.0], [], []
    plain = BatchIterator.__next__

    def timed(self: Any) -> Any:
        start = time.perf_counter()
        batch = plain(self)
        took = time.perf_counter() - start
        fetched[0] += took
        engine = getattr(module, "_engine", None)
        leaves = () if engine is None else engine._leaves
        if all(leaf.is_ready() for leaf in leaves):
            waited[0] += took
        return batch

    class Epochs(jl.Callback):
        def on_train_epoch_start(self, *_: Any) -> None:
            waited[0] = fetched[0] = 0.0
            self.started = time.perf_counter()

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            float(trainer.callback_metrics["loss"])
            took = time.perf_counter() - self.started
            shares.append(waited[0] / took)
            hidden.append(fetched[0] / took)

    BatchIterator.__next__ = timed  # type: ignore[method-assign]
    try:
        with quiet() as folder:
            trainer = jl.Trainer(
                max_epochs=epochs, logger=False, enable_checkpointing=False, callbacks=[Epochs()],
                default_root_dir=folder,
            )  # fmt: skip
            trainer.fit(module, batches)
    finally:
        BatchIterator.__next__ = plain  # type: ignore[method-assign]
    report.result["wait_shares"], report.result["fetch_shares"] = shares, hidden
    report.check("input wait / epoch, fast path on", statistics.median(shares[1:]), WAIT_LIMIT)  # the first compiles
    report.check("time in the loader / epoch", statistics.median(hidden[1:]), None)


def hand_written(batches: DataLoader[Any]) -> Callable[[], float]:
    """Return a pass of the hand-written loop over the loader's batches, prebuilt as numpy arrays."""
    arrays = [(x.numpy(), y.numpy()) for x, y in batches]
    net, optimizer = CNN(), optax.adam(1e-3)
    variables = jax.jit(net.init)(jax.random.key(0), arrays[0][0])
    params, stats = variables["params"], variables["batch_stats"]
    opt_state = optimizer.init(params)

    def step(params: Any, stats: Any, opt_state: Any, x: jax.Array, y: jax.Array) -> Any:
        def loss_of(params: Any) -> Any:
            logits, new = net.apply({"params": params, "batch_stats": stats}, x, train=True, mutable=["batch_stats"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), new["batch_stats"]

        (loss, stats_), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, opt_state_ = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), stats_, opt_state_, loss

    jitted = jax.jit(step, donate_argnums=(0, 1, 2))

    def one_pass() -> float:
        nonlocal params, stats, opt_state
        start = time.perf_counter()
        for x, y in arrays:
            params, stats, opt_state, loss = jitted(params, stats, opt_state, x, y)
        loss.block_until_ready()
        return (time.perf_counter() - start) / len(arrays)

    return one_pass


def run_lightning(batches: DataLoader[Any], clock: Clock) -> None:
    """Pair PyTorch Lightning with the hand-written loop."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            layers: list[Any] = []
            for before, after in ((1, 16), (16, 32)):
                layers += [
                    torch.nn.Conv2d(before, after, 3, stride=2, padding=1),
                    torch.nn.BatchNorm2d(after),
                    torch.nn.ReLU(),
                ]
            pool = [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(32, CLASSES)]
            self.net = torch.nn.Sequential(*layers, *pool)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            loss = torch.nn.functional.cross_entropy(self.net(x), y)
            self.log("loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=1e-3)

    lightning_interleaved(Module(), batches, clock, "loss")


def main() -> int:
    """Print the numbers; return 1 when a limit is missed by more than the A/A spread."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=15, help="pairs (%(default)s)")
    parser.add_argument("--images", type=int, default=100 * BATCH, help="images in an epoch (%(default)s)")
    parser.add_argument("--peers", type=int, default=6, help="pairs with Lightning, 0 for none (%(default)s)")
    parser.add_argument("--data", type=Path, default=None, help="folder with Fashion-MNIST")
    parser.add_argument("--json", type=Path, default=None, metavar="PATH", help="write the result there")
    args = parser.parse_args()
    batches, what = loader(args.images, args.data)
    report = Report("vision", args.json)
    report.result["data"] = what
    # What an epoch costs is not what a batch costs, so these are the real epochs of the data: 468 batches.
    many = loader(min(10 * args.images, 468 * BATCH), args.data)[0]
    plumbing(report, many, Empty(), args.pairs)
    plumbing(report, many, EmptyWithLog(), max(2, args.pairs // 3))
    wait(report, batches, args.pairs)
    one_pass = hand_written(batches)
    clock = Clock(one_pass, args.pairs, len(batches))
    fit_interleaved(LitCNN(), batches, clock, "loss", log_every_n_steps=10)
    report.result["fit"] = clock.numbers()
    report.check("fit from the DataLoader", 1e3 * statistics.median(clock.fit), None, unit="ms per step")
    report.check("fit from the DataLoader / hand-written on prebuilt arrays", clock.ratio, None)
    if args.peers and importlib.util.find_spec("lightning") is not None:
        peer = Clock(one_pass, args.peers, len(batches))
        run_lightning(batches, peer)
        report.result["lightning"] = peer.numbers()
        report.check("Lightning / fit", peer.ratio / clock.ratio, None)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
