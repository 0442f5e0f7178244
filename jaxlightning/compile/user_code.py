"""Where in the user's code something happens, for messages."""

from __future__ import annotations

import os
import sys
from types import FrameType

__all__ = ["user_line"]

_OWN = frozenset({"jaxlightning", "jax", "jaxlib", "flax", "optax", "contextlib", "functools", "copy", "collections"})


def user_line() -> str:
    """The innermost line of the call stack that belongs to the user, as `"file.py:31"`; empty when there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.partition(".")[0] not in _OWN:
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
