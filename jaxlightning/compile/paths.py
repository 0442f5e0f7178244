"""Nested dictionaries of arrays and their flat form `{"a/b/c": leaf}`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Nested = dict[str, Any]


def flatten(tree: Mapping[str, Any], prefix: str = "", separator: str = "/") -> dict[str, Any]:
    """Flattens nested dictionaries; every other object is a leaf. Empty dictionaries vanish."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{separator}{key}" if prefix else str(key)
        if isinstance(value, Mapping):
            flat.update(flatten(value, path, separator))
        else:
            flat[path] = value
    return flat


def unflatten(flat: Mapping[str, Any], separator: str = "/") -> Nested:
    """The inverse of `flatten` (without empty dictionaries)."""
    tree: Nested = {}
    for path, value in flat.items():
        *parents, last = path.split(separator)
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = value
    return tree


def select(tree: Mapping[str, Any], keep: Callable[[str], bool], prefix: str = "") -> Nested:
    """The part of a nested dictionary whose leaf paths satisfy `keep`; empty branches are dropped."""
    out: Nested = {}
    for key, value in tree.items():
        path = f"{prefix}/{key}" if prefix else str(key)
        if isinstance(value, Mapping):
            branch = select(value, keep, path)
            if branch:
                out[key] = branch
        elif keep(path):
            out[key] = value
    return out


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> Nested:
    """`base` with the leaves of `over` put over it; both stay unchanged."""
    out: Nested = dict(base)
    for key, value in over.items():
        old = out.get(key)
        out[key] = merge(old, value) if isinstance(value, Mapping) and isinstance(old, Mapping) else value
    return out


def plain(tree: Any) -> Any:
    """Copies mappings (also frozen ones) into plain dictionaries with text keys; leaves are shared."""
    if isinstance(tree, Mapping):
        return {str(key): plain(value) for key, value in tree.items()}
    return tree
