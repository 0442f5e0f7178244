"""Batch leaves: which ones JAX can hold, and how each becomes a fresh numpy array.

This file owns the rules for single values (dtype narrowing, range checks, byte order, copies). Containers are
walked by `_convert.py`; torch and TensorFlow tensors come here after their own modules turned them into numpy.
"""

from __future__ import annotations

import logging
from typing import Any

import jax
import ml_dtypes
import numpy as np

logger = logging.getLogger("jaxlightning")

Path = tuple[Any, ...]
"""Position inside a batch: dict keys, sequence indices and `Attribute` names."""

Array = np.ndarray[Any, np.dtype[Any]]

_NARROWER: dict[str, str] = {"int64": "int32", "uint64": "uint32", "float64": "float32", "complex128": "complex64"}
_NATIVE_KINDS = "biufc"
_KEEP = object()
_HOST = object()
_SWAP = object()
_told: set[str] = set()


class Attribute(str):
    """A path element that is an attribute name (shown as `.name`), not a dict key."""

    __slots__ = ()


def format_path(path: Path) -> str:
    """Write a position inside a batch as Python would address it.

    Args:
        path: Keys, indices and `Attribute` names from the batch down to the leaf.

    Returns:
        For example `batch['image'][0].label`.
    """
    parts = ["batch"]
    for key in path:
        parts.append(f".{key}" if isinstance(key, Attribute) else f"[{key!r}]")
    return "".join(parts)


def x64_enabled() -> bool:
    """Tell whether JAX keeps 64-bit values, without starting a backend."""
    return bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined,unused-ignore]


def _action(dtype: np.dtype[Any], x64: bool) -> Any:
    if not dtype.isnative:
        return _SWAP
    if dtype.kind in _NATIVE_KINDS:
        if dtype.itemsize > 8 and dtype.name not in _NARROWER:  # longdouble and its complex twin
            return np.dtype("float64" if dtype.kind == "f" else "complex128")
        narrower = None if x64 else _NARROWER.get(dtype.name)
        return _KEEP if narrower is None else np.dtype(narrower)
    return _KEEP if dtype.type.__module__.partition(".")[0] == ml_dtypes.__name__ else _HOST


_SMALL = 4096  # elements
# One call that converts and compares, in NumPy 2.4 and newer: half the time of any two calls.
_SAME_VALUE = np.lib.NumpyVersion(np.__version__) >= "2.4.0"

_actions: tuple[dict[np.dtype[Any], Any], dict[np.dtype[Any], Any]] = ({}, {})
_kept: tuple[set[np.dtype[Any]], set[np.dtype[Any]]] = (set(), set())


def is_device_dtype(dtype: np.dtype[Any]) -> bool:
    """Tell whether JAX can hold arrays of this dtype (strings, objects, dates and records it cannot)."""
    return _action(dtype, False) is not _HOST


def narrow(value: Array, target: np.dtype[Any], path: Path) -> Array:
    """Convert to a narrower dtype of the same kind, refusing values that do not fit.

    Args:
        value: Array of any shape.
        target: Dtype of the result.
        path: Position of the array, for messages.

    Returns:
        A new array.

    Raises:
        OverflowError: If an integer, or a finite float, does not fit.
    """
    if target.kind in "iu":
        result = narrowed_integers(value, target)
        if result is None:
            raise OverflowError(
                f"{format_path(path)} holds {value.dtype} values from {value.min()} to {value.max()}, and JAX without "
                f"64-bit mode stores them as {target}, where they would wrap around. Shift or re-map the values in the "
                "dataset, split them in two columns, or call jax.config.update('jax_enable_x64', True) before fit()."
            )
        return result
    if target.name not in _told:
        _told.add(target.name)
        logger.info(
            f"{format_path(path)} is {value.dtype} and becomes {target}, as everywhere in JAX without 64-bit mode "
            "(jax_enable_x64). Other leaves are treated the same way without a further message."
        )
    try:
        with np.errstate(over="raise"):
            rounded: Array = value.astype(target)
    except FloatingPointError:
        raise OverflowError(
            f"{format_path(path)} holds {value.dtype} values beyond the range of {target}, to which JAX without 64-bit "
            "mode converts them; they would become infinite. Rescale them in the dataset, or call "
            "jax.config.update('jax_enable_x64', True) before fit()."
        ) from None
    return rounded


def narrowed_integers(value: Array, target: np.dtype[Any]) -> Array | None:
    """Convert integers to a narrower dtype; None when one of them does not fit.

    Args:
        value: Integers, of any shape.
        target: An integer dtype of the same signedness.
    """
    if _SAME_VALUE:
        try:
            return value.astype(target, casting="same_value")  # type: ignore[call-overload,no-any-return,unused-ignore]
        except ValueError:
            return None
    result: Array = value.astype(target)
    if value.size <= _SMALL:
        # Between two batches of Python code, when nothing is in the caches, half the time of a mixed comparison.
        fits = result.astype(value.dtype).tobytes() == value.tobytes()
    else:
        fits = not np.count_nonzero(result != value)  # `any` is a third slower
    return result if fits else None


def kept_dtypes(x64: bool) -> set[np.dtype[Any]]:
    """The dtypes, of those met so far, whose arrays go to the device as they are."""
    return _kept[x64]


def canonical_array(value: Array, path: Path, *, x64: bool, copy: bool) -> Array:
    """Turn one numpy array into what JAX would hold, contiguous and (on request) freshly allocated.

    Args:
        value: Array of any shape and dtype. Dtypes that JAX cannot hold are returned unchanged (host leaves).
        path: Position of the array, for messages.
        x64: Whether JAX keeps 64-bit values.
        copy: Whether the buffer may be written to later, so that a copy is needed.

    Returns:
        A C-contiguous array of the same shape.

    Raises:
        TypeError: For masked arrays.
        OverflowError: If narrowing loses an integer or makes a finite float infinite.
    """
    table = _actions[x64]
    dtype = value.dtype
    action: Any = table.get(dtype)
    if action is None:
        action = table.setdefault(dtype, _action(dtype, x64))
        if action is _KEEP:
            _kept[x64].add(dtype)
    if action is _KEEP:
        if copy:
            return np.array(value, order="C")
        if type(value) is np.ndarray and value.flags.c_contiguous:
            return value
        return np.array(value, order="C", copy=None)
    if action is _HOST:
        return np.array(value) if copy else value
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(_masked(path))
    if action is _SWAP:
        return canonical_array(value.astype(dtype.newbyteorder("=")), path, x64=x64, copy=False)
    return canonical_array(narrow(value, action, path), path, x64=x64, copy=False)


def _masked(path: Path) -> str:
    return (
        f"{format_path(path)} is a numpy masked array, and JAX arrays have no mask. Return value.filled(...) and the "
        "mask as two leaves from the dataset or its collate function."
    )


def canonical_foreign(value: Any, path: Path, *, x64: bool) -> Array:
    """Convert Python and numpy scalars (0-d result) and subclasses of numpy arrays (copied).

    Args:
        value: A bool, int, float, complex, numpy scalar or ndarray subclass.
        path: Position of the value, for messages.
        x64: Whether JAX keeps 64-bit values.

    Returns:
        A fresh numpy array; 0-d for scalars.

    Raises:
        TypeError: For masked arrays.
        OverflowError: For integers that do not fit.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(_masked(path))
    array = np.array(value, subok=False)
    if array.dtype.kind == "O" and isinstance(value, int):
        raise OverflowError(
            f"{format_path(path)} is the integer {value}, which no integer type of JAX holds. Shift or re-map it in "
            "the dataset, or return it as a string, which stays on the host."
        )
    return canonical_array(array, path, x64=x64, copy=False)


def to_channels_last(value: Array) -> Array:
    """Move the channel axis of an image batch from position 1 to the end.

    The rule: a 4-d array of a floating dtype or uint8, whose axis 1 has length 1, 3 or 4, is an NCHW image batch.
    Everything else is returned unchanged.

    Args:
        value: Array of any shape; `[N, C, H, W]` if it is an image batch.

    Returns:
        The array itself, or a fresh `[N, H, W, C]` array.
    """
    if is_channels_first_image(value.shape, value.dtype):
        return np.ascontiguousarray(value.transpose(0, 2, 3, 1))
    return value


def is_channels_first_image(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
    """Tell whether the rule of `channels_last` takes an array for an NCHW image batch."""
    if len(shape) != 4 or shape[1] not in (1, 3, 4):
        return False
    # the extension floats (bfloat16, float8) report kind "V", so ask for what they are not
    return dtype == np.uint8 or dtype.kind == "f" or (dtype.kind == "V" and is_device_dtype(dtype))
