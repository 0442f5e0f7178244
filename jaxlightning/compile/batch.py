"""Splitting a batch into arrays for the device and leaves that stay on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import numpy as np

__all__ = ["HostLeaf", "host_leaf_of", "join", "leaf_paths", "split"]


_HOST_KINDS = "OSUMmVT"
"""Kinds of NumPy arrays that JAX cannot hold, or (V) not always."""


class HostLeaf:
    """Stands inside a compiled step for a batch leaf that JAX cannot hold.

    It may be handed on: appended to a list on the module, given to a logger, returned. Whoever gets it, gets the leaf
    of the batch of that step. A use of its value raises and names its path.

    Args:
        path: Where it is in the batch.
        kind: Name of its type.
        index: Its number among the leaves of the batch.
    """

    __slots__ = ("_index", "_path", "_type")
    _path: str
    _type: str
    _index: int

    def __init__(self, path: str, kind: str, index: int) -> None:
        object.__setattr__(self, "_path", path)
        object.__setattr__(self, "_type", kind)
        object.__setattr__(self, "_index", index)

    def _refuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise TypeError(
            f"The step uses the batch leaf {self._path!r}, a {self._type} that JAX cannot hold. Such leaves stay on "
            "the host: a compiled step may append one to a list on `self`, give it to a logger or return it, but not "
            "look at it. Hooks that receive the batch see it. Encode it as numbers in the data loader, or use "
            "`Trainer(jit=False)`."
        )

    def __repr__(self) -> str:
        return f"<host leaf {self._path!r}: {self._type}>"

    __call__ = __getattr__ = __getitem__ = __iter__ = __len__ = __bool__ = __int__ = __float__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __array__ = _refuse
    __str__ = __format__ = _refuse
    __hash__ = object.__hash__


def is_array(leaf: Any) -> bool:
    """Whether JAX can hold the leaf."""
    if isinstance(leaf, jax.Array):
        return True
    if isinstance(leaf, np.ndarray | np.generic):
        kind = leaf.dtype.kind
        # bfloat16 and its like have the kind of records; records, raw bytes and NumPy's own strings have no place there
        return kind not in _HOST_KINDS or (kind == "V" and leaf.dtype.type.__module__.startswith("ml_dtypes"))
    return False


def split(leaves: list[Any]) -> tuple[list[Any], tuple[int, ...] | None]:
    """Arrays of a flattened batch and, when some leaves must stay on the host, the positions of the arrays."""
    for leaf in leaves:
        if type(leaf) is not np.ndarray or leaf.dtype.kind in _HOST_KINDS:
            break
    else:
        return leaves, None
    positions = tuple(
        i for i, leaf in enumerate(leaves) if is_array(leaf) or isinstance(leaf, bool | int | float | complex)
    )
    arrays = [leaves[i] if is_array(leaves[i]) else np.asarray(leaves[i]) for i in positions]
    return arrays, (None if len(positions) == len(leaves) else positions)


def leaf_paths(batch: Any) -> list[str]:
    """A readable path for every leaf, in flattening order."""
    return [jax.tree_util.keystr(path) or "batch" for path, _ in jax.tree_util.tree_flatten_with_path(batch)[0]]


def host_leaf_of(item: Any, leaves: Sequence[Any] | None) -> Any:
    """The leaf of the batch that a `HostLeaf` stands for; anything else as it is."""
    return leaves[item._index] if type(item) is HostLeaf and leaves is not None else item


def join(treedef: Any, arrays: Any, positions: tuple[int, ...] | None, paths: list[str], kinds: list[str]) -> Any:
    """The batch that a step sees: arrays at their places, `HostLeaf` stand-ins elsewhere."""
    if positions is None:
        return jax.tree_util.tree_unflatten(treedef, arrays)
    return joined(
        treedef, arrays, positions, [HostLeaf(*each) for each in zip(paths, kinds, range(len(paths)), strict=True)]
    )


def joined(treedef: Any, arrays: Any, positions: Sequence[int], others: Sequence[Any]) -> Any:
    """A batch of arrays at their places and of something else at the others."""
    leaves = list(others)
    for position, array in zip(positions, arrays, strict=True):
        leaves[position] = array
    return jax.tree_util.tree_unflatten(treedef, leaves)
