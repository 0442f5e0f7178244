"""What a step wrote to its module, found by comparing before and after; and what becomes of each write.

A step runs on the real module, so whatever it writes stands there at the end of the trace: with traced values, and
for this one time. `Snapshot` finds the writes and undoes them; `settle_writes` makes effects of them that happen after
every step, or refuses them by name.
"""

from __future__ import annotations

import collections
import enum
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import numpy as np

from jaxlightning.compile.containers import is_container, is_user_object
from jaxlightning.compile.effects import INTERNAL, OwnerTracer
from jaxlightning.compile.host_random import States, generator_states, set_generator_states
from jaxlightning.compile.networks import is_network
from jaxlightning.compile.outputs import is_array
from jaxlightning.compile.recording import can_stand_in
from jaxlightning.compile.replay import Replay
from jaxlightning.compile.values import SIMPLE, same_value
from jaxlightning.compile.watched import MISSING

if TYPE_CHECKING:
    from jaxlightning.compile.trace import Trace

__all__ = ["Snapshot", "as_it_was", "settle_writes"]

_MAX_DEPTH = 5
_MAX_LENGTH = 4096
"""Longer containers hold data; only their length is compared."""


class Snapshot:
    """What a module, or one of its child modules, held before a step.

    Args:
        module: The module.
        prefix: Its path with a dot at its end; empty for the module itself.
    """

    def __init__(self, module: Any, prefix: str = "") -> None:
        self.module = module
        self.prefix = prefix
        self.before = dict(module.__dict__)
        self._containers = {
            name: _containers(value, set()) for name, value in self.before.items() if name not in INTERNAL
        }

    def assigned(self) -> dict[str, tuple[Any, Any]]:
        """Attributes that were set or deleted: what they held and hold, `MISSING` for nothing."""
        instance = self.module.__dict__
        names = [*self.before, *(name for name in instance if name not in self.before)]
        return {
            name: (self.before.get(name, MISSING), instance.get(name, MISSING))
            for name in names
            if name not in INTERNAL and instance.get(name, MISSING) is not self.before.get(name, MISSING)
        }

    def changed_in_place(self) -> dict[str, Any]:
        """Attributes whose object, or one inside it, was changed in place, with the innermost such object."""
        return {
            name: container
            for name, pairs in self._containers.items()
            for container, contents in pairs
            if not _same_contents(container, contents)
        }

    def restore(self) -> None:
        """Gives the module back what it held."""
        instance = self.module.__dict__
        for name in [n for n in instance if n not in self.before and n not in INTERNAL]:
            del instance[name]
        for name, value in self.before.items():
            if name in INTERNAL:
                continue
            instance[name] = value
            for container, contents in self._containers.get(name, ()):
                if not _same_contents(container, contents):
                    _refill(container, contents)


@contextmanager
def as_it_was(moments: Sequence[Snapshot], generators: States | None = None) -> Iterator[None]:
    """Gives modules the attributes that they had at an earlier moment, for the length of a `with` block.

    Args:
        moments: One for each module, made at that moment.
        generators: States of the host's generators at that moment; None leaves them alone.
    """
    drawn = None if generators is None else generator_states()
    if generators is not None:
        set_generator_states(generators)
    now = [Snapshot(moment.module, moment.prefix) for moment in moments]
    for moment in moments:
        moment.restore()
    try:
        yield
    finally:
        for moment in now:
            moment.restore()
        if drawn is not None:
            set_generator_states(drawn)


def settle_writes(snapshot: Snapshot, tracer: OwnerTracer, trace: Trace, where: str) -> None:
    """Decides what becomes of everything that a compiled step wrote to one module.

    Args:
        snapshot: Taken before the step; the module still holds what the step wrote.
        tracer: What was read, and the lines of the writes.
        trace: Gets the effects for the host, and what turned out to be state.
        where: The user's step, for example `"Net.training_step"`.

    Raises:
        RuntimeError: For a write that cannot be repeated after each step.
    """
    attributes = trace.attributes
    if attributes is None or attributes.engine is None:
        raise RuntimeError("Writes of a compiled step need the engine's attributes.")
    prefix, owner = snapshot.prefix, snapshot.module
    refuse = _Refusal(where, prefix, tracer)
    in_place = snapshot.changed_in_place()
    for name in in_place:
        value = snapshot.before[name]
        path = prefix + name
        if isinstance(in_place[name], np.ndarray):
            refuse(name, "a numpy array changed in place", _ARRAY_WAYS)
        elif can_stand_in(value) and _only_standard(value) and path not in attributes.engine.effect_facts.recorded:
            attributes.filled.add(path)
        elif is_container(value):
            attributes.found[path] = None
        else:
            refuse(name, f"the {type(in_place[name]).__name__} in it changed", _OBJECT_WAYS)
    for name in tracer.arrays - set(in_place):
        attributes.found[prefix + name] = None
    for name, (old, new) in snapshot.assigned().items():
        if name in tracer.settled:
            continue
        read = name in tracer.reads
        if new is MISSING:
            refuse(name, "it was deleted", _CONSTANT_WAYS)
        elif is_network(new) or is_network(old):
            refuse(name, "a network was put there", _NETWORK_WAYS)
        elif _carries_arrays(new):
            if name in tracer.arrays:
                attributes.found[prefix + name] = None
            elif read and isinstance(old, bool | int | float) and is_array(new):
                attributes.found[prefix + name] = np.asarray(old, new.dtype)
            elif attributes.engine.effect_facts.pure and is_array(new):
                attributes.found[prefix + name] = np.zeros(new.shape, new.dtype)  # never read
            else:
                _deliver(trace, owner, prefix, name, new, tracer)
        elif holds_tracers(new):
            refuse(name, f"a {type(new).__name__} that holds values of the step", _OBJECT_WAYS)
        elif old is not MISSING and same_value(old, new):
            continue
        elif read:
            refuse(name, f"it was read and then set to {new!r:.60}", _CONSTANT_WAYS)
        elif _repeatable(new):
            _deliver(trace, owner, prefix, name, new, tracer)
        else:
            refuse(name, f"an object of type {type(new).__name__} was put there", _OBJECT_WAYS)
    if refuse.lines:
        refuse.raise_all()


def _deliver(trace: Trace, owner: Any, prefix: str, name: str, value: Any, tracer: OwnerTracer) -> None:
    """The attribute gets its value after each step."""
    instance = owner.__dict__
    engine: Any = trace.attributes.engine  # type: ignore[union-attr]
    key = (id(owner), name)

    def apply(concrete: Any) -> None:
        if name in instance.get("_carried", ()):
            engine.write_attribute(owner, name, concrete)
        else:
            instance[name] = concrete
        if key in engine.effect_facts.constants:
            engine.mark_dirty()

    trace.replays.append(Replay(f"`self.{prefix}{name} = ...` ({tracer.lines.get(name, '')})", value, apply))


class _Refusal:
    """Collects writes that cannot be repeated, to name them all."""

    def __init__(self, where: str, prefix: str, tracer: OwnerTracer) -> None:
        self.where = where
        self.prefix = prefix
        self.tracer = tracer
        self.lines: list[str] = []
        self.ways: list[str] = []

    def __call__(self, name: str, what: str, ways: str) -> None:
        line = self.tracer.lines.get(name) or self.tracer.reads.get(name, "")
        self.lines.append(f"`self.{self.prefix}{name}` ({what}{f', {line}' if line else ''})")
        if ways not in self.ways:
            self.ways.append(ways)

    def raise_all(self) -> NoReturn:
        raise RuntimeError(
            f"`{self.where}` changed {', '.join(self.lines)}. The step is compiled: it is run by Python once, while it "
            f"is traced, and this change would happen then and never again. {' '.join(self.ways)}"
        )


_CONSTANT_WAYS = (
    "Strings, flags and objects that a step both reads and changes decide what is compiled: change them in a hook such "
    "as `on_train_batch_end` (the step is compiled again when it sees the change), use a number or an array, or run "
    "with `Trainer(jit=False)`."
)
_OBJECT_WAYS = (
    "Keep the arrays on `self`, or in a list, dict or dataclass there, return them from the step and keep them in a "
    "hook such as `on_train_batch_end`, or run with `Trainer(jit=False)`."
)
_ARRAY_WAYS = (
    "Make it a JAX array and write `self.x = self.x.at[i].set(v)`: an attribute that holds a JAX array is carried from "
    "step to step."
)
_NETWORK_WAYS = "Create and replace networks in `__init__`, `configure_model` or a hook."


def _repeatable(value: Any) -> bool:
    """Whether assigning the very same value after each step is what the step would do."""
    if isinstance(value, (*SIMPLE, enum.Enum, np.dtype, type)):
        return True
    return isinstance(value, tuple | frozenset) and all(_repeatable(item) for item in value)


def _carries_arrays(value: Any) -> bool:
    """Whether a value is an array, or a pytree with arrays and nothing traced hidden in it."""
    if is_array(value):
        return True
    if isinstance(value, SIMPLE) or not is_container(value):
        return False
    leaves = jax.tree_util.tree_leaves(value)
    return any(is_array(leaf) for leaf in leaves) and not any(
        holds_tracers(leaf) for leaf in leaves if not is_array(leaf)
    )


def holds_tracers(value: Any, depth: int = 0) -> bool:
    """Whether an object has traced values among its attributes or items."""
    if isinstance(value, jax.core.Tracer):
        return True
    if depth > 3 or isinstance(value, (*SIMPLE, type)) or is_array(value):
        return False
    if isinstance(value, dict):
        return any(holds_tracers(item, depth + 1) for item in value.values())
    if isinstance(value, list | tuple | set | frozenset | collections.deque):
        return any(holds_tracers(item, depth + 1) for item in value)
    return is_user_object(value) and any(holds_tracers(item, depth + 1) for item in vars(value).values())


def _only_standard(value: Any, depth: int = 0) -> bool:
    """Whether a container and the containers in it all have stand-ins."""
    if depth > _MAX_DEPTH or not can_stand_in(value):
        return depth > 0 and not is_container(value)
    if isinstance(value, set) or len(value) > _MAX_LENGTH:
        return True
    items = value.values() if isinstance(value, dict) else value
    return all(_only_standard(item, depth + 1) or is_array(item) or isinstance(item, tuple) for item in items)


def _containers(value: Any, seen: set[int], depth: int = 0) -> Sequence[tuple[Any, Any]]:
    """Everything in a value that can change in place, with a shallow copy of its contents."""
    if depth > _MAX_DEPTH or isinstance(value, (*SIMPLE, jax.Array)) or id(value) in seen or is_network(value):
        return []
    if isinstance(value, np.ndarray):
        return [(value, value.copy())] if value.dtype.kind not in "OSU" and value.size <= 1 << 22 else []
    own: Any
    if isinstance(value, dict):
        own, items = (dict(value), list(value.values()))
    elif isinstance(value, list | collections.deque):
        own, items = (list(value), list(value))
    elif isinstance(value, set):
        return [(value, set(value))]
    elif isinstance(value, tuple):
        own, items = None, list(value)
    elif is_user_object(value):
        own, items = (dict(vars(value)), list(vars(value).values()))
    else:
        return []
    seen.add(id(value))
    pairs = [] if own is None else [(value, own)]
    if len(items) <= _MAX_LENGTH:
        pairs += [pair for item in items for pair in _containers(item, seen, depth + 1)]
    return pairs


def _same_contents(container: Any, contents: Any) -> bool:
    if isinstance(container, np.ndarray):
        return bool(np.array_equal(container, contents, equal_nan=container.dtype.kind in "fc"))
    if isinstance(container, set):
        return bool(container == contents)
    if isinstance(container, list | collections.deque):
        return len(container) == len(contents) and all(a is b for a, b in zip(container, contents, strict=True))
    now = container if isinstance(container, dict) else vars(container)
    return now.keys() == contents.keys() and all(now[key] is contents[key] for key in contents)


def _refill(container: Any, contents: Any) -> None:
    if isinstance(container, np.ndarray):
        container[...] = contents
    elif isinstance(container, list | collections.deque):
        container.clear()
        container.extend(contents)
    elif isinstance(container, dict | set):
        container.clear()
        container.update(contents)
    else:
        vars(container).clear()
        vars(container).update(contents)
