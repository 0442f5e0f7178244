"""Reads of learning rates by the user's code inside a compiled step: they follow the host instead of being frozen.

Parameter groups and schedulers are plain objects of the host. While the engine traces a step it listens here, so that
`self.optimizers().param_groups[0]["lr"]` and `self.lr_schedulers().get_last_lr()` become inputs of the step.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Listener", "listener", "listening"]

Listener = Callable[[Any, str, Any, "Callable[[], Any] | None"], Any]
"""Called with the object, what is read, its value and a function that reads it again; gives what the reader sees.

None in place of the function: a write. It gives true when the value is set later, when the step has run.
"""

_active = threading.local()


def listener() -> Listener | None:
    """Who listens in this thread, when the code that called the caller is not ours."""
    found: Listener | None = getattr(_active, "listener", None)
    if found is None:
        return None
    name = str(sys._getframe(2).f_globals.get("__name__", ""))
    return None if name.partition(".")[0] == "jaxlightning" else found


@contextmanager
def listening(found: Listener) -> Iterator[None]:
    """Lets `found` hear of reads and writes for the length of a `with` block."""
    before = getattr(_active, "listener", None)
    _active.listener = found
    try:
        yield
    finally:
        _active.listener = before
