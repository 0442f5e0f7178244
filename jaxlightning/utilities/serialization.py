"""Any state as plain JSON plus arrays, and back, without pickle and without importing what a file names.

JSON has no tuples, no bytes, no infinities, no arrays and only text keys. Such values are written as an object with one
reserved key, `TAG`, whose value is a word out of the closed list below. Nothing that a file contains chooses a class.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from argparse import Namespace
from collections.abc import Callable, Mapping
from datetime import timedelta
from enum import Enum
from pathlib import Path as LocalPath
from pathlib import PurePath
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxlightning.utilities.parsing import AttributeDict

#: The reserved key. A user's dict that has it is written as a list of pairs, so nothing is misread.
TAG = "__jaxlightning__"

#: Arrays of at most so many bytes go into the JSON itself.
INLINE_BYTES = 256

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_MAX_TEXT = 200

Json = Any
Path = tuple[str, ...]
#: Takes the place of an array that is too large for JSON, the array, and whether nobody else can change it;
#: returns the name under which it can be had back.
StoreArray = Callable[[Path, np.ndarray, bool], str]
#: Takes a text and returns the JSON that replaces it (such as a path relative to the checkpoint), or None.
RewriteText = Callable[[str], Any]
#: Returns a stored array by its name.
Fetch = Callable[[str], np.ndarray]
#: Turns a tagged JSON object that `RewriteText` made back into a text.
ResolveText = Callable[[dict[str, Any]], Any]
#: Takes a value that cannot be written and returns None to store its description, or raises.
OnUnwritable = Callable[[Path, Any], None]


class Unwritten:
    """Stands for a value that could not be written: its description is all that is left of it.

    Attributes:
        text: What the value looked like.
        type_name: The name of its class.
    """

    def __init__(self, text: str, type_name: str) -> None:
        self.text = text
        self.type_name = type_name

    def __repr__(self) -> str:
        return f"<not written: {self.text}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unwritten) and (self.text, self.type_name) == (other.text, other.type_name)

    def __hash__(self) -> int:
        return hash((self.text, self.type_name))


def describe(value: Any) -> str:
    """Return a short text for a value, without memory addresses, so that the same thing always reads the same."""
    name = getattr(value, "__qualname__", None)
    if name is not None and callable(value):
        text = f"{getattr(value, '__module__', '?')}.{name}"
    else:
        try:
            text = repr(value)
        except Exception:
            text = f"<{type(value).__name__}>"
    text = _ADDRESS.sub("", text)
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 3] + "..."


def _refuse(path: Path, value: Any) -> None:
    raise TypeError(
        f"{'/'.join(path) or 'The value'} is of type {type(value).__name__} and cannot be written without pickle. "
        "Use numbers, text, bytes, None, lists, tuples, sets, dicts, paths, timedeltas, and numpy or JAX arrays."
    )


def encode(
    value: Any,
    *,
    path: Path = (),
    store: StoreArray | None = None,
    inline_bytes: int = INLINE_BYTES,
    on_unwritable: OnUnwritable = _refuse,
    rewrite_text: RewriteText | None = None,
) -> Json:
    """Turn a value into something that `json.dumps(..., allow_nan=False)` accepts.

    Args:
        value: Numbers, text, bytes, None, containers, paths, durations, numpy and JAX arrays (also typed PRNG keys).
        path: Where the value stands, for messages.
        store: Where larger arrays go; without one they are written inline as base64.
        inline_bytes: The largest array that stays in the JSON although there is a store.
        on_unwritable: Called for anything else; returns to have a description stored, or raises.
        rewrite_text: Called for every text, keys of dicts included.

    Returns:
        The JSON value.

    Raises:
        TypeError: Something cannot be written and ``on_unwritable`` is not given.
        ValueError: A container contains itself.
    """
    return _Encoder(store, inline_bytes, on_unwritable, rewrite_text).encode(value, path)


class _Encoder:
    def __init__(
        self,
        store: StoreArray | None,
        inline_bytes: int,
        on_unwritable: OnUnwritable,
        rewrite_text: RewriteText | None,
    ) -> None:
        self._store = store
        self._inline_bytes = inline_bytes
        self._on_unwritable = on_unwritable
        self._rewrite_text = rewrite_text
        self._open: set[int] = set()

    def encode(self, value: Any, path: Path) -> Json:
        if type(value) is str:
            changed = self._rewrite_text(value) if self._rewrite_text is not None else None
            return value if changed is None else changed
        if value is None or type(value) in (bool, int):
            return value
        if type(value) is float:
            return value if np.isfinite(value) else {TAG: "float", "value": repr(value)}
        if isinstance(value, np.ndarray | np.generic | jax.Array):
            return self._array(value, path)
        if isinstance(value, Mapping | list | tuple | set | frozenset | Namespace):
            return self._container(value, path)
        return self._simple(value, path)

    def _simple(self, value: Any, path: Path) -> Json:
        if isinstance(value, Enum):
            if isinstance(value, str | int):  # class Mode(str, Enum): equal to its value
                return self.encode(value.value, path)
        elif isinstance(value, bytes | bytearray):
            return {TAG: "bytes", "data": _to_base64(bytes(value))}
        elif isinstance(value, PurePath):
            return {TAG: "path", "value": value.as_posix()}
        elif isinstance(value, timedelta):
            return {TAG: "timedelta", "days": value.days, "seconds": value.seconds, "micros": value.microseconds}
        elif type(value) is complex:
            return {TAG: "complex", "value": [repr(value.real), repr(value.imag)]}
        elif type(value) is range:
            return {TAG: "range", "value": [value.start, value.stop, value.step]}
        elif type(value) is slice:
            return {TAG: "slice", "value": [self.encode(x, path) for x in (value.start, value.stop, value.step)]}
        elif isinstance(value, Unwritten):
            return {TAG: "text", "text": value.text, "type": value.type_name}
        elif isinstance(value, str | int | float) and not isinstance(value, bool):  # subclasses of these
            return self.encode(next(t(value) for t in (str, int, float) if isinstance(value, t)), path)
        self._on_unwritable(path, value)
        return {TAG: "text", "text": describe(value), "type": type(value).__name__}

    def _container(self, value: Any, path: Path) -> Json:
        if hasattr(value, "_fields") and isinstance(value, tuple):  # a namedtuple names a class
            return self._simple(value, path)
        if id(value) in self._open:
            raise ValueError(f"{'/'.join(path) or 'The value'} contains itself and cannot be written.")
        self._open.add(id(value))
        try:
            if isinstance(value, Namespace):
                return {TAG: "namespace", "items": self._pairs(vars(value), path)}
            if isinstance(value, Mapping):
                if TAG not in value and all(self._is_plain_key(key) for key in value):
                    plain = {key: self.encode(item, (*path, key)) for key, item in value.items()}
                    return {TAG: "attributes", "items": plain} if isinstance(value, AttributeDict) else plain
                return {TAG: "dict", "items": self._pairs(value, path)}
            items = [self.encode(item, (*path, str(i))) for i, item in enumerate(value)]
            if isinstance(value, list):
                return items
            kind = "tuple" if isinstance(value, tuple) else "frozenset" if isinstance(value, frozenset) else "set"
            return {TAG: kind, "items": items}
        finally:
            self._open.discard(id(value))

    def _is_plain_key(self, key: Any) -> bool:
        return type(key) is str and (self._rewrite_text is None or self._rewrite_text(key) is None)

    def _pairs(self, value: Mapping[Any, Any], path: Path) -> list[list[Json]]:
        return [
            [self.encode(key, (*path, "<key>")), self.encode(item, (*path, str(key)))] for key, item in value.items()
        ]

    def _array(self, value: Any, path: Path) -> Json:
        if isinstance(value, jax.Array):
            if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
                data = self._host_array(np.asarray(jax.random.key_data(value)), path, fresh=True)
                return {TAG: "prng_key", "impl": str(jax.random.key_impl(value)), "data": data}
            if not (value.is_fully_addressable or value.is_fully_replicated):
                raise ValueError(f"{'/'.join(path)} is an array that this process holds only a part of.")
            # On a CPU numpy sees the device's own memory, which a donating step reuses.
            fresh = len(value.devices()) > 1 or next(iter(value.devices())).platform != "cpu"
            return {**self._host_array(np.asarray(value), path, fresh=fresh), "jax": True}
        return self._host_array(value, path, fresh=False)

    def _host_array(self, value: Any, path: Path, *, fresh: bool) -> Json:
        array = np.asarray(value)
        if array.dtype.kind in "US" and not array.dtype.hasobject:
            return {TAG: "strings", "shape": list(array.shape), "items": [str(x) for x in array.ravel()]}
        if dtype_or_none(array.dtype.name) is None:
            return self._simple(value, path)
        kind = "scalar" if isinstance(value, np.generic) else "array"
        described = {"dtype": array.dtype.name, "shape": list(array.shape)}
        if self._store is not None and array.nbytes > self._inline_bytes:
            stored = {TAG: "stored", **described, "name": self._store(path, array, fresh)}
            return {**stored, "scalar": True} if kind == "scalar" else stored
        little = array.astype(array.dtype.newbyteorder("<")) if array.dtype.byteorder == ">" else array
        encoded = {TAG: kind, **described, "data": _to_base64(little.tobytes())}
        if array.ndim == 0 and array.dtype.kind in "biuf":
            encoded["reads"] = str(array.item())  # for people who look into the file
        return encoded


def decode(value: Json, *, fetch: Fetch | None = None, resolve_text: ResolveText | None = None) -> Any:
    """Turn what `encode` returned back into values.

    Args:
        value: The JSON value.
        fetch: Returns a stored array by its name.
        resolve_text: Turns what ``rewrite_text`` made back into a text; gets the tagged JSON.

    Returns:
        The value; descriptions of what could not be written come back as `Unwritten`.

    Raises:
        ValueError: The JSON is not something that `encode` writes.
    """
    return _Decoder(fetch, resolve_text).decode(value)


class _Decoder:
    def __init__(self, fetch: Fetch | None, resolve_text: ResolveText | None) -> None:
        self._fetch = fetch
        self._resolve_text = resolve_text

    def decode(self, value: Json) -> Any:
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        if TAG not in value:
            return {key: self.decode(item) for key, item in value.items()}
        try:
            return self._tagged(value)
        except (KeyError, TypeError, AttributeError, OverflowError, binascii.Error) as error:
            raise ValueError(f"A value tagged {value[TAG]!r} is damaged: {error!r}") from error

    def _tagged(self, value: dict[str, Any]) -> Any:
        tag = value[TAG]
        if tag in ("array", "scalar", "stored"):
            return self._array(value)
        if tag == "prng_key":
            return jax.random.wrap_key_data(self._array(value["data"]), impl=value["impl"])
        if tag in ("tuple", "set", "frozenset"):
            items = [self.decode(item) for item in value["items"]]
            return {"tuple": tuple, "set": set, "frozenset": frozenset}[tag](items)
        if tag in ("dict", "namespace"):
            pairs = {self.decode(key): self.decode(item) for key, item in value["items"]}
            return pairs if tag == "dict" else Namespace(**pairs)
        if tag == "attributes":
            return AttributeDict(self.decode(value["items"]))
        if tag == "slice":
            return slice(*(self.decode(part) for part in value["value"]))
        if tag in _SIMPLE:
            return _SIMPLE[tag](value)
        if self._resolve_text is not None:
            return self._resolve_text(value)
        raise ValueError(f"The tag {tag!r} is not known to this version.")

    def _array(self, value: dict[str, Any]) -> Any:
        dtype = dtype_or_none(value["dtype"])
        shape = tuple(int(n) for n in value["shape"])
        if dtype is None or any(n < 0 for n in shape):
            raise ValueError(f"An array has the dtype {value['dtype']!r} and shape {shape}, which is not allowed.")
        if value[TAG] == "stored":
            array = self._stored(value["name"], dtype, shape)
        else:
            data = base64.b64decode(value["data"], validate=True)
            expected = dtype.itemsize * math.prod(shape)
            if len(data) != expected:
                raise ValueError(f"An array of {dtype.name}{list(shape)} has {len(data)} bytes instead of {expected}.")
            array = np.frombuffer(data, dtype=dtype).reshape(shape).copy()
        if value.get("scalar") or value[TAG] == "scalar":
            return array[()]
        # With 64-bit types off, a 64-bit array stays numpy: JAX would narrow it without a word.
        if value.get("jax") and jax.dtypes.canonicalize_dtype(array.dtype) == array.dtype:
            return jnp.array(array)
        return array

    def _stored(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
        if self._fetch is None:
            raise ValueError(f"The array {name!r} is stored elsewhere and cannot be fetched here.")
        array = self._fetch(name)
        if array.dtype != dtype or array.shape != shape:
            raise ValueError(
                f"The array {name!r} should be {dtype.name}{list(shape)} but is {array.dtype.name}{list(array.shape)}."
            )
        return array


_SIMPLE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "float": lambda v: float(v["value"]),
    "complex": lambda v: complex(*(float(part) for part in v["value"])),
    "bytes": lambda v: base64.b64decode(v["data"], validate=True),
    "path": lambda v: LocalPath(str(v["value"])),
    "timedelta": lambda v: timedelta(days=v["days"], seconds=v["seconds"], microseconds=v["micros"]),
    "range": lambda v: range(*v["value"]),
    "text": lambda v: Unwritten(str(v["text"]), str(v["type"])),
    "strings": lambda v: np.array(v["items"], dtype=np.str_).reshape(v["shape"]),
}


def dtype_or_none(name: Any) -> np.dtype[Any] | None:
    """Return the dtype of that name when JAX knows it too; no object, void, text or date dtypes."""
    if not isinstance(name, str):
        return None
    if name == "bool" or re.fullmatch(r"(u?int|float|complex)\d+", name):
        try:
            return np.dtype(name)
        except TypeError:
            pass  # int4, uint2: ml_dtypes has these
    if re.fullmatch(r"(bfloat16|u?int[24]|float[4-8]_\w+)", name) and hasattr(ml_dtypes, name):
        special: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return special
    return None


def _to_base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
