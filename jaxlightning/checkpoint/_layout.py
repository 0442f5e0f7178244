"""Where a checkpoint lies and whether it is whole: names, the commit marker, replacing, deleting, cleaning up.

A checkpoint is one directory. It is written beside its final name and renamed when it is complete, so a name that ends
like a checkpoint is a checkpoint, except after outside damage, which `verify` finds.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jaxlightning.checkpoint._errors import CheckpointError, IncompleteCheckpointError, NotACheckpointError
from jaxlightning.utilities.rank_zero import rank_zero_warn

#: What Orbax writes last into a composite, with the time of the commit.
COMMIT_FILE = "_CHECKPOINT_METADATA"
METADATA_ITEM = "metadata"
METADATA_FILE = "metadata.json"

STAGED = re.compile(r"\.saving-[0-9a-f]{8}$")
_DELETED = re.compile(r"\.deleting-[0-9a-f]{8}$")
_REPLACED = re.compile(r"\.replaced-[0-9a-f]{8}$")
_ORBAX_TEMPORARY = re.compile(r"\.orbax-checkpoint-tmp(-\d+)?$")
PATTERN = re.compile(r"[*?\[\]{}]")
_MAX_METADATA_BYTES = 1 << 30
_SCHEME = re.compile(r"^[A-Za-z][A-Za-z0-9+.\-]+://")


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Say whether a path has a scheme (``gs://...``) and so is no path of this machine."""
    return _SCHEME.match(os.fspath(path)) is not None


def staging_path(target: Path) -> Path:
    """Return a fresh name beside ``target`` to write to."""
    # A name with brackets would be a pattern for Orbax (see `plainly_named`).
    return target.with_name(staging_name("checkpoint.ckpt" if PATTERN.search(target.name) else target.name))


def staging_name(name: str) -> str:
    """Return a fresh name that `STAGED` knows."""
    return f"{name}.saving-{uuid.uuid4().hex[:8]}"


@contextlib.contextmanager
def plainly_named(directory: Path) -> Iterator[Path]:
    """Give a directory a name in which nothing looks like a pattern, for as long as the context lasts.

    Orbax looks for files by patterns that contain the directory: below `runs/lr=[1,2]` it would find nothing, and a
    checkpoint would be written without its data.

    Args:
        directory: The directory, which exists.

    Yields:
        The directory itself, or a link to it.
    """
    if not PATTERN.search(str(directory)):
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="jaxlightning-") as folder:
        link = Path(folder, "directory")
        link.symlink_to(directory, target_is_directory=True)
        yield link


def make_durable(directory: Path) -> None:
    """Wait until all files of a directory are on the disk, many at a time: the disk takes them together."""
    places = [directory, *directory.rglob("*")]
    with ThreadPoolExecutor(max_workers=min(16, len(places)), thread_name_prefix="jaxlightning-sync") as pool:
        list(pool.map(_synchronize, places))


def _synchronize(place: Path) -> None:
    if place.is_dir():
        with contextlib.suppress(OSError):  # where directories cannot be opened, they need not be
            _synchronize_descriptor(os.open(place, os.O_RDONLY))
    else:
        _synchronize_descriptor(os.open(place, os.O_RDWR))  # Windows wants to be able to write


def _synchronize_descriptor(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(staged: Path, target: Path) -> None:
    """Give a complete checkpoint its final name; what had that name before is deleted afterwards.

    A kill between the two renames leaves the old one under a name that `clean_up` puts back.
    """
    if target.is_symlink():
        target.unlink()
    if not target.exists():
        os.rename(staged, target)
        _synchronize(target.parent)
        return
    old = target.with_name(f"{target.name}.replaced-{uuid.uuid4().hex[:8]}")
    os.rename(target, old)
    os.rename(staged, target)
    _synchronize(target.parent)  # the new one has the name for good before the old one goes
    delete_tree(old)


def link(target: Path, place: Path) -> None:
    """Make ``place`` a relative link to ``target``; where links are not possible, a copy.

    The old link is replaced by a rename, so ``place`` exists at every moment.
    """
    if target == place:
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    fresh = staging_path(place)
    try:
        fresh.symlink_to(os.path.relpath(target, place.parent), target_is_directory=True)
    except OSError:  # e.g. an unprivileged Windows user
        shutil.copytree(target, fresh)
        publish(fresh, place)
        return
    if place.is_dir() and not place.is_symlink():
        delete_tree(place)
    os.replace(fresh, place)


def commit_time(path: Path) -> int:
    """Return when a checkpoint was committed, in nanoseconds; the directory's own time if the marker does not say."""
    try:
        stamp = json.loads((path / COMMIT_FILE).read_text(encoding="utf-8"))["commit_timestamp_nsecs"]
        if isinstance(stamp, int) and stamp > 0:
            return stamp
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    return path.stat().st_mtime_ns


def delete_tree(path: Path) -> None:
    """Delete a file, a link (not what it points to) or a directory; a missing path is fine."""
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    elif path.exists():
        shutil.rmtree(path)


def delete_checkpoint(path: Path, *, within: Path | None = None) -> None:
    """Delete a checkpoint (or a link to one) and nothing else; a missing one is fine.

    Args:
        path: The checkpoint.
        within: Folders between it and this directory that are empty afterwards are removed too: a metric with a slash
            in its name made them.
    """
    if not path.is_symlink() and path.exists() and not (path / COMMIT_FILE).is_file():
        rank_zero_warn(f"{path} was to be deleted as an old checkpoint, but it is none; it was left alone.")
        return
    if path.is_dir() and not path.is_symlink():
        # Under another name first: a kill in between must not leave half a checkpoint under this one.
        doomed = path.with_name(f"{path.name}.deleting-{uuid.uuid4().hex[:8]}")
        try:
            os.rename(path, doomed)
        except OSError:  # the folder may not be writable, for instance
            doomed = path
        delete_tree(doomed)
    else:
        delete_tree(path)
    if within is not None:
        folder = path.parent
        while within in folder.parents:
            try:
                folder.rmdir()
            except OSError:  # not empty, or not there
                break
            folder = folder.parent


def clean_up(directory: Path) -> list[Path]:
    """Remove what an interrupted process left in a directory of checkpoints.

    A replaced checkpoint whose successor never got its name is put back first.

    Args:
        directory: The directory; nothing happens when it does not exist.

    Returns:
        What was removed or put back.
    """
    touched: list[Path] = []
    if not directory.is_dir():
        return touched
    for entry in sorted(directory.iterdir()):
        if entry.is_symlink() or not entry.is_dir():
            continue
        if _REPLACED.search(entry.name):
            original = entry.with_name(_REPLACED.sub("", entry.name))
            if not os.path.lexists(original) and is_complete(entry):
                os.rename(entry, original)
            else:
                shutil.rmtree(entry, ignore_errors=True)
            touched.append(entry)
        elif STAGED.search(entry.name) or _DELETED.search(entry.name) or _ORBAX_TEMPORARY.search(entry.name):
            shutil.rmtree(entry, ignore_errors=True)
            touched.append(entry)
    return touched


def is_complete(path: Path) -> bool:
    """Say whether a directory holds one complete commit."""
    try:
        verify(path)
    except (CheckpointError, OSError):
        return False
    return True


def verify(path: Path) -> None:
    """Check that a path is a whole checkpoint, reading nothing but the marker and the names.

    Args:
        path: The checkpoint; a link to one is followed, links inside are not allowed.

    Raises:
        FileNotFoundError: There is nothing.
        NotACheckpointError: It is a file, or a directory of something else.
        IncompleteCheckpointError: There is no complete commit in it.
        CheckpointError: It holds links or special files.
    """
    if not path.exists():
        raise FileNotFoundError(f"Checkpoint file not found: {path}")
    if not path.is_dir():
        raise NotACheckpointError(_what_the_file_is(path))
    if STAGED.search(path.name) or _ORBAX_TEMPORARY.search(path.name):
        raise IncompleteCheckpointError(f"{path} is a checkpoint whose saving was interrupted; it cannot be loaded.")
    root = path.resolve()
    for entry in _walk(root):
        mode = entry.lstat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise CheckpointError(
                f"The checkpoint {path} contains {entry.relative_to(root)}, which is a link or a special file. "
                "A checkpoint holds plain files only; this one was changed after it was written and is not loaded."
            )
    marker, metadata = root / COMMIT_FILE, root / METADATA_ITEM / METADATA_FILE
    plain_tree = (root / "_METADATA").is_file()  # Orbax's own PyTree, without items
    if not metadata.is_file() and (plain_tree or not marker.is_file()):
        raise NotACheckpointError(
            f"{path} is a directory, but no checkpoint of jaxlightning: {COMMIT_FILE} and "
            f"{METADATA_ITEM}/{METADATA_FILE} are missing. It contains {sorted(os.listdir(root))[:10]}. "
            "For a plain Orbax tree use jaxlightning.checkpoint.load_weights."
        )
    for file in (marker, metadata):
        if not file.is_file():
            raise IncompleteCheckpointError(
                f"The checkpoint {path} is incomplete: {file.relative_to(root)} is missing. It cannot be loaded."
            )
    try:
        stamp = json.loads(marker.read_text(encoding="utf-8"))["commit_timestamp_nsecs"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise IncompleteCheckpointError(f"The commit marker of {path} is damaged: {error!r}") from error
    if not isinstance(stamp, int) or isinstance(stamp, bool) or stamp <= 0:
        raise IncompleteCheckpointError(f"The checkpoint {path} was never committed; its saving was interrupted.")


def read_metadata(path: Path) -> dict[str, object]:
    """Return the JSON of a verified checkpoint.

    Raises:
        CheckpointError: The JSON is damaged or of another format.
    """
    file = path / METADATA_ITEM / METADATA_FILE
    if file.stat().st_size > _MAX_METADATA_BYTES:
        raise CheckpointError(f"{file} is larger than {_MAX_METADATA_BYTES} bytes and is not read.")
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"The metadata of the checkpoint {path} is damaged: {error!r}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"The metadata of the checkpoint {path} is a {type(data).__name__}, not an object.")
    return data


def _walk(root: Path) -> Iterator[Path]:
    for entry in root.iterdir():
        yield entry
        if entry.is_dir() and not entry.is_symlink():
            yield from _walk(entry)


def _what_the_file_is(path: Path) -> str:
    with path.open("rb") as file:
        head = file.read(4)
    hint = ""
    if head[:2] == b"PK" or head[:1] == b"\x80":
        hint = " It looks like a PyTorch checkpoint (a pickle), which is never opened here."
    return f"{path} is a file, but a checkpoint of jaxlightning is a directory.{hint}"
