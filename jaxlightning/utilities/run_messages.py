"""Show the package's INFO lines while a run is on, for programs that set up no logging of their own."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["shown_messages"]


@contextmanager
def shown_messages() -> Iterator[None]:
    """Write lines of the logger "jaxlightning" from INFO on to standard error while the context is open.

    Importing the package changes no logging, and neither does this where the program has a handler or a level of its
    own for the logger: what is shown is then the program's business.
    """
    log = logging.getLogger("jaxlightning")
    if log.hasHandlers() or log.level != logging.NOTSET or not log.propagate:
        yield
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    # A library may give the root logger a handler in the middle of a run (absl does so when Orbax is imported), which
    # would say every line once more.
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        handler.close()
        log.setLevel(logging.NOTSET)
        log.propagate = True
