"""How often each action ran and how long it took."""

from __future__ import annotations

import math
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from jaxlightning.profilers.profiler import Profiler


class SimpleProfiler(Profiler):
    """Record the duration of every action and report means and totals.

    Args:
        dirpath: Folder of the report; by default the Trainer's `log_dir`.
        filename: Name of the report's file, without an ending. Without one the report is printed.
        extended: Whether the report has the number of calls and the share of the whole time.

    Attributes:
        recorded_durations: For each action the seconds of each of its calls.
    """

    def __init__(self, dirpath: str | Path | None = None, filename: str | None = None, extended: bool = True) -> None:
        super().__init__(dirpath=dirpath, filename=filename)
        self.extended = extended
        self.current_actions: dict[str, float] = {}
        self.recorded_durations: dict[str, list[float]] = defaultdict(list)
        self.start_time = time.perf_counter()

    def start(self, action_name: str) -> None:
        """Begin the clock of an action.

        Raises:
            ValueError: It is running already.
        """
        if action_name in self.current_actions:
            raise ValueError(f"Attempted to start {action_name} which has already started.")
        self.current_actions[action_name] = time.perf_counter()

    def stop(self, action_name: str) -> None:
        """End the clock of an action.

        Raises:
            ValueError: It is not running.
        """
        end = time.perf_counter()
        if action_name not in self.current_actions:
            raise ValueError(f"Attempting to stop recording an action ({action_name}) which was never started.")
        self.recorded_durations[action_name].append(end - self.current_actions.pop(action_name))

    def summary(self) -> str:
        """Return the report, the longest actions first."""
        rows = [(name, math.fsum(times) / len(times), len(times), math.fsum(times)) for name, times in self._items()]
        if not self.extended:
            rows.sort(key=lambda row: row[1], reverse=True)
            short = [(name, f"{mean:.5}", f"{total:.5}") for name, mean, _, total in rows]
            return self._render(("Action", "Mean duration (s)", "Total time (s)"), [], short)
        whole = time.perf_counter() - self.start_time
        rows.sort(key=lambda row: row[3], reverse=True)
        header = ("Action", "Mean duration (s)", "Num calls", "Total time (s)", "Percentage %")
        totals = [("Total", "-", str(sum(row[2] for row in rows)), f"{whole:.5}", "100 %")]
        body = [
            (n, f"{mean:.5}", str(calls), f"{total:.5}", f"{100 * total / whole:.5}") for n, mean, calls, total in rows
        ]
        return self._render(header, totals, body)

    def _items(self) -> list[tuple[str, list[float]]]:
        return [(name, times) for name, times in self.recorded_durations.items() if times]

    def _render(self, header: Sequence[str], totals: Sequence[Sequence[str]], body: Sequence[Sequence[str]]) -> str:
        lines = [header, *totals, *body]
        widths = [max(len(line[column]) for line in lines) for column in range(len(header))]

        def text(line: Sequence[str]) -> str:
            return "|  " + "  |  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + "  |"

        rule = "-" * len(text(header))
        blocks = [self._title(), "", rule, text(header), rule]
        if totals:
            blocks += [*map(text, totals), rule]
        return os.linesep.join([*blocks, *map(text, body), rule, ""])
