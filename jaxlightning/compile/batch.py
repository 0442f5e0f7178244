"""Splitting a batch into arrays for the device and leaves that stay on the host."""

from __future__ import annotations

from typing import Any, NoReturn

import jax
import numpy as np

__all__ = ["HostLeaf", "join", "leaf_paths", "split"]


class HostLeaf:
    """Stands inside a compiled step for a batch leaf that JAX cannot hold; any use raises and names its path."""

    __slots__ = ("_path", "_type")
    _path: str
    _type: str

    def __init__(self, path: str, kind: str) -> None:
        object.__setattr__(self, "_path", path)
        object.__setattr__(self, "_type", kind)

    def _refuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise TypeError(
            f"The step uses the batch leaf {self._path!r}, a {self._type} that JAX cannot hold. Such leaves stay on "
            "the "
            "host: hooks that receive the batch see them, a compiled step does not. Encode it as numbers in the data "
            "loader, or use `Trainer(jit=False)`."
        )

    def __repr__(self) -> str:
        return f"<host leaf {self._path!r}: {self._type}>"

    __call__ = __getattr__ = __getitem__ = __iter__ = __len__ = __bool__ = __int__ = __float__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __array__ = _refuse
    __hash__ = object.__hash__


def is_array(leaf: Any) -> bool:
    """Whether JAX can hold the leaf."""
    if isinstance(leaf, jax.Array):
        return True
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.dtype.kind not in "OSUMm"
    return False


def split(leaves: list[Any]) -> tuple[list[Any], tuple[int, ...] | None]:
    """Arrays of a flattened batch and, when some leaves must stay on the host, the positions of the arrays."""
    for leaf in leaves:
        if type(leaf) is not np.ndarray or leaf.dtype.kind in "OSUMm":
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


def join(treedef: Any, arrays: Any, positions: tuple[int, ...] | None, paths: list[str], kinds: list[str]) -> Any:
    """The batch that a step sees: arrays at their places, `HostLeaf` stand-ins elsewhere."""
    if positions is None:
        return jax.tree_util.tree_unflatten(treedef, arrays)
    leaves: list[Any] = [HostLeaf(path, kind) for path, kind in zip(paths, kinds, strict=True)]
    for position, array in zip(positions, arrays, strict=True):
        leaves[position] = array
    return jax.tree_util.tree_unflatten(treedef, leaves)
