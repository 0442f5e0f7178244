"""What `ArrayLoader` and `BucketLoader` share: loaders of ours whose order is a function of (`seed`, epoch) alone."""

from __future__ import annotations

from typing import Any, Self

from ._source import Source


class SeededLoader(Source):
    """A source over data in memory that is its own origin; without `set_epoch`, every pass is the next epoch.

    Args:
        shuffle: Whether every epoch has its own random order.
        drop_last: Whether to leave out batches that are not full.
        seed: Seed of the order.
    """

    resumes_by = "by skipping the indices (no data is read)"

    def __init__(self, *, shuffle: bool, drop_last: bool, seed: int) -> None:
        super().__init__(None)
        self.origin = self
        self.shuffle = bool(shuffle)
        self.drop_last = bool(drop_last)
        self.seed = int(seed)
        self._epoch_of_next_pass = 0

    @property
    def num_workers(self) -> int:
        """Always 0: indexing data in memory needs no workers."""
        return 0

    @property
    def is_shuffled(self) -> bool:
        """Whether epochs have random orders."""
        return self.shuffle

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass."""
        super().set_epoch(epoch)
        self._epoch_of_next_pass = epoch

    def state_dict(self) -> dict[str, Any]:
        """Position; between two passes it is the start of the next one."""
        state = super().state_dict()
        if self._iterator is None:
            state["epoch"] = self._epoch_of_next_pass
        return {**state, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position, in the saved order."""
        super().load_state_dict(state)
        self.seed = int(state["seed"])
        self._epoch_of_next_pass = self._epoch

    def sequential(self) -> Self:
        """Give a loader over the same data in its order."""
        if not self.shuffle:
            return self
        new = self._copy()
        new.shuffle = False
        return new

    def _copy(self) -> Self:
        new = super()._copy()
        new.origin = new
        return new
