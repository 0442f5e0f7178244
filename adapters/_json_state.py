"""State dicts of foreign loaders as JSON types, without pickle."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from ._convert import from_library

_TAG = "__kind__"


def encode_state(value: Any) -> Any:
    """Turn a nested state into JSON types.

    Args:
        value: Nested dicts, lists, tuples, numbers, strings, bytes, None, numpy arrays and torch tensors.

    Returns:
        The same content in JSON types, for `decode_state`.

    Raises:
        TypeError: If something else is inside.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [encode_state(item) for item in value]
    if isinstance(value, tuple):
        return {_TAG: "tuple", "items": [encode_state(item) for item in value]}
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and _TAG not in value:
            return {key: encode_state(item) for key, item in value.items()}
        return {_TAG: "dict", "items": [[encode_state(key), encode_state(item)] for key, item in value.items()]}
    if isinstance(value, bytes):
        return {_TAG: "bytes", "data": base64.b64encode(value).decode("ascii")}
    if isinstance(value, np.generic):
        return encode_state(value.item())
    if from_library(type(value), "torch", "Tensor"):
        from ._torch_tensors import tensor_to_numpy

        return {_TAG: "tensor", "value": encode_state(tensor_to_numpy(value))}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode("ascii")
        return {_TAG: "array", "dtype": value.dtype.str, "shape": list(value.shape), "data": data}
    raise TypeError(f"a state holds a {type(value).__qualname__}, which has no JSON form")


def decode_state(value: Any) -> Any:
    """Give back what `encode_state` was given.

    Args:
        value: JSON types.
    """
    if isinstance(value, list):
        return [decode_state(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_TAG)
    if kind is None:
        return {key: decode_state(item) for key, item in value.items()}
    if kind == "tuple":
        return tuple(decode_state(item) for item in value["items"])
    if kind == "dict":
        return {decode_state(key): decode_state(item) for key, item in value["items"]}
    if kind == "bytes":
        return base64.b64decode(value["data"])
    if kind == "tensor":
        import torch

        return torch.from_numpy(decode_state(value["value"]))
    array = np.frombuffer(base64.b64decode(value["data"]), np.dtype(value["dtype"]))
    return array.reshape(value["shape"]).copy()
