"""Copies of arrays in the host's memory, in pages of their own.

What the C library's allocator gets back it often keeps, so that a snapshot that is dropped piece by piece would stay
in the process's memory all the same. A large copy therefore lies in a mapping of its own, which goes back to the
system when the array is dropped.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["HostCopies", "fresh_copy", "host_copies", "own_pages"]

_OWN_PAGES_FROM_BYTES = 1 << 20


def fresh_copy(array: np.ndarray) -> np.ndarray:
    """Copy an array, with its values only in common with the source."""
    if array.nbytes < _OWN_PAGES_FROM_BYTES or array.dtype.hasobject:
        return np.array(array, copy=True)
    copy = own_pages(array.shape, array.dtype)
    copy[...] = array
    return copy


def host_copies(leaves: Sequence[Any]) -> list[np.ndarray]:
    """Copy arrays of a device to the host; at no time is more than one of them held twice there.

    Args:
        leaves: JAX and numpy arrays; shards are put together.

    Returns:
        Arrays that nobody else holds.
    """
    # An array keeps what was fetched from it as long as it lives, so it is fetched from handles of its own.
    handles = [_handles(leaf) for leaf in leaves]
    for parts in handles:
        for _, part in parts or ():
            part.copy_to_host_async()  # all travel while the first one is waited for
    copies: list[np.ndarray] = []
    for index, leaf in enumerate(leaves):
        parts, handles[index] = handles[index], None
        if parts is None:
            copies.append(fresh_copy(np.asarray(jax.device_get(leaf))))
        elif len(parts) == 1:
            copies.append(fresh_copy(np.asarray(parts[0][1])))
        else:
            whole = own_pages(leaf.shape, leaf.dtype)
            while parts:
                place, part = parts.pop()
                whole[place] = np.asarray(part)
            copies.append(whole)
        del parts
    return copies


class HostCopies:
    """Remembers which copies of which arrays are still held by somebody, so that none is copied twice."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], weakref.ref[Any]]] = {}

    def of(self, leaves: Sequence[Any]) -> list[np.ndarray]:
        """Copy arrays, or return the copies of them that live; callers do not change what they get.

        Args:
            leaves: As for `host_copies`.
        """
        found = [self._living(leaf) for leaf in leaves]
        fresh = iter(host_copies([leaf for leaf, copy in zip(leaves, found, strict=True) if copy is None]))
        copies = [next(fresh) if copy is None else copy for copy in found]
        for leaf, copy in zip(leaves, copies, strict=True):
            if isinstance(leaf, jax.Array):
                self._known[id(leaf)] = weakref.ref(leaf), weakref.ref(copy)
        return copies

    def know(self, leaves: Sequence[Any]) -> bool:
        """Say whether all of these very arrays were copied."""
        return all((known := self._known.get(id(leaf))) is not None and known[0]() is leaf for leaf in leaves)

    def forget(self) -> None:
        """Forget everything."""
        self._known.clear()

    def _living(self, leaf: Any) -> np.ndarray | None:
        known = self._known.get(id(leaf))
        return known[1]() if known is not None and known[0]() is leaf else None


def _handles(leaf: Any) -> list[tuple[Any, jax.Array]] | None:
    """Return new handles on the parts of an array, with their places; None for what has to be fetched as it is."""
    if not isinstance(leaf, jax.Array) or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return None
    if leaf.is_fully_replicated:
        return [(..., leaf.addressable_data(0))]
    if not leaf.is_fully_addressable:
        return None
    # Not from `addressable_shards`: the array would keep those handles, and with them its memory when it is donated.
    places = leaf.sharding.addressable_devices_indices_map(leaf.shape)
    parts: dict[str, tuple[Any, jax.Array]] = {}
    for index in range(len(places)):
        part = leaf.addressable_data(index)
        place = places[next(iter(part.devices()))]
        parts.setdefault(str(place), (place, part))  # one of several replicas
    return list(parts.values())


def own_pages(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return an uninitialized array; a large one in pages of its own.

    Args:
        shape: Of the array.
        dtype: Of the array.
    """
    kind: np.dtype[Any] = np.dtype(dtype)
    nbytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    if nbytes < _OWN_PAGES_FROM_BYTES:
        return np.empty(shape, kind)
    if sys.platform == "win32":
        pages = mmap.mmap(-1, nbytes)
    else:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them
                pages.madvise(mmap.MADV_HUGEPAGE)  # fewer page faults; the training waits for this copy
    whole: np.ndarray = np.frombuffer(pages, np.uint8, count=nbytes).view(kind).reshape(shape)
    return whole
