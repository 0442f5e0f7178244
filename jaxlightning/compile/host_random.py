"""Generators of random numbers on the host: a compiled step may not draw from them, a repeated one draws the same."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np

from jaxlightning.compile.user_code import is_user_frame

__all__ = ["States", "generator_states", "refuse_draws", "set_generator_states"]

States = tuple[Any, Any, Any]
"""Of `random`, of `numpy.random`, of torch (None where torch is not imported)."""


def generator_states() -> States:
    """The states of the global generators."""
    torch = sys.modules.get("torch")
    known = torch is not None and hasattr(torch, "get_rng_state")
    return random.getstate(), np.random.get_state(), torch.get_rng_state() if known and torch is not None else None


def set_generator_states(states: States) -> None:
    """Puts the global generators back."""
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch = sys.modules.get("torch")
    if states[2] is not None and torch is not None:
        torch.set_rng_state(states[2])


def _drawn(before: States, after: States) -> list[str]:
    drew = []
    if before[0] != after[0]:
        drew.append("random")
    if any(not np.array_equal(a, b) for a, b in zip(before[1], after[1], strict=True)):
        drew.append("numpy.random")
    if before[2] is not None and after[2] is not None and not bool((before[2] == after[2]).all()):
        drew.append("torch")
    return drew


def refuse_draws(before: States, where: str, again: Callable[[], Any]) -> None:
    """Refuses a step that drew from a generator of the host.

    Args:
        before: The states before it.
        where: The user's step, for example `"Net.training_step"`.
        again: Runs the step once more, to find the line.

    Raises:
        RuntimeError: Naming the line.
    """
    drew = _drawn(before, generator_states())
    if not drew:
        return
    line = _line_of_draw(before, again)
    raise RuntimeError(
        f"`{where}` drew random numbers from {', '.join(drew)}{line}. The step is compiled: the same numbers would be "
        "used at every step. Draw with `jax.random.*(self.next_rng(), ...)`, which gives a new key at every call and "
        "step."
    )


def _line_of_draw(before: States, again: Callable[[], Any]) -> str:
    """Runs the step once more under a trace function of Python and says after which line a generator moved."""
    set_generator_states(before)
    found: list[str] = []
    last: list[tuple[str, int]] = []

    def look(frame: FrameType, event: str, arg: Any) -> Any:
        if not is_user_frame(frame):
            return None
        if last and not found and _drawn(before, generator_states()):
            found.append(f"{os.path.basename(last[0][0])}:{last[0][1]}")
        if event in ("call", "line"):
            last[:] = [(frame.f_code.co_filename, frame.f_lineno)]
        return look

    previous = sys.gettrace()
    sys.settrace(look)
    try:
        again()
    except Exception:  # only the line matters here
        found = found or [""]
    finally:
        sys.settrace(previous)
    if not found and last:
        found.append(f"{os.path.basename(last[0][0])}:{last[0][1]}")
    return f" at {found[0]}" if found and found[0] else ""
