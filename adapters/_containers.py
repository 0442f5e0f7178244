"""Containers that a batch may use and that JAX does not know: registered as pytree nodes when first met.

dict, list, tuple, namedtuple, None, OrderedDict and defaultdict are JAX's own. Dataclasses, attrs classes and other
mappings (UserDict, a tokenizer's BatchEncoding) are rebuilt without calling their constructors, because leaves are
tracers inside a compiled step and a constructor may validate or copy them.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from ._leaves import Path, format_path

_registered: set[type] = set()


def attribute_names(value: Any) -> tuple[str, ...]:
    """Name the attributes of a dataclass or attrs instance that carry its content.

    Args:
        value: An instance.

    Returns:
        The declared fields in order, then further instance attributes in alphabetical order.
    """
    cls = type(value)
    if dataclasses.is_dataclass(cls):
        declared = [field.name for field in dataclasses.fields(cls)]
    else:
        declared = [attribute.name for attribute in cls.__attrs_attrs__]
    declared = [name for name in declared if hasattr(value, name)]
    extra = sorted(set(getattr(value, "__dict__", ())) - set(declared))
    return (*declared, *extra)


def rebuild_attributes(cls: type, names: Iterable[str], values: Iterable[Any]) -> Any:
    """Make an instance with the given attributes, without calling the constructor (frozen classes included)."""
    new: Any = object.__new__(cls)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(new, name, value)
    return new


def register_attributes_class(cls: type) -> None:
    """Make a dataclass or attrs class a pytree node, once.

    Args:
        cls: The class; subclasses are not covered.
    """
    if cls in _registered:
        return

    def with_keys(value: Any) -> tuple[Any, Any]:
        names = attribute_names(value)
        return tuple((jax.tree_util.GetAttrKey(name), getattr(value, name)) for name in names), names

    def flatten(value: Any) -> tuple[Any, Any]:
        names = attribute_names(value)
        return tuple(getattr(value, name) for name in names), names

    def unflatten(names: Any, children: Iterable[Any]) -> Any:
        return rebuild_attributes(cls, names, children)

    jax.tree_util.register_pytree_with_keys(cls, with_keys, unflatten, flatten)
    _registered.add(cls)


def _ordered_keys(value: Mapping[Any, Any]) -> tuple[Any, ...]:
    keys = tuple(value)
    try:
        return tuple(sorted(keys))
    except TypeError:  # keys of several types: keep the mapping's own order
        return keys


def _simple_attributes(value: Any, skip: str) -> tuple[tuple[str, Any], ...]:
    # only what is comparable may be part of the tree structure; the rest belongs to one batch and is reset
    found = []
    for name, item in sorted(getattr(value, "__dict__", {}).items()):
        if name != skip:
            found.append((name, item if item is None or isinstance(item, (bool, int, float, str)) else None))
    return tuple(found)


def rebuild_mapping(cls: type, structure: Any, values: Iterable[Any]) -> Any:
    """Make a mapping of a class from the structure that `mapping_structure` gave and the values."""
    keys, attributes = structure
    items = dict(zip(keys, values, strict=True))
    if issubclass(cls, dict):
        new: Any = cls.__new__(cls)
        for key, value in items.items():
            dict.__setitem__(new, key, value)
    elif issubclass(cls, collections.UserDict):
        new = object.__new__(cls)
        object.__setattr__(new, "data", items)
    else:
        make: Any = cls
        return make(items)
    for name, value in attributes:
        object.__setattr__(new, name, value)
    return new


def mapping_structure(value: Mapping[Any, Any]) -> Any:
    """Describe a mapping without its values: sorted keys and simple attributes."""
    return _ordered_keys(value), _simple_attributes(value, "data")


def register_mapping_class(cls: type, value: Mapping[Any, Any], path: Path) -> None:
    """Make a mapping class a pytree node, once.

    Args:
        cls: The class; subclasses are not covered.
        value: An instance, used to see whether instances can be rebuilt.
        path: Position of the instance, for messages.

    Raises:
        TypeError: If an instance cannot be rebuilt from its items.
    """
    if cls in _registered:
        return
    try:
        rebuilt = rebuild_mapping(cls, mapping_structure(value), [value[key] for key in _ordered_keys(value)])
        same = list(_ordered_keys(rebuilt)) == list(_ordered_keys(value))
    except Exception as error:
        raise TypeError(_cannot_rebuild(cls, path)) from error
    if not same:
        raise TypeError(_cannot_rebuild(cls, path))

    def with_keys(node: Any) -> tuple[Any, Any]:
        structure = mapping_structure(node)
        return tuple((jax.tree_util.DictKey(key), node[key]) for key in structure[0]), structure

    def flatten(node: Any) -> tuple[Any, Any]:
        structure = mapping_structure(node)
        return tuple(node[key] for key in structure[0]), structure

    def unflatten(structure: Any, children: Iterable[Any]) -> Any:
        return rebuild_mapping(cls, structure, children)

    jax.tree_util.register_pytree_with_keys(cls, with_keys, unflatten, flatten)
    _registered.add(cls)


def _cannot_rebuild(cls: type, path: Path) -> str:
    return (
        f"{format_path(path)} is a mapping of type {cls.__module__}.{cls.__qualname__} that cannot be rebuilt from its "
        "items, so it cannot go through a compiled step. Return dict(...) from the dataset or its collate function, or "
        "register the class with jax.tree_util.register_pytree_node."
    )
