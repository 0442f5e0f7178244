"""JAX's persistent compilation cache during a run, so that a script which starts again need not compile again.

What the user chose always wins: a cache that is configured or switched off in `jax.config` or in the environment is
left as it is. Otherwise a run uses a folder of the user's own, and JAX's options are put back after it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import stat
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from jaxlightning.utilities.exceptions import MisconfigurationException
from jaxlightning.utilities.rank_zero import rank_zero_warn

__all__ = ["check_compilation_cache", "default_cache_folder", "healing", "persistent_cache"]

_config: Any = jax.config
_log = logging.getLogger("jaxlightning")

MIN_COMPILE_S = 0.05
"""Compilations that took less are not written: reading them back would save nothing, and there are many."""

MAX_BYTES = 2 * 1024**3
"""Above this size the entries written first are deleted."""

_ENTRIES = "*-cache"
_JAX_MIN_COMPILE_S = 1.0  # JAX's own default; another value is the user's choice
_READ_ERROR = "Error reading persistent compilation cache entry"
_own_folder: Path | None = None  # the folder that the present run uses, None when it is not one of ours


def check_compilation_cache(value: Any) -> bool | Path:
    """The flag `Trainer(compilation_cache=...)`, checked.

    Raises:
        MisconfigurationException: If it is neither True, False nor a path.
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, (str, os.PathLike)) and os.fspath(value):
        return Path(value).expanduser()
    raise MisconfigurationException(
        f"`Trainer(compilation_cache={value!r})` must be True (a folder in your cache directory), False, or the path of"
        " a folder."
    )


def default_cache_folder() -> Path:
    """The user's cache directory as the platform has it, then a folder per kind of processor.

    Compiled programs use the instructions of the machine that made them, and JAX's keys do not tell CPUs apart: with a
    home directory that several machines share each kind needs a folder of its own.
    """
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = str(Path.home() / "Library" / "Caches")
    else:
        # The XDG base directory specification: a relative path is to be ignored.
        base = os.environ.get("XDG_CACHE_HOME", "")
        if not os.path.isabs(base):
            base = str(Path.home() / ".cache")
    return Path(base) / "jaxlightning" / "xla" / _processor()


def _processor() -> str:
    words = [platform.machine(), platform.processor()]
    with contextlib.suppress(OSError):
        # What a core can do, and its model; only the lines of the first core.
        with open("/proc/cpuinfo") as lines:
            first = lines.read().split("\n\n", 1)[0].splitlines()
        words += [line for line in first if line.split(":")[0].strip() in ("flags", "Features", "model name")]
    return f"{platform.machine() or 'cpu'}-{hashlib.sha256(repr(words).encode()).hexdigest()[:12]}"


def _is_users() -> bool:
    """Whether the user configured JAX's cache, or switched it off."""
    named = bool(_config.jax_compilation_cache_dir) or bool(os.environ.get("JAX_COMPILATION_CACHE_DIR"))
    return named or not _config.jax_enable_compilation_cache


def _prepare(folder: Path, *, private: bool) -> bool:
    """Makes the folder; whether it can be used.

    Args:
        folder: Where entries go.
        private: Whether nobody else may write there: who can write an entry can run code here.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = folder.stat()
        if private and _open_to_others(found):
            _log.info("The compilation cache %s is not used: others may write there.", folder)
            return False
        return os.access(folder, os.R_OK | os.W_OK | os.X_OK)
    except (OSError, RuntimeError):  # a read-only or missing home directory; a file in the way
        return False


def _open_to_others(found: os.stat_result) -> bool:
    if not hasattr(os, "getuid"):
        return False
    return found.st_uid != os.getuid() or bool(found.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


@contextlib.contextmanager
def persistent_cache(choice: bool | Path) -> Iterator[Path | None]:
    """Keeps what is compiled inside in a folder, and takes from there what was compiled before.

    Args:
        choice: The checked flag: True for the default folder, False for no cache of ours, or a folder.

    Yields:
        The folder, None when JAX's options are left alone.
    """
    global _own_folder
    if choice is False:
        yield None
        return
    if _is_users():
        if isinstance(choice, Path) and _config.jax_compilation_cache_dir != str(choice):
            rank_zero_warn(
                f"`Trainer(compilation_cache={str(choice)!r})` has no effect: JAX's own options or environment"
                " (jax_compilation_cache_dir, jax_enable_compilation_cache) already say what is cached where, and they"
                " win."
            )
        yield None
        return
    try:
        folder = default_cache_folder() if choice is True else choice
    except RuntimeError:  # no home directory
        yield None
        return
    if not _prepare(folder, private=choice is True):
        if choice is not True:
            raise MisconfigurationException(
                f"`Trainer(compilation_cache={str(folder)!r})`: this folder cannot be made or written. Give another"
                " folder, or False for no cache."
            )
        yield None
        return
    options: dict[str, Any] = {"jax_compilation_cache_dir": str(folder)}
    if _config.jax_persistent_cache_min_compile_time_secs == _JAX_MIN_COMPILE_S:
        options["jax_persistent_cache_min_compile_time_secs"] = MIN_COMPILE_S
    # JAX itself writes this one when it first opens a cache.
    before = {name: getattr(_config, name) for name in (*options, "jax_persistent_cache_min_entry_size_bytes")}
    outer = _own_folder
    # People whose warnings are errors should not lose a run to a damaged file.
    warnings.filterwarnings("default", message=_READ_ERROR)
    filters: Any = warnings.filters
    tolerance = filters[0]
    try:
        for name, value in options.items():
            _config.update(name, value)
        _reopen()
        _own_folder = folder
        yield folder
    finally:
        _own_folder = outer
        for name, value in before.items():
            # What user code chose during the run stays.
            if name not in options or getattr(_config, name) == options[name]:
                _config.update(name, value)
        _reopen()
        with contextlib.suppress(ValueError):
            filters.remove(tolerance)
        if choice is True:
            prune(folder, MAX_BYTES)


def _reopen() -> None:
    """Lets JAX look at its options again; it opens a cache only once otherwise."""
    from jax.experimental.compilation_cache import compilation_cache

    compilation_cache.reset_cache()


@contextlib.contextmanager
def healing() -> Iterator[None]:
    """Inside, an entry of the cache that cannot be read costs a compilation and nothing else.

    JAX warns of such an entry, which is an error for people whose warnings are errors, and never replaces it. One in a
    folder of ours is deleted, so that the next run finds a good one.
    """
    folder = _own_folder
    if folder is None:
        yield
        return
    damaged: list[str] = []

    def show(message: Any, *args: Any, **kwargs: Any) -> None:
        if str(message).startswith(_READ_ERROR):
            damaged.append(str(message))
        else:
            before(message, *args, **kwargs)

    with warnings.catch_warnings():
        before = warnings.showwarning
        warnings.showwarning = show
        warnings.filterwarnings("always", message=_READ_ERROR)
        yield
    for text in damaged:
        _log.info("An entry of the compilation cache could not be read, so it was compiled again: %s", text)
        name = text[len(_READ_ERROR) :].split("'")
        for entry in folder.glob(f"{name[1]}-{_ENTRIES}") if len(name) > 2 else ():
            with contextlib.suppress(OSError):
                entry.unlink()


def prune(folder: Path, most: int) -> None:
    """Deletes the entries written first until at most `most` bytes are left."""
    entries: list[tuple[float, int, Path]] = []
    with contextlib.suppress(OSError):
        for path in folder.glob(_ENTRIES):
            with contextlib.suppress(OSError):  # another process deleted it
                found = path.stat()
                entries.append((found.st_mtime, found.st_size, path))
    total = sum(size for _, size, _ in entries)
    for _, size, path in sorted(entries):
        if total <= most:
            return
        with contextlib.suppress(OSError):
            path.unlink()
        total -= size
