"""Effects that are repeated on the host after every step: appends, calls of a logger, printing, written attributes.

While a step is traced each effect is recorded with its traced values; the arrays among them leave the compiled step as
outputs, and after each call the effects are applied in the order in which the step had them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxlightning.compile.outputs import OutputTree

__all__ = ["HostEffects", "Replay"]


@dataclass
class Replay:
    """One effect of a step.

    Attributes:
        what: How the step wrote it, for messages: ``"`self.outputs.append(...)`"``.
        value: A pytree whose arrays are outputs of the step; the rest is as it was while the step was traced.
        apply: Called with `value` and its concrete arrays after each step.
    """

    what: str
    value: Any
    apply: Callable[[Any], None]


class HostEffects:
    """The effects of one variant of a step.

    Args:
        replays: What the trace recorded, in order.
    """

    def __init__(self, replays: Sequence[Replay]) -> None:
        self._trees = [OutputTree(replay.value) for replay in replays]
        self._apply = [replay.apply for replay in replays]
        self._counts = [len(tree.arrays) for tree in self._trees]

    def __bool__(self) -> bool:
        return bool(self._apply)

    def detach(self) -> tuple[Any, ...]:
        """The arrays that the compiled step returns; afterwards the object holds none."""
        return tuple(array for tree in self._trees for array in tree.detach())

    def __call__(self, arrays: Sequence[Any]) -> None:
        """Applies the effects of one step.

        Args:
            arrays: What the compiled step returned for them.
        """
        start = 0
        for tree, apply, count in zip(self._trees, self._apply, self._counts, strict=True):
            apply(tree.rebuild(arrays[start : start + count]))
            start += count
