"""A value of the user's step on its way out of the compiled call: arrays travel, everything else is remembered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxlightning.compile.batch import host_leaf_of

__all__ = ["OutputTree", "is_array"]


class OutputTree:
    """Structure of a step's return value: arrays travel through the compiled call, everything else is remembered."""

    def __init__(self, value: Any) -> None:
        leaves, self._treedef = jax.tree_util.tree_flatten(value)
        self._static = [None if is_array(leaf) else leaf for leaf in leaves]
        self._is_array = [is_array(leaf) for leaf in leaves]
        self.arrays = tuple(leaf for leaf in leaves if is_array(leaf))

    def detach(self) -> tuple[Any, ...]:
        """The arrays; afterwards the object holds only the structure."""
        arrays, self.arrays = self.arrays, ()
        return arrays

    def rebuild(self, arrays: Sequence[Any], batch: Sequence[Any] | None = None) -> Any:
        """The user's return value with concrete arrays, and the leaves of a batch that stayed on the host."""
        given = iter(arrays)
        pairs = zip(self._is_array, self._static, strict=True)
        leaves = [next(given) if is_array else host_leaf_of(static, batch) for is_array, static in pairs]
        return jax.tree_util.tree_unflatten(self._treedef, leaves)


def is_array(leaf: Any) -> bool:
    """Whether a value of a step is an array."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)
