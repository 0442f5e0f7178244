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
from jaxlightning.compile.reads import ReadRecorder
from jaxlightning.compile.user_code import user_line

if TYPE_CHECKING:
    from jaxlightning.compile.trace import Trace

__all__ = [
    "OwnerTracer",
    "ReadRecorder",
    "SideEffects",
    "as_it_was",
    "refuse_writes",
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
            self.recorder.record_missing(self.owner, name)

    def write(self, name: str, value: Any) -> None:
        """The step is about to set an attribute."""
        self.lines[name] = user_line()
        self.settled.discard(name)
        if self.trace.numbers is not None and is_number(value) and self.trace.numbers.write(self, name, value):
            self.settled.add(name)

    def code(self, name: str, value: Any) -> None:
        """The step looked up a method, a property or a function: what that reads elsewhere is watched."""
        if name in self.owner.__dict__:
            self.recorder.record(self.owner, name, value)
        self.recorder.record_code(getattr(value, "fget", None) or value)

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
        else:
            tracer.code(name, plain)
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
