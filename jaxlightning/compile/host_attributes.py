"""Python numbers on a module that a step reads and changes: `self.count += 1`, then `if self.count % 5 == 0`.

They stay plain attributes on the host. A step that writes one is traced with a `HostNumber` in its place; what it
assigns is an expression that the host evaluates after each step, so the attribute is at every moment what it would be
without compilation. A number that only hooks change enters the step the same way once it was seen to change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxlightning.compile.host_proxy import AVAILABLE, HostNumber
from jaxlightning.compile.host_values import Expression, leaf
from jaxlightning.compile.trace import RetraceError, current_trace
from jaxlightning.compile.user_code import user_line

if TYPE_CHECKING:
    from jaxlightning.compile.effects import OwnerTracer
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
        expression = value._expression if isinstance(value, HostNumber) else Expression(repr(value), lambda env: value)
        self._register(key, owner, name)
        self._written.add(key)
        if not self.silent:
            held = owner.owner.__dict__
            self.inputs.writes[key] = (lambda number: held.__setitem__(name, number), expression)
        return True

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


def _shown(value: Any) -> str:
    return value._expression.text if isinstance(value, HostNumber) else f"{value!r:.60}"
