"""Which Python functions an action spends its time in."""

from __future__ import annotations

import cProfile
import io
import os
import pstats
from collections import defaultdict
from pathlib import Path
from typing import Any

from jaxlightning.profilers.profiler import Profiler


class AdvancedProfiler(Profiler):
    """Record every function call of every action with Python's `cProfile`. The report is long.

    Args:
        dirpath: Folder of the report; by default the Trainer's `log_dir`.
        filename: Name of the report's file, without an ending. Without one the report is printed.
        line_count_restriction: How much of each action's table is shown: an int for so many lines, a float in [0, 1]
            for that share of them.
        dump_stats: Whether the raw data of each action is written to `dirpath` too, for `pstats` and its viewers.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        line_count_restriction: float = 1.0,
        dump_stats: bool = False,
    ) -> None:
        super().__init__(dirpath=dirpath, filename=filename)
        self.line_count_restriction = line_count_restriction
        self.dump_stats = dump_stats
        self.profiled_actions: dict[str, cProfile.Profile] = defaultdict(cProfile.Profile)
        self._running: list[str] = []

    def start(self, action_name: str) -> None:
        """Begin recording an action; the one around it pauses, since only one recording can run at a time."""
        if self._running:
            self.profiled_actions[self._running[-1]].disable()
        self._running.append(action_name)
        self.profiled_actions[action_name].enable()

    def stop(self, action_name: str) -> None:
        """End recording an action; the one around it goes on.

        Raises:
            ValueError: It was never started.
        """
        profile = self.profiled_actions.get(action_name)
        if profile is None:
            raise ValueError(f"Attempting to stop recording an action ({action_name}) which was never started.")
        profile.disable()
        if action_name in self._running:
            self._running.remove(action_name)
        if self._running:
            self.profiled_actions[self._running[-1]].enable()

    def summary(self) -> str:
        """Return the table of each action."""
        lines = [self._title()]
        for name, profile in self.profiled_actions.items():
            if self.dump_stats:
                self._dump(name, profile)
            stream = io.StringIO()
            pstats.Stats(profile, stream=stream).strip_dirs().sort_stats("cumulative").print_stats(
                self.line_count_restriction
            )
            rank = "" if self._local_rank is None else f" rank: {self._local_rank}"
            lines += [f"Profile stats for: {name}{rank}", stream.getvalue()]
        return os.linesep.join(lines)

    def teardown(self, stage: str | None) -> None:
        """Close the file and forget the recordings."""
        super().teardown(stage)
        for name in self._running:
            self.profiled_actions[name].disable()
        self._running.clear()
        self.profiled_actions.clear()

    def __reduce__(self) -> tuple[Any, ...]:
        settings = (self.dirpath, self.filename, self.line_count_restriction, self.dump_stats)
        return (type(self), settings)  # recordings cannot be pickled

    def _dump(self, action_name: str, profile: cProfile.Profile) -> None:
        if not self.dirpath:
            raise ValueError("`AdvancedProfiler(dump_stats=True)` needs a `dirpath`, or a Trainer with a `log_dir`.")
        os.makedirs(self.dirpath, exist_ok=True)
        profile.dump_stats(os.path.join(self.dirpath, self._prepare_filename(action_name, extension=".prof")))
