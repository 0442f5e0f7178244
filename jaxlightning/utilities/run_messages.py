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
    own = log.handlers or log.level != logging.NOTSET or not log.propagate
    if own or not _is_as_absl_leaves_it(logging.root):
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


def _is_as_absl_leaves_it(root: logging.Logger) -> bool:
    """Whether nobody set up the root logger: it has no handler, or the one that absl puts there by itself.

    absl calls `logging.basicConfig()` when it first logs, which importing orbax makes it do, in the middle of a run
    that saves its first checkpoint. The next run of the program still has no logging of its own.
    """
    if root.level not in (logging.NOTSET, logging.WARNING):
        return False
    return all(
        type(handler) is logging.StreamHandler
        and handler.level == logging.NOTSET
        and handler.formatter is not None
        and handler.formatter._fmt == logging.BASIC_FORMAT
        for handler in root.handlers
    )
