"""Checkpoints on other file systems, by fsspec: `s3://`, `gs://`, `memory://`, `file://` and whatever else it knows.

A checkpoint is written to a local directory first, with all checks, and then sent there. Object stores cannot rename a
directory at once, so what counts there is the commit marker: it is sent last and deleted first, and a directory without
one is no checkpoint. What is read is fetched as a whole before anything in it is looked at.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import shutil
import sys
import tempfile
import weakref
from pathlib import Path
from typing import Any

from jaxlightning.checkpoint import _layout
from jaxlightning.checkpoint._errors import CheckpointError, IncompleteCheckpointError, NotACheckpointError
from jaxlightning.utilities.rank_zero import rank_zero_warn

_PREFIX = "jaxlightning-"


def file_system(path: str | os.PathLike[str], options: dict[str, Any] | None = None) -> tuple[Any, str]:
    """Return the file system of a path with a scheme, and the path in it.

    Args:
        path: The path.
        options: For the file system, as fsspec takes them.

    Raises:
        ValueError: Nobody knows the scheme.
        ImportError: Its package is not installed.
    """
    text = os.fspath(path)
    try:
        import fsspec
    except ImportError as error:
        raise ImportError(f"{text!r} is on another file system, which needs fsspec: pip install fsspec") from error
    try:
        fs, inner = fsspec.core.url_to_fs(text, **(options or {}))
    except ImportError as error:
        raise ImportError(f"The file system of {text!r} needs another package: {error}") from error
    except ValueError as error:
        raise ValueError(
            f"No file system is known for {text!r}: {error}. Use a local path, or a scheme that fsspec knows, such as "
            "s3:// (pip install s3fs) or gs:// (pip install gcsfs)."
        ) from error
    return fs, str(inner).rstrip("/")


def normalized(path: str | os.PathLike[str]) -> str:
    """Return a path with a scheme in the form by which two of them are compared."""
    return os.fspath(path).rstrip("/")


def preparing() -> tempfile.TemporaryDirectory[str]:
    """Return a local directory for what is going to be sent; one that a killed process left can be told by its name."""
    return tempfile.TemporaryDirectory(prefix=_temporary_prefix())


def send(local: Path, target: str | os.PathLike[str], options: dict[str, Any] | None = None) -> None:
    """Send a complete local checkpoint; one that has the name is replaced only when all of the new one is there.

    Args:
        local: The local directory.
        target: Where it goes.
        options: For the file system.
    """
    fs, final = file_system(target, options)
    staged = _layout.staging_name(final)
    replaces = fs.exists(final)
    place = staged if replaces else final
    try:
        for file in _marker_last(local):
            remote = posixpath.join(place, file.relative_to(local).as_posix())
            fs.makedirs(posixpath.dirname(remote), exist_ok=True)
            fs.put_file(str(file), remote)
        if replaces:
            # A kill from here on leaves the whole new checkpoint under its staging name; `settle` puts it in place.
            _move(fs, staged, final)
    except BaseException:
        if not _is_committed(fs, place) and fs.exists(place):
            _remove_all(fs, place)
        raise
    fs.invalidate_cache()


def fetch(source: str | os.PathLike[str], options: dict[str, Any] | None = None) -> Path:
    """Fetch a checkpoint into a temporary directory.

    Args:
        source: Where it is.
        options: For the file system.

    Returns:
        The local directory; the caller deletes it.

    Raises:
        FileNotFoundError: There is nothing.
        NotACheckpointError: It is a file.
        CheckpointError: There is no complete commit.
    """
    fs, inner = file_system(source, options)
    fs.invalidate_cache()
    if not fs.exists(inner):
        raise FileNotFoundError(f"Checkpoint file not found: {os.fspath(source)}")
    if fs.isfile(inner):
        raise NotACheckpointError(f"{os.fspath(source)} is a file, but a checkpoint of jaxlightning is a directory.")
    plain_tree = fs.exists(posixpath.join(inner, "_METADATA"))  # Orbax's own PyTree
    if not plain_tree and not fs.exists(posixpath.join(inner, _layout.COMMIT_FILE)):
        raise IncompleteCheckpointError(
            f"The checkpoint {os.fspath(source)} is incomplete: {_layout.COMMIT_FILE} is missing. It cannot be loaded."
        )
    folder = Path(tempfile.mkdtemp(prefix=_temporary_prefix()))
    local = folder / "checkpoint"
    try:
        local.mkdir()
        for name in fs.find(inner):
            relative = posixpath.relpath(str(name), inner)
            if relative.startswith("..") or posixpath.isabs(relative):
                raise NotACheckpointError(f"{os.fspath(source)} lists {name!r}, which lies outside of it.")
            place = local / relative
            place.parent.mkdir(parents=True, exist_ok=True)
            fs.get_file(name, str(place))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return local


def fetch_for(owner: object, source: str | os.PathLike[str]) -> Path:
    """Fetch a checkpoint that is deleted with an object."""
    local = fetch(source)
    weakref.finalize(owner, shutil.rmtree, local.parent, ignore_errors=True)
    return local


def exists(path: str | os.PathLike[str]) -> bool:
    """Say whether something has that name."""
    fs, inner = file_system(path)
    fs.invalidate_cache()
    return bool(fs.exists(inner))


def delete(path: str | os.PathLike[str]) -> None:
    """Delete a checkpoint and nothing else; a missing one is fine."""
    fs, inner = file_system(path)
    fs.invalidate_cache()
    if not fs.exists(inner):
        return
    if not fs.exists(posixpath.join(inner, _layout.COMMIT_FILE)):
        rank_zero_warn(f"{os.fspath(path)} was to be deleted as an old checkpoint, but it is none; it was left alone.")
        return
    _delete(fs, inner)
    fs.invalidate_cache()


def settle(path: str) -> None:
    """Deal with the staging directory that an interrupted `send` left.

    When what it was to replace is gone already and it is whole, it takes the name; otherwise it is deleted.

    Args:
        path: The staging directory; what is not named like one is left alone.
    """
    match = _layout.STAGED.search(path)
    if match is None:
        return
    fs, staged = file_system(path)
    final = staged[: -len(match.group())]
    fs.invalidate_cache()
    if _is_committed(fs, staged) and not _is_committed(fs, final):
        _move(fs, staged, final)
    elif fs.exists(staged):
        _delete(fs, staged)
    fs.invalidate_cache()


def read_header(path: str) -> tuple[int, dict[str, Any]]:
    """Read the commit marker and the metadata of a checkpoint, without fetching it.

    Args:
        path: The checkpoint.

    Returns:
        The time of the commit in nanoseconds, and the JSON.

    Raises:
        CheckpointError: There is no complete commit, or the JSON is damaged.
    """
    fs, inner = file_system(path)
    with tempfile.TemporaryDirectory(prefix=_temporary_prefix()) as folder:
        local = Path(folder, "checkpoint")
        for name in (_layout.COMMIT_FILE, f"{_layout.METADATA_ITEM}/{_layout.METADATA_FILE}"):
            place = local / name
            place.parent.mkdir(parents=True, exist_ok=True)
            if fs.exists(posixpath.join(inner, name)):
                fs.get_file(posixpath.join(inner, name), str(place))
        try:
            _layout.verify(local)
            return _layout.commit_time(local), _layout.read_metadata(local)
        except CheckpointError as error:
            raise type(error)(str(error).replace(str(local), path)) from None


def files_below(directory: str) -> list[str]:
    """Return the paths of all files below a directory, relative to it; nothing when it does not exist.

    Args:
        directory: The directory; object stores list it in one go.
    """
    fs, inner = file_system(directory)
    fs.invalidate_cache()
    if not fs.isdir(inner):
        return []
    return [posixpath.relpath(str(name), inner) for name in fs.find(inner)]


def remove_abandoned() -> None:
    """Delete the local directories in which killed processes of this machine prepared what was to be sent."""
    if sys.platform == "win32":  # where asking for a process may end it
        return
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        owner = folder.name[len(_PREFIX) :].partition("-")[0]
        try:
            if not owner.isdigit() or folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            os.kill(int(owner), 0)
        except ProcessLookupError:
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # gone meanwhile, or a process of somebody else's
            continue


def _temporary_prefix() -> str:
    return f"{_PREFIX}{os.getpid()}-"


def _is_committed(fs: Any, inner: str) -> bool:
    return bool(fs.exists(posixpath.join(inner, _layout.COMMIT_FILE)))


def _move(fs: Any, staged: str, final: str) -> None:
    """Move a whole checkpoint, marker last, over what has the name and is not whole any more."""
    if fs.exists(final):
        _delete(fs, final)
    marker = posixpath.join(staged, _layout.COMMIT_FILE)
    for name in sorted(map(str, fs.find(staged)), key=lambda name: posixpath.basename(name) == _layout.COMMIT_FILE):
        place = posixpath.join(final, posixpath.relpath(name, staged))
        fs.makedirs(posixpath.dirname(place), exist_ok=True)
        fs.cp_file(name, place)  # `copy` would take brackets in a name for a pattern
    if not fs.exists(marker):
        raise IncompleteCheckpointError(f"{staged} changed while it was moved to {final}.")
    _delete(fs, staged)


def listing(directory: str | os.PathLike[str]) -> list[str]:
    """Return what lies in a directory, with the scheme; nothing when it does not exist."""
    fs, inner = file_system(directory)
    fs.invalidate_cache()
    if not fs.isdir(inner):
        return []
    return [
        posixpath.join(normalized(directory), posixpath.basename(str(each).rstrip("/"))) for each in fs.ls(inner, False)
    ]


def commit_time(path: str | os.PathLike[str]) -> int:
    """Return when a checkpoint was committed, in nanoseconds; 0 if that cannot be told."""
    import json

    fs, inner = file_system(path)
    try:
        stamp = json.loads(fs.cat_file(posixpath.join(inner, _layout.COMMIT_FILE)))["commit_timestamp_nsecs"]
    except (OSError, ValueError, KeyError, TypeError):
        return 0
    return stamp if isinstance(stamp, int) else 0


def is_inside(path: str | os.PathLike[str], directory: str | os.PathLike[str]) -> bool:
    """Say whether a path lies below a directory, by their names alone."""
    inner, outer = normalized(path), normalized(directory)
    return inner.startswith(f"{outer}/") and ".." not in inner[len(outer) :].split("/")


def _marker_last(local: Path) -> list[Path]:
    files = sorted(path for path in local.rglob("*") if path.is_file())
    return sorted(files, key=lambda path: path == local / _layout.COMMIT_FILE)


def _delete(fs: Any, inner: str) -> None:
    marker = posixpath.join(inner, _layout.COMMIT_FILE)
    if fs.exists(marker):
        fs.rm_file(marker)
    if fs.exists(inner):
        _remove_all(fs, inner)


def _remove_all(fs: Any, inner: str) -> None:
    if not _layout.PATTERN.search(inner):
        fs.rm(inner, recursive=True)
        return
    # `rm` would take the name for a pattern and find nothing, or something else.
    for name, entry in sorted(fs.find(inner, withdirs=True, detail=True).items(), reverse=True):
        if entry["type"] == "directory":
            with contextlib.suppress(FileNotFoundError):  # in an object store it went with its last file
                fs.rmdir(name)
        else:
            fs.rm_file(name)
    with contextlib.suppress(OSError):  # object stores have no directories
        fs.rmdir(inner)
