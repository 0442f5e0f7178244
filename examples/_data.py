"""Fashion-MNIST for the examples, found on this machine; scikit-learn's digits where it is not.

Nothing is downloaded. Looked for are the four idx files (`train-images-idx3-ubyte` and so on, plain or as `.gz`) in the
folder given with `--data`, in `./data`, in `data` beside this project, and where Debian's package
`dataset-fashion-mnist` puts them. They are unpacked once to `<data>/FashionMNIST/raw`, torchvision's own layout.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
CLASSES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot")
MEAN, STD = 0.2860, 0.3530
"""Mean and standard deviation of the pixels of Fashion-MNIST's training set, after scaling to [0, 1]."""
VALIDATION = 1 / 12
"""Share of the training images that is kept apart for validation: 5,000 of 60,000."""
EVAL_BATCH = 500


@dataclass(frozen=True, kw_only=True)
class Images:
    """A data set in memory.

    Attributes:
        name: For example `"Fashion-MNIST"`.
        classes: The name of each label.
        train_x: Training images, uint8 of shape (n, 28, 28).
        train_y: Training labels, int64 of shape (n,).
        test_x: Test images, as `train_x`.
        test_y: Test labels, as `train_y`.
    """

    name: str
    classes: tuple[str, ...]
    train_x: np.ndarray
    train_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray


def have_torch() -> bool:
    """Whether torch and torchvision can be imported."""
    return all(importlib.util.find_spec(name) is not None for name in ("torch", "torchvision"))


def add_arguments(parser: argparse.ArgumentParser, *, epochs: int = 5, batch_size: int = 128) -> None:
    """Add the options that all examples share.

    Args:
        parser: The parser to add them to.
        epochs: Default number of epochs.
        batch_size: Default number of images in a training batch.
    """
    parser.add_argument("--epochs", type=int, default=epochs, help="passes over the training images (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=batch_size, help="images in a batch (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, order and dropout (%(default)s)")
    parser.add_argument("--limit", type=int, default=None, metavar="N", help="use only N training images")
    parser.add_argument("--data", type=Path, default=None, metavar="DIR", help="folder to look for Fashion-MNIST in")
    parser.add_argument("--output", type=Path, default=Path("example_output"), metavar="DIR", help="logs go here")
    parser.add_argument("--quiet", action="store_true", help="no progress bar and no model summary")


def find_fashion_mnist(data: Path | None = None) -> Path | None:
    """Return a folder that torchvision takes as `root`, or None when the files are nowhere.

    Args:
        data: A folder to look in first, and to unpack to.
    """
    homes = [data] if data is not None else [Path("data"), Path(__file__).resolve().parents[1] / "data"]
    for home in homes:
        if all((home / "FashionMNIST" / "raw" / name).is_file() for name in FILES):
            return home
    places = [place for home in homes for place in (home / "FashionMNIST" / "raw", home / "fashion-mnist", home)]
    for place in [*places, DEBIAN]:
        sources = [next((p for p in (place / name, place / f"{name}.gz") if p.is_file()), None) for name in FILES]
        if None not in sources:
            _unpack([source for source in sources if source is not None], homes[-1])
            return homes[-1]
    return None


def _unpack(sources: Iterable[Path], home: Path) -> None:
    raw = home / "FashionMNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for name, source in zip(FILES, sources, strict=True):
        # Written aside and renamed: two examples may start at the same time.
        part = raw / f".{name}.{os.getpid()}"
        opener: Any = gzip.open if source.suffix == ".gz" else open
        with opener(source, "rb") as packed, part.open("wb") as plain:
            shutil.copyfileobj(packed, plain)
        part.replace(raw / name)


def load_images(data: Path | None = None, limit: int | None = None) -> Images:
    """Read Fashion-MNIST, or scikit-learn's digits enlarged to 28 x 28, as arrays.

    Args:
        data: Folder to look for Fashion-MNIST in.
        limit: Keep only so many training images (and a fifth of it for the test).
    """
    home = find_fashion_mnist(data)
    if home is not None:
        raw = home / "FashionMNIST" / "raw"
        train_x, test_x = (
            np.frombuffer((raw / FILES[i]).read_bytes(), np.uint8, offset=16).reshape(-1, 28, 28) for i in (0, 2)
        )
        train_y, test_y = (
            np.frombuffer((raw / FILES[i]).read_bytes(), np.uint8, offset=8).astype(np.int64) for i in (1, 3)
        )
        name, classes = "Fashion-MNIST", CLASSES
    else:
        from sklearn.datasets import load_digits

        digits = load_digits()
        small = np.clip(digits.images * 16, 0, 255).astype(np.uint8)
        large = np.pad(small.repeat(3, axis=1).repeat(3, axis=2), ((0, 0), (2, 2), (2, 2)))
        order = np.random.default_rng(0).permutation(len(large))
        x, y = large[order], digits.target[order].astype(np.int64)
        train_x, train_y, test_x, test_y = x[:1440], y[:1440], x[1440:], y[1440:]
        name, classes = "scikit-learn's digits", tuple("0123456789")
    if limit is not None:
        train_x, train_y = train_x[:limit], train_y[:limit]
        test_x, test_y = test_x[: max(1, limit // 5)], test_y[: max(1, limit // 5)]
    return Images(name=name, classes=classes, train_x=train_x, train_y=train_y, test_x=test_x, test_y=test_y)


def normalize(images: np.ndarray) -> np.ndarray:
    """Scale uint8 images (n, 28, 28) to float32 (n, 28, 28, 1) with zero mean and unit variance."""
    return ((images.astype(np.float32) / 255.0 - MEAN) / STD)[..., None]


def split(number: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of training and validation images, the same in every example."""
    order = np.random.default_rng(0).permutation(number)
    held_out = max(1, round(number * VALIDATION))
    return order[held_out:], order[:held_out]


def torch_loaders(args: argparse.Namespace) -> tuple[Any, Any, Any]:
    """Make the training, validation and test `DataLoader` that a PyTorch script would have.

    The batches hold NCHW images and int64 labels. Fashion-MNIST is read through `torchvision.datasets.FashionMNIST`
    and its transforms; the digits through a `TensorDataset`.

    Args:
        args: The parsed options of `add_arguments`.
    """
    import torch
    from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

    home = find_fashion_mnist(args.data)
    whole: Dataset[Any]
    test: Dataset[Any]
    if home is not None:
        from torchvision import transforms
        from torchvision.datasets import FashionMNIST

        transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((MEAN,), (STD,))])
        whole = FashionMNIST(home, train=True, transform=transform)
        test = FashionMNIST(home, train=False, transform=transform)
        number, test_number = len(whole), len(test)
    else:
        images = load_images(args.data)
        whole, test = (
            TensorDataset(torch.from_numpy(normalize(x).transpose(0, 3, 1, 2)), torch.from_numpy(y))
            for x, y in ((images.train_x, images.train_y), (images.test_x, images.test_y))
        )
        number, test_number = len(images.train_x), len(images.test_x)
    if args.limit is not None:
        number, test_number = min(number, args.limit), min(test_number, max(1, args.limit // 5))
        test = Subset(test, range(test_number))
    train_part, val_part = split(number)
    return (
        DataLoader(
            Subset(whole, train_part.tolist()),
            batch_size=args.batch_size,
            shuffle=True,
            drop_last=True,
            generator=torch.Generator().manual_seed(args.seed),
        ),
        DataLoader(Subset(whole, val_part.tolist()), batch_size=EVAL_BATCH),
        DataLoader(test, batch_size=EVAL_BATCH),
    )


def array_loaders(args: argparse.Namespace) -> tuple[Any, Any, Any]:
    """Make the same three loaders from arrays, for a Python without torch; the images are NHWC.

    Args:
        args: The parsed options of `add_arguments`.
    """
    import jaxlightning as jl

    images = load_images(args.data, args.limit)
    train_part, val_part = split(len(images.train_x))
    x, y = normalize(images.train_x), images.train_y.astype(np.int32)
    return (
        jl.ArrayLoader(
            x[train_part], y[train_part], batch_size=args.batch_size, shuffle=True, drop_last=True, seed=args.seed
        ),
        jl.ArrayLoader(x[val_part], y[val_part], batch_size=EVAL_BATCH),
        jl.ArrayLoader(normalize(images.test_x), images.test_y.astype(np.int32), batch_size=EVAL_BATCH),
    )
