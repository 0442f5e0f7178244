"""Names of checkpoints: `{epoch}-{val_loss:.2f}` and the metrics of a moment make `epoch=3-val_loss=0.25`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxlightning.checkpoint import _layout, _remote

if TYPE_CHECKING:
    from jaxlightning.trainer import Trainer

_FIELD = re.compile(r"\{([^{}:]*)(:[^{}]*)?\}")


def plain_number(value: Any) -> Any:
    """Return the Python number in a 0-d array or numpy scalar, which formats as Lightning's tensors do."""
    return value.item() if hasattr(value, "item") else value


def fill_template(template: str, metrics: Mapping[str, Any], *, equals: str, insert_names: bool) -> str:
    """Replace `{name}` and `{name:format}` by the values of metrics.

    Args:
        template: The text; names may contain dots and slashes.
        metrics: Values by name; one that is missing counts as 0.
        equals: Stands between name and value.
        insert_names: Whether the name is written before the value.

    Returns:
        The text without fields.
    """

    def fill(match: re.Match[str]) -> str:
        name, spec = match.group(1), (match.group(2) or ":")[1:]
        text = format(plain_number(metrics.get(name, 0)), spec)
        return f"{name}{equals}{text}" if insert_names else text

    return _FIELD.sub(fill, template)


def default_directory(trainer: Trainer) -> str:
    """Return where checkpoints go when nobody says: beside the first logger's files, else below the root directory."""
    root = os.fspath(trainer.default_root_dir)
    if not trainer.loggers:
        return os.path.join(root, "checkpoints")
    logger = trainer.loggers[0]
    save_dir = logger.save_dir if logger.save_dir is not None else root
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    return os.path.join(save_dir, str(logger.name), version, "checkpoints")


def find_last(directory: str | os.PathLike[str], *, name: str, extension: str) -> set[str]:
    """Return the checkpoints in a directory whose name begins like that of the last one."""
    pattern = re.compile(rf"^{name}(-(\d+))?")
    if _layout.is_remote(directory):
        return {
            each
            for each in _remote.listing(directory)
            if each.endswith(extension) and pattern.match(each.rpartition("/")[2])
        }
    root = Path(directory)
    if not root.is_dir():
        return set()
    return {
        os.path.normpath(entry) for entry in root.iterdir() if entry.suffix == extension and pattern.match(entry.stem)
    }


def is_inside(path: str | os.PathLike[str], directory: str | os.PathLike[str]) -> bool:
    """Say whether a path lies below a directory, with dots and links on the way resolved; a link itself stays one."""
    if _layout.is_remote(directory) or _layout.is_remote(path):
        return _remote.is_inside(path, directory)
    absolute = os.path.abspath(path)
    place = Path(os.path.realpath(os.path.dirname(absolute)), os.path.basename(absolute))
    return Path(os.path.realpath(directory)) in place.parents
