"""Hyper-parameters in the shape that loggers can record: flat, and with plain values."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["convert_params", "flatten_dict", "sanitize_params"]


def convert_params(params: Mapping[str, Any] | Namespace | None) -> dict[str, Any]:
    """Hyper-parameters as a dictionary; None is an empty one."""
    if params is None:
        return {}
    return dict(vars(params)) if isinstance(params, Namespace) else dict(params)


def flatten_dict(params: Mapping[Any, Any], delimiter: str = "/") -> dict[str, Any]:
    """Flatten nested mappings, namespaces, dataclasses, and lists of mappings.

    Args:
        params: The nested values.
        delimiter: What joins the names of the levels.

    Returns:
        `{"a/b": value}` for `{"a": {"b": value}}`, and `{"a/0/b": value}` for `{"a": [{"b": value}]}`.
    """
    flat: dict[str, Any] = {}

    def visit(prefix: str, value: Any) -> None:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = dataclasses.asdict(value)
        elif isinstance(value, Namespace):
            value = vars(value)
        if isinstance(value, Mapping):
            for key, inner in value.items():
                visit(f"{prefix}{delimiter}{key}" if prefix else str(key), inner)
        elif isinstance(value, list) and all(isinstance(inner, Mapping) for inner in value) and value:
            for index, inner in enumerate(value):
                visit(f"{prefix}{delimiter}{index}", inner)
        else:
            flat[prefix] = value

    for key, value in params.items():
        visit(str(key), value)
    return flat


def sanitize_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Turn every value into a Python bool, int, float or str.

    Args:
        params: Flat hyper-parameters.

    Returns:
        The same names; NumPy numbers as Python's, functions and classes by name, anything else as text.
    """
    return {name: _plain(value) for name, value in params.items()}


def _plain(value: Any) -> bool | int | float | str:
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) in (bool, int, float, str):
        return value  # type: ignore[no-any-return]
    name = getattr(value, "__name__", None)
    return name if callable(value) and isinstance(name, str) else str(value)
