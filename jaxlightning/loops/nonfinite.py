"""Speaks on the host about updates that were not finite; counts are fetched at log points and read one point later."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxlightning.optim._nonfinite import report

if TYPE_CHECKING:
    from jaxlightning.compile import Engine

__all__ = ["NonfiniteWatch"]


class NonfiniteWatch:
    """Follows the counts that the compiled step keeps for `Trainer(on_nonfinite=...)`.

    Args:
        engine: The engine whose state has the counts.
        mode: `"raise"`, `"skip"` or `"warn"`.
    """

    def __init__(self, engine: Engine, mode: str) -> None:
        self._engine = engine
        self._mode = mode
        self._fetching: Any = None
        self._known = engine.nonfinite_counts_now()[0]

    def after(self, log: Callable[[], None]) -> Callable[[], None]:
        """What to call at a log point in place of `log`: the same, and then `look`."""

        def log_and_look() -> None:
            log()
            self.look()

        return log_and_look

    def look(self) -> None:
        """At a log point: report what the last one began to fetch, and begin to fetch the counts of now.

        Raises:
            FloatingPointError: If the mode is `"raise"` and there was such an update.
        """
        arrived, self._fetching = self._fetching, self._engine.nonfinite_counts()
        if self._fetching is not None:
            self._fetching.copy_to_host_async()
        if arrived is not None:
            self._report(arrived)

    def finish(self) -> None:
        """At the end of an epoch: report everything up to now.

        Raises:
            FloatingPointError: As in `look`.
        """
        self._fetching = None
        counts = self._engine.nonfinite_counts()
        if counts is not None:
            self._report(counts)

    def _report(self, counts: Any) -> None:
        count, last = (int(number) for number in np.asarray(jax.device_get(counts)))
        before, self._known = self._known, count
        report(self._mode, count, last, before)
