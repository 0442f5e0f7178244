"""Paths inside a checkpoint, kept relative to it, so that a run's directory can be moved and names no machine."""

from __future__ import annotations

import os
from pathlib import Path
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
        self._base = None if is_remote(text) else Path(os.path.abspath(text)).parent

    def shorten(self, text: str) -> dict[str, str] | None:
        """Return the JSON for an absolute path near the checkpoint; None leaves the text as it is.

        "Near" is the folder of the checkpoint, what is below it, and up to three folders above: a run's directory
        with its loggers and other checkpoint callbacks. Text that merely begins with a slash is not touched.
        """
        if self._base is None or not text.startswith(os.sep) or os.path.normpath(text) != text:
            return None
        roots = [self._base, *list(self._base.parents)[:3]]
        # Never the root of the file system or a home directory's parent: anything would be "near" then.
        if not any(len(root.parts) > 2 and Path(text).is_relative_to(root) for root in roots):
            return None
        return {TAG: _KIND, "path": Path(os.path.relpath(text, self._base)).as_posix()}

    def resolve(self, value: dict[str, Any]) -> str:
        """Return the absolute path for what `shorten` made, seen from where the checkpoint lies now.

        Raises:
            ValueError: The JSON is something else.
        """
        if value.get(TAG) != _KIND or self._base is None:
            raise ValueError(f"The tag {value.get(TAG)!r} is not known to this version.")
        path = value["path"]
        if not isinstance(path, str) or os.path.isabs(path):
            raise ValueError(f"A path beside the checkpoint must be relative, got {path!r}.")
        return os.path.normpath(os.path.join(self._base, path))
