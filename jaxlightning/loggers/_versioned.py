"""What the loggers that keep each run in a directory of its own share: where that directory is."""

from __future__ import annotations

import os

from jaxlightning.loggers._versions import local_directory, next_version, version_name
from jaxlightning.loggers.logger import Logger

__all__ = ["VersionedLogger"]


class VersionedLogger(Logger):
    """Base of the loggers that write to `<save_dir>/<name>/version_<n>`.

    Args:
        save_dir: Where everything is kept.
        name: Name of the experiment and of its folder; None or "" for no folder.
        version: Number or name of the version; by default the number after the highest in the folder.

    Raises:
        NotImplementedError: If `save_dir` is an address on another file system.
    """

    def __init__(
        self, save_dir: str | os.PathLike[str], name: str | None = "lightning_logs", version: int | str | None = None
    ) -> None:
        self._save_dir = local_directory(save_dir, type(self).__name__)
        self._name = name or ""
        self._version = version

    @property
    def name(self) -> str:
        """Name of the experiment; "" if it has no folder."""
        return self._name

    @property
    def version(self) -> int | str:
        """The version; found in the folder at the first call if none was given."""
        if self._version is None:
            self._version = next_version(self.root_dir)
        return self._version

    @property
    def save_dir(self) -> str:
        """Where everything is kept."""
        return self._save_dir

    @property
    def root_dir(self) -> str:
        """Directory of all versions."""
        return os.path.join(self.save_dir, self.name)

    @property
    def log_dir(self) -> str:
        """Directory of this version."""
        return os.path.join(self.root_dir, version_name(self.version))
