"""Loaders whose data lies in arrays: what the rows are, and whether somebody changed them.

A loop may take row numbers in place of batches (`Source.row_reader`) and gather the rows by itself, for example from
copies of the arrays on a device. The loader's own sampler decides the rows, as it decides the batches.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import numpy as np

from ._leaves import Array

Rows = Array
"""Integer `[n]`: the rows of one batch, none negative and none beyond the last."""

_WORDS = 4096
"""64-bit words of a block in `fingerprint`: 32 KB, so that a block stays in the processor's cache."""


class InMemory(Protocol):
    """The data of a loader, for one pass.

    Attributes:
        size: Number of rows.
        nbytes: Bytes of all columns, as batches have them.
        structure: `PyTreeDef` of a batch; its leaves are the columns.
    """

    size: int

    @property
    def nbytes(self) -> int:
        """Bytes of all columns, as batches have them."""

    @property
    def structure(self) -> Any:
        """`PyTreeDef` of a batch."""

    def columns(self) -> list[Array]:
        """Give the leaves of a batch of all rows, in their order; they may share memory with the user's arrays."""

    def gather(self, rows: Rows) -> Any:
        """Give the batch of some rows, as a pass without a row reader would."""

    def fingerprint(self) -> Hashable:
        """Give a value that changes whenever the data, or what is done with it, changes."""


RowReader = Callable[[InMemory], Callable[[Rows], Any] | None]
"""Asked once at the start of a pass; what it gives makes each batch of its rows. None: batches as usual."""


def fingerprint(arrays: Sequence[Array]) -> Hashable:
    """Sum arrays up so that any change shows, at the speed of memory (27 GB/s here, a CRC 2 GB/s).

    Sums of the 64-bit words along both axes of a table of blocks: an exchange of two words changes one or the other.

    Args:
        arrays: Arrays of plain numbers.

    Returns:
        Where each lies, its form and its sums.
    """
    return tuple((array.ctypes.data, array.shape, array.strides, array.dtype.str, *_sums(array)) for array in arrays)


def _sums(array: Array) -> tuple[int, ...]:
    data: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    table = data[: data.size // (8 * _WORDS) * (8 * _WORDS)].view(np.uint64).reshape(-1, _WORDS)
    rest = zlib.crc32(data[table.nbytes :])
    if not len(table):
        return (rest,)
    return zlib.crc32(table.sum(axis=0)), zlib.crc32(table.sum(axis=1)), rest
