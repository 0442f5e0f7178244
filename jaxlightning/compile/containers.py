"""Containers of arrays on a module: taken apart into arrays and a skeleton, put together again, filled in place.

A container that a step reads is part of the carried state: its arrays are leaves, its shape (types, keys, lengths, and
every value that is no array) is the skeleton, which is static. Known are list, tuple, named tuple, dict with its
standard relatives, deque, dataclasses, and whatever is registered as a pytree.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jaxlightning.compile.outputs import is_array
from jaxlightning.compile.values import same_value

__all__ = [
    "Carried",
    "Skeleton",
    "array_paths",
    "has_arrays",
    "is_container",
    "map_items",
    "rebuild",
    "take_apart",
    "transplant",
]

_DICTS = (dict, collections.OrderedDict, collections.defaultdict)
_MAX_DEPTH = 12


def is_container(value: Any) -> bool:
    """Whether a value is of a kind that can be taken apart."""
    return _kind(value) is not None


def _kind(value: Any) -> str | None:
    cls = type(value)
    if cls is list:
        return "list"
    if cls in _DICTS:
        return "dict"
    if cls is collections.deque:
        return "deque"
    if isinstance(value, tuple) and (cls is tuple or hasattr(cls, "_fields")):
        return "tuple"
    if isinstance(value, type) or is_array(value):
        return None
    if any(c.__module__.startswith(("flax.linen", "flax.nnx", "jaxlightning")) for c in cls.__mro__):
        return None
    if dataclasses.is_dataclass(value) or is_user_object(value):
        return "object"
    return "tree" if _is_registered(value) else None


def _is_registered(value: Any) -> bool:
    if value is None or isinstance(value, str | bytes | int | float | complex):
        return False
    return not jax.tree_util.all_leaves([value])


_FOREIGN = frozenset(
    {
        "jaxlightning", "jax", "jaxlib", "flax", "optax", "numpy", "torch", "torchvision", "tensorflow", "grain",
        "datasets", "lightning", "tensorboardX", "logging", "builtins", "functools", "types", "pathlib", "wandb",
        "threading", "queue", "matplotlib", "orbax", "chex", "equinox", "haiku",
    }
)  # fmt: skip
"""Packages whose objects keep their own state; objects of other classes are containers of their attributes."""


def is_user_object(value: Any) -> bool:
    """Whether a value is an object of the user's own, whose attributes a step may change."""
    if isinstance(value, type | types.FunctionType | types.MethodType | types.ModuleType | enum.Enum):
        return False
    if not hasattr(value, "__dict__") or isinstance(value, dict | list | tuple | set):
        return False
    return not any(cls.__module__.split(".")[0] in _FOREIGN for cls in type(value).__mro__ if cls is not object)


class Skeleton:
    """Everything of a container but its arrays, comparable and hashable, so that it can be part of a tree's structure.

    Attributes:
        kind: `"array"`, `"constant"`, or which kind of container.
        meta: What is needed to build it: a type, keys, a value.
        children: Skeletons of its items.
    """

    __slots__ = ("children", "kind", "meta")

    def __init__(self, kind: str, meta: Any = None, children: tuple[Skeleton, ...] = ()) -> None:
        self.kind = kind
        self.meta = meta
        self.children = children

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Skeleton)
            and self.kind == other.kind
            and len(self.children) == len(other.children)
            and (same_value(self.meta, other.meta) if self.kind == "constant" else bool(self.meta == other.meta))
            and self.children == other.children
        )

    def __hash__(self) -> int:
        return hash((self.kind, self.children))

    def __repr__(self) -> str:
        return f"Skeleton({self.kind}, {self.meta!r:.40}, {list(self.children)!r})"


@jax.tree_util.register_pytree_with_keys_class
class Carried:
    """A container in the carried state.

    Attributes:
        arrays: Its arrays, in the order of the skeleton.
        skeleton: The rest.
    """

    __slots__ = ("arrays", "skeleton")

    def __init__(self, arrays: tuple[Any, ...], skeleton: Skeleton) -> None:
        self.arrays = arrays
        self.skeleton = skeleton

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], Skeleton]:
        """The arrays with their paths."""
        keys = [jax.tree_util.GetAttrKey(path) for path in array_paths(self.skeleton)]
        return tuple(zip(keys, self.arrays, strict=True)), self.skeleton

    def tree_flatten(self) -> tuple[tuple[Any, ...], Skeleton]:
        """The arrays."""
        return tuple(self.arrays), self.skeleton

    @classmethod
    def tree_unflatten(cls, skeleton: Skeleton, arrays: Any) -> Carried:
        """The inverse of `tree_flatten`."""
        return cls(tuple(arrays), skeleton)

    def container(self) -> Any:
        """A fresh container with these arrays."""
        return rebuild(self.skeleton, iter(self.arrays))


def has_arrays(value: Any, depth: int = 0) -> bool:
    """Whether a value is an array of JAX's or a container that holds one."""
    if isinstance(value, jax.Array):
        return True
    if depth > _MAX_DEPTH:
        return False
    kind = _kind(value)
    if kind == "object" and not dataclasses.is_dataclass(value):
        return False  # constants, until a step changes them
    return kind is not None and any(has_arrays(item, depth + 1) for _, item in _items(value, kind))


def _items(value: Any, kind: str) -> list[tuple[Any, Any]]:
    if kind == "dict":
        return list(value.items())
    if kind == "object":
        return [(name, item) for name, item in vars(value).items()] if hasattr(value, "__dict__") else []
    if kind == "tree":
        leaves, _ = jax.tree_util.tree_flatten(value, is_leaf=lambda node: node is not value)
        return list(enumerate(leaves))
    return list(enumerate(value))


def take_apart(value: Any, convert: Callable[[str, Any], Any] | None = None, *, copies: bool = True) -> Carried:
    """Splits a container into arrays and skeleton.

    Args:
        value: A container, or a single value.
        convert: Called with the path and value of every leaf; may give an array in its place.
        copies: Whether objects without arrays are taken apart too, so that the result shares none with `value`.
    """
    arrays: list[Any] = []

    def visit(item: Any, path: str, depth: int) -> Skeleton:
        kind = _kind(item) if depth <= _MAX_DEPTH else None
        if kind is None:
            item = item if convert is None else convert(path, item)
            if is_array(item) and getattr(item, "dtype", np.dtype(object)).kind not in "OSUMm":
                arrays.append(item)
                return Skeleton("array")
            return Skeleton("constant", item)
        items = _items(item, kind)
        before = len(arrays)
        children = tuple(visit(child, f"{path}/{key}" if path else str(key), depth + 1) for key, child in items)
        if not copies and kind in ("object", "tree") and len(arrays) == before and convert is None:
            return Skeleton("constant", item)
        return Skeleton(kind, _meta(item, kind, [key for key, _ in items]), children)

    skeleton = visit(value, "", 0)
    return Carried(tuple(arrays), skeleton)


def _meta(value: Any, kind: str, keys: list[Any]) -> Any:
    cls = type(value)
    if kind == "dict":
        return cls, getattr(value, "default_factory", None), tuple(keys)
    if kind == "deque":
        return value.maxlen
    if kind == "tuple":
        return cls
    if kind == "object":
        return cls, tuple(keys)
    if kind == "tree":
        return jax.tree_util.tree_structure(value, is_leaf=lambda node: node is not value)
    return None


def rebuild(skeleton: Skeleton, arrays: Iterator[Any]) -> Any:
    """A fresh container from a skeleton and its arrays, in order."""
    kind, meta = skeleton.kind, skeleton.meta
    if kind == "array":
        return next(arrays)
    if kind == "constant":
        return meta
    items = [rebuild(child, arrays) for child in skeleton.children]
    if kind == "list":
        return items
    if kind == "deque":
        return collections.deque(items, meta)
    if kind == "tuple":
        return meta(*items) if hasattr(meta, "_fields") else tuple(items)
    if kind == "dict":
        cls, factory, keys = meta
        made = cls(factory) if cls is collections.defaultdict else cls()
        made.update(zip(keys, items, strict=True))
        return made
    if kind == "object":
        cls, keys = meta
        made = object.__new__(cls)
        for key, item in zip(keys, items, strict=True):
            object.__setattr__(made, key, item)
        return made
    return jax.tree_util.tree_unflatten(meta, items)


def array_paths(skeleton: Skeleton, path: str = "") -> list[str]:
    """Readable paths of a skeleton's arrays, in order; `""` for a single array."""
    if skeleton.kind == "array":
        return [path]
    keys: Any = range(len(skeleton.children))
    if skeleton.kind == "dict":
        keys = skeleton.meta[2]
    elif skeleton.kind == "object":
        keys = skeleton.meta[1]
    return [
        found
        for key, child in zip(keys, skeleton.children, strict=True)
        for found in array_paths(child, f"{path}/{key}" if path else str(key))
    ]


def map_items(value: Any, function: Callable[[Any], Any]) -> Any:
    """Applies a function to everything in nested lists, tuples and dicts; unlike a pytree's map it keeps the order."""
    if type(value) is list:
        return [map_items(item, function) for item in value]
    if type(value) is tuple:
        return tuple(map_items(item, function) for item in value)
    if type(value) is dict:
        return {key: map_items(item, function) for key, item in value.items()}
    return function(value)


def transplant(target: Any, fresh: Any) -> Any:
    """Gives a container of the user's the contents of a fresh one, in place where its type allows it.

    Args:
        target: The user's object.
        fresh: A container with the contents that it is to have.

    Returns:
        `target`, or `fresh` where `target` cannot be changed in place.
    """
    kind = _kind(target)
    if kind is None or type(target) is not type(fresh) or kind in ("tuple", "tree") or _frozen(target):
        return fresh
    if kind == "list":
        target[:] = [transplant(*pair) for pair in _paired(list(target), list(fresh))]
    elif kind == "deque":
        items = [transplant(*pair) for pair in _paired(list(target), list(fresh))]
        target.clear()
        target.extend(items)
    elif kind == "dict":
        entries = {key: transplant(target.get(key), item) for key, item in fresh.items()}
        target.clear()
        target.update(entries)
    else:
        for name, item in vars(fresh).items():
            object.__setattr__(target, name, transplant(vars(target).get(name), item))
    return target


def _frozen(value: Any) -> bool:
    parameters = getattr(type(value), "__dataclass_params__", None)
    return parameters is not None and bool(parameters.frozen)


def _paired(old: list[Any], new: list[Any]) -> list[tuple[Any, Any]]:
    return [(old[i] if i < len(old) else None, item) for i, item in enumerate(new)]
