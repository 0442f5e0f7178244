"""The profiler that records nothing."""

from __future__ import annotations

from jaxlightning.profilers.profiler import Profiler


class PassThroughProfiler(Profiler):
    """Record nothing; the Trainer's default."""

    def start(self, action_name: str) -> None:
        """Do nothing."""

    def stop(self, action_name: str) -> None:
        """Do nothing."""
