"""Which compiled variant of a step fits the numbers of the host: decisions of Python, remembered as guards.

While a step is traced, every Python decision that depends on a number of the host becomes a `Guard`: an expression and
the outcome it had. The variants of one step form a tree: at each node one expression is evaluated, its outcome leads
on, and a leaf is a compiled variant. A step without such decisions is a tree of one leaf.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from jaxlightning.compile.host_values import Expression, HostEnvironment
from jaxlightning.utilities.rank_zero import rank_zero_warn

__all__ = ["MAX_VARIANTS", "WARN_VARIANTS", "DecisionHistory", "Guard", "VariantGroup"]

WARN_VARIANTS = 8
"""So many variants of one step are worth a warning: each one cost a compilation."""

MAX_VARIANTS = 32
"""So many variants of one step, each used for a few batches only, are an error."""

_SHORT = 16
"""A variant that served fewer batches than this on average was not worth its compilation."""

Variant = TypeVar("Variant")


@dataclass(frozen=True)
class Guard:
    """One Python decision of a step.

    Attributes:
        expression: What was asked, for example `bool((batch_idx % 5) == 0)`.
        outcome: What the answer was; hashable.
        where: The user's line, for example `"net.py:31"`.
    """

    expression: Expression
    outcome: Any
    where: str = ""

    @property
    def decides(self) -> bool:
        """Whether it is a decision of the user's code, and not a check of a number's type."""
        return not self.expression.text.startswith("type(")

    def __str__(self) -> str:
        return f"{self.expression.text} is {self.outcome!r}" + (f" ({self.where})" if self.where else "")


class _Node(Generic[Variant]):
    __slots__ = ("branches", "evaluate", "text")

    def __init__(self, guard: Guard) -> None:
        self.text = guard.expression.text
        self.evaluate: Callable[[HostEnvironment], Any] = guard.expression.evaluate
        self.branches: dict[Any, _Node[Variant] | Variant] = {}


class DecisionHistory:
    """Which decisions were compiled for, over all kinds of batches of one step; judges when there are too many.

    Args:
        owner: The user's step, for messages, for example `"Net's train step"`.
    """

    def __init__(self, owner: str = "the step") -> None:
        self.owner = owner
        self._taken: dict[tuple[tuple[str, Any], ...], tuple[Sequence[Guard], int]] = {}
        self._warned = False

    def note(self, guards: Sequence[Guard], moment: int) -> None:
        """Takes note of a compilation.

        Args:
            guards: The decisions of the variant.
            moment: How many batches the run has seen, to judge how long the variants serve.

        Raises:
            RuntimeError: If there are more than `MAX_VARIANTS`, each used for a few batches only.
        """
        self._taken[tuple((guard.expression.text, guard.outcome) for guard in guards)] = (guards, moment)
        count = len(self._taken)
        if count > WARN_VARIANTS and not self._warned:
            self._warned = True
            rank_zero_warn(
                f"`{self.owner}` was compiled {count} times because of Python decisions by numbers that change from "
                f"step to step:\n{self.report()}\n{_WAYS_OUT}"
            )
        if count > MAX_VARIANTS:
            oldest = next(iter(self._taken))
            if moment - self._taken[oldest][1] < _SHORT * MAX_VARIANTS:
                raise RuntimeError(
                    f"`{self.owner}` was compiled {count} times because of Python decisions by numbers that change "
                    f"from step to step, and each result served for a few batches only:\n{self.report()}\n{_WAYS_OUT}"
                )
            del self._taken[oldest]

    def report(self) -> str:
        """The decisions with the most outcomes, one a line."""
        outcomes: dict[str, tuple[Guard, dict[Any, None]]] = {}
        for guards, _ in self._taken.values():
            for guard in guards:
                outcomes.setdefault(guard.expression.text, (guard, {}))[1][guard.outcome] = None
        ranked = sorted(outcomes.values(), key=lambda entry: -len(entry[1]))
        lines = []
        for guard, values in ranked[:5]:
            shown = ", ".join(repr(value) for value in list(values)[:4]) + (", ..." if len(values) > 4 else "")
            place = f" at {guard.where}" if guard.where else ""
            lines.append(f"  {guard.expression.text}{place}: {len(values)} outcomes ({shown})")
        return "\n".join(lines)


class VariantGroup(Generic[Variant]):
    """All variants of one step for one kind of batch.

    Args:
        history: Judges the number of compilations; one of its own when None.
    """

    def __init__(self, history: DecisionHistory | None = None) -> None:
        self.history = DecisionHistory() if history is None else history
        self._members: list[tuple[tuple[Guard, ...], Variant]] = []
        self._root: _Node[Variant] | Variant | None = None

    def find(self, env: HostEnvironment | None) -> Variant | None:
        """The variant for these numbers, None when it is not compiled yet."""
        node: Any = self._root
        while type(node) is _Node:
            if env is None:
                return None
            try:
                outcome = node.evaluate(env)
            except Exception:  # the user's own error (a division by zero): tracing the step again shows it in its place
                return None
            node = node.branches.get(outcome)
        found: Variant | None = node
        return found

    def add(self, guards: Sequence[Guard], variant: Variant, moment: int = 0) -> None:
        """Takes in a compiled variant; beyond `MAX_VARIANTS` the oldest goes.

        Args:
            guards: Its decisions, in order.
            variant: The variant.
            moment: As in `DecisionHistory.note`.

        Raises:
            RuntimeError: As `DecisionHistory.note` does.
        """
        if guards:
            self.history.note(guards, moment)
        self._members.append((tuple(guards), variant))
        if len(self._members) > MAX_VARIANTS:
            self._rebuild(self._members[1:])
            return
        self._insert(tuple(guards), variant)
        self._drop_unreachable()

    def remove(self, unwanted: Callable[[Variant], bool]) -> list[Variant]:
        """Takes out variants; returns them."""
        gone = [variant for _, variant in self._members if unwanted(variant)]
        if gone:
            self._rebuild([(guards, variant) for guards, variant in self._members if not unwanted(variant)])
        return gone

    def variants(self) -> list[Variant]:
        """All compiled variants, in the order in which they came."""
        return [variant for _, variant in self._members]

    def _rebuild(self, members: list[tuple[tuple[Guard, ...], Variant]]) -> None:
        self._members, self._root = members, None
        for guards, variant in members:
            self._insert(guards, variant)
        self._drop_unreachable()

    def _insert(self, guards: tuple[Guard, ...], variant: Variant) -> None:
        if not guards:
            self._root = variant
            return
        root = self._root
        if not isinstance(root, _Node) or root.text != guards[0].expression.text:
            root = self._root = _Node(guards[0])
        node: _Node[Variant] = root
        for before, guard in itertools.pairwise(guards):
            below = node.branches.get(before.outcome)
            if not isinstance(below, _Node) or below.text != guard.expression.text:
                # Nothing there yet; or the step asked something else before, and what lies there is out of date.
                below = node.branches[before.outcome] = _Node(guard)
            node = below
        node.branches[guards[-1].outcome] = variant

    def _drop_unreachable(self) -> None:
        reachable = {id(variant) for variant in _leaves(self._root)}
        self._members = [(guards, variant) for guards, variant in self._members if id(variant) in reachable]


def _leaves(node: Any) -> list[Any]:
    if type(node) is _Node:
        return [leaf for below in node.branches.values() for leaf in _leaves(below)]
    return [] if node is None else [node]


_WAYS_OUT = (
    "Every outcome is compiled by itself, so a text or a key made from a step number, or a loop by it, compiles "
    "at every step. Keep such numbers as arrays (jnp.where, jax.lax.cond, `x[batch_idx]` on a JAX array), decide by "
    "something that has few outcomes (`batch_idx % 100 == 0`), or do it in a hook such as `on_train_batch_end`."
)
