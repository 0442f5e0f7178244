"""How Orbax writes the arrays of a snapshot: not copied again, a little at a time, each forgotten when it is written.

Orbax's own handler copies every array first, writes all of them at once, and everybody who was given the tree holds it
until the end, so that a save takes three times the state beside the live one. Here the snapshot shrinks while it is
written, and what is under way at any moment is a slice. So that both together are never more than the state, an array
that comes late is put on disk before the first slice is taken (`lend`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxlightning.utilities.host_memory import own_pages

#: What is under way at once: this, or this part of the item for items so large that they would fall into very many
#: pieces. Storage takes about three times of it: the source, its compressed form, and the file that is written.
_SLICE_BYTES = 1 << 20
_MOST_SLICES = 256

#: Snapshots of fewer bytes lend nothing: there what a save takes is counted in what Python itself takes.
_LENDING_FROM_BYTES = 32 << 20
#: What is lent: so many slices, and what the storage library takes for itself (threads, tables).
_SLICES_UNDER_WAY, _LIBRARY_BYTES = 4, 2 << 20
#: An array of more than this part of the snapshot is not lent: it would be written twice.
_LARGEST_LENT = 0.25


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
        self._file: Any = None
        self.shape, self.dtype, self.size, self.nbytes = array.shape, array.dtype, array.size, array.nbytes

    def take(self) -> np.ndarray:
        """Return the array and forget it.

        Raises:
            RuntimeError: It was taken before.
            OSError: It was lent, and cannot be read back.
        """
        array, self._array = self._array, None
        file, self._file = self._file, None
        if file is not None:
            with file:
                array = own_pages(self.shape, self.dtype)
                file.seek(0)
                left = _bytes_of(array)
                while left:  # one call reads 2 GiB at most
                    count = file.readinto(left)
                    if not count:
                        raise OSError("A part of a snapshot that lay on disk until its turn cannot be read back.")
                    left = left[count:]
        if array is None:
            raise RuntimeError("This array was written and is gone; a snapshot can be written once.")
        return array

    def lend(self, folder: str | os.PathLike[str]) -> None:
        """Put the array into a file without a name, from which `take` reads it.

        Args:
            folder: Where the file lies.

        Raises:
            OSError: It cannot be written; the array stays in memory.
        """
        array = self._array
        if array is None or not array.flags.c_contiguous:
            return
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(tempfile.TemporaryFile(dir=folder, buffering=0))
            left = _bytes_of(array)
            while left:
                left = left[file.write(left) :]
            stack.pop_all()
        self._array, self._file = None, file

    def close(self) -> None:
        """Forget the array, also one that was lent."""
        file, self._file, self._array = self._file, None, None
        if file is not None:
            file.close()


def lend(arrays: Sequence[Pending], folder: str | os.PathLike[str]) -> None:
    """Put as much of a large snapshot on disk as writing it takes besides.

    What is lent comes back when at least as much was written and is gone.

    Args:
        arrays: The snapshot, in the order in which it will be written.
        folder: Where the files lie, which have no names.
    """
    total = sum(array.nbytes for array in arrays)
    if total < _LENDING_FROM_BYTES:
        return
    wanted = _SLICES_UNDER_WAY * _slice_bytes(arrays) + _LIBRARY_BYTES
    before = itertools.accumulate((array.nbytes for array in arrays), initial=0)
    late = [
        array
        for array, written in zip(arrays, before, strict=False)
        if written >= wanted and array.nbytes <= _LARGEST_LENT * total
    ]
    large = [array for array in late if array.nbytes >= wanted]
    chosen = [min(large, key=lambda array: array.nbytes)] if large else sorted(late, key=lambda array: -array.nbytes)
    with contextlib.suppress(OSError):  # no room: the save takes a little more memory
        for array in chosen:
            if wanted <= 0:
                return
            array.lend(folder)
            wanted -= array.nbytes


def _bytes_of(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


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
