"""What one attempt to trace a step finds out about numbers of the host, and how the compiled step gets them.

`HostFacts` is what an engine knows about its module's numbers over all attempts; a `HostInputs` belongs to one attempt
and, when it ends in a compiled variant, stays with it: its guards choose the variant, its slots are the inputs, its
writes are done after each step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxlightning.compile.guards import Guard
from jaxlightning.compile.host_proxy import AVAILABLE, HostNumber, plain_value, weak
from jaxlightning.compile.host_values import BASE, Expression, HostEnvironment, apply, leaf
from jaxlightning.compile.packing import float_dtype
from jaxlightning.compile.trace import RetraceError, Scalars
from jaxlightning.compile.user_code import user_line

__all__ = ["HostFacts", "HostInputs", "Room"]


class HostFacts:
    """What an engine has learnt about numbers of the host.

    Attributes:
        sources: How to read each number by name outside a step.
        numbers: Attributes that steps write (`"written"`; `"made"` when there was none before) or that host code was
            seen to change (`"changed"`), by name: `"self.count"`.
        fresh: What was learnt since the engine looked last: module and attribute. A variant that took such an attribute
            for a constant is out of date.
        hints: Which advice was given already.
        names: Objects beside the module that steps read, by identity, with a number for messages.
    """

    def __init__(self) -> None:
        self.sources: dict[str, Callable[[], Any]] = {}
        self.numbers: dict[str, str] = {}
        self.fresh: list[tuple[Any, str]] = []
        self.names: dict[int, tuple[int, Any]] = {}
        self.hints: set[str] = set()

    def learn(self, key: str, why: str, owner: Any, name: str) -> None:
        """Takes note of a number of the host.

        Args:
            key: Its name from the module: `"self.child.count"`.
            why: `"written"`, `"made"` or `"changed"`.
            owner: The module whose attribute it is.
            name: The attribute.
        """
        self.numbers[key] = why
        self.fresh.append((owner, name))


class Room:
    """What the variants of one step have in common; grows when a trace needs more.

    Attributes:
        integers: Room for computed integers.
        floats: Room for computed floats.
        valued: Texts of expressions that have to be plain numbers (the size of an array), so that each of their values
            is compiled by itself.
        attempts: How often the step was traced since a trace was compiled last.
    """

    def __init__(self) -> None:
        self.integers = 0
        self.floats = 0
        self.valued: set[str] = set()
        self.attempts = 0

    def grow(self, floating: bool) -> None:
        """Makes room for more numbers of one kind."""
        if floating:
            self.floats = 4 * self.floats or 8
        else:
            self.integers = 4 * self.integers or 8

    @property
    def sizes(self) -> tuple[int, int]:
        """Room for integers, room for floats."""
        return self.integers, self.floats


@dataclass
class Slot:
    """One input of a compiled step.

    Attributes:
        expression: How the host computes it.
        index: Its place in the vector of its kind.
        kind: Type of the number, for example `int`; other types do not fit.
    """

    expression: Expression
    index: int
    kind: type


class HostInputs:
    """Numbers of the host in one attempt to trace a step.

    Args:
        facts: What the engine knows.
        env: The numbers of the step for which it is traced.
        room: Room for computed numbers.

    Attributes:
        guards: Python decisions, in order, by their text.
        writes: What is assigned after each step: name to the function that assigns and the expression.
        evaluated: Whether something on the host wants the numbers of each step.
        looks_back: Whether it reads what the trainer knows only when the step before is booked (metrics, the last
            batch), so that steps cannot be run ahead of the bookkeeping.
    """

    def __init__(self, facts: HostFacts, env: HostEnvironment, room: Room | None = None) -> None:
        self.facts = facts
        self.env = env
        self.room = Room() if room is None else room
        self.guards: dict[str, Guard] = {}
        self.writes: dict[str, tuple[Callable[[Any], None], Expression]] = {}
        self.refused: list[str] = []
        self.evaluated = False
        self.looks_back = False
        self.room.attempts += 1
        self._sizes = self.room.sizes
        # As wide as JAX's numbers are now; the compiled step keeps them so.
        floating = np.dtype(float_dtype())
        self._dtypes: tuple[np.dtype[Any], np.dtype[Any]] = (
            np.dtype(np.int64 if floating == np.float64 else np.int32),
            floating,
        )
        self._pinned: set[str] = set()
        self._slots: tuple[dict[str, Slot], dict[str, Slot]] = ({}, {})
        self._traced: dict[str, Any] = {}
        self._abstract: dict[type, Any] = {}
        self._zero: Any = None
        self._vectors: tuple[list[dict[type, Any]], list[dict[type, Any]]] = ([], [])

    # --- while the step is traced -----------------------------------------------------------------------------------

    def bind(self, base: Sequence[Any], host: Sequence[Any]) -> None:
        """Takes the traced inputs: made into scalars at once, because a use may lie inside a transform of the user's.

        Args:
            base: The integers that every step has, in the order of `BASE`.
            host: The vectors of computed integers and floats, or nothing.
        """
        wide = self._dtypes[0]  # as wide as computed integers, so that all host numbers are of one type
        base = [value if value.dtype == wide else weak(value.astype(wide)) for value in base]
        self._traced = dict(zip(BASE, base, strict=True))
        self._slots = ({}, {})
        integers, floats = host or ((), ())
        self._abstract = {
            int: base[0].aval,
            float: weak(base[0].astype(float)).aval,
            bool: (base[0] != 0).aval,
        }
        self._zero = base[0]
        self._vectors = (
            [_forms(integers[i]) for i in range(self._sizes[0])],
            [_forms(floats[i]) for i in range(self._sizes[1])],
        )

    def release(self) -> None:
        """Lets go of everything that belongs to the trace."""
        self._traced, self._vectors, self._zero = {}, ([], []), None
        self.env = HostEnvironment(self.facts.sources)
        self.room.attempts = 0

    def scalars(self, micro_step: Any, dataloader_idx: int | None = None) -> Scalars:
        """The numbers of the framework as the user's step sees them."""
        batch_idx, current_epoch, global_step = (self.number(name) for name in BASE)
        return Scalars(batch_idx, current_epoch, global_step, micro_step, dataloader_idx)

    def number(self, name: str) -> Any:
        """The number with this name, as an object for the user's code."""
        if not AVAILABLE:
            return self._traced.get(name, self.env[name])
        return self._given(leaf(name), self.env[name])

    def _given(self, expression: Expression, known: Any) -> Any:
        if expression.text in self.room.valued:
            return self.decide(expression, f"value({expression.text})", lambda value: value, pins=True)
        return HostNumber(self, expression, known)

    def compute(self, text: str, function: Callable[..., Any], *operands: Any) -> Any:
        """Applies a function to host numbers and plain values.

        Args:
            text: The expression as source.
            function: Any function of plain values.
            *operands: `HostNumber`s and plain values.

        Returns:
            A `HostNumber`; something that is no number (a tuple, an array) is given as it is and guarded.
        """
        known = function(*(plain_value(operand) for operand in operands))
        if known is NotImplemented:
            return known
        parts = [o._expression if isinstance(o, HostNumber) else o for o in operands]
        expression = apply(text, function, *parts)
        if all(part.text in self._pinned for part in parts if isinstance(part, Expression)):
            self._pinned.add(text)
        if isinstance(known, bool | int | float | np.bool_ | np.integer | np.floating):
            return self._given(expression, known)
        for operand in operands:
            if isinstance(operand, HostNumber):
                hash(operand)
        return known

    def decide(self, number: Expression, text: str, function: Callable[[Any], Any], *, pins: bool = False) -> Any:
        """What Python's question about a number is answered with; the variant is for this answer only.

        Args:
            number: The number.
            text: The question as source, for example `"bool(batch_idx > 3)"`.
            function: The question.
            pins: Whether the answer tells the number exactly.

        Returns:
            The answer in this step.
        """
        outcome = function(number.evaluate(self.env))
        if number.text not in self._pinned:
            if pins:
                self._pinned.add(number.text)
            if text not in self.guards:
                self.guards[text] = Guard(apply(text, function, number), outcome, user_line())
        return outcome

    def ask(self, question: str, answer: Callable[[], Any]) -> Any:
        """What a question about something else than a number is answered with; the variant is for this answer only.

        Args:
            question: As source, for example `"len(self.outputs)"`.
            answer: Gives a hashable value.
        """
        if question not in self.guards:
            self.guards[question] = Guard(Expression(question, lambda _: answer()), answer(), user_line())
        return self.guards[question].outcome

    def traced(self, expression: Expression, known: Any) -> Any:
        """The input of the compiled step that carries an expression.

        Raises:
            RetraceError: If the step has no room for it; it is traced again with more.
        """
        found = self._traced.get(expression.text)
        if found is not None:
            return found
        floating = isinstance(known, float | np.floating)
        slots, vector = self._slots[floating], self._vectors[floating]
        if len(slots) >= len(vector):
            room = self.room
            raise RetraceError(f"the number `{expression.text}`", lambda _: room.grow(floating))
        slot = Slot(expression, len(slots), type(known))
        slots[expression.text] = slot
        if not expression.fixed:  # `self.beta = 1` becomes 0.5, 2 ** -batch_idx is no integer: another variant
            self.decide(expression, f"type({expression.text})", type)
        forms = vector[slot.index]
        value = forms.get(type(known))
        if value is None:  # a rare dtype: made where it is used, and not kept, since that may be a transform
            return forms[object].astype(jax.dtypes.canonicalize_dtype(known.dtype))
        self._traced[expression.text] = value
        return value

    def settle(self, error: BaseException) -> RetraceError | None:
        """What to do about an error of a library that was refused the value of a number: trace again, with the value.

        Args:
            error: What the step raised.

        Returns:
            The reason to trace again, None when the error has nothing to do with it.
        """
        if not self.refused or isinstance(error, RetraceError) or self.refused[-1] in self.room.valued:
            return None
        if not isinstance(error, TypeError | IndexError | ValueError | jax.errors.JAXTypeError):
            return None
        text, room = self.refused[-1], self.room
        return RetraceError(f"the value of `{text}`", lambda _: room.valued.add(text))

    def abstract(self, known: Any) -> Any:
        """What JAX knows of a number as an array of the trace."""
        kind = type(known)
        if kind not in self._abstract:
            self._abstract[kind] = self._zero.astype(jax.dtypes.canonicalize_dtype(known.dtype)).aval
        return self._abstract[kind]

    # --- with the compiled step -------------------------------------------------------------------------------------

    @property
    def needed(self) -> bool:
        """Whether the variant differs from one that knows no numbers of the host."""
        return bool(self.guards or self.writes or self.evaluated or any(self._sizes))

    def inputs(self, env: HostEnvironment) -> tuple[np.ndarray[Any, Any], ...]:
        """The vectors of computed integers and floats for one step; empty when the variant has none.

        Raises:
            TypeError: If a number has another type than in the trace.
            OverflowError: If an integer does not fit.
        """
        if not any(self._sizes):
            return ()
        return (
            _vector(self._slots[0], self._sizes[0], self._dtypes[0], env),
            _vector(self._slots[1], self._sizes[1], self._dtypes[1], env),
        )

    def example(self) -> tuple[np.ndarray[Any, Any], ...]:
        """Vectors of the shapes that `inputs` gives."""
        if not any(self._sizes):
            return ()
        return np.zeros(self._sizes[0], self._dtypes[0]), np.zeros(self._sizes[1], self._dtypes[1])

    def finish(self, env: HostEnvironment) -> None:
        """Does the writes of a step: all values first, as they were at its start."""
        values = [(assign, expression.evaluate(env)) for assign, expression in self.writes.values()]
        for assign, value in values:
            assign(value)


@functools.lru_cache(maxsize=64)
def _zeros(size: int, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    return np.zeros(size, dtype)


def _vector(slots: dict[str, Slot], size: int, dtype: np.dtype[Any], env: HostEnvironment) -> np.ndarray[Any, Any]:
    if not slots:
        return _zeros(size, dtype)  # nobody writes to it, so it may be the same one at every step
    values: list[Any] = []
    for slot in slots.values():
        value = slot.expression.evaluate(env)
        if type(value) is not slot.kind:
            raise TypeError(
                f"`{slot.expression.text}` is of type {type(value).__name__} in this step, {slot.kind.__name__} in the "
                "step that was compiled."
            )
        values.append(value)
    values += [0] * (size - len(values))
    try:
        return np.array(values, dtype)
    except OverflowError:
        limits = np.iinfo(dtype)
        large = next(
            s for s, value in zip(slots.values(), values, strict=False) if not limits.min <= value <= limits.max
        )
        raise OverflowError(
            f"`{large.expression.text}` is too large for a {dtype.name} of the compiled step. Scale it down, make it a "
            "float, or enable 64-bit numbers (`jax_enable_x64`)."
        ) from None


def _forms(value: Any) -> dict[type, Any]:
    """A scalar of an input vector as each kind of number that the host may have there: Python's own are weakly typed.

    All are made at once, before the user's code runs: what is made later might belong to a transform of the user's.
    """
    if jax.numpy.issubdtype(value.dtype, jax.numpy.integer):
        truth = value != 0
        return {object: value, int: weak(value), bool: truth, np.bool_: truth}
    return {
        object: value,
        float: weak(value),
        np.float32: value.astype(np.float32),
        np.float64: value.astype(jax.dtypes.canonicalize_dtype(np.float64)),
    }
