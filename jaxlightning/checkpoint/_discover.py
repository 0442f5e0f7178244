"""Find the checkpoint from which an interrupted run continues."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from jaxlightning.checkpoint import _io, _layout
from jaxlightning.checkpoint._errors import CheckpointError
from jaxlightning.utilities.rank_zero import rank_zero_warn

_SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages"})


def newest_checkpoint(root: str | os.PathLike[str], *, clean: bool = True) -> str | None:
    """Return the newest checkpoint below a directory from which a run can continue.

    Damaged ones are named in a warning and passed over; a checkpoint of weights alone does not count.

    Args:
        root: The run's root directory.
        clean: Whether to remove what an interrupted process left half written. Only when no other process is saving
            there.

    Returns:
        Its path, or None.
    """
    return next((str(path) for path in _newest_first(Path(root), clean=clean)), None)


def open_newest(root: str | os.PathLike[str], *, clean: bool = True) -> _io.StoredCheckpoint | None:
    """Return the newest checkpoint below a directory, read as a whole: every array has its check sum.

    Args:
        root: As for `newest_checkpoint`.
        clean: As for `newest_checkpoint`.

    Returns:
        The checkpoint, whose arrays are in memory, or None.
    """
    for path in _newest_first(Path(root), clean=clean):
        try:
            stored = _io.StoredCheckpoint(path)
            stored.read_all()
        except (CheckpointError, OSError) as error:
            _warn(path, error)
            continue
        return stored
    return None


def _newest_first(base: Path, *, clean: bool) -> Iterator[Path]:
    if not base.is_dir():
        return
    if clean:
        for folder in {base, *(path.parent for path in _candidates(base, also_temporary=True))}:
            _layout.clean_up(folder)
    # By the time of the commit: a run that was restarted from an older step may have gone another way since.
    dated: list[tuple[int, int, Path]] = []
    for path in _candidates(base):
        try:
            _layout.verify(path)
            metadata = _layout.read_metadata(path)
            body = metadata.get("checkpoint")
            if not isinstance(body, dict) or "optimizer_states" not in body or "loops" not in body:
                continue
            dated.append((_layout.commit_time(path), int(body.get("global_step", 0)), path))
        except (CheckpointError, OSError, ValueError, TypeError) as error:
            _warn(path, error)
    yield from (path for *_, path in sorted(dated, reverse=True))


def _warn(path: Path, error: Exception) -> None:
    rank_zero_warn(f"The checkpoint {path} cannot be used and is passed over: {error}")


def _candidates(root: Path, *, also_temporary: bool = False) -> Iterator[Path]:
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
            yield from _candidates(entry, also_temporary=also_temporary)
