"""Loaders of given batches, and what takes and notes them, for either library."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.beside import Side, events_callback, plain


class Items:
    """One loader: a plain iterable of given batches."""

    def __init__(self, *batches: Any) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        return iter(self.batches)


def watching(side: Side, seen: list[Any], *hooks: str) -> Any:
    def note(hook: str, trainer: Any, module: Any, batch: Any, *at: int) -> None:
        seen.append([plain(batch), *at])

    return events_callback(side, list(hooks), note)


def free(side: Side) -> Any:
    """A module whose steps accept any batch."""

    class Free(side.Tiny):  # type: ignore[name-defined,misc]
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            return (self.layer(side.array(np.zeros((1, 4)))) ** 2).mean()

        def validation_step(self, batch: Any, batch_idx: Any, dataloader_idx: Any = 0) -> None:
            return None

        def predict_step(self, batch: Any, batch_idx: Any, dataloader_idx: Any = 0) -> Any:
            return batch_idx

    return Free()
