"""The fast path for torch loaders over datasets in memory: same order, same bits, no Python per sample.

Index batches come from the loader's own sampler; the arrays are indexed in one go. Only exact types count: a subclass
may override anything. A few samples are compared with the dataset's own `__getitem__` before every pass.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from . import _torch_sampling as sampling
from ._convert import Converter
from ._fast_leaves import Leaf, TensorLeaf, VisionLeaf, is_stock
from ._leaves import Array
from ._pointwise import NotVectorizableError as NotVectorizableError
from .in_memory import fingerprint

_SAMPLES = 4
_CHUNK = 1024  # rows that `columns` looks up at a time
_MOST_VALUES = 4_000_000  # of all outcomes of one random sample; beyond, only its form is compared


class _Rows:
    """Where the samples of a dataset tree live: leaf number and row for each index (None: one leaf, in order)."""

    def __init__(self, leaves: list[Leaf], size: int, which: Array | None = None, rows: Array | None = None) -> None:
        self.leaves = leaves
        self.size = size
        self.which = which
        self.rows = rows

    def selected(self, indices: Array) -> _Rows:
        which = None if self.which is None else self.which[indices]
        if self.rows is None:
            rows = np.where(indices < 0, indices + self.size, indices)
            if len(rows) and (rows.min() < 0 or rows.max() >= self.size):
                raise NotVectorizableError("a Subset has indices outside its dataset")
        else:
            rows = self.rows[indices]
        return _Rows(self.leaves, len(indices), which, rows)


def _resolve(dataset: Any, converter: Converter, cache: dict[Any, Any], random: bool) -> _Rows:
    from torch.utils.data import ConcatDataset, Subset, TensorDataset

    kind = type(dataset)
    if kind is TensorDataset:
        return _Rows([TensorLeaf(dataset, converter)], len(dataset))
    if is_stock(dataset):
        return _Rows([VisionLeaf(dataset, converter, cache, random=random)], len(dataset))
    if kind is Subset:
        inner = _resolve(dataset.dataset, converter, cache, random)
        indices = np.asarray(dataset.indices)
        if len(indices) == 0:
            indices = indices.astype(np.int64)
        if indices.ndim != 1 or indices.dtype.kind not in "iu":
            raise NotVectorizableError(f"a Subset has indices of type {type(dataset.indices).__qualname__}")
        try:
            return inner.selected(indices)
        except IndexError:
            raise NotVectorizableError("a Subset has indices outside its dataset") from None
    if kind is ConcatDataset:
        parts = [_resolve(part, converter, cache, random) for part in dataset.datasets]
        leaves: list[Leaf] = []
        which, rows = [], []
        for part in parts:
            which.append((np.zeros(part.size, np.intp) if part.which is None else part.which) + len(leaves))
            rows.append(np.arange(part.size) if part.rows is None else part.rows)
            leaves.extend(part.leaves)
        if any(leaf.signature != leaves[0].signature for leaf in leaves):
            raise NotVectorizableError("the parts of a ConcatDataset have samples of different form")
        return _Rows(leaves, len(dataset), np.concatenate(which), np.concatenate(rows))
    raise NotVectorizableError(
        f"the dataset {kind.__qualname__} is neither a TensorDataset, a stock in-memory dataset of torchvision, nor a "
        "Subset or ConcatDataset of those (subclasses do not count)"
    )


class Plan:
    """How to make the batches of one loader by indexing arrays."""

    def __init__(self, loader: Any, rows: _Rows, converter: Converter) -> None:
        self._loader = loader
        self._rows = rows
        self._converter = converter

    def gather(self, index: Array) -> list[Array]:
        """Give the batch for dataset indices `[n]`, as default_collate and the converter would."""
        rows = self._rows
        if rows.which is None:
            return rows.leaves[0].gather(index if rows.rows is None else rows.rows[index])
        which = rows.which[index]
        inner: Array = index if rows.rows is None else rows.rows[index]
        columns: list[Array] | None
        if (which == which[0]).all():
            columns = rows.leaves[which[0]].gather(inner)
            return columns
        columns = None
        for number in np.unique(which):
            mask = which == number
            part = rows.leaves[number].gather(inner[mask])
            if columns is None:
                columns = [np.empty((len(index), *column.shape[1:]), column.dtype) for column in part]
            for column, values in zip(columns, part, strict=True):
                column[mask] = values
        return columns or []

    # for a loop that gathers rows by itself (`in_memory.InMemory`)

    @property
    def size(self) -> int:
        """Number of samples."""
        return self._rows.size

    @property
    def is_random(self) -> bool:
        """Whether two passes over the same rows differ."""
        return any(isinstance(leaf, VisionLeaf) and leaf.is_random for leaf in self._rows.leaves)

    @property
    def structure(self) -> Any:
        """`PyTreeDef` of a batch."""
        return jax.tree_util.tree_structure([0] * len(self.gather(np.zeros(1, np.intp))))

    @property
    def nbytes(self) -> int:
        """Bytes of all samples, as batches have them."""
        return sum(column.nbytes for column in self.gather(np.zeros(1, np.intp))) * self.size

    def columns(self) -> list[Array]:
        """Give a batch of all samples."""
        self._converter.refresh()
        wholes: list[Array] = []
        for start in range(0, self.size, _CHUNK):
            part = self.gather(np.arange(start, min(start + _CHUNK, self.size)))
            if not wholes:
                wholes = [np.empty((self.size, *column.shape[1:]), column.dtype) for column in part]
            for whole, column in zip(wholes, part, strict=True):
                whole[start : start + len(column)] = column
        return wholes

    def fingerprint(self) -> Hashable:
        """Give a value that changes with the data, the labels, the transforms and the samples that are chosen."""
        rows = self._rows
        chosen = fingerprint([part for part in (rows.which, rows.rows) if part is not None])
        forms = self._converter.channels_last, jax.dtypes.canonicalize_dtype(np.float64).str
        return (rows.size, chosen, forms, *(leaf.fingerprint() for leaf in rows.leaves))

    def batches(
        self, indices: Iterable[Any], first: int = 0, make: Callable[[Array], Any] | None = None
    ) -> Iterator[Any]:
        """Give a batch for each index batch of the sampler.

        Args:
            indices: The index batches; `base_seed`, if they have one, seeds random transforms.
            first: Number of the first batch in its pass.
            make: Makes a batch of its rows, in place of `gather`.
        """
        self._converter.refresh()
        random = [leaf for leaf in self._rows.leaves if isinstance(leaf, VisionLeaf) and leaf.is_random]
        seed = getattr(indices, "base_seed", 0) & (2**64 - 1)
        for number, index in enumerate(indices, first):
            for leaf in random:
                # a function of seed and batch, so that a resumed pass draws what an uninterrupted one would
                leaf.rng = np.random.default_rng([seed, number])
            rows = np.array(index) if type(index) is list else np.asarray(index)
            if rows.ndim != 1 or rows.dtype.kind not in "iu" or len(rows) == 0:
                yield self._one_by_one(index)
            elif make is None:
                yield self.gather(rows)
            else:
                yield self._made(rows, make)

    def _made(self, rows: Array, make: Callable[[Array], Any]) -> Any:
        # negative numbers look like large ones, so that one look finds both
        if (rows.view(f"u{rows.itemsize}").max() if rows.dtype.kind == "i" else rows.max()) < self.size:
            return make(rows)
        rows = np.where(rows < 0, rows + self.size, rows)
        return self.gather(rows) if rows.min() < 0 or rows.max() >= self.size else make(rows)

    def _one_by_one(self, index: Any) -> Any:
        # a sampler of slices, keys or empty batches: what torch's fetcher does with them
        dataset = self._loader.dataset
        if getattr(dataset, "__getitems__", None):
            samples = dataset.__getitems__(index)
        else:
            samples = [dataset[item] for item in index]
        return self._converter(self._loader.collate_fn(samples))

    def verify(self) -> None:
        """Compare a few samples with the dataset's own; random ones with everything that can become of them.

        Raises:
            NotVectorizableError: If one differs.
        """
        size = self._rows.size
        self._converter.refresh()
        random = any(isinstance(leaf, VisionLeaf) and leaf.is_random for leaf in self._rows.leaves)
        states = sampling.capture_global() if random else None
        try:
            for index in sorted({*np.linspace(0, size - 1, _SAMPLES).astype(int).tolist()} if size else ()):
                try:
                    slow = self._converter(self._loader.collate_fn([self._loader.dataset[index]]))
                    fast = self.gather(np.array([index]))
                    same = self._same_random(index, slow, fast) if random else _same(slow, fast)
                except Exception as error:  # left to the slow path, which raises it in the batch where it belongs
                    raise NotVectorizableError(f"sample {index} raises {type(error).__name__}: {error}") from error
                if not same:
                    name = type(self._loader.dataset).__qualname__
                    raise NotVectorizableError(f"sample {index} differs from what {name} gives")
        finally:
            if states is not None:
                sampling.restore_captured(states)

    def _same_random(self, index: int, slow: Any, fast: list[Array]) -> bool:
        rows = self._rows
        leaf = rows.leaves[0 if rows.which is None else int(rows.which[index])]
        if not isinstance(leaf, VisionLeaf):
            return _same(slow, fast)
        alike = [
            part.dtype == other.dtype and part.shape == other.shape for part, other in zip(slow, fast, strict=True)
        ]
        if not all(alike) or not _same(slow[1:], fast[1:]):
            return False
        possible = leaf.outcomes(index if rows.rows is None else int(rows.rows[index]), _MOST_VALUES)
        return possible is None or any(one.tobytes() == slow[0][0].tobytes() for one in possible)


def _same(slow: Any, fast: list[Array]) -> bool:
    return len(slow) == len(fast) and all(
        left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
        for left, right in zip(slow, fast, strict=True)
    )


def make_plan(loader: Any, converter: Converter, cache: dict[Any, Any], *, random: bool = False) -> Plan:
    """Find out whether a loader can be read by indexing arrays, and how.

    Args:
        loader: A torch DataLoader.
        converter: What a batch has to look like.
        cache: Kept by the caller between passes; holds the last lookup table.
        random: Whether random crops and flips may be replaced by ones that match in distribution only.

    Returns:
        The plan; it sees the arrays, transforms and labels that the dataset has now.

    Raises:
        NotVectorizableError: With the reason.
    """
    from torch.utils.data import DataLoader, default_collate

    if type(loader) is not DataLoader:
        raise NotVectorizableError(f"the loader is a {type(loader).__qualname__}, a subclass of DataLoader")
    if loader.batch_sampler is None:
        raise NotVectorizableError("batch_size=None turns batching off")
    if loader.collate_fn is not default_collate:
        name = getattr(loader.collate_fn, "__qualname__", type(loader.collate_fn).__qualname__)
        raise NotVectorizableError(f"the collate_fn {name} is not torch's default_collate")
    if loader.worker_init_fn is not None and loader.num_workers > 0:
        raise NotVectorizableError("the worker_init_fn may change the dataset in the workers")
    plan = Plan(loader, _resolve(loader.dataset, converter, cache, random), converter)
    plan.verify()
    return plan
