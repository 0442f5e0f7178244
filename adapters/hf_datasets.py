"""Hugging Face datasets read directly: rows are batches, as `dataset.batch(n)` makes them.

A torch DataLoader over such a dataset is a torch loader (`torch_loader.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ._convert import from_library
from ._json_state import decode_state, encode_state
from ._source import BatchIterator, Source, SourceOptions, sized_length


class HFSource(Source):
    """Read a `datasets.Dataset` or `datasets.IterableDataset`."""

    def __init__(self, origin: Any, options: SourceOptions | None = None) -> None:
        super().__init__(origin, options)
        self._map_style = from_library(type(origin), "datasets", "Dataset")
        self._saved: Any = None
        self._reading: Any = None
        self._hint_unbatched()

    @property
    def resumes_by(self) -> str:  # type: ignore[override]
        """How a mid-epoch resume finds its position."""
        return "by skipping rows (no data is read)" if self._map_style else "by the dataset's own state"

    @property
    def length(self) -> int | None:
        """Number of rows of a map-style dataset."""
        return sized_length(self.origin) if self._map_style else None

    @property
    def batch_size(self) -> int | None:
        """Unknown."""
        return None

    @property
    def is_shuffled(self) -> bool | None:
        """False for map-style datasets, whose rows have one order."""
        return False if self._map_style else None

    def set_epoch(self, epoch: int) -> None:
        """Forward the epoch to a streamed dataset, which shuffles by it."""
        super().set_epoch(epoch)
        if callable(getattr(self.origin, "set_epoch", None)):
            self.origin.set_epoch(epoch)

    def _hint_unbatched(self) -> None:
        features = self.origin.features or {}
        scalars = [
            name
            for name, feature in features.items()
            if type(feature).__name__ == "ClassLabel"
            or (type(feature).__name__ == "Value" and feature.dtype not in ("string", "large_string", "binary"))
        ]
        if scalars:
            self._warn(
                f"The Hugging Face dataset looks unbatched: column {scalars[0]!r} holds one number per row, so every "
                "row becomes a step. Pass dataset.batch(batch_size), or a torch DataLoader over it."
            )

    def _formatted(self) -> Any:
        kind = (
            self.origin.format["type"]
            if self._map_style
            else getattr(getattr(self.origin, "_formatting", None), "format_type", None)
        )
        # without a format, columns are lists of Python numbers; formats that the user set are kept
        return self.origin if kind not in (None, "python") else self.origin.with_format("numpy")

    def _open(self, skip: int) -> BatchIterator:
        dataset = self._formatted()
        saved, self._saved = self._saved, None
        if skip and self._map_style:
            dataset = dataset.skip(skip)
        elif skip and saved is not None:
            dataset.load_state_dict(decode_state(saved))
        elif skip:
            dataset = dataset.skip(skip)
        self._reading = None if self._map_style else dataset
        raw: Iterator[Any] = iter(dataset)
        return BatchIterator(self, raw, self._converter(), getattr(raw, "close", None))

    def state_dict(self) -> dict[str, Any]:
        """Position; with the state of a streamed dataset."""
        state = super().state_dict()
        if self._iterator is not None and self._reading is not None:
            state["dataset"] = encode_state(self._reading.state_dict())
        elif self._saved is not None:
            state["dataset"] = self._saved
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position."""
        super().load_state_dict(state)
        self._saved = state.get("dataset")

    def _copy(self) -> HFSource:
        new = super()._copy()
        new._saved = new._reading = None
        return new


def make_source(obj: Any, options: SourceOptions) -> Source:
    """Make a source from a Hugging Face dataset.

    Args:
        obj: A `datasets.Dataset` or `datasets.IterableDataset`.
        options: How to read it.

    Returns:
        The source.
    """
    return HFSource(obj, options)
