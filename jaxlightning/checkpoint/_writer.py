"""The thread that writes checkpoints while training goes on.

Operations run in the order in which they were given, one at a time. A deletion that was asked for after a save runs
after that save's commit, and not at all when the save failed. An error surfaces at the next call or at `wait`.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxlightning.checkpoint import _io, _layout, _remote
from jaxlightning.utilities.rank_zero import log

_Operation = tuple[str, str, Callable[[], None]]


class CheckpointWriter:
    """Writes, links and deletes checkpoints in order, in the background or at once.

    Args:
        background: Whether operations run in a thread of their own.
    """

    def __init__(self, *, background: bool) -> None:
        self.background = background
        self._queue: deque[_Operation] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._process = os.getpid()
        _writers.add(self)

    def __getstate__(self) -> dict[str, Any]:
        """A copy has a thread and a queue of its own; what is being written stays with the original."""
        return {"background": self.background}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Start with nothing to write."""
        self.__init__(background=state["background"])  # type: ignore[misc]

    # --- what callers ask for -----------------------------------------------------------------------------------

    def save(
        self,
        payload: _io.Payload,
        path: str | os.PathLike[str],
        options: dict[str, Any] | None = None,
        *,
        beside: bool = False,
    ) -> None:
        """Write a snapshot; returns before it is on disk when in the background.

        Args:
            payload: The snapshot.
            path: Where it goes.
            options: For the file system of a path with a scheme.
            beside: Whether it may wait while others are written, because it holds the same arrays; otherwise they are
                waited for.
        """
        arguments = (payload, path, options) if options else (payload, path)
        self._submit("save", path, lambda: _io.commit(*arguments), beside=beside)

    def remove(self, path: str | os.PathLike[str], *, within: str | os.PathLike[str] | None = None) -> None:
        """Delete a checkpoint, after everything asked for earlier was committed.

        Args:
            path: The checkpoint; anything else is left alone, with a warning.
            within: The directory up to which folders that became empty are removed.
        """
        if _layout.is_remote(path):
            self._submit("remove", path, lambda: _remote.delete(path))
            return
        root = None if within is None else _absolute(within)
        self._submit("remove", path, lambda: _layout.delete_checkpoint(_absolute(path), within=root))

    def link(self, target: str | os.PathLike[str], link: str | os.PathLike[str]) -> None:
        """Make a relative link to a checkpoint, after it was committed."""
        self._submit("save", link, lambda: _layout.link(_absolute(target), _absolute(link)), beside=True)

    def exists(self, path: str | os.PathLike[str]) -> bool:
        """Say whether something has that name, counting what is still to be written or deleted."""
        place = _place(path)
        with self._lock:
            for kind, pending, _ in reversed(self._queue):
                if pending == place:
                    return kind == "save"
        return _remote.exists(path) if _layout.is_remote(path) else os.path.lexists(place)

    def wait(self) -> None:
        """Wait until everything is on disk.

        Raises:
            BaseException: What went wrong in the background, once.
        """
        self._join()
        self._raise()

    def check(self) -> None:
        """Raise what went wrong in the background so far, once."""
        self._raise()

    @property
    def busy(self) -> bool:
        """Whether something is still being written."""
        with self._lock:
            return bool(self._queue) and self._process == os.getpid()

    # --- how it is done -------------------------------------------------------------------------------------------

    def _submit(
        self, kind: str, path: str | os.PathLike[str], run: Callable[[], None], *, beside: bool = False
    ) -> None:
        if not self.background:
            run()
            return
        if kind == "save" and not beside:
            _prepare()
            self.wait()  # at most one state is held beside the live one
        else:
            self.check()
        with self._lock:
            self._queue.append((kind, _place(path), run))
            if self._thread is None:
                # Not a daemon: the interpreter must not end with half a checkpoint written.
                self._thread = threading.Thread(target=self._work, name="jaxlightning-checkpoint", daemon=False)
                self._thread.start()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._thread = None
                    return
                _, _, run = self._queue[0]
            try:
                run()
            except BaseException as error:
                with self._lock:
                    self._error = error
                    self._queue.clear()  # deletions that were to follow a save which failed
                    self._thread = None
                return
            with self._lock:
                self._queue.popleft()

    def _join(self) -> None:
        if self._process != os.getpid():  # a forked worker has no such thread
            return
        while True:
            with self._lock:
                thread = self._thread
            if thread is None or thread is threading.current_thread():
                return
            thread.join()

    def _raise(self) -> None:
        with self._lock:
            error, self._error = self._error, None
        if error is not None:
            error.add_note("This happened while a checkpoint was written in the background.")
            raise error


_writers: weakref.WeakSet[CheckpointWriter] = weakref.WeakSet()


def _finish_all() -> None:
    for writer in list(_writers):
        try:
            writer.wait()
        except BaseException as error:
            log.error("A checkpoint could not be written: %r", error)


@functools.cache
def _prepare() -> None:
    """Make the end of the interpreter wait for what is being written.

    Orbax uses executors, which stop accepting work when the interpreter begins to end: before non-daemon threads are
    joined, and before `atexit`. So the wait is registered where they register theirs, and after them, since the last
    one runs first; therefore Orbax is imported here and not in the thread.
    """
    import orbax.checkpoint  # noqa: F401

    register = getattr(threading, "_register_atexit", atexit.register)
    register(_finish_all)


def _place(path: str | os.PathLike[str]) -> str:
    return _remote.normalized(path) if _layout.is_remote(path) else os.path.abspath(path)


def _absolute(path: str | os.PathLike[str]) -> Path:
    return Path(os.path.abspath(path))
