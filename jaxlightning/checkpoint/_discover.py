"""Find the checkpoint from which an interrupted run continues, on this machine or on another file system."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from jaxlightning.checkpoint import _layout, _remote, _stored
from jaxlightning.checkpoint._errors import CheckpointError
from jaxlightning.utilities.rank_zero import rank_zero_warn

_SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages"})


def newest_checkpoint(root: str | os.PathLike[str], *, clean: bool = True) -> str | None:
    """Return the newest checkpoint below a directory from which a run can continue.

    Damaged ones are named in a warning and passed over; a checkpoint of weights alone does not count.

    Args:
        root: The run's root directory; a path with a scheme is looked up on its file system.
        clean: Whether to remove what an interrupted process left half written. Only when no other process is saving
            there.

    Returns:
        Its path, or None.
    """
    return next(_newest_first(root, clean=clean), None)


def open_newest(root: str | os.PathLike[str], *, clean: bool = True) -> _stored.StoredCheckpoint | None:
    """Return the newest checkpoint below a directory, read as a whole: every array has its check sum.

    Args:
        root: As for `newest_checkpoint`.
        clean: As for `newest_checkpoint`.

    Returns:
        The checkpoint, whose arrays are in memory, or None.
    """
    for path in _newest_first(root, clean=clean):
        try:
            stored = _stored.StoredCheckpoint(path)
            stored.read_all()
        except (CheckpointError, OSError) as error:
            _warn(path, error)
            continue
        return stored
    return None


class _Place(Protocol):
    """A directory somewhere, as far as the search needs it."""

    def clean_up(self) -> None: ...

    def checkpoints(self) -> list[str]: ...

    def read(self, path: str) -> tuple[int, dict[str, Any]]: ...


class _Here:
    """A directory of this machine.

    Args:
        root: The directory; it may be missing.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def clean_up(self) -> None:
        """Remove what was left half written."""
        for folder in {self._root, *(path.parent for path in _local(self._root, also_temporary=True))}:
            _layout.clean_up(folder)

    def checkpoints(self) -> list[str]:
        """Return what is named like a checkpoint."""
        return [str(path) for path in _local(self._root)]

    def read(self, path: str) -> tuple[int, dict[str, Any]]:
        """Return the time of the commit, and the metadata."""
        _layout.verify(Path(path))
        return _layout.commit_time(Path(path)), _layout.read_metadata(Path(path))


class _There:
    """A directory of another file system.

    Args:
        root: Its path, with the scheme.
    """

    def __init__(self, root: str) -> None:
        self._root = root

    def clean_up(self) -> None:
        """Remove what was left half written, there and in this machine's temporary directory."""
        _remote.remove_abandoned()
        for path in self._named(temporary=True):
            _remote.settle(path)

    def checkpoints(self) -> list[str]:
        """Return what is named like a checkpoint."""
        return self._named(temporary=False)

    def read(self, path: str) -> tuple[int, dict[str, Any]]:
        """Return the time of the commit, and the metadata."""
        return _remote.read_header(path)

    def _named(self, *, temporary: bool) -> list[str]:
        found: dict[str, bool] = {}
        for file in _remote.files_below(self._root):
            parts = file.split("/")
            for index, name in enumerate(parts[:-1]):
                if name in _SKIPPED or name.startswith("."):
                    break
                is_temporary = ".ckpt." in name
                if is_temporary or name.endswith(".ckpt") or parts[index + 1 :] == [_layout.COMMIT_FILE]:
                    found["/".join(parts[: index + 1])] = is_temporary
                    break
        root = _remote.normalized(self._root)
        return [f"{root}/{path}" for path in sorted(found) if found[path] is temporary]


def _newest_first(root: str | os.PathLike[str], *, clean: bool) -> Iterator[str]:
    place: _Place = _There(os.fspath(root)) if _layout.is_remote(root) else _Here(Path(root))
    if clean:
        place.clean_up()
    # By the time of the commit: a run that was restarted from an older step may have gone another way since.
    dated: list[tuple[int, int, str]] = []
    for path in place.checkpoints():
        try:
            committed, metadata = place.read(path)
            body = metadata.get("checkpoint")
            if not isinstance(body, dict) or "optimizer_states" not in body or "loops" not in body:
                continue
            dated.append((committed, int(body.get("global_step", 0)), path))
        except (CheckpointError, OSError, ValueError, TypeError) as error:
            _warn(path, error)
    yield from (path for *_, path in sorted(dated, reverse=True))


def _warn(path: str, error: Exception) -> None:
    rank_zero_warn(f"The checkpoint {path} cannot be used and is passed over: {error}")


def _local(root: Path, *, also_temporary: bool = False) -> Iterator[Path]:
    """Yield what is named like a checkpoint, without looking inside checkpoints or following links."""
    try:
        entries = sorted(root.iterdir())
    except OSError:
        return
    for entry in entries:
        if entry.is_symlink() or not entry.is_dir() or entry.name in _SKIPPED or entry.name.startswith("."):
            continue
        named = entry.suffix == ".ckpt" or (entry / _layout.COMMIT_FILE).exists()
        temporary = ".ckpt." in entry.name
        if named or temporary:
            if named or also_temporary:
                yield entry
        else:
            yield from _local(entry, also_temporary=also_temporary)
