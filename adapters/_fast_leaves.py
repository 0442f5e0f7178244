"""In-memory datasets that the fast path can index in one go: TensorDataset and torchvision's stock datasets."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import numpy as np

from . import _leaves, _pointwise
from ._convert import Converter
from ._leaves import Array
from ._pointwise import NotVectorizableError
from ._torch_tensors import tensor_to_numpy
from .in_memory import fingerprint


class Leaf(Protocol):
    """A dataset in memory.

    `signature` describes dtype and sample shape of each column; leaves of one loader must agree.
    """

    signature: Any

    def gather(self, rows: Array) -> list[Array]:
        """Give the columns of a batch: fresh arrays, one per element of a sample.

        Args:
            rows: Integer `[n]`; negative values count from the end.
        """

    def fingerprint(self) -> Hashable:
        """Give a value that changes with everything that `gather` reads."""


class TensorLeaf:
    """A TensorDataset: its tensors are viewed, never copied, so in-place changes are seen as by torch."""

    def __init__(self, dataset: Any, converter: Converter) -> None:
        self._columns: list[Array] = []
        for position, tensor in enumerate(dataset.tensors):
            if tensor.device.type != "cpu":
                raise NotVectorizableError(f"tensor {position} of the TensorDataset is on {tensor.device}")
            try:
                self._columns.append(tensor_to_numpy(tensor, (position,)))
            except TypeError as error:
                raise NotVectorizableError(str(error)) from None
        self._converter = converter
        self.signature = ("tensors", [(column.dtype.str, column.shape[1:]) for column in self._columns])

    def gather(self, rows: Array) -> list[Array]:
        """Give the columns of a batch."""
        finish = self._converter.finish
        return [finish(column.take(rows, axis=0), (index,)) for index, column in enumerate(self._columns)]

    def fingerprint(self) -> Hashable:
        """Give a value that changes with the tensors."""
        return fingerprint(self._columns)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Stock:
    """How a stock dataset keeps its samples.

    Attributes:
        layout: "HW", "HWC" or "CHW" of one image.
        labels: Attribute of the labels.
        as_int: Whether `__getitem__` calls int() on the label.
    """

    layout: str
    labels: str = "targets"
    as_int: bool = True


_DATASETS = "torchvision.datasets"
_STOCK = {
    (f"{_DATASETS}.mnist", "MNIST"): _Stock(layout="HW"),
    (f"{_DATASETS}.mnist", "FashionMNIST"): _Stock(layout="HW"),
    (f"{_DATASETS}.mnist", "KMNIST"): _Stock(layout="HW"),
    (f"{_DATASETS}.mnist", "EMNIST"): _Stock(layout="HW"),
    (f"{_DATASETS}.mnist", "QMNIST"): _Stock(layout="HW"),
    (f"{_DATASETS}.cifar", "CIFAR10"): _Stock(layout="HWC", as_int=False),
    (f"{_DATASETS}.cifar", "CIFAR100"): _Stock(layout="HWC", as_int=False),
    (f"{_DATASETS}.svhn", "SVHN"): _Stock(layout="CHW", labels="labels"),
    (f"{_DATASETS}.stl10", "STL10"): _Stock(layout="CHW", labels="labels"),
    (f"{_DATASETS}.usps", "USPS"): _Stock(layout="HW"),
}


def is_stock(dataset: Any) -> bool:
    """Tell whether a dataset is exactly one of torchvision's in-memory datasets (no subclass)."""
    return (type(dataset).__module__, type(dataset).__qualname__) in _STOCK


class VisionLeaf:
    """A torchvision dataset in memory, read through pointwise transforms as tables."""

    def __init__(self, dataset: Any, converter: Converter, cache: dict[Any, Any], *, random: bool) -> None:
        cls = type(dataset)
        stock = _STOCK[cls.__module__, cls.__qualname__]
        if not cls.__getitem__.__module__.startswith(_DATASETS):
            raise NotVectorizableError(f"{cls.__qualname__}.__getitem__ was replaced")
        if dataset.target_transform is not None:
            raise NotVectorizableError(f"the target_transform of {cls.__qualname__} may compute anything")
        if dataset.transform is None:
            raise NotVectorizableError(f"{cls.__qualname__} without a transform gives PIL images")
        self._converter = converter
        steps = _pointwise.take_apart(dataset.transform, random=random)
        self._moves = steps.moves
        self._images, self._layout = _images(dataset, stock)
        self._labels = _label_reader(dataset, stock)
        self._gray = self._layout != "HW" and _pointwise.starts_with_grayscale(steps.pointwise)
        # crops and flips see images as PIL has them
        self._layout_out = "HW" if self._gray else "HWC" if self._moves and self._layout == "CHW" else self._layout
        # the grey image is what PIL makes of an "L" image too, so the whole transform can be probed with one
        mode = "L" if self._layout_out == "HW" else "RGB"
        table = _pointwise.probe_table(steps.values, mode, lambda image: converter(image))
        self.rng = np.random.default_rng(0)
        try:
            moved = self._moved(np.zeros((1, *self._images.shape[1:]), np.uint8))
        except ValueError as error:  # a fill for other channels, a reflection beyond the image
            raise NotVectorizableError(f"a crop cannot be applied to {cls.__qualname__}: {error}") from error
        self._height, self._width = moved.shape[2:4] if self._layout_out == "CHW" else moved.shape[1:3]
        self._channels = len(table)
        self._table = table.tobytes()
        # a converter moves channels last only where a whole batch would have moved
        shape = (1, self._channels, self._height, self._width)
        self._last = converter.channels_last and _leaves.is_channels_first_image(shape, table.dtype)
        self._lookup = self._make_lookup(table, cache)
        self.signature = ("vision", table.dtype.str, shape, self._last, self._labels.dtype.str)

    def _make_lookup(self, table: Array, cache: dict[Any, Any]) -> _pointwise.Lookup:
        key = (table.tobytes(), table.dtype.str, self._layout, self._last, self._height, self._width, self._channels)
        if key not in cache:
            cache.clear()
            pixels = self._height * self._width
            channels = np.arange(self._channels)
            channel_of = np.tile(channels, pixels) if self._last else np.repeat(channels, pixels)
            cache[key] = _pointwise.Lookup.build(table, channel_of)
        lookup: _pointwise.Lookup = cache[key]
        return lookup

    @property
    def is_random(self) -> bool:
        """Whether the images of two calls differ; `rng` then draws for the next ones."""
        return any(move.random for move in self._moves)

    def gather(self, rows: Array) -> list[Array]:
        """Give images and labels of a batch."""
        images = self._looked_up(self._moved(self._images.take(rows, axis=0)))
        return [images, self._converter.finish(self._labels.take(rows), (1,))]

    def fingerprint(self) -> Hashable:
        """Give a value that changes with the images, the labels and the transform."""
        moves = tuple(map(repr, self._moves))
        return (self.signature, moves, self._gray, self._table, fingerprint([self._images]), self._labels.content())

    def outcomes(self, row: int, limit: int) -> Array | None:
        """Give everything that the transforms can make of one image, or None if that is more than `limit` values."""
        images = self._prepared(self._images.take([row], axis=0))
        for move in self._moves:
            if images.size > limit:
                return None
            images = move.outcomes(images)
        return None if images.size > limit else self._looked_up(images)

    def _prepared(self, images: Array) -> Array:
        if self._layout == "CHW" and self._layout_out != "CHW":
            images = images.transpose(0, 2, 3, 1)
        return _pointwise.grayscale_like_pil(images) if self._gray else images

    def _moved(self, images: Array) -> Array:
        images = self._prepared(images)
        for move in self._moves:
            images = move(images, self.rng)
        return images

    def _looked_up(self, images: Array) -> Array:
        n = len(images)
        axis = 3 if self._last else 1
        if self._layout_out == "HW":
            if self._channels > 1:  # one input channel feeds all
                images = np.stack([images] * self._channels, axis=axis)
        elif self._layout_out == "HWC" and not self._last:
            images = images.transpose(0, 3, 1, 2)
        elif self._layout_out == "CHW" and self._last:
            images = images.transpose(0, 2, 3, 1)
        flat = self._lookup(np.ascontiguousarray(images).reshape(n, -1))
        shape = (self._height, self._width)
        full = (n, *shape, self._channels) if self._last else (n, self._channels, *shape)
        return flat.reshape(full)


def _images(dataset: Any, stock: _Stock) -> tuple[Array, str]:
    data = dataset.data
    images = tensor_to_numpy(data) if hasattr(data, "is_quantized") else data
    layout, name = stock.layout, type(dataset).__qualname__
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.ndim != len(layout) + 1:
        raise NotVectorizableError(f"{name}.data was replaced by {type(data).__qualname__} of another form")
    if layout != "HW" and images.shape[1 + layout.index("C")] != 3:
        raise NotVectorizableError(f"{name}.data has {images.shape[1 + layout.index('C')]} channels instead of 3")
    return images, layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Labels:
    dtype: np.dtype[Any]
    take: Callable[[Array], Array]
    content: Callable[[], Hashable]


def _label_reader(dataset: Any, stock: _Stock) -> _Labels:
    labels = getattr(dataset, stock.labels)
    name = f"{type(dataset).__qualname__}.{stock.labels}"
    int64 = np.dtype(np.int64)
    if type(dataset).__qualname__ == "QMNIST":
        if not dataset.compat or labels.ndim != 2:
            raise NotVectorizableError("QMNIST with compat=False gives the full label rows")
        column = tensor_to_numpy(labels)[:, 0]
        return _Labels(
            dtype=int64,
            take=lambda rows: column.take(rows).astype(int64),
            content=lambda: fingerprint([column]),
        )
    if isinstance(labels, list):
        if not set(map(type, labels)) <= {int}:
            raise NotVectorizableError(f"{name} holds other objects than int")

        def take_list(rows: Array) -> Array:
            return np.fromiter(map(labels.__getitem__, rows.tolist()), np.int64, len(rows))

        return _Labels(dtype=int64, take=take_list, content=lambda: tuple(labels))
    array = tensor_to_numpy(labels) if hasattr(labels, "is_quantized") else labels
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "iu":
        raise NotVectorizableError(f"{name} is no list or vector of integers")
    content = functools.partial(fingerprint, [array])
    if stock.as_int:
        return _Labels(dtype=int64, take=lambda rows: array.take(rows).astype(int64), content=content)
    return _Labels(dtype=array.dtype, take=lambda rows: array.take(rows), content=content)
