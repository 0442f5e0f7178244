"""The tqdm bar that `TQDMProgressBar` uses, made when it is first needed so that importing us does not import tqdm.

On a terminal it is tqdm's bar on one line. Where the output is a file or a pipe, drawing a line over and over would
fill it, so there the bar writes a plain line once in a while and one at the end of each epoch.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import os
import sys
from typing import Any

PAD_SIZE = 5
"""Numbers are padded to this many characters, so that the bar's width does not flicker."""

PLAIN_FORMAT = "{desc}{percentage:3.0f}% {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_noinv_fmt}{postfix}]"
PLAIN_FORMAT_WITHOUT_TOTAL = "{desc}{n_fmt} [{elapsed}, {rate_noinv_fmt}{postfix}]"


def in_notebook() -> bool:
    """Whether this process is a Jupyter kernel, whose output is no terminal but can redraw a line."""
    ipython = sys.modules.get("IPython")
    if ipython is None:
        return False
    shell = ipython.get_ipython()
    return shell is not None and hasattr(shell, "kernel")


def is_plain_output(file: Any) -> bool:
    """Whether a stream can only be appended to: a file, a pipe, a captured output, a terminal without a width."""
    if in_notebook():
        return False
    isatty = getattr(file, "isatty", None)
    try:
        if isatty is None or not isatty():
            return True
    except ValueError:  # closed
        return True
    try:
        return os.get_terminal_size(file.fileno()).columns == 0
    except (AttributeError, OSError, ValueError):  # a terminal of another kind
        return False


@functools.cache
def tqdm_class() -> type[Any]:
    """Return the bar class; the first call imports tqdm."""
    # tqdm.auto without ipywidgets fails in a notebook instead of falling back
    has_widgets = importlib.util.find_spec("ipywidgets") is not None
    base: Any = importlib.import_module("tqdm.auto" if has_widgets else "tqdm").tqdm

    class Tqdm(base):  # type: ignore[misc]
        """A tqdm bar that can be hidden, and that writes plain lines where nothing can be redrawn."""

        monitor_interval = 0  # no thread: the loop itself draws
        _metrics: dict[str, Any] | None = None
        _postfix: str | None = None

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.hidden = False
            self.plain = not kwargs.get("disable", False) and is_plain_output(kwargs.get("file") or sys.stderr)
            super().__init__(*args, **kwargs)

        def show_metrics(self, metrics: dict[str, Any]) -> None:
            """Take new metrics; they become text when somebody looks, which is far less often than they change."""
            self._metrics = metrics

        @property
        def postfix(self) -> str | None:
            """The text behind the bar."""
            metrics, self._metrics = self._metrics, None
            if metrics is not None:
                self.set_postfix(metrics, refresh=False)
            return self._postfix

        @postfix.setter
        def postfix(self, value: str | None) -> None:
            self._metrics, self._postfix = None, value

        @staticmethod
        def format_num(n: float | str) -> str:
            """Format a number with three significant digits and pad it to a constant width."""
            text = n if isinstance(n, str) else str(base.format_num(n))
            if not isinstance(n, (float, str)) or "e" in text:
                return text
            if "." not in text and len(text) < PAD_SIZE:
                try:
                    float(text)
                except ValueError:
                    return text
                text += "."
            return text + "0" * (PAD_SIZE - len(text))

        def display(self, *args: Any, **kwargs: Any) -> Any:
            """Draw, unless hidden or not redrawable."""
            if self.plain or self.hidden:
                return True
            return super().display(*args, **kwargs)

        def clear(self, *args: Any, **kwargs: Any) -> None:
            """Erase the drawn line."""
            if not self.plain:
                super().clear(*args, **kwargs)

        def close(self) -> None:
            """Close; a plain bar leaves nothing behind but the lines it wrote."""
            if self.disable:
                return  # closed before: tqdm asks again when the object goes, perhaps while Python shuts down
            if self.plain:
                self.delay = math.inf  # tqdm takes the bar as one that was never drawn
            super().close()
            if not type(self)._instances:
                from jaxlightning.callbacks.progress._stdout import remove

                remove()

        def write_line(self) -> None:
            """Write the current state as one plain line."""
            if self.disable or getattr(self.fp, "write", None) is None:
                return  # a process whose output was closed has nowhere to write to
            state = dict(self.format_dict)
            state["bar_format"] = PLAIN_FORMAT if self.total else PLAIN_FORMAT_WITHOUT_TOTAL
            state["ncols"] = None
            self.fp.write(self.format_meter(**state).strip() + "\n")
            getattr(self.fp, "flush", lambda: None)()

    return Tqdm


def hide(bar: Any) -> None:
    """Take a bar off the screen until `show`."""
    if not bar.disable and hasattr(bar, "hidden") and not bar.hidden:
        bar.clear()
        bar.hidden = True


def show(bar: Any) -> None:
    """Put a hidden bar back on the screen."""
    if hasattr(bar, "hidden"):
        bar.hidden = False
    bar.refresh()


def finite_or_none(total: float | None) -> int | float | None:
    """Return a total as tqdm wants it, which knows no infinity.

    Args:
        total: Number of batches.

    Returns:
        The number, or None when it is infinite or unknown.
    """
    if total is None or math.isinf(total) or math.isnan(total):
        return None
    return total
