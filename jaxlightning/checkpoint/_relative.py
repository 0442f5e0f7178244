"""Paths inside a checkpoint, kept relative to it, so that a run's directory can be moved and names no machine."""

from __future__ import annotations

import os
import posixpath
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

from jaxlightning.checkpoint._layout import is_remote
from jaxlightning.utilities.serialization import TAG

_KIND = "beside_checkpoint"


class RelativePaths:
    """Turns absolute paths into ones relative to the checkpoint's folder, and back.

    Args:
        checkpoint: Where the checkpoint lies (or will).
    """

    def __init__(self, checkpoint: str | os.PathLike[str]) -> None:
        text = os.fspath(checkpoint)
        self._remote = is_remote(text)
        scheme, separator, rest = text.partition("://") if self._remote else ("", "", os.path.abspath(text))
        self._start = scheme + separator
        self._flavour: type[PurePath] = PurePosixPath if self._remote else Path
        self._base = self._flavour(posixpath.normpath(rest) if self._remote else rest).parent

    def shorten(self, text: str) -> dict[str, str] | None:
        """Return the JSON for an absolute path near the checkpoint; None leaves the text as it is.

        "Near" is the folder of the checkpoint, what is below it, and up to three folders above: a run's directory
        with its loggers and other checkpoint callbacks. Text that merely begins with a slash is not touched.
        """
        path = text.removeprefix(self._start)
        begins = text.startswith(self._start) if self._remote else text.startswith(os.sep)
        normal = posixpath.normpath(path) if self._remote else os.path.normpath(path)
        if not begins or normal != path:
            return None
        # Never the root of the file system or a home directory's parent, nor a whole bucket: anything would be "near".
        far = 1 if self._remote and not self._base.is_absolute() else 2
        roots = [root for root in list(self._base.parents)[:3] if len(root.parts) > far]
        if far == 1 or len(self._base.parts) > far:
            roots.append(self._base)
        if not any(self._flavour(path).is_relative_to(root) for root in roots):
            return None
        relpath = posixpath.relpath if self._remote else os.path.relpath
        return {TAG: _KIND, "path": self._flavour(relpath(path, self._base)).as_posix()}

    def resolve(self, value: dict[str, Any]) -> str:
        """Return the absolute path for what `shorten` made, seen from where the checkpoint lies now.

        Raises:
            ValueError: The JSON is something else.
        """
        if value.get(TAG) != _KIND:
            raise ValueError(f"The tag {value.get(TAG)!r} is not known to this version.")
        path = value["path"]
        if not isinstance(path, str) or os.path.isabs(path) or posixpath.isabs(path):
            raise ValueError(f"A path beside the checkpoint must be relative, got {path!r}.")
        if self._remote:
            return self._start + posixpath.normpath(posixpath.join(str(self._base), path))
        return os.path.normpath(os.path.join(self._base, path))
