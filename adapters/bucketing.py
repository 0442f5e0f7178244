"""Sequences of different lengths in a few shapes: padding to boundaries, and batches of samples of similar length.

Every shape of a batch is a compilation. `bucketed` keeps a loader's batches and their order and pads each up to the
next boundary; `BucketLoader` makes the batches itself, of samples that share a boundary, so that little is padding.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from ._leaves import Array, Path, format_path
from ._seeded import SeededLoader
from ._source import BatchIterator
from .mapped import MappedSource

TooLong = Literal["error", "truncate"]


def _path_of(keys: Any) -> Path:
    return tuple(getattr(key, "key", getattr(key, "idx", getattr(key, "name", str(key)))) for key in keys)


def _names(path: Path, wanted: Any) -> bool:
    parts = wanted if isinstance(wanted, tuple) else (wanted,)
    return path[: len(parts)] == parts


class _Rules:
    """Boundaries and what is padded with what.

    Args:
        boundaries: Allowed lengths, ascending.
        leaves: Which leaves have the length, by key, index or path; None finds them.
        pad_value: What to pad with: one value, or one for each of `leaves`.
        mask: Key under which a mask of the real places is added to a batch that is a dict.
        too_long: What to do with a sequence beyond the last boundary.
    """

    def __init__(
        self, boundaries: Sequence[int], leaves: Sequence[Any] | None, pad_value: Any, mask: str | None, too_long: str
    ) -> None:
        self.boundaries = [int(boundary) for boundary in boundaries]
        if not self.boundaries or self.boundaries != sorted(set(self.boundaries)) or self.boundaries[0] < 1:
            raise ValueError(f"boundaries must be positive and ascending. Received: boundaries={list(boundaries)!r}")
        if too_long not in ("error", "truncate"):
            raise ValueError(f'too_long must be "error" or "truncate". Received: too_long={too_long!r}')
        self.leaves = None if leaves is None else list(leaves)
        self.pad_value = pad_value
        self.mask = mask
        self.too_long = too_long

    def target(self, length: int, what: str) -> int:
        """The boundary for a length.

        Raises:
            ValueError: If it is beyond the last boundary and that is an error.
        """
        place = bisect.bisect_left(self.boundaries, length)
        if place < len(self.boundaries):
            return self.boundaries[place]
        if self.too_long == "error":
            raise ValueError(
                f"{what} has length {length}, beyond the last boundary {self.boundaries[-1]}. Add a boundary, or cut "
                'such sequences off with too_long="truncate".'
            )
        return self.boundaries[-1]

    def is_wanted(self, path: Path) -> bool:
        return self.leaves is not None and any(_names(path, wanted) for wanted in self.leaves)

    def value_for(self, path: Path) -> Any:
        if not isinstance(self.pad_value, Mapping):
            return self.pad_value
        for wanted, value in self.pad_value.items():
            if _names(path, wanted):
                return value
        return 0

    def with_mask(self, batch: Any, lengths: Array, size: int) -> Any:
        """Add the mask, bool `[n, size]`, where one is wanted."""
        if self.mask is None:
            return batch
        if not isinstance(batch, dict):
            raise TypeError(
                f"mask={self.mask!r} adds a key to the batch, which has to be a dict. Received: a batch of type "
                f"{type(batch).__qualname__}. Return dicts from the dataset or its collate function."
            )
        if self.mask in batch:
            raise ValueError(f"The batch has a leaf {self.mask!r} already; give `mask` another name.")
        return {**batch, self.mask: np.arange(size)[None, :] < lengths[:, None]}


def _resized(array: Array, axis: int, size: int, value: Any) -> Array:
    have = array.shape[axis]
    if have == size:
        return array
    if have > size:
        index: list[Any] = [slice(None)] * array.ndim
        index[axis] = slice(0, size)
        return np.ascontiguousarray(array[tuple(index)])
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, size - have)
    return np.pad(array, widths, constant_values=np.asarray(value).astype(array.dtype))


def bucketed(
    loader: Any,
    boundaries: Sequence[int],
    *,
    axis: int = 1,
    leaves: Sequence[Any] | None = None,
    pad_value: Any = 0,
    mask: str | None = None,
    too_long: TooLong = "error",
) -> MappedSource:
    """Pad the sequences of every batch up to the next boundary, so that a step is compiled once per boundary.

    Args:
        loader: A loader whose batches are padded to their own longest sequence (`pad_sequence`, `padded_batch`).
        boundaries: The lengths that batches may have, ascending.
        axis: The axis of the length.
        leaves: The leaves that have it: keys, indices, or paths as tuples. By default every leaf with that axis; a
            batch whose leaves differ there is refused then.
        pad_value: What to pad with, or a dict with a value for each of `leaves`.
        mask: Key under which a mask (bool, batch by length, True where the loader's batch had something) is added.
        too_long: "error", or "truncate" to cut off what is beyond the last boundary.

    Returns:
        A loader for the Trainer, with the position and order of the one given.

    Raises:
        ValueError: If the boundaries are not ascending, and while reading, for a sequence that is too long or leaves
            that differ in length.
    """
    rules = _Rules(boundaries, leaves, pad_value, mask, too_long)

    def pad(batch: Any) -> Any:
        found, structure = jax.tree_util.tree_flatten_with_path(batch)
        paths = [_path_of(keys) for keys, _ in found]
        chosen = [
            position
            for position, (_, leaf) in enumerate(found)
            if getattr(leaf, "ndim", 0) > axis and (rules.leaves is None or rules.is_wanted(paths[position]))
        ]
        if not chosen:
            raise ValueError(
                f"bucketed(..., axis={axis}, leaves={rules.leaves!r}) finds no leaf with such an axis. The batch has "
                + ", ".join(
                    f"{format_path(p)}: {getattr(leaf, 'shape', ())}" for p, (_, leaf) in zip(paths, found, strict=True)
                )
            )
        lengths = {paths[position]: found[position][1].shape[axis] for position in chosen}
        if len(set(lengths.values())) > 1:
            listing = ", ".join(f"{format_path(path)}: {length}" for path, length in lengths.items())
            raise ValueError(
                f"The leaves of a batch differ in length along axis {axis}: {listing}. Name those that are sequences "
                "with leaves=[...]."
            )
        length = next(iter(lengths.values()))
        size = rules.target(length, format_path(paths[chosen[0]]))
        new = [leaf for _, leaf in found]
        for position in chosen:
            new[position] = _resized(np.asarray(new[position]), axis, size, rules.value_for(paths[position]))
        padded = jax.tree_util.tree_unflatten(structure, new)
        rows = len(new[chosen[0]])
        return rules.with_mask(padded, np.full(rows, min(length, size)), size)

    return MappedSource(loader, pad)


class BucketLoader(SeededLoader):
    """Make batches of samples of similar length, padded to a few lengths.

    A sample belongs to the first boundary that is not shorter than it; batches are made of samples of one boundary and
    padded to it. The order is a function of (`seed`, epoch): samples come in their shuffled order, and a batch when its
    bucket is full; what is left at the end comes last, short batches by ascending boundary.

    Example:
        >>> sentences = [np.arange(n) for n in (3, 9, 4, 10)]
        >>> [batch.shape for batch in BucketLoader(sentences, [4, 10], batch_size=2)]
        [(2, 4), (2, 10)]

    Args:
        samples: Anything with `len` and indexing: a list of arrays, dicts or other pytrees of arrays, or a map-style
            dataset.
        boundaries: The lengths that batches may have, ascending.
        batch_size: Samples per batch; a sequence gives one for each boundary (shorter ones may be larger).
        lengths: The length of every sample, int `[len(samples)]`. By default all samples are read once to measure them.
        leaves: The leaves of a sample that have the length along their first axis. By default those that vary.
        pad_value: What to pad with, or a dict with a value for each of `leaves`.
        mask: Key under which a mask (bool, batch by length) is added to batches of dicts.
        too_long: "error", or "truncate" to cut off what is beyond the last boundary.
        shuffle: Whether every epoch has its own random order.
        drop_last: Whether to leave out batches that are not full.
        seed: Seed of the order.

    Raises:
        ValueError: If an argument is out of range, or a sample is too long.
        TypeError: If `samples` cannot be indexed.
    """

    def __init__(
        self,
        samples: Any,
        boundaries: Sequence[int],
        *,
        batch_size: int | Sequence[int] = 1,
        lengths: Any = None,
        leaves: Sequence[Any] | None = None,
        pad_value: Any = 0,
        mask: str | None = None,
        too_long: TooLong = "error",
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int = 0,
    ) -> None:
        if not hasattr(samples, "__len__") or not hasattr(samples, "__getitem__"):
            raise TypeError(
                f"BucketLoader needs samples with len() and indexing. Received: {type(samples).__qualname__}. Use "
                "bucketed(loader, boundaries) for a loader that makes batches."
            )
        super().__init__(shuffle=shuffle, drop_last=drop_last, seed=seed)
        self._samples = samples
        self._rules = _Rules(boundaries, leaves, pad_value, mask, too_long)
        sizes = [batch_size] * len(self._rules.boundaries) if isinstance(batch_size, int) else list(batch_size)
        if len(sizes) != len(self._rules.boundaries) or any(not isinstance(n, int) or n < 1 for n in sizes):
            raise ValueError(
                "batch_size must be a positive integer, or one for each boundary. Received: "
                f"batch_size={batch_size!r} for {len(self._rules.boundaries)} boundaries"
            )
        self._sizes = sizes
        self._lengths = self._measure() if lengths is None else np.asarray(lengths).astype(np.int64)
        if self._lengths.shape != (len(samples),):
            raise ValueError(
                f"lengths must have one entry per sample. Received: shape {self._lengths.shape} for {len(samples)} "
                "samples"
            )
        self._bucket_of = np.array(
            [
                self._rules.boundaries.index(self._rules.target(int(length), f"sample {index}"))
                for index, length in enumerate(self._lengths)
            ],
            np.int64,
        )

    def _measure(self) -> Array:
        """Read all samples once: their lengths, and which leaves vary."""
        shapes: list[list[int | None]] = []
        paths: list[Path] = []
        for index in range(len(self._samples)):
            flat = jax.tree_util.tree_flatten_with_path(self._converted(index))[0]
            paths = [_path_of(keys) for keys, _ in flat]
            shapes.append([leaf.shape[0] if getattr(leaf, "ndim", 0) else None for _, leaf in flat])
        if not shapes:
            return np.zeros(0, np.int64)
        if self._rules.leaves is None:
            varying = [p for p in range(len(paths)) if len({row[p] for row in shapes}) > 1]
            first = next((p for p in range(len(paths)) if shapes[0][p] is not None), None)
            chosen = varying or ([] if first is None else [first])
            self._rules.leaves = [paths[position] for position in chosen]
        else:
            chosen = [p for p in range(len(paths)) if shapes[0][p] is not None and self._rules.is_wanted(paths[p])]
        if not chosen:
            raise ValueError(
                f"BucketLoader finds no leaf with a length in its samples (leaves={self._rules.leaves!r}); they have "
                + ", ".join(map(format_path, paths))
            )
        for index, row in enumerate(shapes):
            if len({row[position] for position in chosen}) > 1:
                listing = ", ".join(f"{format_path(paths[position])}: {row[position]}" for position in chosen)
                raise ValueError(
                    f"The leaves of sample {index} that vary in length differ: {listing}. Name those that belong "
                    "together with leaves=[...]; others have to have one length."
                )
        return np.array([row[chosen[0]] for row in shapes], np.int64)

    def _converted(self, index: int) -> Any:
        return self._converter(copy=False)(self._samples[index])

    # the protocol

    def _plan(self, epoch: int) -> list[Array]:
        """Sample indices of every batch of an epoch."""
        order = np.arange(len(self._samples))
        if self.shuffle:
            order = np.random.default_rng([self.seed, epoch]).permutation(order)
        waiting: list[list[int]] = [[] for _ in self._sizes]
        batches = []
        for index in order.tolist():
            bucket = int(self._bucket_of[index])
            waiting[bucket].append(index)
            if len(waiting[bucket]) == self._sizes[bucket]:
                batches.append(np.array(waiting[bucket]))
                waiting[bucket] = []
        if not self.drop_last:
            batches += [np.array(rest) for rest in waiting if rest]
        return batches

    def __len__(self) -> int:
        counts = np.bincount(self._bucket_of, minlength=len(self._sizes))
        sizes = np.array(self._sizes)
        return int((counts // sizes if self.drop_last else -(-counts // sizes)).sum())

    @property
    def length(self) -> int:
        """Number of batches of one pass."""
        return len(self)

    @property
    def batch_size(self) -> int | None:
        """Samples of a full batch; None if it depends on the boundary."""
        return self._sizes[0] if len(set(self._sizes)) == 1 else None

    def _open(self, skip: int) -> BatchIterator:
        epoch, self._epoch_of_next_pass = self._epoch_of_next_pass, self._epoch_of_next_pass + 1
        self._epoch = epoch
        return BatchIterator(self, self._batches(epoch, skip), None)

    def _batches(self, epoch: int, skip: int) -> Iterator[Any]:
        collate = self._collate()
        for rows in self._plan(epoch)[skip:]:
            if self.options.record_indices:
                self.last_batch_indices = rows.tolist()
            yield collate(rows)

    def _collate(self) -> Callable[[Array], Any]:
        rules, converter = self._rules, self._converter(copy=False)

        def collate(rows: Array) -> Any:
            size = rules.boundaries[int(self._bucket_of[rows[0]])]
            columns: list[list[Array]] = []
            paths: list[Path] = []
            structure: Any = None
            for index in rows.tolist():
                flat, structure = jax.tree_util.tree_flatten_with_path(converter(self._samples[index]))
                paths = paths or [_path_of(keys) for keys, _ in flat]
                columns = columns or [[] for _ in flat]
                for column, path, (_, leaf) in zip(columns, paths, flat, strict=True):
                    array = np.asarray(leaf)
                    if array.ndim and rules.is_wanted(path):
                        array = _resized(array, 0, size, rules.value_for(path))
                    column.append(array)
            stacked = [_stack(column, path) for column, path in zip(columns, paths, strict=True)]
            batch = jax.tree_util.tree_unflatten(structure, stacked)
            return converter(rules.with_mask(batch, np.minimum(self._lengths[rows], size), size))

        return collate

    def describe(self) -> str:
        """Name the loader and what it holds."""
        return f"BucketLoader of {len(self._samples)} samples with boundaries {self._rules.boundaries}"


def _stack(column: list[Array], path: Path) -> Array:
    shapes = {array.shape for array in column}
    if len(shapes) > 1:
        raise ValueError(
            f"{format_path(path)} has different shapes in one batch: {sorted(shapes)}. If it has the length of the "
            "sample, name it in leaves=[...]."
        )
    return np.stack(column)
