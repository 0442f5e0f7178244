"""Effects that are repeated on the host after every step: appends, calls of a logger, printing, written attributes.

While a step is traced each effect is recorded with its traced values; the arrays among them leave the compiled step as
outputs, and after each call the effects are applied in the order in which the step had them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxlightning.compile.batch import HostLeaf, host_leaf_of
from jaxlightning.compile.containers import Skeleton, map_items, rebuild, take_apart
from jaxlightning.compile.host_proxy import HostNumber
from jaxlightning.compile.host_values import Expression, HostEnvironment

__all__ = ["HostEffects", "Replay"]


@dataclass
class Replay:
    """One effect of a step.

    Attributes:
        what: How the step wrote it, for messages: ``"`self.outputs.append(...)`"``.
        value: A container whose arrays are outputs of the step; the rest is as it was while the step was traced.
        apply: Called with `value` and its concrete arrays after each step.
        state: Whether the value is state and no value of the batch, so that no rows of padding are in it.
    """

    what: str
    value: Any
    apply: Callable[[Any], None]
    state: bool = False


class _Number:
    """A number of the host in a value: computed anew for each step, in Python."""

    __slots__ = ("expression",)

    def __init__(self, expression: Expression) -> None:
        self.expression = expression


class HostEffects:
    """The effects of one variant of a step.

    Args:
        replays: What the trace recorded, in order.
    """

    def __init__(self, replays: Sequence[Replay]) -> None:
        self._arrays: tuple[Any, ...] = ()
        self._entries: list[tuple[Skeleton, int, bool, Replay]] = []
        for replay in replays:
            value, numbers = _without_numbers(replay.value)
            parts = take_apart(value, copies=False)
            self._arrays += parts.arrays
            self._entries.append((parts.skeleton, len(parts.arrays), numbers, replay))

    def __bool__(self) -> bool:
        return bool(self._entries)

    @property
    def text(self) -> str:
        """What the effects are, for messages."""
        return ", ".join(replay.what for *_, replay in self._entries)

    def detach(self) -> tuple[Any, ...]:
        """The arrays that the compiled step returns; afterwards the object holds none."""
        arrays, self._arrays = self._arrays, ()
        return arrays

    def __call__(
        self,
        arrays: Sequence[Any],
        env: HostEnvironment | None,
        real_rows: Callable[[Any], Any] = tuple,
        leaves: Sequence[Any] | None = None,
    ) -> None:
        """Applies the effects of one step.

        Args:
            arrays: What the compiled step returned for them.
            env: Numbers of the host in the step.
            real_rows: Takes rows of padding off arrays of the batch.
            leaves: Leaves of the batch, where some of them stay on the host.
        """
        start = 0
        for skeleton, count, numbers, replay in self._entries:
            part = arrays[start : start + count]
            start += count
            value = rebuild(skeleton, iter(part if replay.state else real_rows(part)))
            replay.apply(map_items(value, lambda item: _evaluated(item, env, leaves)) if numbers else value)


def _without_numbers(value: Any) -> tuple[Any, bool]:
    """A value whose host numbers stay on the host, and whether it has any or leaves of the batch that stay there."""
    found: list[Any] = []

    def replace(item: Any) -> Any:
        if type(item) is HostLeaf:
            found.append(item)
        if type(item) is not HostNumber:
            return item
        found.append(item)
        item._inputs.evaluated = True
        return _Number(item._expression)

    return map_items(value, replace), bool(found)


def _evaluated(item: Any, env: HostEnvironment | None, leaves: Sequence[Any] | None) -> Any:
    if type(item) is _Number and env is not None:
        return item.expression.evaluate(env)
    return host_leaf_of(item, leaves)
