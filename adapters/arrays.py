"""Batches of arrays in memory: `ArrayLoader`, which is a source itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Self

import jax
import numpy as np

from . import _leaves
from ._convert import from_library
from ._seeded import SeededLoader
from ._source import BatchIterator
from .in_memory import fingerprint

Array = _leaves.Array


class ArrayLoader(SeededLoader):
    """Make batches of arrays that are in memory.

    The order is a function of (`seed`, epoch) alone. Without `set_epoch`, every pass is the next epoch.

    Example:
        >>> loader = ArrayLoader(np.zeros((10, 3)), np.zeros(10), batch_size=4, shuffle=True)
        >>> len(loader)
        3

    Args:
        *arrays: Arrays with the same first axis (numpy, JAX, torch or nested in dicts, lists, ...). With one argument a
            batch has its structure; with several it is a tuple.
        batch_size: Samples per batch.
        shuffle: Whether every epoch has its own random order.
        drop_last: Whether to leave out a last batch that is not full.
        seed: Seed of the order.

    Raises:
        ValueError: If there are no arrays, their first axes differ, or a number is out of range.
        TypeError: If a leaf is no array.
    """

    def __init__(
        self,
        *arrays: Any,
        batch_size: int = 1,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int = 0,
    ) -> None:
        if not arrays:
            raise ValueError("ArrayLoader needs at least one array. Received none.")
        if isinstance(batch_size, bool) or not isinstance(batch_size, (int, np.integer)) or batch_size < 1:
            raise ValueError(f"batch_size must be a positive integer. Received: batch_size={batch_size!r}")
        if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
            raise ValueError(f"seed must be a non-negative integer. Received: seed={seed!r}")
        super().__init__(shuffle=shuffle, drop_last=drop_last, seed=seed)
        self._batch_size = int(batch_size)
        self._leaves, self._structure, self._paths = _take_apart(arrays[0] if len(arrays) == 1 else arrays)
        self._size = len(self._leaves[0])
        self._prepared: tuple[Any, list[Array]] | None = None

    @property
    def batch_size(self) -> int:
        """Samples of a full batch."""
        return self._batch_size

    @property
    def num_samples(self) -> int:
        """Length of the first axis."""
        return self._size

    def __len__(self) -> int:
        full = self._size / self._batch_size
        return math.floor(full) if self.drop_last else math.ceil(full)

    @property
    def length(self) -> int:
        """Number of batches of one pass."""
        return len(self)

    def order(self, epoch: int) -> Array | None:
        """Give the order of the samples in one epoch.

        Args:
            epoch: Zero-based epoch number.

        Returns:
            int64 indices `[num_samples]`, or None for the order in memory.
        """
        if not self.shuffle:
            return None
        return np.random.default_rng([self.seed, epoch]).permutation(self._size)

    def _open(self, skip: int) -> BatchIterator:
        self._epoch = self._epoch_of_next_pass
        self._epoch_of_next_pass += 1
        make = None if self.row_reader is None or not self._size else self.row_reader(_ArraysInMemory(self))
        batches = self._batches(self._epoch, skip) if make is None else self._made_of_rows(self._epoch, skip, make)
        return BatchIterator(self, batches, None)

    def _columns(self) -> list[Array]:
        # dtypes follow the 64-bit mode of the moment; arrays that need no conversion are only viewed
        key = (_leaves.x64_enabled(), self.options.channels_last)
        if self._prepared is None or self._prepared[0] != key:
            columns = []
            for leaf, path in zip(self._leaves, self._paths, strict=True):
                column = _leaves.canonical_array(leaf, path, x64=key[0], copy=False)
                columns.append(_leaves.to_channels_last(column) if key[1] else column)
            self._prepared = (key, columns)
        return self._prepared[1]

    def _batches(self, epoch: int, skip: int) -> Iterator[Any]:
        columns = self._columns()
        order = self.order(epoch)
        size, unflatten = self._batch_size, self._rebuild()
        record = self.options.record_indices
        end = len(self) * size if self.drop_last else self._size
        for start in range(skip * size, end, size):
            stop = min(start + size, end)
            if order is None:
                batch = [column[start:stop].copy() for column in columns]
            else:
                rows = order[start:stop]
                batch = [column.take(rows, axis=0) for column in columns]
            if record:
                self.last_batch_indices = list(range(start, stop)) if order is None else order[start:stop].tolist()
            yield unflatten(batch)

    def _made_of_rows(self, epoch: int, skip: int, make: Callable[[Array], Any]) -> Iterator[Any]:
        order = self.order(epoch)
        rows = np.arange(self._size, dtype=np.int32) if order is None else order.astype(np.int32)
        size = self._batch_size
        end = len(self) * size if self.drop_last else self._size
        for start in range(skip * size, end, size):
            chosen = rows[start : min(start + size, end)]
            if self.options.record_indices:
                self.last_batch_indices = chosen.tolist()
            yield make(chosen)

    def _rebuild(self) -> Callable[[list[Any]], Any]:
        structure = self._structure
        if structure == jax.tree_util.tree_structure(0):
            return lambda leaves: leaves[0]
        if structure == jax.tree_util.tree_structure((0,) * len(self._leaves)):
            return tuple
        return lambda leaves: jax.tree_util.tree_unflatten(structure, leaves)

    def _copy(self) -> Self:
        new = super()._copy()
        new._prepared = None
        return new

    def describe(self) -> str:
        """Name the loader and what it holds."""
        shapes = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in self._leaves[:4])
        return f"ArrayLoader of {shapes}{', ...' if len(self._leaves) > 4 else ''}"

    def __repr__(self) -> str:
        return (
            f"{self.describe()} (batch_size={self._batch_size}, shuffle={self.shuffle}, drop_last={self.drop_last}, "
            f"seed={self.seed})"
        )


class _ArraysInMemory:
    """The data of an `ArrayLoader` for a loop that gathers rows (`in_memory.InMemory`)."""

    def __init__(self, loader: ArrayLoader) -> None:
        self.size = loader._size
        self.structure = loader._structure
        self._columns = loader._columns()
        self._rebuild = loader._rebuild()

    @property
    def nbytes(self) -> int:
        return sum(column.nbytes for column in self._columns)

    def columns(self) -> list[Array]:
        return self._columns

    def gather(self, rows: Array) -> Any:
        return self._rebuild([column.take(rows, axis=0) for column in self._columns])

    def fingerprint(self) -> Any:
        return fingerprint(self._columns)


def _take_apart(tree: Any) -> tuple[list[Array], Any, list[_leaves.Path]]:
    pairs, structure = jax.tree_util.tree_flatten_with_path(tree)
    if not pairs:
        raise ValueError("ArrayLoader needs at least one array. Received a structure without leaves.")
    leaves: list[Array] = []
    paths: list[_leaves.Path] = []
    for keys, value in pairs:
        path = tuple(getattr(key, "key", getattr(key, "idx", getattr(key, "name", str(key)))) for key in keys)
        if from_library(type(value), "torch", "Tensor"):
            from ._torch_tensors import tensor_to_numpy

            value = tensor_to_numpy(value, path)
        is_array = isinstance(value, (np.ndarray, jax.Array)) or hasattr(value, "__array__")
        if not is_array:
            raise TypeError(
                f"ArrayLoader needs arrays, but {_leaves.format_path(path)} is {type(value).__qualname__} "
                f"({value!r:.60}). "
                "Pass numpy arrays, for example np.asarray(values)."
            )
        array = np.asarray(value)
        if array.ndim == 0:
            raise ValueError(
                f"ArrayLoader makes batches along the first axis, but {_leaves.format_path(path)} is 0-dimensional."
            )
        leaves.append(array)
        paths.append(path)
    sizes = [len(leaf) for leaf in leaves]
    if len(set(sizes)) > 1:
        listing = ", ".join(f"{_leaves.format_path(path)}: {size}" for path, size in zip(paths, sizes, strict=True))
        raise ValueError(f"The arrays of an ArrayLoader need first axes of one length. Received: {listing}")
    return leaves, structure, paths
