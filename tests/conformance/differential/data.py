"""Loaders that hand out the same numbers to both sides."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

FEATURES = 2


def batch_rows(start: int, index: int, size: int) -> np.ndarray:
    """Return the float32 rows `[size, FEATURES]` of a batch: quarters, so that short sums are exact."""
    rng = np.random.default_rng([start, index])
    return (rng.integers(-6, 7, (size, FEATURES)) / 4).astype(np.float32)


class Sizeless:
    """An iterable without a length.

    Args:
        spec: The loader's part of the configuration.
        convert: Makes a batch of the side out of rows.
    """

    def __init__(self, spec: dict[str, Any], convert: Callable[[np.ndarray], Any]) -> None:
        self.spec, self.convert = spec, convert

    def __iter__(self) -> Iterator[Any]:
        for index, size in enumerate(self.spec["sizes"]):
            yield self.convert(batch_rows(self.spec["start"], index, size))


class Sized(Sizeless):
    """An iterable with a length, which may claim more batches than it has."""

    def __len__(self) -> int:
        return int(self.spec.get("claims", len(self.spec["sizes"])))


class Stateful(Sized):
    """One that tells where it stands, and goes on there once."""

    def __init__(self, spec: dict[str, Any], convert: Callable[[np.ndarray], Any]) -> None:
        super().__init__(spec, convert)
        self.position = self.first = 0

    def state_dict(self) -> dict[str, int]:
        """Return the position."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Let the next pass begin there."""
        self.first = state["position"] % len(self)

    def __iter__(self) -> Iterator[Any]:
        first, self.first = self.first, 0
        for index, batch in enumerate(super().__iter__()):
            if index >= first:
                self.position = index + 1
                yield batch


def make_loader(spec: dict[str, Any], convert: Callable[[np.ndarray], Any]) -> Any:
    """Make one loader.

    Args:
        spec: `kind`, `sizes` (rows of each batch), `start` (which numbers), `claims` for a loader that ends early.
        convert: Makes a batch of the side out of rows.

    Returns:
        The loader; a torch DataLoader for the kinds `torch` and `shuffled`.
    """
    kind = spec["kind"]
    if kind == "sizeless":
        return Sizeless(spec, convert)
    if kind in ("torch", "shuffled"):
        import torch
        from torch.utils.data import DataLoader, TensorDataset

        rows = [batch_rows(spec["start"], index, size) for index, size in enumerate(spec["sizes"])]
        table = np.concatenate(rows) if rows else np.zeros((0, FEATURES), np.float32)
        if kind == "shuffled":
            return DataLoader(TensorDataset(torch.from_numpy(table)), batch_size=2, shuffle=True)
        return DataLoader(TensorDataset(torch.from_numpy(table)), batch_size=2)
    return (Stateful if kind == "stateful" else Sized)(spec, convert)


def make_loaders(spec: dict[str, Any], convert: Callable[[np.ndarray], Any], combined: Any) -> Any:
    """Make what is passed to a verb or returned by a hook.

    Args:
        spec: `join` and `loaders`.
        convert: Makes a batch of the side out of rows.
        combined: The side's CombinedLoader.

    Returns:
        A loader, a list or a dictionary of loaders, a CombinedLoader, or None without any loader.
    """
    loaders = [make_loader(each, convert) for each in spec["loaders"]]
    join = spec["join"]
    if not loaders:
        return None
    if join is None:
        return loaders[0]
    if join == "list":
        return loaders
    if join == "dict":
        return {f"k{number}": each for number, each in enumerate(loaders)}
    return combined(loaders, join)


def ends_early(train: dict[str, Any], flags: dict[str, Any]) -> bool:
    """Say whether the train loaders give fewer batches than their lengths and the limit announce."""
    limit = flags.get("fast_dev_run") or flags.get("overfit_batches") or flags.get("limit_train_batches", 1.0)
    if isinstance(limit, float) and limit != 1.0:
        return False
    most = math.inf if isinstance(limit, float) else int(limit)
    reduce = min if train["join"] == "min_size" else max
    loaders = train["loaders"]
    given = reduce(min(len(spec["sizes"]), most) for spec in loaders)
    announced = reduce(min(_announced(spec), most) for spec in loaders)
    return given < announced < math.inf


def _announced(spec: dict[str, Any]) -> float:
    return math.inf if spec["kind"] == "sizeless" else spec.get("claims", len(spec["sizes"]))


def leaves(batch: Any) -> list[Any]:
    """Return the arrays of a batch in order; None (a loader that has ended) is left out."""
    if batch is None:
        return []
    if isinstance(batch, dict):
        return [leaf for key in sorted(batch) for leaf in leaves(batch[key])]
    if isinstance(batch, (list, tuple)):
        return [leaf for each in batch for leaf in leaves(each)]
    return [batch]
