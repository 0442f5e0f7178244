"""Numbered run directories: `<save_dir>/<name>/version_<n>`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

__all__ = ["known_version", "local_directory", "next_version", "version_name"]

_VERSION = re.compile(r"version_(\d+)")


def next_version(directory: str) -> int:
    """The number after the highest `version_<n>` in a directory; 0 if there is none."""
    try:
        entries = list(os.scandir(directory))
    except OSError:
        return 0
    found = [int(match[1]) for entry in entries if entry.is_dir() and (match := _VERSION.fullmatch(entry.name))]
    return max(found) + 1 if found else 0


def version_name(version: int | str) -> str:
    """Name of a version's directory: a string as it is, a number as `version_<n>`."""
    return version if isinstance(version, str) else f"version_{version}"


def known_version(position: Mapping[str, Any]) -> int | str | None:
    """The version in a logger's saved position; None if it cannot be the name of a directory."""
    version = position.get("version")
    if isinstance(version, str):
        return version if version not in ("", ".", "..") and os.path.basename(version) == version else None
    return version if isinstance(version, int) and not isinstance(version, bool) and version >= 0 else None


def local_directory(save_dir: str | os.PathLike[str], logger: str) -> str:
    """The directory as text.

    Args:
        save_dir: The directory.
        logger: Class name of the logger, for the error.

    Raises:
        NotImplementedError: If it is an address on another file system.
    """
    path = os.fspath(save_dir)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", path):
        raise NotImplementedError(
            f"{logger}(save_dir={path!r}): writing to remote file systems is not built yet. Give a local directory."
        )
    return path
