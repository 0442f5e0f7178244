"""Constants of a compiled step: what it read, in a form that shows later whether it changed.

A step may read values through containers, objects of the user's, class attributes, closures and globals of modules.
None of these tells when it changes, so what was read is copied (`snapshot`) and compared after code of the user's ran.
What stands for itself (arrays of JAX, functions, objects of libraries) is compared by identity.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import dis
import functools
import inspect
import operator
import random
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxlightning.compile.networks import is_network

__all__ = ["MISSING", "current_value", "in_place", "is_generator", "same", "snapshot", "used_by"]

MISSING = object()
"""Stands for what is not there."""

_SIMPLE = (int, float, complex, bool, str, bytes, type(None))
_MAX_DEPTH = 8
_MAX_NODES = 20_000
"""A value with more parts than this holds data; it is compared by identity from there on."""

_MAX_ARRAY = 1 << 24
"""Arrays of more bytes than this are compared by identity, shape and a sample."""

_LIBRARIES = frozenset(
    {
        "jaxlightning", "jax", "jaxlib", "flax", "optax", "numpy", "scipy", "torch", "torchvision", "tensorflow",
        "chex", "lightning", "pytorch_lightning", "lightning_fabric", "orbax", "grain", "datasets", "haiku", "equinox",
        "einops", "matplotlib", "sklearn", "pandas", "tensorboardX", "tqdm", "PIL",
    }
)  # fmt: skip
_VALUE_OBJECTS = (types.SimpleNamespace, argparse.Namespace)


def _of_user(module: str | None) -> bool:
    top = (module or "").partition(".")[0]
    return top not in _LIBRARIES and top not in sys.stdlib_module_names


def _is_user_object(value: Any) -> bool:
    """Whether the object is a plain one of the user's, whose attributes are values."""
    kind = type(value)
    if isinstance(value, type | types.FunctionType | types.ModuleType | types.MethodType) or is_network(value):
        return False
    if any(base.__name__ in ("LightningModule", "LightningDataModule", "ModuleHooks") for base in kind.__mro__):
        return False
    if isinstance(value, _VALUE_OBJECTS):
        return True
    return (_of_user(kind.__module__) or kind.__module__ == "__main__") and (
        hasattr(value, "__dict__") or hasattr(kind, "__slots__") or dataclasses.is_dataclass(value)
    )


@dataclasses.dataclass
class _Parts:
    """The snapshot of a container or an object.

    Attributes:
        kind: Its type.
        keys: What its parts are called: keys, indices, names of attributes.
        values: Snapshots of the parts.
        itself: The object.
        flat: Whether every part is a simple value, so that identical parts mean an equal whole.
    """

    kind: type
    keys: list[Any]
    values: list[Any]
    itself: Any
    flat: bool = True


@dataclasses.dataclass
class _Array:
    itself: Any
    copy: Any


@dataclasses.dataclass
class _Generator:
    itself: Any
    state: str


def _generator_state(value: Any) -> str:
    if isinstance(value, random.Random):
        return repr(value.getstate())
    return repr(value.bit_generator.state if isinstance(value, np.random.Generator) else value.get_state(legacy=False))


def snapshot(value: Any) -> Any:
    """What is kept of a value to notice later that it is another one, or was changed in place."""
    return _Snapshots().take(value, 0)


class _Snapshots:
    def __init__(self) -> None:
        self.nodes = 0
        self.seen: dict[int, _Parts] = {}

    def take(self, value: Any, depth: int) -> Any:
        self.nodes += 1
        if isinstance(value, _SIMPLE) or depth > _MAX_DEPTH or self.nodes > _MAX_NODES:
            return value
        if isinstance(value, random.Random | np.random.Generator | np.random.RandomState):
            return _Generator(value, _generator_state(value))
        if isinstance(value, np.ndarray):
            return _Array(value, value.copy() if value.nbytes <= _MAX_ARRAY else _sample(value))
        parts = _parts(value)
        if parts is None:
            return value
        if id(value) in self.seen:
            return self.seen[id(value)]
        found = self.seen[id(value)] = _Parts(type(value), [], [], value)
        for key, item in parts:
            found.keys.append(key)
            found.values.append(self.take(item, depth + 1))
            found.flat = found.flat and isinstance(item, _SIMPLE)
        return found


def _parts(value: Any) -> list[tuple[Any, Any]] | None:
    """The named parts of a container or an object of the user's; None for what stands for itself."""
    if isinstance(value, dict):
        found = list(value.items())
    elif isinstance(value, list | tuple | collections.deque):
        found = list(enumerate(value))
    elif isinstance(value, set | frozenset):
        return [(item, None) for item in value]
    elif isinstance(value, functools.partial):
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    elif _is_user_object(value):
        return _attributes(value)
    else:
        return None
    if isinstance(value, dict | list) and type(value) not in (dict, list) and _is_user_object(value):
        found += _attributes(value)
    return found


def _attributes(value: Any) -> list[tuple[Any, Any]]:
    found: dict[str, Any] = {}
    for kind in reversed(type(value).__mro__):
        if not _of_user(kind.__module__) and kind.__module__ != "__main__":
            continue
        for name, item in vars(kind).items():
            if not name.startswith("__") and not hasattr(type(item), "__get__"):
                found[name] = item
        for name in getattr(kind, "__slots__", ()):
            if hasattr(value, name):
                found[name] = getattr(value, name)
    found.update(getattr(value, "__dict__", {}))
    return list(found.items())


def _sample(value: np.ndarray[Any, Any]) -> Any:
    flat = value.reshape(-1) if value.flags.c_contiguous else value.ravel()[:0]
    return flat[:: max(1, flat.size // 4096)].copy()


def same(old: Any, new: Any, *, grown: bool = False) -> bool:
    """Whether a value still is what its snapshot says.

    Args:
        old: The snapshot.
        new: The value.
        grown: Whether further keys and attributes do not count.
    """
    return _same(old, new, set(), grown)


def _same(old: Any, new: Any, under_way: set[int], grown: bool) -> bool:
    if isinstance(old, _Array):
        if not isinstance(new, np.ndarray) or new.dtype != old.itself.dtype:
            return False
        if new.nbytes > _MAX_ARRAY:
            return new is old.itself and _equal(old.copy, _sample(new))
        return old.copy.shape == new.shape and _equal(old.copy, new)
    if isinstance(old, _Generator):
        return new is old.itself and _generator_state(new) == old.state
    if isinstance(old, _Parts):
        if type(new) is not old.kind:
            return False
        if id(old) in under_way:
            return True
        under_way.add(id(old))
        if old.flat and isinstance(new, list | tuple) and len(new) == len(old.values):
            same_parts = all(map(operator.is_, old.values, new))  # a list of many words costs microseconds
            if same_parts:
                return True
        parts = _parts(new)
        if parts is None:
            return False
        if isinstance(new, set | frozenset):
            return set(old.keys) == set(new)
        if isinstance(new, list | tuple | collections.deque):
            return len(parts) == len(old.keys) and all(
                _same(value, item, under_way, grown) for value, (_, item) in zip(old.values, parts, strict=True)
            )
        held = dict(parts)
        return (grown or len(held) == len(old.keys)) and all(
            key in held and _same(value, held[key], under_way, grown)
            for key, value in zip(old.keys, old.values, strict=True)
        )
    if old is new:
        return True
    if isinstance(old, _SIMPLE):
        return type(old) is type(new) and bool(old == new or (old != old and new != new))
    # Bound methods are made anew by every look-up.
    return isinstance(old, types.MethodType) and old == new


def _equal(a: Any, b: Any) -> bool:
    return bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fc"))


def is_generator(old: Any) -> bool:
    """Whether a snapshot is one of a generator of random numbers."""
    return isinstance(old, _Generator)


def in_place(old: Any) -> bool:
    """Whether a value with this snapshot can change without an assignment to the attribute that holds it."""
    if isinstance(old, _Parts):
        return old.kind is not tuple or any(in_place(value) for value in old.values)
    return isinstance(old, _Array)


def current_value(holder: Any, name: str) -> Any:
    """What a global, a cell of a closure or an attribute holds now, without calling descriptors; `MISSING` for nothing.

    Args:
        holder: A module's dictionary, a cell, or an object.
        name: The name in it.
    """
    if isinstance(holder, dict):
        return holder.get(name, MISSING)
    if isinstance(holder, types.CellType):
        try:
            return holder.cell_contents
        except ValueError:
            return MISSING
    instance = getattr(holder, "__dict__", {})
    if name in instance:
        return instance[name]
    for cls in type(holder).__mro__:
        if name in cls.__dict__:
            found = cls.__dict__[name]
            return getattr(holder, name, MISSING) if isinstance(found, property | types.MemberDescriptorType) else found
    return MISSING


# --- closures and globals -------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def _global_names(code: types.CodeType) -> tuple[tuple[str, str | None], ...]:
    """Globals that a piece of code reads, each with the attribute that it reads of it next, if any."""
    found: dict[tuple[str, str | None], None] = {}
    instructions = list(dis.get_instructions(code))
    for instruction, following in zip(instructions, [*instructions[1:], None], strict=True):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            reads = following is not None and following.opname in ("LOAD_ATTR", "LOAD_METHOD")
            found[instruction.argval, following.argval if reads and following is not None else None] = None
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found.update(dict.fromkeys(_global_names(constant)))
    return tuple(found)


def used_by(function: Any, seen: set[int]) -> Iterator[tuple[Any, str, Any, str]]:
    """Values that a function of the user's reads from its closure and from globals, also through functions it calls.

    Args:
        function: The function.
        seen: Identities of functions that were looked at; grows.

    Yields:
        What holds the value, its name there, the value, and how to call it in a message.
    """
    function = inspect.unwrap(getattr(function, "__func__", function))
    if not isinstance(function, types.FunctionType) or id(function) in seen or len(seen) > 500:
        return
    seen.add(id(function))
    space = function.__globals__
    module = str(space.get("__name__", ""))
    if not _of_user(module) or "site-packages" in function.__code__.co_filename:
        return
    found: list[tuple[Any, str, Any, str]] = []
    for name, attribute in _global_names(function.__code__):
        # Names that no source can have are made by tools that rewrite code (pytest's assertions).
        value = space.get(name, MISSING) if name.isidentifier() else MISSING
        if isinstance(value, types.ModuleType):
            installed = "site-packages" in (getattr(value, "__file__", None) or "")
            if attribute is not None and not installed and _of_user(value.__name__):
                held = vars(value).get(attribute, MISSING)
                found.append((vars(value), attribute, held, f"{name}.{attribute}"))
        elif value is not MISSING:
            found.append((space, name, value, f"the global {name}"))
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        value = current_value(cell, name)
        if name != "__class__" and value is not MISSING:
            found.append((cell, name, value, f"{name} in the closure of {function.__name__}"))
    for holder, name, value, text in found:
        if isinstance(value, type | types.BuiltinFunctionType):
            continue
        yield holder, name, value, text
        yield from used_by(value, seen)
