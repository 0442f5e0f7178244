"""Python numbers on a module that a step reads and changes: `self.count += 1`, then `if self.count % 5 == 0`.

They stay plain attributes on the host. A step that writes one is traced with a `HostNumber` in its place; what it
assigns is an expression that the host evaluates after each step, so the attribute is at every moment what it would be
without compilation. A number that only hooks change enters the step the same way once it was seen to change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxlightning.compile.host_proxy import AVAILABLE, HostNumber
from jaxlightning.compile.host_values import Expression, leaf
from jaxlightning.compile.trace import RetraceError, current_trace
from jaxlightning.compile.user_code import user_line

if TYPE_CHECKING:
    from jaxlightning.compile.effects import OwnerTracer, ReadRecorder
    from jaxlightning.compile.host_inputs import HostInputs

__all__ = ["HostAttributes"]

_NUMBERS = (int, float)
_MISSING = object()


class HostAttributes:
    """The numbers on the module and its child modules in one run of a step.

    Args:
        inputs: What the attempt to trace the step finds out.
        silent: Whether writes are dropped (a run for gradients only); reads are the same.
    """

    def __init__(self, inputs: HostInputs, *, silent: bool) -> None:
        self.inputs = inputs
        self.silent = silent
        self._written: set[str] = set()
        self._given: dict[str, Any] = {}
        if not silent:
            inputs.writes.clear()

    def read(self, owner: OwnerTracer, name: str, value: Any) -> Any:
        """What the step sees of an attribute that holds a simple value.

        Args:
            owner: Whose attribute.
            name: Its name.
            value: What it holds now: what the step wrote, else what it held before the step.

        Returns:
            The value, or an object that stands for it in every step.
        """
        key = _key(owner, name)
        if isinstance(value, HostNumber) or key in self._written:
            return value
        facts = self.inputs.facts
        if key in facts.numbers and AVAILABLE:
            self._register(key, owner, name)
            self.inputs.env[key] = value  # as it was before the step: nothing was written yet
            if facts.numbers[key] == "made":
                self._presence(key, owner, name, True)
            if type(value) in _NUMBERS:
                return self.inputs.number(key)
            # A text or a flag that host code was seen to change: each value is compiled once.
            self.inputs.decide(leaf(key), f"value({key})", lambda found: found, pins=True)
            return value
        owner.recorder.record(owner.owner, name, value)
        return value

    def missing(self, owner: OwnerTracer, name: str) -> None:
        """The step asked for an attribute that there is not."""
        key = _key(owner, name)
        if self.inputs.facts.numbers.get(key) == "made" and key not in self._written:
            self._presence(key, owner, name, False)
        else:
            owner.recorder.record_missing(owner.owner, name)

    def write(self, owner: OwnerTracer, name: str, value: Any) -> bool:
        """Takes note of a number that the step assigns.

        Args:
            owner: Whose attribute.
            name: Its name.
            value: A number of Python's or a `HostNumber`.

        Returns:
            Whether the write is taken care of.

        Raises:
            RuntimeError: If the attribute held something else than a number when the step read it.
            RetraceError: If the step took the attribute for a constant so far.
        """
        if not AVAILABLE:
            return False
        key = _key(owner, name)
        trace = current_trace()
        if trace is not None and not self.silent:
            trace.require_own_level(
                f"The assignment of `{key}` at {user_line()}",
                "return the number from the function and assign it outside",
            )
        before = owner.recorder.held(owner.owner, name, _MISSING)
        if before is not _MISSING and type(before) not in _NUMBERS:
            raise RuntimeError(self._refusal(key, before, value))
        facts = self.inputs.facts
        why = "written" if key in self._written or owner.present(name) else "made"
        if facts.numbers.get(key) not in ("made", "written"):
            owned = owner.owner
            raise RetraceError(f"the number `{key}`", lambda all_facts: all_facts.host.learn(key, why, owned, name))
        self._register(key, owner, name)
        self._written.add(key)
        if not self.silent:
            held = owner.owner.__dict__
            self.inputs.writes[key] = (lambda number: held.__setitem__(name, number), _expression(value))
        return True

    # --- beside the module: trainer, datamodule, learning rates ---------------------------------------------------

    def source(self, key: str, value: Any, read: Callable[[], Any]) -> Any:
        """A number that is read anew before each step.

        Args:
            key: How the user reaches it.
            value: Its value in the step being traced.
            read: Reads it.
        """
        self.inputs.facts.sources[key] = read
        self.inputs.env[key] = value
        return self.inputs.number(key) if AVAILABLE else value

    def flag(self, key: str, value: Any, read: Callable[[], Any]) -> Any:
        """Something hashable by which the step may decide: each of its values is compiled by itself."""
        self.inputs.facts.sources[key] = read
        self.inputs.env[key] = value
        return self.inputs.decide(leaf(key), f"value({key})", lambda found: found, pins=True)

    def assign(self, key: str, value: Any, setter: Callable[[Any], None]) -> None:
        """Repeats an assignment after each step.

        Args:
            key: What is assigned.
            value: A `HostNumber`, or a plain value.
            setter: Assigns it.
        """
        trace = current_trace()
        if trace is not None and not self.silent:
            trace.require_own_level(f"The assignment of `{key}` at {user_line()}", "assign it outside of the function")
        self._given[key] = value
        if not self.silent:
            self.inputs.writes[key] = (setter, _expression(value))

    def written_value(self, key: str, default: Any) -> Any:
        """What this run of the step assigned, `default` when it did not."""
        return self._given.get(key, default)

    def read_beside(self, key: str, recorder: ReadRecorder, target: Any, name: str, value: Any) -> Any:
        """What the step sees of an attribute of an object that is no module: a constant that is watched.

        Args:
            key: How the user reaches it.
            recorder: Remembers constants.
            target: The object.
            name: The attribute.
            value: What it holds.
        """
        facts = self.inputs.facts
        if key in facts.numbers and AVAILABLE:
            if type(value) in _NUMBERS:
                return self.source(key, value, lambda: getattr(target, name))
            return self.flag(key, value, lambda: getattr(target, name))
        recorder.record(target, name, value, key)
        return value

    def hear(self, owner: Any, name: str, value: Any, read: Callable[[], Any] | None) -> Any:
        """What the user's code sees of a learning rate and its like.

        Setting one (`read` is None) is recorded in a manual step and refused in others.
        """
        what = f"param_groups[...][{name!r}]" if isinstance(owner, dict) else f"{type(owner).__name__}.{name}()"
        trace = current_trace()
        rates = None if trace is None or trace.manual is None else trace.manual.rates
        if read is None:
            if trace is not None and trace.manual is not None and trace.silent:
                return True
            if rates is not None and isinstance(value, HostNumber | int | float | np.integer | np.floating):
                rates.assign(owner, name, value, self)
                return True
            raise RuntimeError(
                f"The step sets `{what}` at {user_line()}. The step is compiled: it would be set once, while the step "
                "is traced. Set it in a hook such as `on_train_batch_start`, or use a learning-rate scheduler."
            )
        names = self.inputs.facts.names
        number = names.setdefault(id(owner), (len(names), owner))[0]
        key = f"{what}#{number}"
        if isinstance(value, bool | str | type(None)):
            return self.flag(key, value, read)
        if rates is not None and isinstance(value, int | float | list | tuple):
            found = rates.seen(key, value, read, self)
            if found is not None:
                return found
        if isinstance(value, int | float):
            return self.source(key, value, read)
        if isinstance(value, list | tuple) and all(isinstance(item, int | float) for item in value):
            return type(value)(self.source(f"{key}[{i}]", item, _item(read, i)) for i, item in enumerate(value))
        return value

    def _presence(self, key: str, owner: OwnerTracer, name: str, present: bool) -> None:
        owned = owner.owner
        self.inputs.facts.sources[f"hasattr({key})"] = lambda: hasattr(owned, name)
        self.inputs.env[f"hasattr({key})"] = present
        self.inputs.decide(leaf(f"hasattr({key})"), f"hasattr({key})", bool)

    def _register(self, key: str, owner: OwnerTracer, name: str) -> None:
        owned = owner.owner
        self.inputs.facts.sources[key] = lambda: getattr(owned, name)

    def _refusal(self, key: str, before: Any, value: Any) -> str:
        what = "flag" if isinstance(before, bool) else type(before).__name__
        return (
            f"The step reads `{key}` (a {what}: {before!r:.60}) and changes it to {_shown(value)} at {user_line()}. "
            "The step is compiled, and inside it only numbers and arrays can be read and changed: use a number (0, 1 "
            "for a flag), an array with `jnp.where`, or change the attribute in a hook such as `on_train_batch_end`."
        )


def _key(owner: OwnerTracer, name: str) -> str:
    return f"self.{owner.prefix}{name}"


def _item(read: Callable[[], Any], index: int) -> Callable[[], Any]:
    return lambda: read()[index]


def _expression(value: Any) -> Expression:
    if isinstance(value, HostNumber):
        return value._expression
    return Expression(repr(value), lambda env: value, fixed=True)


def _shown(value: Any) -> str:
    return value._expression.text if isinstance(value, HostNumber) else f"{value!r:.60}"
