"""Where in the user's code something happens, for messages."""

from __future__ import annotations

import os
import sys
from types import FrameType

__all__ = ["asked_by_us", "is_user_frame", "line_of", "user_line"]

_OWN = frozenset({"jaxlightning", "jax", "jaxlib", "flax", "optax", "contextlib", "functools", "copy", "collections"})


def asked_by_us() -> bool:
    """Whether the code that reads a property of the module belongs to this package; called by the property."""
    frame: FrameType | None = sys._getframe(2)
    # In a trace attributes of the module are looked up by the tracing class.
    while frame is not None and frame.f_globals.get("__name__") == "jaxlightning.compile.effects":
        frame = frame.f_back
    return frame is None or str(frame.f_globals.get("__name__", "")).partition(".")[0] == "jaxlightning"


def is_user_frame(frame: FrameType) -> bool:
    """Whether a frame runs code of the user's, and not of a library or of Python's own."""
    top = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    if top in _OWN or (top in sys.stdlib_module_names and top != "__main__"):
        return False
    return "site-packages" not in frame.f_code.co_filename


def line_of(error: BaseException) -> str:
    """The user's line from which an exception came, as `"file.py:31"`; empty when there is none."""
    found, traceback = "", error.__traceback__
    while traceback is not None:
        if is_user_frame(traceback.tb_frame):
            found = f"{os.path.basename(traceback.tb_frame.f_code.co_filename)}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return found


def user_line() -> str:
    """The innermost line of the call stack that belongs to the user, as `"file.py:31"`; empty when there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.partition(".")[0] not in _OWN:
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
