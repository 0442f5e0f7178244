"""What the user's code sees in place of a number of the host: an array of the trace that knows its value.

A `HostNumber` is a tracer of the running trace, so everything in JAX takes it (indexing, `at[]`, `lax.cond`, shapes of
results, your own transforms). Arithmetic with Python numbers gives another `HostNumber`, evaluated on the host before
each step; a Python decision (`if`, `range`, an f-string, a key of a dictionary) gets the value that the number has
now and is remembered as a guard, so that another outcome is compiled as another variant.

This file is the only one that knows how JAX represents tracers; without that knowledge (a later JAX) host scalars are
plain arrays of the trace: arithmetic works, and Python decisions raise JAX's own error.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxlightning.compile.host_values import Expression, constant_text

try:  # no public counterpart: a subclass of the tracer of `jax.jit` is the only thing that all of JAX accepts
    from jax._src.interpreters.partial_eval import DynamicJaxprTracer as _Tracer
except ImportError:  # pragma: no cover - a JAX that keeps its tracers elsewhere
    _Tracer = None  # type: ignore[assignment,misc]

if TYPE_CHECKING:
    from jaxlightning.compile.host_inputs import HostInputs

try:  # no public way to make a traced scalar weakly typed, so that it adapts to the other operand as `2` does
    from jax._src.lax.lax import _convert_element_type
except ImportError:  # pragma: no cover
    _convert_element_type = None  # type: ignore[assignment]

__all__ = ["AVAILABLE", "HostNumber", "is_host_number", "plain_value", "weak"]

AVAILABLE = _Tracer is not None
"""Whether this JAX lets an object be a tracer and know its value."""

_LIBRARIES = frozenset({"jax", "jaxlib", "flax", "optax", "chex", "haiku", "equinox", "orbax", "einops", "distrax"})
_BETWEEN = frozenset({"functools", "dataclasses", "contextlib", "enum", "collections", "weakref", "typing"})
_NUMPY_FUNCTIONS = frozenset({"clip", "round", "around", "interp", "real", "imag", "isclose", "allclose", "heaviside"})
_PLAIN = (bool, int, float, np.bool_, np.number)


def weak(value: Any) -> Any:
    """A traced scalar with a weak type: arithmetic with it keeps the other operand's dtype."""
    return value if _convert_element_type is None else _convert_element_type(value, weak_type=True)


def is_host_number(value: Any) -> bool:
    """Whether a value in a step is a number that the host knows."""
    return isinstance(value, HostNumber)


def plain_value(value: Any) -> Any:
    """The value that a host number has in the step being traced; anything else as it is."""
    return value._known if isinstance(value, HostNumber) else value


def asked_by_library(depth: int = 2) -> bool:
    """Whether the code that asks for a value belongs to JAX or a library on it.

    Those probe tracers (`operator.index(x)` in a `try`), and an answer would compile the step for that value alone.
    """
    frame: Any = sys._getframe(depth)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if name not in _BETWEEN:
            return name in _LIBRARIES
        frame = frame.f_back
    return False


_SYMBOLS: dict[str, tuple[str, Callable[..., Any]]] = {
    "add": ("+", operator.add),
    "sub": ("-", operator.sub),
    "mul": ("*", operator.mul),
    "truediv": ("/", operator.truediv),
    "floordiv": ("//", operator.floordiv),
    "mod": ("%", operator.mod),
    "pow": ("**", operator.pow),
    "and": ("&", operator.and_),
    "or": ("|", operator.or_),
    "xor": ("^", operator.xor),
    "lshift": ("<<", operator.lshift),
    "rshift": (">>", operator.rshift),
}
_COMPARISONS: dict[str, tuple[str, Callable[..., Any]]] = {
    "lt": ("<", operator.lt),
    "le": ("<=", operator.le),
    "gt": (">", operator.gt),
    "ge": (">=", operator.ge),
    "eq": ("==", operator.eq),
    "ne": ("!=", operator.ne),
}
_UNARY: dict[str, tuple[str, Callable[..., Any]]] = {
    "neg": ("-{}", operator.neg),
    "pos": ("+{}", operator.pos),
    "abs": ("abs({})", abs),
    "invert": ("~{}", operator.invert),
    "trunc": ("math.trunc({})", math.trunc),
    "floor": ("math.floor({})", math.floor),
    "ceil": ("math.ceil({})", math.ceil),
}


class HostNumber(_Tracer if AVAILABLE else object):  # type: ignore[misc]
    """A number of the host inside a step that is traced.

    Args:
        inputs: Collects what this attempt to trace the step finds out.
        expression: How the host computes it.
        known: Its value in the step being traced.
    """

    __slots__ = ("_expression", "_inputs", "_known")

    _inputs: HostInputs
    _expression: Expression
    _known: Any

    def __init__(self, inputs: HostInputs, expression: Expression, known: Any) -> None:
        # Not the tracer's own: what JAX asks for is looked up on the traced input, once somebody uses it as an array.
        self._inputs = inputs
        self._expression = expression
        self._known = known

    @property
    def _traced(self) -> Any:
        return self._inputs.traced(self._expression, self._known)

    @property
    def aval(self) -> Any:
        """What JAX knows of the array: its dtype, no axes; asking for it does not make it an input of the step."""
        return self._inputs.abstract(self._known)

    # --- Python's questions ---------------------------------------------------------------------------------------

    def _decide(self, text: str, function: Callable[[Any], Any], *, pins: bool = False) -> Any:
        return self._inputs.decide(self._expression, text.format(self._expression.text), function, pins=pins)

    def _refused(self) -> bool:
        """Whether a library asks, which gets a tracer's answer; remembered, for when it cannot go on with that."""
        refused = asked_by_library(3)
        if refused:
            self._inputs.refused.append(self._expression.text)
        return refused

    def to_concrete_value(self) -> Any:
        """What JAX asks before it says that it needs a concrete value."""
        self._inputs.refused.append(self._expression.text)

    def __bool__(self) -> bool:
        if self._refused():
            return bool(super().__bool__())
        return bool(self._decide("bool({})", bool, pins=isinstance(self._known, bool)))

    def __int__(self) -> int:
        if self._refused():
            return int(super().__int__())
        return int(self._decide("int({})", int, pins=isinstance(self._known, int)))

    def __index__(self) -> int:
        if self._refused():
            return int(super().__index__())
        return int(self._decide("index({})", operator.index, pins=True))

    def __float__(self) -> float:
        if self._refused():
            return float(super().__float__())
        return float(self._decide("float({})", float, pins=True))

    def __complex__(self) -> complex:
        if self._refused():
            return complex(super().__complex__())
        return complex(self._decide("complex({})", complex, pins=True))

    def __str__(self) -> str:
        if asked_by_library():
            return str(super().__str__())
        return str(self._decide("str({})", str, pins=True))

    def __repr__(self) -> str:
        if asked_by_library():
            return str(super().__repr__())
        return str(self._decide("repr({})", repr, pins=True))

    def __format__(self, spec: str) -> str:
        if asked_by_library():
            return str(super().__format__(spec))
        if spec:
            text = self._expression.text
            question = f"format({text}, {spec!r})"
            return str(self._inputs.decide(self._expression, question, lambda value: format(value, spec)))
        return str(self._decide("str({})", str, pins=True))

    def __hash__(self) -> int:
        if self._refused():
            raise TypeError(f"unhashable type: {type(self).__name__}")
        return hash(self._decide("value({})", _itself, pins=True))

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        if self._refused():
            return super().__array__(*args, **kwargs)
        return np.asarray(self._decide("value({})", _itself, pins=True), *args, **kwargs)

    # --- Python's other arithmetic --------------------------------------------------------------------------------

    def __round__(self, ndigits: Any = None) -> Any:
        if ndigits is None:
            return self._inputs.compute(f"round({self._expression.text})", round, self)
        return self._inputs.compute(f"round({self._expression.text}, {ndigits!r})", round, self, ndigits)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def is_integer(self) -> Any:
        """As `float.is_integer`."""
        return self._inputs.compute(f"{self._expression.text}.is_integer()", lambda value: value.is_integer(), self)

    def bit_length(self) -> Any:
        """As `int.bit_length`."""
        return self._inputs.compute(f"{self._expression.text}.bit_length()", lambda value: value.bit_length(), self)

    def item(self, *args: Any) -> Any:
        """The number itself: what `.item()` of a metric of the trainer gives."""
        return self

    # --- NumPy's functions ----------------------------------------------------------------------------------------

    def __array_ufunc__(self, ufunc: Any, method: str, *operands: Any, **kwargs: Any) -> Any:
        if method == "__call__" and not kwargs and all(isinstance(o, (HostNumber, *_PLAIN)) for o in operands):
            shown = ", ".join(_text(operand) for operand in operands)
            return self._inputs.compute(f"np.{ufunc.__name__}({shown})", ufunc, *operands)
        traced = getattr(jax.numpy, ufunc.__name__, None)
        if method != "__call__" or traced is None:
            return NotImplemented
        return traced(*operands, **kwargs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        flat = [*args, *kwargs.values()]
        if func.__name__ in _NUMPY_FUNCTIONS and all(_plain_operand(operand) or operand is None for operand in flat):
            names = [*(_text(a) for a in args), *(f"{key}={_text(value)}" for key, value in kwargs.items())]
            keys = list(kwargs)

            def call(*values: Any) -> Any:
                return func(*values[: len(args)], **dict(zip(keys, values[len(args) :], strict=True)))

            return self._inputs.compute(f"np.{func.__name__}({', '.join(names)})", call, *flat)
        # As for an object that does not know this protocol: `np.ndim(x)` and its like ask for attributes.
        return func._implementation(*args, **kwargs)

    # Pickling and copying a number gives the number.
    def __copy__(self) -> HostNumber:
        return self

    def __deepcopy__(self, memo: Any) -> HostNumber:
        return self


def _itself(value: Any) -> Any:
    return value


def _text(value: Any) -> str:
    return value._expression.text if isinstance(value, HostNumber) else constant_text(value)


def _plain_operand(value: Any) -> bool:
    return isinstance(value, (HostNumber, *_PLAIN))


def _binary(name: str, symbol: str, function: Callable[..., Any]) -> None:
    def forward(self: HostNumber, other: Any) -> Any:
        if not _plain_operand(other):
            if name == "mul" and isinstance(other, str | bytes | list | tuple):
                return operator.index(self) * other
            return getattr(super(HostNumber, self), f"__{name}__")(other)
        return self._inputs.compute(f"({self._expression.text} {symbol} {_text(other)})", function, self, other)

    def backward(self: HostNumber, other: Any) -> Any:
        if not _plain_operand(other):
            if name == "mul" and isinstance(other, str | bytes | list | tuple):
                return other * operator.index(self)
            return getattr(super(HostNumber, self), f"__r{name}__")(other)
        return self._inputs.compute(f"({_text(other)} {symbol} {self._expression.text})", function, other, self)

    setattr(HostNumber, f"__{name}__", forward)
    setattr(HostNumber, f"__r{name}__", backward)


def _comparison(name: str, symbol: str, function: Callable[..., Any]) -> None:
    def compare(self: HostNumber, other: Any) -> Any:
        if not _plain_operand(other):
            if not isinstance(other, jax.Array | np.ndarray):
                return NotImplemented  # a string, None: Python says that they differ, or raises
            return getattr(super(HostNumber, self), f"__{name}__")(other)
        return self._inputs.compute(f"({self._expression.text} {symbol} {_text(other)})", function, self, other)

    setattr(HostNumber, f"__{name}__", compare)


def _unary(name: str, text: str, function: Callable[..., Any]) -> None:
    def method(self: HostNumber) -> Any:
        return self._inputs.compute(text.format(self._expression.text), function, self)

    setattr(HostNumber, f"__{name}__", method)


def _forwarded(name: str) -> property:
    return property(lambda self: getattr(self._traced, name))


for _name, (_symbol, _function) in _SYMBOLS.items():
    _binary(_name, _symbol, _function)
for _name, (_symbol, _function) in _COMPARISONS.items():
    _comparison(_name, _symbol, _function)
for _name, (_symbol, _function) in _UNARY.items():
    _unary(_name, _symbol, _function)
if AVAILABLE:
    # What JAX keeps on a tracer is kept by the traced input behind the number.
    for _kind in _Tracer.__mro__:
        for _name in getattr(_kind, "__slots__", ()):
            if _name not in ("__weakref__", "aval", *HostNumber.__slots__):
                setattr(HostNumber, _name, _forwarded(_name))
