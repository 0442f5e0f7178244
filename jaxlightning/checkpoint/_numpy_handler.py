"""How Orbax writes the arrays of a snapshot: not copied again, a little at a time, each forgotten when it is written.

Orbax's own handler copies every array first, writes all of them at once, and everybody who was given the tree holds it
until the end, so that a save takes three times the state beside the live one. Here the snapshot shrinks while it is
written, and what is under way at any moment is a slice.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

#: What is under way at once: this, or this part of the item for items so large that they would fall into very many
#: pieces. Storage takes about three times of it: the source, its compressed form, and the file that is written.
_SLICE_BYTES = 1 << 20
_MOST_SLICES = 256


class Pending:
    """An array that is still to be written; the only one who holds it.

    Args:
        array: The array.

    Attributes:
        shape: As of the array; these four stay when it is gone.
        dtype: As of the array.
        size: As of the array.
        nbytes: As of the array.
    """

    def __init__(self, array: np.ndarray) -> None:
        self._array: np.ndarray | None = array
        self.shape, self.dtype, self.size, self.nbytes = array.shape, array.dtype, array.size, array.nbytes

    def take(self) -> np.ndarray:
        """Return the array and forget it.

        Raises:
            RuntimeError: It was taken before.
        """
        array, self._array = self._array, None
        if array is None:
            raise RuntimeError("This array was written and is gone; a snapshot can be written once.")
        return array


@functools.cache
def registry() -> Any:
    """Orbax's registry of type handlers for a tree of `Pending` arrays that nobody changes."""
    import jax
    import orbax.checkpoint as ocp
    import tensorstore as ts

    class InSlices(ocp.type_handlers.NumpyHandler):  # type: ignore[misc]
        async def serialize(
            self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None
        ) -> Any:
            arguments = list(args) if args is not None else [ocp.SaveArgs() for _ in values]
            self._slice = _slice_bytes(values)
            infos = [info.replace(ts_context=_unsynchronized()) for info in infos]
            for start, stop in _groups([value.nbytes for value in values], self._slice):
                arrays = [value.take() for value in values[start:stop]]
                futures = await super().serialize(arrays, infos[start:stop], arguments[start:stop])
                for future in futures:
                    future.result()
                del arrays, futures
            return []

        async def _open_and_write(self, value: np.ndarray, tspec: dict[str, Any], ts_context: Any) -> None:
            """Write an array slice by slice: storage holds what it is given until it is on disk."""
            chunks = _chunk_shape(value.shape, value.itemsize, self._slice)
            metadata = tspec.get("metadata", {})
            if chunks == value.shape or "chunks" not in metadata:
                await super()._open_and_write(value, tspec, ts_context)
                return
            metadata["chunks"] = list(chunks)
            store = await ts.open(ts.Spec(tspec), create=True, open=True, context=ts_context)
            for place in _boxes(value.shape, chunks):
                await store[place].write(value[place], can_reference_source_data_indefinitely=True)

    return ocp.type_handlers.create_type_handler_registry(
        (Pending, InSlices(deepcopy_host_arrays=False)),
        (jax.Array, ocp.type_handlers.ArrayHandler()),  # not used; Orbax warns when it is missing
    )


@functools.cache
def _unsynchronized() -> Any:
    """Tensorstore's settings as Orbax makes them, but without waiting for the disk after each of very many files.

    All of them are made durable together before the checkpoint gets its name.
    """
    import tensorstore as ts

    return ts.Context(
        {
            "file_io_sync": False,
            "file_io_concurrency": {"limit": 128},
            "cache_pool#ocdbt": {"total_bytes_limit": 100_000_000},
        }
    )


def _slice_bytes(values: Sequence[Any]) -> int:
    total: int = sum(value.nbytes for value in values)
    return max(_SLICE_BYTES, total // _MOST_SLICES)


def _groups(sizes: Sequence[int], limit: int) -> Iterator[tuple[int, int]]:
    """Yield the bounds of consecutive groups of at most ``limit`` bytes, or of one array."""
    start, total = 0, 0
    for index, size in enumerate(sizes):
        if index > start and total + size > limit:
            yield start, index
            start, total = index, 0
        total += size
    if start < len(sizes):
        yield start, len(sizes)


def _chunk_shape(shape: tuple[int, ...], itemsize: int, limit: int) -> tuple[int, ...]:
    """Return the shape of consecutive pieces (in C order) of at most ``limit`` bytes, or of one element."""
    below = itemsize
    for axis in reversed(range(len(shape))):
        if below * shape[axis] > limit:
            return (*(1 for _ in range(axis)), max(1, limit // below), *shape[axis + 1 :])
        below *= shape[axis]
    return shape


def _boxes(shape: tuple[int, ...], chunks: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """Yield the pieces of an array, in C order."""
    counts = [math.ceil(length / chunk) for length, chunk in zip(shape, chunks, strict=True)]
    for place in np.ndindex(*counts):
        yield tuple(
            slice(i * chunk, min((i + 1) * chunk, length))
            for i, chunk, length in zip(place, chunks, shape, strict=True)
        )
