"""`Trainer(prefetch_batches=n)`: batches are read, and sent to the accelerator, by a background thread.

Dispatch is asynchronous, so the loop reads the next batch while the device computes anyway, and on a CPU numpy goes
straight into the compiled call; a thread pays off for loaders whose Python spends its time outside the interpreter lock
(files, sockets, decoding). It is off by default.

The thread reads ahead, so the loader's position is taken after every batch and handed out with it: a checkpoint says
where the loop is, not where the thread is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from jaxlightning.adapters import Prefetcher
from jaxlightning.compile.batch import is_array

__all__ = ["PrefetchedSource", "to_device"]


class PrefetchedSource(Iterable[Any]):
    """A source that is read ahead by one thread, never beyond its limit.

    Args:
        source: A source of an adapter, or several of its batches joined (`GroupedSource`).
        size: Batches to hold ready.
        move: What to do with each batch in the thread, or None.

    Attributes:
        limit: The most batches of one pass, those that a resume skips included.
    """

    def __init__(self, source: Any, size: int, move: Callable[[Any], Any] | None = None) -> None:
        self.source = source
        self.size = size
        self.limit: int | float = math.inf
        self._move = move
        self._reader: _Reader | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> _Reader:
        self._close_reader()
        self._reader = _Reader(self)
        return self._reader

    @property
    def last_batch_indices(self) -> list[int] | None:
        """Dataset indices of the batch handed out last, where they are known."""
        found: list[int] | None = self.source.last_batch_indices if self._reader is None else self._reader.indices
        return found

    def state_dict(self) -> dict[str, Any]:
        """Where the loop is: after the batch handed out last."""
        state: dict[str, Any] = self.source.state_dict() if self._reader is None else self._reader.state
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position."""
        self._close_reader()
        self.source.load_state_dict(state)

    def finish_pass(self) -> None:
        """Ask the loader once more after its last batch; the thread has stopped there."""
        self.source.finish_pass()
        if self._reader is not None:
            self._reader.state = self.source.state_dict()

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes next; the thread of an earlier pass ends first."""
        self._close_reader()
        self.source.set_epoch(epoch)

    def sequential(self) -> PrefetchedSource:
        """The same batches without shuffling."""
        return PrefetchedSource(self.source.sequential(), self.size, self._move)

    def close(self) -> None:
        """End the thread and release what the source holds."""
        self._close_reader()
        self.source.close()

    def _close_reader(self) -> None:
        if self._reader is not None:
            self._reader.close()


class _Reader(Iterator[Any]):
    """One pass."""

    def __init__(self, owner: PrefetchedSource) -> None:
        self._owner = owner
        source = owner.source
        batches = iter(source)
        self.state: dict[str, Any] = source.state_dict()
        self.indices: list[int] | None = None
        done = math.ceil(int(self.state.get("batch", 0)) / getattr(source, "n", 1))
        limit = None if owner.limit == math.inf else max(0, int(owner.limit) - done)
        self._prefetcher = Prefetcher(_with_position(source, batches, owner._move), owner.size, limit)

    def __next__(self) -> Any:
        try:
            batch, self.state, self.indices = next(self._prefetcher)
        except BaseException:  # the end included: the pass is over, and the source knows where it stands
            self.close()
            raise
        return batch

    def close(self) -> None:
        """End the thread and the pass."""
        if self._owner._reader is self:
            self._owner._reader = None
        self._prefetcher.close()


def _with_position(source: Any, batches: Any, move: Callable[[Any], Any] | None) -> Iterator[Any]:
    try:
        for batch in batches:
            yield batch if move is None else move(batch), source.state_dict(), source.last_batch_indices
    finally:
        close = getattr(batches, "close", None)
        if callable(close):
            close()


def to_device(strategy: Any) -> Callable[[Any], Any] | None:
    """Make what starts the transfer of a batch's arrays, or None on a CPU, where numpy is what the call takes fastest.

    Args:
        strategy: The strategy of the run.
    """
    device = strategy.root_device
    if device.platform == "cpu":
        return None
    sharding_of = getattr(strategy, "batch_sharding", None)

    def move(batch: Any) -> Any:
        return jax.tree.map(
            lambda leaf: (
                jax.device_put(leaf, device if sharding_of is None else sharding_of(leaf))
                if isinstance(leaf, np.ndarray) and is_array(leaf)
                else leaf
            ),
            batch,
        )

    return move
