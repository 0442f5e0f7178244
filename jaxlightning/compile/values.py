"""Comparing what an attribute held with what it holds."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["SIMPLE", "same_value"]

SIMPLE = (int, float, complex, bool, str, bytes, type(None))


def same_value(old: Any, new: Any, depth: int = 0) -> bool:
    """Whether a value still equals its snapshot."""
    if old is new:
        return True
    if isinstance(old, np.ndarray) and isinstance(new, np.ndarray):
        return (
            old.dtype == new.dtype
            and old.shape == new.shape
            and bool(np.array_equal(old, new, equal_nan=old.dtype.kind in "fc"))
        )
    if isinstance(old, SIMPLE) or isinstance(new, SIMPLE):
        return type(old) is type(new) and (old == new or (old != old and new != new))
    if isinstance(old, dict) and isinstance(new, dict):
        return old.keys() == new.keys() and all(same_value(old[k], new[k], depth + 1) for k in old)
    if type(old) is type(new) and isinstance(old, list | tuple):
        return len(old) == len(new) and all(same_value(a, b, depth + 1) for a, b in zip(old, new, strict=True))
    if isinstance(old, set | frozenset) and isinstance(new, set | frozenset):
        return old == new
    return False
