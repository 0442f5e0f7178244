"""grain: MapDataset, IterDataset and DataLoader, resumed by their own iterator state."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from ._convert import from_library
from ._json_state import decode_state, encode_state
from ._source import BatchIterator, Source, SourceOptions, discard, sized_length
from .iterables import make_source as make_iterable_source


class GrainSource(Source):
    """Read a grain pipeline; each element is a batch."""

    resumes_by = "by grain's own state"

    def __init__(self, origin: Any, options: SourceOptions | None = None) -> None:
        super().__init__(origin, options)
        self._raw: Any = None
        self._saved: Any = None

    @property
    def length(self) -> int | None:
        """`len()` of a MapDataset; None for endless ones, IterDatasets and DataLoaders."""
        size = sized_length(self.origin)
        return None if size is None or size >= sys.maxsize else size

    def _open(self, skip: int) -> BatchIterator:
        raw = iter(self.origin)
        saved, self._saved = self._saved, None
        if skip and saved is not None and callable(getattr(raw, "set_state", None)):
            raw.set_state(decode_state(saved))
        else:
            discard(raw, skip)
        self._raw = raw
        return BatchIterator(self, raw, self._converter(), self._closer(raw))

    def _closer(self, raw: Iterator[Any]) -> Callable[[], None]:
        def close() -> None:
            self._raw = None
            stop = getattr(raw, "close", None)
            if callable(stop):
                stop()

        return close

    def state_dict(self) -> dict[str, Any]:
        """Position and grain's iterator state."""
        state = super().state_dict()
        get_state = getattr(self._raw, "get_state", None)
        if self._iterator is not None and callable(get_state):
            state["iterator"] = encode_state(get_state())
        elif self._saved is not None:
            state["iterator"] = self._saved
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position."""
        super().load_state_dict(state)
        self._saved = state.get("iterator")

    def _copy(self) -> GrainSource:
        new = super()._copy()
        new._raw = new._saved = None
        return new


def make_source(obj: Any, options: SourceOptions) -> Source:
    """Make a source from a grain dataset or DataLoader.

    Args:
        obj: The user's object.
        options: How to read it.

    Returns:
        The source; other iterables of grain (such as its iterators) are read like any iterable.
    """
    if from_library(type(obj), "grain", "MapDataset", "IterDataset", "DataLoader"):
        return GrainSource(obj, options)
    return make_iterable_source(obj, options)
