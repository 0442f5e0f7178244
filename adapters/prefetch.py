"""Read a bounded number of batches ahead in one background thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

_END = object()


class Prefetcher(Iterator[Any]):
    """Iterate another iterator from a background thread.

    At most `size` items wait, and never more than `limit` items are taken from the iterator in all. An exception of the
    iterator is raised, with its own traceback, when its turn comes. `close()` stops the thread and closes the iterator.

    Args:
        iterator: What to read; used only by the thread until closed.
        size: Number of items to hold ready.
        limit: Number of items to take in all, or None.

    Raises:
        ValueError: If `size` is smaller than 1 or `limit` is negative.
    """

    def __init__(self, iterator: Iterator[Any], size: int = 2, limit: int | None = None) -> None:
        if size < 1:
            raise ValueError(f"size must be at least 1. Received: size={size}")
        if limit is not None and limit < 0:
            raise ValueError(f"limit must not be negative. Received: limit={limit}")
        self._iterator = iterator
        self._items: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue()
        # one slot per item that may wait: taken before reading, so nothing is pulled that nobody has room for
        self._slots = threading.Semaphore(size)
        self._stop = threading.Event()
        self._finished = False
        self._thread: threading.Thread | None = threading.Thread(
            target=_read_ahead,
            args=(iterator, limit, self._items, self._slots, self._stop),
            name="jaxlightning-prefetch",
            daemon=True,
        )
        self._thread.start()

    def __iter__(self) -> Prefetcher:
        return self

    def __next__(self) -> Any:
        if self._finished:
            raise StopIteration
        item, error = self._items.get()
        self._slots.release()
        if item is _END:
            self.close()
            if error is not None:
                raise error
            raise StopIteration
        return item

    def close(self) -> None:
        """Stop the thread, wait for it, and close the iterator."""
        self._finished = True
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._stop.set()
        self._slots.release()
        if thread is not threading.current_thread():
            thread.join()
        close = getattr(self._iterator, "close", None)
        if callable(close):
            close()

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_thread", None) is not None:
            self.close()


def _read_ahead(
    iterator: Iterator[Any],
    limit: int | None,
    items: queue.Queue[tuple[Any, BaseException | None]],
    slots: threading.Semaphore,
    stop: threading.Event,
) -> None:
    # a plain function: a method would keep the Prefetcher alive and `__del__` would never run
    taken = 0
    error: BaseException | None = None
    try:
        while limit is None or taken < limit:
            slots.acquire()
            if stop.is_set():
                return
            items.put((next(iterator), None))
            taken += 1
    except StopIteration:
        pass
    except BaseException as raised:  # handed to the reader, whose turn it is to raise it
        error = raised
    items.put((_END, error))


def prefetched(iterator: Iterator[Any], size: int, limit: int | None = None) -> Iterator[Any]:
    """Wrap an iterator in a `Prefetcher`; with `size=0` give it back unchanged.

    Args:
        iterator: What to read.
        size: Number of items to hold ready; 0 turns prefetching off.
        limit: Number of items to take in all, or None.

    Returns:
        An iterator with `close()` if the original has one.
    """
    return iterator if size == 0 else Prefetcher(iterator, size, limit)
