"""From loaders to the batches of one pass: grouping for several devices, and knowing which batch is the last."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np

from jaxlightning.compile.resident import ResidentBatch
from jaxlightning.utilities.combined_loader import CombinedLoader

END = object()
"""Stands for "no more batches" where None could be one."""


class LoaderError:
    """Stands for a batch whose loading failed, until the batches before it have run.

    Args:
        error: What the loader raised, with its traceback.
    """

    def __init__(self, error: Exception) -> None:
        self.error = error


def concatenate(batches: list[Any]) -> Any:
    """Join consecutive batches along axis 0.

    Args:
        batches: Batches of the same structure; leaves are numpy arrays, or lists of strings that stay on the host.

    Returns:
        One batch of that structure.

    Raises:
        ValueError: When a leaf without a batch axis differs between the batches.
    """
    first = batches[0]
    if len(batches) == 1:
        return first
    if isinstance(first, dict):
        joined = {key: concatenate([batch[key] for batch in batches]) for key in first}
        return joined if type(first) is dict else type(first)(joined)
    if type(first) is ResidentBatch:
        return ResidentBatch(np.concatenate([batch.rows for batch in batches]), first.columns, first.layout)
    if isinstance(first, (list, tuple)):
        if first and all(isinstance(item, (str, bytes)) for item in first):
            return type(first)(item for batch in batches for item in batch)
        items = [concatenate([batch[position] for batch in batches]) for position in range(len(first))]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [item.name for item in dataclasses.fields(first)]
        return dataclasses.replace(
            first, **{name: concatenate([getattr(batch, name) for batch in batches]) for name in names}
        )
    if getattr(first, "ndim", 0) > 0:
        return np.concatenate([np.asarray(batch) for batch in batches], axis=0)
    if all(_same(first, other) for other in batches[1:]):
        return first
    raise ValueError(
        "Several loader batches make one batch for all devices, and the leaves are joined along axis 0. This one has"
        f" no axis and differs between the batches: {first!r} and {batches[1]!r}. Give it a batch axis in the collate"
        " function, or run on one device."
    )


def _same(left: Any, right: Any) -> bool:
    try:
        return bool(left == right)
    except (TypeError, ValueError):
        return left is right


class GroupedSource(Iterable[Any]):
    """Joins `n` consecutive batches of a source into one global batch; the last one may be smaller.

    Args:
        source: The source of an adapter.
        n: Loader batches in one global batch.
    """

    def __init__(self, source: Any, n: int) -> None:
        self.source = source
        self.n = n

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    @property
    def length(self) -> int | None:
        """The number of global batches, None when the source does not know its own."""
        length = self.source.length
        return None if length is None else math.ceil(length / self.n)

    def __len__(self) -> int:
        length = self.length
        if length is None:
            raise TypeError("This source has no length.")
        return length

    def __iter__(self) -> Iterator[Any]:
        inner = iter(self.source)
        try:
            while True:
                group = []
                for batch in inner:
                    group.append(batch)
                    if len(group) == self.n:
                        break
                if not group:
                    return
                yield concatenate(group)
                if len(group) < self.n:
                    return
        finally:
            close = getattr(inner, "close", None)
            if callable(close):
                close()

    def sequential(self) -> GroupedSource:
        """The same batches without shuffling."""
        return GroupedSource(self.source.sequential(), self.n)


class SizedView(Iterable[Any]):
    """A source with its length where `len()` looks for it.

    Args:
        source: A source, whose `length` is a number of batches or None.
    """

    def __init__(self, source: Any) -> None:
        self.source = source

    def __len__(self) -> int:
        if self.source.length is None:
            raise TypeError("This source has no length.")
        return int(self.source.length)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.source)


class BatchStream:
    """The batches of one pass over combined loaders.

    With a length nothing is read ahead, so a loader with a position of its own is where the loop is. Without one a
    single batch is read ahead: only so can the last batch be known while it runs.

    Attributes:
        length: Batches in a pass, None when unknown.
        ahead: The item read ahead; only without a length.
        returned: Batches that were read and given back; they come before what `fetch` gives.
        fetch: Returns the next item or `END`; an item is `(batch, batch_idx, dataloader_idx)`.

    Args:
        combined: The combined sources, with their limits set.
        around_fetch: A context manager factory for the profiler, or None.
    """

    def __init__(self, combined: CombinedLoader, around_fetch: Callable[[], Any] | None = None) -> None:
        self._combined = combined
        self._around_fetch = around_fetch
        self._single: Iterator[Any] | None = None
        self._fetched = 0
        self.fetch: Callable[[], Any] = lambda: END
        self.ahead: Any = END
        self.returned: deque[Any] = deque()
        self.length: int | None = None

    def start(self, *, bare: bool = False, fetched: int = 0) -> None:
        """Make fresh iterators; those of an earlier pass are released.

        Args:
            bare: Hand out batches without their indices.
            fetched: Batches of this pass that were handed out before the run was interrupted.
        """
        self.close()
        total = self._combined.total()
        self.length = None if total == math.inf else int(total)
        self._fetched = fetched
        combined = self._combined
        if bare and len(combined.flattened) == 1 and combined.iterables is combined.flattened[0]:
            # The common case: no structure to rebuild, no index to count.
            self._single = iter(combined.flattened[0])
            self.fetch = partial(next, self._single, END)
        else:
            iterator = iter(combined)
            self.fetch = partial(_first_of, iterator) if bare else partial(next, iterator, END)
        if self._around_fetch is not None:
            self.fetch = partial(_inside, self._around_fetch, self.fetch)
        if self.length is None:
            self.ahead = self.fetch()

    def __iter__(self) -> Iterator[tuple[Any, bool]]:
        """Yield every item with whether it is the last one."""
        while self.length is None or self._fetched < self.length:
            if self.length is None:
                item, self.ahead = self.ahead, END
                if item is END:
                    return
                self.ahead = self.fetch()
                last = self.ahead is END
            else:
                item = self.fetch()
                if item is END:
                    return
                last = self._fetched + 1 >= self.length
            self._fetched += 1
            yield item, last

    def unused(self) -> int:
        """How many batches were read from the loaders and wait for their step."""
        waiting = sum(item is not END and type(item) is not LoaderError for item in self.returned)
        return waiting + int(self.length is None and self.ahead is not END)

    def close(self) -> None:
        """Release iterators, and with them worker processes and open files."""
        self.ahead = END
        self.returned.clear()
        self.fetch = lambda: END
        single, self._single = self._single, None
        if single is not None:
            close = getattr(single, "close", None)
            if callable(close):
                close()
        self._combined.reset()


def _first_of(iterator: Iterator[Any]) -> Any:
    item: Any = next(iterator, END)
    return item if item is END else item[0]


def _inside(context: Callable[[], Any], function: Callable[[], Any]) -> Any:
    with context():
        return function()
