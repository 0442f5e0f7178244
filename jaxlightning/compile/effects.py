"""What a step reads from and does to `self` while it is traced.

Reads of plain attributes become constants of the compiled step; they are remembered, so that a later change by host
code makes the step compile again instead of using a stale value. Arrays become state (`attributes`), containers that
the step fills get a stand-in (`recording`), numbers may follow the host. What is done with writes is in `writes`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxlightning.compile.containers import has_arrays
from jaxlightning.compile.networks import is_network, walk
from jaxlightning.compile.reads import ReadRecorder
from jaxlightning.compile.recording import Place, can_stand_in, stand_in
from jaxlightning.compile.user_code import user_line
from jaxlightning.compile.watched import MISSING

if TYPE_CHECKING:
    from jaxlightning.compile.trace import Trace

__all__ = [
    "OwnerTracer",
    "ReadRecorder",
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
        "_carried",
        "_buffers",
        "_transient_buffers",
        "_raw_parameters",
        "_copied_weights",
    }
)
"""Instance attributes that belong to the framework."""


def plain_attribute(module: Any, name: str) -> Any:
    """What the instance, else its classes, hold under a name, without calling descriptors; `MISSING` for neither."""
    instance = object.__getattribute__(module, "__dict__")
    if name in instance:
        return instance[name]
    for cls in type(module).__mro__:
        if name in cls.__dict__:
            return cls.__dict__[name]
    return MISSING


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
        self.reads: dict[str, str] = {}
        self.arrays: set[str] = set()
        self._stand_ins: dict[str, Any] = {}

    def read(self, name: str, value: Any) -> Any:
        """What the step sees of an attribute that holds `value`."""
        if name in self.lines:
            return value  # written in this step
        attributes = self.trace.attributes
        if name in self.owner.__dict__.get("_raw_parameters", ()):
            return value
        if attributes is not None:
            if name in self.owner.__dict__.get("_carried", ()):
                return value
            if attributes.engine is not None and self.prefix + name in attributes.engine.effect_facts.recorded:
                return self._recorded(name, value)
        self.reads.setdefault(name, user_line())
        if self.trace.numbers is not None and is_simple(value):
            return self.trace.numbers.read(self, name, value)
        if attributes is not None and has_arrays(value):
            self.arrays.add(name)
            return value
        self.recorder.record(self.owner, name, value)
        return value

    def _recorded(self, name: str, value: Any) -> Any:
        if not can_stand_in(value):
            return value
        if name not in self._stand_ins:
            engine = self.trace.attributes.engine  # type: ignore[union-attr]
            place = Place(self.owner, name, self.prefix + name, self.trace, engine.carry_recorded)
            self._stand_ins[name] = stand_in(value, place)
        return self._stand_ins[name]

    def present(self, name: str) -> bool:
        """Whether the owner has such an attribute now."""
        return plain_attribute(self.owner, name) is not MISSING

    def missing(self, name: str) -> None:
        """The step asked for an attribute that there is not."""
        if self.trace.numbers is not None:
            self.trace.numbers.missing(self, name)
        else:
            self.recorder.record_missing(self.owner, name)

    def write(self, name: str, value: Any) -> bool:
        """The step is about to set an attribute; whether it is to be set."""
        stand_in = self._stand_ins.get(name)
        if stand_in is not None and value is stand_in:
            return False  # `self.outputs += [...]` assigns what it changed
        if self.trace.numbers is None or not is_number(value):
            self.trace.require_own_level(
                f"`self.{self.prefix}{name} = ...`", "return the value from the function and assign it outside"
            )
        self.lines[name] = user_line()
        self.settled.discard(name)
        if self.trace.numbers is not None and is_number(value) and self.trace.numbers.write(self, name, value):
            self.settled.add(name)
        return True

    def code(self, name: str, value: Any) -> None:
        """The step looked up a method, a property or a function: what that reads elsewhere is watched."""
        if name in self.owner.__dict__:
            self.recorder.record(self.owner, name, value)
        self.recorder.record_code(getattr(value, "fget", None) or value)

    def delete(self, name: str) -> None:
        """The step is about to delete an attribute."""
        self.trace.require_own_level(f"`del self.{self.prefix}{name}`", "do it outside")
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
        plain = plain_attribute(self, name)
        if plain is MISSING:
            tracer.missing(name)
        # Methods and properties are code; what they read is recorded by itself.
        elif not hasattr(type(plain), "__get__") and not is_network(plain):
            return tracer.read(name, plain)
        else:
            tracer.code(name, plain)
        return object.__getattribute__(self, name)

    def setattribute(self: Any, name: str, value: Any) -> None:
        tracer = object.__getattribute__(self, "__dict__").get("_tracer")
        if tracer is not None and name not in INTERNAL and not tracer.write(name, value):
            return
        cls.__setattr__(self, name, value)  # type: ignore[call-arg]

    def deleteattribute(self: Any, name: str) -> None:
        tracer = object.__getattribute__(self, "__dict__").get("_tracer")
        if tracer is not None:
            tracer.delete(name)
        cls.__delattr__(self, name)  # type: ignore[call-arg]

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


def has_networks(value: Any) -> bool:
    """Whether an attribute value holds a network."""
    return bool(walk(value, ""))
