"""The base class of profilers."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO


class Profiler(ABC):
    """Record the actions of a run, such as `"run_training_batch"` or `"[LightningModule]Model.on_fit_start"`.

    A step is dispatched to the device and runs there while the host goes on, so the duration of an action is that of
    the host's work. Use `JaxProfiler` to see the device.

    Args:
        dirpath: Folder of the report; by default the Trainer's `log_dir`.
        filename: Name of the report's file, without an ending. Without one the report is printed.
    """

    def __init__(self, dirpath: str | Path | None = None, filename: str | None = None) -> None:
        self.dirpath = dirpath
        self.filename = filename
        self._stage: str | None = None
        self._local_rank: int | None = None
        self._output_file: TextIO | None = None
        self._write_stream: Callable[[str], Any] | None = None

    @abstractmethod
    def start(self, action_name: str) -> None:
        """Begin recording an action."""

    @abstractmethod
    def stop(self, action_name: str) -> None:
        """End recording an action."""

    def summary(self) -> str:
        """Return the report."""
        return ""

    @contextmanager
    def profile(self, action_name: str) -> Iterator[str]:
        """Record what happens inside a `with` block.

        Args:
            action_name: The action.

        Yields:
            The action's name.
        """
        self.start(action_name)
        try:
            yield action_name
        finally:
            self.stop(action_name)

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | Path | None = None) -> None:
        """Called when a run begins.

        Args:
            stage: The verb: `"fit"`, `"validate"`, `"test"` or `"predict"`.
            local_rank: Number of this process on its machine, None when there is only one.
            log_dir: Where reports go unless `dirpath` says otherwise.
        """
        self._stage = stage
        self._local_rank = local_rank
        self.dirpath = self.dirpath or log_dir

    def describe(self) -> None:
        """Print the report, or write it to the file."""
        self._prepare_streams()
        summary = self.summary()
        if summary and self._write_stream is not None:
            self._write_stream(summary)
        if self._output_file is not None:
            self._output_file.flush()
        self.teardown(stage=self._stage)

    def teardown(self, stage: str | None) -> None:
        """Called when a run ends; closes the file."""
        self._write_stream = None
        if self._output_file is not None:
            self._output_file.close()
            self._output_file = None

    @property
    def local_rank(self) -> int:
        """Number of this process on its machine."""
        return 0 if self._local_rank is None else self._local_rank

    def _prepare_streams(self) -> None:
        if self._write_stream is not None:
            return
        if self.filename and self.dirpath:
            os.makedirs(self.dirpath, exist_ok=True)
            path = os.path.join(self.dirpath, self._prepare_filename())
            self._output_file = open(path, "a", encoding="utf-8")  # noqa: SIM115  closed in teardown
            self._write_stream = self._output_file.write
        elif self.local_rank == 0:
            self._write_stream = print

    def _prepare_filename(self, action_name: str | None = None, extension: str = ".txt") -> str:
        parts = [self._stage, self.filename, None if self._local_rank is None else str(self._local_rank), action_name]
        name = "-".join(part for part in parts if part)
        # action names hold characters that some file system forbids
        name = re.sub(r"_+", "_", re.sub(r"[\\/:*?\"<>|\n\r\t]", "_", name)).strip()
        return (name or "profile") + extension

    def _title(self) -> str:
        return "Profiler Report" if self._stage is None else f"{self._stage.upper()} Profiler Report"
