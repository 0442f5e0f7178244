"""What a step reads from and does to `self` while it is traced.

Reads of plain attributes become constants of the compiled step; they are remembered, so that a later change by host
code makes the step compile again instead of using a stale value. Writes would happen once, at the trace, and never
again; a step that writes is refused with the names of what it wrote.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxlightning.compile.networks import is_network, walk
from jaxlightning.compile.user_code import user_line

if TYPE_CHECKING:
    from jaxlightning.compile.trace import Trace

__all__ = [
    "OwnerTracer",
    "ReadRecorder",
    "SideEffects",
    "as_it_was",
    "refuse_writes",
    "same_value",
    "snapshot_value",
    "tracing_class",
]

INTERNAL = frozenset(
    {
        "_current_fx_name",
        "_trainer",
        "_engine",
        "_modes",
        "_tracer",
        "training",
        "_nnx_attributes",
        "_freezing",
        "_host_rng_calls",
    }
)
"""Instance attributes that belong to the framework."""

_SIMPLE = (int, float, complex, bool, str, bytes, type(None))
_MAX_DEPTH = 4


def snapshot_value(value: Any, depth: int = 0) -> Any:
    """A copy of a value deep enough to notice later changes in place; opaque objects stand for themselves."""
    if isinstance(value, _SIMPLE) or depth > _MAX_DEPTH:
        return value
    if isinstance(value, dict):
        return {key: snapshot_value(item, depth + 1) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(snapshot_value(item, depth + 1) for item in value)
    if isinstance(value, set | frozenset):
        return type(value)(value)
    if isinstance(value, np.ndarray):
        return value.copy()
    return value


def same_value(old: Any, new: Any, depth: int = 0) -> bool:
    """Whether a value still equals its snapshot."""
    if old is new:
        return True
    if isinstance(old, np.ndarray) and isinstance(new, np.ndarray):
        return (
            old.dtype == new.dtype
            and old.shape == new.shape
            and bool(np.array_equal(old, new, equal_nan=old.dtype.kind in "fc"))
        )
    if isinstance(old, _SIMPLE) or isinstance(new, _SIMPLE):
        return type(old) is type(new) and (old == new or (old != old and new != new))
    if isinstance(old, dict) and isinstance(new, dict):
        return old.keys() == new.keys() and all(same_value(old[k], new[k], depth + 1) for k in old)
    if type(old) is type(new) and isinstance(old, list | tuple):
        return len(old) == len(new) and all(same_value(a, b, depth + 1) for a, b in zip(old, new, strict=True))
    if isinstance(old, set | frozenset) and isinstance(new, set | frozenset):
        return old == new
    return False


class ReadRecorder:
    """Attributes of modules that a trace read, with what they held."""

    def __init__(self) -> None:
        self.reads: dict[tuple[int, str], tuple[Any, Any]] = {}
        self.keys: dict[tuple[int, str], str] = {}

    def record(self, module: Any, name: str, value: Any, key: str | None = None) -> None:
        """Remembers a read; only the first of each name counts.

        Args:
            module: The module, or an object beside it.
            name: The attribute.
            value: What it held.
            key: How the user reaches it, where that is not `self.<name>`.
        """
        place = (id(module), name)
        if place not in self.reads:
            self.reads[place] = (module, snapshot_value(value))
            if key is not None:
                self.keys[place] = key

    def record_missing(self, module: Any, name: str) -> None:
        """Remembers that there was no such attribute."""
        self.record(module, name, _MISSING)

    def held(self, module: Any, name: str, default: Any = None) -> Any:
        """What an attribute held when it was read as a constant, `default` when it was not."""
        found = self.reads.get((id(module), name))
        return default if found is None or found[1] is _MISSING else found[1]

    def changed(self) -> list[tuple[Any, str, Any, Any]]:
        """Attributes whose present value differs from the one that was read: module, name, old and new value."""
        found = []
        for (_, name), (module, old) in self.reads.items():
            new = _plain_attribute(module, name)
            if not same_value(old, new):
                found.append((module, name, old, new))
        return found


_MISSING = object()


def _plain_attribute(module: Any, name: str) -> Any:
    """What the instance, else its classes, hold under a name, without calling descriptors; `_MISSING` for neither."""
    instance = object.__getattribute__(module, "__dict__")
    if name in instance:
        return instance[name]
    for cls in type(module).__mro__:
        if name in cls.__dict__:
            return cls.__dict__[name]
    return _MISSING


class OwnerTracer:
    """What a read or a write of an attribute means while a step runs: one for each module, for one trace.

    Args:
        owner: The module, or one of its child modules.
        prefix: Its path with a dot at its end; empty for the module itself.
        trace: The run of the step.
        recorder: Remembers what was read as a constant.
    """

    def __init__(self, owner: Any, prefix: str, trace: Trace, recorder: ReadRecorder) -> None:
        self.owner = owner
        self.prefix = prefix
        self.trace = trace
        self.recorder = recorder
        self.settled: set[str] = set()
        self.lines: dict[str, str] = {}

    def read(self, name: str, value: Any) -> Any:
        """What the step sees of an attribute that holds `value`."""
        if self.trace.numbers is not None and is_simple(value):
            return self.trace.numbers.read(self, name, value)
        self.recorder.record(self.owner, name, value)
        return value

    def present(self, name: str) -> bool:
        """Whether the owner has such an attribute now."""
        return _plain_attribute(self.owner, name) is not _MISSING

    def missing(self, name: str) -> None:
        """The step asked for an attribute that there is not."""
        if self.trace.numbers is not None:
            self.trace.numbers.missing(self, name)
        else:
            self.recorder.record(self.owner, name, _MISSING)

    def write(self, name: str, value: Any) -> None:
        """The step is about to set an attribute."""
        self.lines[name] = user_line()
        self.settled.discard(name)
        if self.trace.numbers is not None and is_number(value) and self.trace.numbers.write(self, name, value):
            self.settled.add(name)

    def delete(self, name: str) -> None:
        """The step is about to delete an attribute."""
        self.lines[name] = user_line()
        self.settled.discard(name)


def is_number(value: Any) -> bool:
    """Whether a value is a number of Python's, or one that stands for it in a step."""
    return type(value) in (int, float, bool) or type(value).__name__ == "HostNumber"


def is_simple(value: Any) -> bool:
    """Whether a value is immutable, and cheap to compare."""
    return value is None or type(value) in (str, bytes) or is_number(value)


_tracing_classes: dict[type, type] = {}


def tracing_class(cls: type) -> type:
    """A subclass of the user's class that tells its `OwnerTracer` of reads and writes, worn only in a trace.

    A permanent `__getattribute__` would cost every read outside a trace.
    """
    found = _tracing_classes.get(cls)
    if found is not None:
        return found

    def getattribute(self: Any, name: str) -> Any:
        if name[:2] == "__" or name in INTERNAL:
            return object.__getattribute__(self, name)
        instance = object.__getattribute__(self, "__dict__")
        tracer = instance.get("_tracer")
        if tracer is None or name in instance.get("_nnx_attributes", ()):
            return object.__getattribute__(self, name)
        plain = _plain_attribute(self, name)
        if plain is _MISSING:
            tracer.missing(name)
        # Methods and properties are code; what they read is recorded by itself.
        elif not hasattr(type(plain), "__get__") and not is_network(plain):
            return tracer.read(name, plain)
        return object.__getattribute__(self, name)

    def setattribute(self: Any, name: str, value: Any) -> None:
        tracer = object.__getattribute__(self, "__dict__").get("_tracer")
        if tracer is not None and name not in INTERNAL:
            tracer.write(name, value)
        cls.__setattr__(self, name, value)

    def deleteattribute(self: Any, name: str) -> None:
        tracer = object.__getattribute__(self, "__dict__").get("_tracer")
        if tracer is not None:
            tracer.delete(name)
        cls.__delattr__(self, name)

    made = type(
        cls.__name__,
        (cls,),
        {
            "__getattribute__": getattribute,
            "__setattr__": setattribute,
            "__delattr__": deleteattribute,
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__,
        },
    )
    _tracing_classes[cls] = made
    return made


class SideEffects:
    """Compares the attributes of a module before and after a trace.

    Args:
        module: The user's module.
        fx: Name of the step, for the message.
        prefix: Path of the module when it is the child of another, with a dot at its end.
    """

    def __init__(self, module: Any, fx: str, prefix: str = "") -> None:
        self.module = module
        self.fx = fx
        self.prefix = prefix
        self.before = dict(module.__dict__)
        self.copies = {name: _containers(value) for name, value in self.before.items() if name not in INTERNAL}

    def restore(self, tracer: OwnerTracer | None = None) -> list[str]:
        """Undoes what the trace wrote.

        Args:
            tracer: Knows which writes are taken care of, and their lines.

        Returns:
            The names of what was written, for example `"count"` or `"outputs (a list changed in place)"`.
        """
        instance = self.module.__dict__
        settled = set() if tracer is None else tracer.settled
        written = []
        for name in [n for n in instance if n not in self.before and n not in INTERNAL]:
            if name not in settled:
                written.append(name)
            del instance[name]
        for name, value in self.before.items():
            if name in INTERNAL:
                continue
            if instance.get(name, self) is not value:
                if name not in settled:
                    written.append(name)
                instance[name] = value
            for container, contents in self.copies.get(name, ()):
                if not _same_contents(container, contents):
                    written.append(f"{name} (a {type(container).__name__} changed in place)")
                    _refill(container, contents)
        return [self.prefix + name for name in written]


@contextmanager
def as_it_was(moments: list[SideEffects]) -> Iterator[None]:
    """Gives modules the attributes that they had at an earlier moment, for the length of a `with` block.

    Args:
        moments: One for each module, made at that moment.
    """
    now = [SideEffects(moment.module, moment.fx, moment.prefix) for moment in moments]
    for moment in moments:
        moment.restore()
    try:
        yield
    finally:
        for moment in now:
            moment.restore()


def refuse_writes(written: list[str], where: str) -> None:
    """Raises for writes that a compiled step cannot repeat.

    Args:
        written: What `SideEffects.restore` returned.
        where: The user's step, for example `"Net.training_step"`.

    Raises:
        RuntimeError: If `written` is not empty.
    """
    if written:
        names = ", ".join(f"`self.{name}`" for name in written)
        raise RuntimeError(
            f"`{where}` changed {names}. The step is compiled: such a write would happen once, while it is traced, and "
            "never again (capturing writes is not built yet). Log the value with `self.log`, return it from the "
            "step and "
            "keep it in `on_train_batch_end` / `on_validation_batch_end`, or run with `Trainer(jit=False)`."
        )


def _containers(value: Any, depth: int = 0) -> list[tuple[Any, Any]]:
    if depth > _MAX_DEPTH or isinstance(value, (*_SIMPLE, np.ndarray, jax.Array)) or is_network(value):
        return []
    if isinstance(value, dict):
        return [(value, dict(value)), *(pair for item in value.values() for pair in _containers(item, depth + 1))]
    if isinstance(value, list):
        return [(value, list(value)), *(pair for item in value for pair in _containers(item, depth + 1))]
    if isinstance(value, set):
        return [(value, set(value))]
    if isinstance(value, tuple):
        return [pair for item in value for pair in _containers(item, depth + 1)]
    return []


def _same_contents(container: Any, contents: Any) -> bool:
    if isinstance(container, dict):
        return container.keys() == contents.keys() and all(container[k] is contents[k] for k in contents)
    if isinstance(container, list):
        return len(container) == len(contents) and all(a is b for a, b in zip(container, contents, strict=True))
    return bool(container == contents)


def _refill(container: Any, contents: Any) -> None:
    container.clear()
    if isinstance(container, list):
        container.extend(contents)
    else:
        container.update(contents)


def has_networks(value: Any) -> bool:
    """Whether an attribute value holds a network."""
    return bool(walk(value, ""))
