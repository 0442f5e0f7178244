"""Standard output while a bar is on the terminal: whole lines go above the bar.

`print` in a hook and `jax.debug.print` in a compiled step write to `sys.stdout` at any moment, the latter from a thread
of JAX's own. Without this their text would begin in the middle of the bar's line.
"""

from __future__ import annotations

import sys
from typing import Any

from jaxlightning.callbacks.progress._tqdm import tqdm_class

__all__ = ["AboveBars", "install", "remove", "stream"]


class AboveBars:
    """Stands in for a terminal stream: complete lines erase the bars, are written, and the bars are drawn again.

    Args:
        target: The real stream.
    """

    def __init__(self, target: Any) -> None:
        self.target = target
        self._pending = ""

    def write(self, text: str) -> int:
        """Takes text; what does not end in a line break waits for one, or for `flush`."""
        self._pending += text
        lines, newline, rest = self._pending.rpartition("\n")
        if newline:
            self._pending = rest
            self._put(lines + newline)
        return len(text)

    def flush(self) -> None:
        """Writes what waits, as a line of its own only if it came so."""
        if self._pending:
            text, self._pending = self._pending, ""
            self._put(text)
        self.target.flush()

    def _put(self, text: str) -> None:
        with tqdm_class().external_write_mode(file=self.target):
            self.target.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)


def stream() -> Any:
    """The real standard output, on which bars draw."""
    return sys.stdout.target if isinstance(sys.stdout, AboveBars) else sys.stdout


def install() -> None:
    """Puts the stand-in in the place of standard output."""
    if not isinstance(sys.stdout, AboveBars):
        sys.stdout = AboveBars(sys.stdout)


def remove() -> None:
    """Takes it away, after what waits in it was written."""
    if isinstance(sys.stdout, AboveBars):
        stand_in = sys.stdout
        sys.stdout = stand_in.target
        stand_in.flush()
