"""From the form of an older version of the format to the newest, so that nobody else knows older ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Migration = Callable[[dict[str, Any]], dict[str, Any]]

#: Version n to the function that makes the metadata of version n + 1. There is one version so far.
MIGRATIONS: Mapping[int, Migration] = {}


def migrate(metadata: dict[str, Any], *, to: int, migrations: Mapping[int, Migration] | None = None) -> dict[str, Any]:
    """Bring the metadata of a checkpoint into the form of a version.

    Args:
        metadata: The JSON, of a version between 1 and ``to``.
        to: The wanted version.
        migrations: In place of the known ones.

    Returns:
        The JSON in the wanted form; the one that was given when nothing has to be done.

    Raises:
        KeyError: A step is missing, which is a mistake in this library.
    """
    steps = MIGRATIONS if migrations is None else migrations
    while metadata["format_version"] < to:
        version = metadata["format_version"]
        metadata = {**steps[version](metadata), "format_version": version + 1}
    return metadata
