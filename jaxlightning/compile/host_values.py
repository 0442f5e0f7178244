"""Numbers of the host that a compiled step uses: where they come from, how they are computed again before each step.

A step may read numbers that change from step to step without being arrays: `batch_idx`, `self.current_epoch`, a counter
of the user's. What it computes from them alone is an `Expression`: Python evaluates it before every step, in Python's
own arithmetic, and the result enters the compiled step as an input, or decides which compiled variant runs. Evaluation
is a function of a `HostEnvironment` and of nothing else, so that several steps can be looked at in advance.

What owns what: this file has values and expressions, `host_proxy` the objects that the user's code sees, `host_inputs`
what one attempt to trace a step collects, `guards` the choice of a variant.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["BASE", "Expression", "HostEnvironment", "constant_text", "leaf"]

BASE = ("batch_idx", "current_epoch", "global_step")
"""The numbers that enter every step as integers, whether it uses them or not."""


class HostEnvironment(dict[str, Any]):
    """The numbers of one step by name; what was not given is read from its source once and kept.

    Args:
        sources: How to read what is not given: name to function without arguments.
        **given: Numbers of this step, for example `batch_idx=3`.
    """

    __slots__ = ("sources",)

    def __init__(self, sources: Mapping[str, Callable[[], Any]], **given: Any) -> None:
        super().__init__(given)
        self.sources = sources

    def __missing__(self, name: str) -> Any:
        value = self[name] = self.sources[name]()
        return value


class Expression:
    """What a step computes from numbers of the host alone.

    Attributes:
        text: The expression as source, for messages; equal texts mean equal values, so it also serves as a key.
        evaluate: Its value in an environment.
        fixed: Whether its type is the same in every step.
    """

    __slots__ = ("evaluate", "fixed", "text")

    def __init__(self, text: str, evaluate: Callable[[HostEnvironment], Any], fixed: bool = False) -> None:
        self.text = text
        self.evaluate = evaluate
        self.fixed = fixed

    def __repr__(self) -> str:
        return f"Expression({self.text})"


def leaf(name: str) -> Expression:
    """The number with this name."""
    return Expression(name, lambda env: env[name], name in BASE)


def constant_text(value: Any) -> str:
    """A text that tells constants apart: `1`, `1.0` and `True` are three."""
    return repr(value)


def apply(text: str, function: Callable[..., Any], *operands: Any) -> Expression:
    """An expression that calls a function.

    Args:
        text: The whole expression as source.
        function: Any function of plain values.
        *operands: Expressions, or values that never change.

    Returns:
        The expression.
    """
    # 2 ** 3 is an integer and 2 ** -3 is not; of everything else the operands' types decide.
    varies = function is operator.pow and not (type(operands[1]) in (int, float) and operands[1] >= 0)
    fixed = not varies and all(o.fixed for o in operands if isinstance(o, Expression))
    # The common shapes without a loop: an evaluation costs a few hundred nanoseconds and happens before every step.
    if len(operands) == 1 and isinstance(operands[0], Expression):
        (only,) = operands
        inner = only.evaluate
        return Expression(text, lambda env: function(inner(env)), fixed)
    if len(operands) == 2:
        left, right = operands
        if isinstance(left, Expression) and isinstance(right, Expression):
            first, second = left.evaluate, right.evaluate
            return Expression(text, lambda env: function(first(env), second(env)), fixed)
        if isinstance(left, Expression):
            first = left.evaluate
            return Expression(text, lambda env: function(first(env), right), fixed)
        if isinstance(right, Expression):
            second = right.evaluate
            return Expression(text, lambda env: function(left, second(env)), fixed)
    parts = [part.evaluate if isinstance(part, Expression) else _always(part) for part in operands]
    return Expression(text, lambda env: function(*(part(env) for part in parts)), fixed)


def _always(value: Any) -> Callable[[HostEnvironment], Any]:
    return lambda env: value
