"""tensorboardX's writer, writing at once instead of through a queue, a second process pipe and a thread.

Imported only when a writer is needed. tensorboardX gives the protocol buffers, the summaries and the file format. Its
asynchronous file writer is replaced: `flush` there misses what is still queued, every flush waits for the disk
(fsync), and two writers opened within one second share a file name and overwrite each other.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

__all__ = ["EventWriter"]

_count = itertools.count()


class _NoTorch:
    """Import hook that hides torch from one thread: tensorboardX imports it where it is installed, for nothing."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] == "torch" and threading.get_ident() == self._thread:
            raise ModuleNotFoundError(f"{name} is not needed to write events", name=name)


@contextmanager
def _without_torch() -> Iterator[None]:
    hidden = _NoTorch()
    sys.meta_path.insert(0, hidden)
    try:
        yield
    finally:
        sys.meta_path.remove(hidden)


with _without_torch():
    from tensorboardX import SummaryWriter
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event, SessionLog
    from tensorboardX.summary import hparams, scalar
    from tensorboardX.writer import FileWriter


class _EventFile(EventsWriter):  # type: ignore[misc]
    """One event file, written by the calling thread; has the methods of tensorboardX's `EventFileWriter`."""

    def __init__(self, logdir: str, max_queue: int, flush_secs: float, filename_suffix: str) -> None:
        os.makedirs(logdir, exist_ok=True)
        super().__init__(os.path.join(logdir, "events"), f".{os.getpid()}.{next(_count)}{filename_suffix}")
        self._logdir = logdir
        self._max_waiting = max_queue
        self._flush_secs = flush_secs
        self._waiting = 0
        self._next_flush = time.monotonic() + flush_secs
        self._open = True
        self.flush()

    def get_logdir(self) -> str:
        return self._logdir

    def add_event(self, event: Any) -> None:
        if not self._open:
            raise ValueError(
                f"The event file in {self._logdir} is closed: the run is over. Ask the logger for `experiment` again."
            )
        self.write_event(event)
        self._waiting += 1
        if self._waiting >= self._max_waiting or time.monotonic() > self._next_flush:
            self.flush()

    def flush(self) -> None:
        """Hand everything to the operating system; unlike tensorboardX, without waiting for the disk."""
        if self._open:
            with self._lock:
                self._py_recordio_writer._writer.flush()
            self._waiting = 0
            self._next_flush = time.monotonic() + self._flush_secs

    def close(self) -> None:
        if self._open:
            self.flush()
            self._open = False
            self._py_recordio_writer.close()


class _Files(FileWriter):  # type: ignore[misc]
    """tensorboardX's `FileWriter` on top of `_EventFile`; registers nothing that lives until the process ends."""

    def __init__(self, logdir: str, max_queue: int, flush_secs: float, filename_suffix: str) -> None:
        self.event_writer = _EventFile(logdir, max_queue, flush_secs, filename_suffix)
        self._default_metadata: dict[str, Any] = {}


class EventWriter(SummaryWriter):  # type: ignore[misc]
    """A `tensorboardX.SummaryWriter` whose events are in the file as soon as they are flushed."""

    file_writer: Any
    all_writers: Any

    def _get_file_writer(self) -> Any:
        if not self._write_to_disk:
            return super()._get_file_writer()
        if self.all_writers is None or self.file_writer is None:
            self.file_writer = self._open(self.logdir)
            self.all_writers = {self.file_writer.get_logdir(): self.file_writer}
            if self.purge_step is not None:
                self.purge(self.purge_step)
        return self.file_writer

    def _open(self, logdir: str) -> _Files:
        return _Files(logdir, self._max_queue, self._flush_secs, self._filename_suffix)

    def purge(self, step: int) -> None:
        """Let TensorBoard hide what earlier files of the directory hold from a step on.

        Args:
            step: The first step that comes again.
        """
        # Once: a second file of this writer must not hide the first.
        self.purge_step = None
        writer = self._get_file_writer()
        writer.add_event(Event(step=step, file_version="brain.Event:2"))
        writer.add_event(Event(step=step, session_log=SessionLog(status=SessionLog.START)))

    def add_scalars(
        self,
        main_tag: str,
        tag_scalar_dict: Mapping[str, float],
        global_step: int | None = None,
        walltime: float | None = None,
    ) -> None:
        """Record several lines of one chart, each in a folder of its own.

        Args:
            main_tag: Name of the chart.
            tag_scalar_dict: Value of each line.
            global_step: The step.
            walltime: Seconds since the epoch; by default now.
        """
        logdir = self._get_file_writer().get_logdir()
        for tag, value in tag_scalar_dict.items():
            directory = os.path.join(str(logdir), main_tag, tag)
            if directory not in self.all_writers:
                self.all_writers[directory] = self._open(directory)
            self.all_writers[directory].add_summary(scalar(main_tag, value), global_step, walltime)

    def add_session(self, params: Mapping[str, Any], metrics: Mapping[str, Any], step: int | None) -> None:
        """Record hyper-parameters and the metrics by which runs are compared.

        Args:
            params: Flat and plain hyper-parameters.
            metrics: The metrics.
            step: Their step.
        """
        writer = self._get_file_writer()
        for summary in hparams(dict(params), dict(metrics)):
            writer.add_summary(summary, step)
