"""Objects of Lightning itself, recognised so that the loops can treat them as their own."""

from __future__ import annotations

import dataclasses
from typing import Any, NoReturn

from ._convert import from_library
from ._source import SourceOptions

_PACKAGES = ("lightning.pytorch", "pytorch_lightning", "lightning")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CombinedParts:
    """What a CombinedLoader is made of.

    Attributes:
        iterables: The user's collection of loaders, unchanged.
        mode: "min_size", "max_size", "max_size_cycle" or "sequential".
        limits: Per-loader limits, if set.
    """

    iterables: Any
    mode: str
    limits: Any = None


def combined_parts(obj: Any) -> CombinedParts | None:
    """Take a CombinedLoader of Lightning apart; the loops do the combining.

    Args:
        obj: Any object.

    Returns:
        Its parts, or None if it is no CombinedLoader of Lightning.
    """
    if not any(from_library(type(obj), package, "CombinedLoader") for package in _PACKAGES):
        return None
    return CombinedParts(iterables=obj.iterables, mode=str(obj._mode), limits=getattr(obj, "_limits", None))


def is_lightning_datamodule(obj: Any) -> bool:
    """Tell whether an object is a LightningDataModule of Lightning itself (its hooks have the names of ours)."""
    return any(from_library(type(obj), package, "LightningDataModule") for package in _PACKAGES)


def refuse_combined(obj: Any, options: SourceOptions) -> NoReturn:
    """Refuse a CombinedLoader where one loader is expected.

    Raises:
        TypeError: Always.
    """
    raise TypeError(
        "Received a CombinedLoader where one loader is expected: it combines several. Pass it to the Trainer, which "
        f"reads each of its loaders and combines them in mode {getattr(obj, '_mode', None)!r}."
    )
