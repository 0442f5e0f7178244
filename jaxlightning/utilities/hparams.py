"""Hyper-parameters of a module or datamodule: the mixin, and their files."""

from __future__ import annotations

import ast
import copy
import csv
import inspect
import types
import warnings
from argparse import Namespace
from collections.abc import Mapping, MutableMapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from jaxlightning.utilities.parsing import AttributeDict as AttributeDict
from jaxlightning.utilities.parsing import save_hyperparameters as _save_hyperparameters
from jaxlightning.utilities.rank_zero import rank_zero_warn

_PRIMITIVES = (bool, int, float, str)


class HyperparametersMixin:
    """Gives a class ``save_hyperparameters()``, ``hparams`` and ``hparams_initial``."""

    _log_hyperparams: bool = False
    _hparams_name: str | None = None
    _hparams: MutableMapping[str, Any]

    def __init__(self) -> None:
        super().__init__()
        self._log_hyperparams = False

    def save_hyperparameters(
        self,
        *args: Any,
        ignore: Sequence[str] | str | None = None,
        frame: types.FrameType | None = None,
        logger: bool = True,
    ) -> None:
        """Keep the constructor's arguments in ``hparams``, in the checkpoints and in the logger.

        Args:
            *args: Nothing for all arguments, names of arguments, or one dict or namespace.
            ignore: Names to leave out, also when a base class saved them.
            frame: The constructor's frame, when it is not the caller's.
            logger: Whether the loggers get them at the start of a run.

        Raises:
            ValueError: A single number or text was passed where a mapping is needed.

        Example:
            ```python
            class Net(JaxLightningModule):
                def __init__(self, hidden=64, lr=1e-3):
                    super().__init__()
                    self.save_hyperparameters()
                    self.hparams.hidden  # 64
            ```
        """
        self._log_hyperparams = logger
        if frame is None:
            here = inspect.currentframe()
            frame = here.f_back if here is not None else None
        _save_hyperparameters(self, *args, ignore=ignore, frame=frame, owner=HyperparametersMixin)

    def _set_hparams(self, hp: MutableMapping[str, Any] | Namespace) -> None:
        converted = self._to_hparams_dict(hp)
        if isinstance(converted, dict) and isinstance(self.hparams, dict):
            self.hparams.update(converted)
        else:
            self._hparams = converted

    def remove_ignored_hparams(self, ignore_list: Sequence[str]) -> None:
        """Drop entries, also those that a base class saved earlier."""
        for key in ignore_list:
            self.hparams.pop(key, None)

    @staticmethod
    def _to_hparams_dict(hp: Any) -> MutableMapping[str, Any]:
        if isinstance(hp, Namespace):
            hp = vars(hp)
        if isinstance(hp, dict):
            return AttributeDict(hp)
        if isinstance(hp, _PRIMITIVES):
            raise ValueError(
                f"save_hyperparameters() got the single value {hp!r}. Primitives {_PRIMITIVES} are not allowed: pass "
                "the name of the argument as text, a dict, or an argparse.Namespace."
            )
        if not isinstance(hp, MutableMapping):
            raise ValueError(
                f"Unsupported config type of {type(hp)}. save_hyperparameters() takes a dict, an argparse.Namespace "
                "or a mutable mapping."
            )
        return hp

    @property
    def hparams(self) -> Any:
        """The saved hyper-parameters, readable as ``hparams.name`` and ``hparams["name"]``, and changeable."""
        if not hasattr(self, "_hparams"):
            self._hparams = AttributeDict()
        return self._hparams

    @property
    def hparams_initial(self) -> Any:
        """What was saved first; a fresh copy at every access, so nothing can change it."""
        if not hasattr(self, "_hparams_initial"):
            return AttributeDict()
        initial: Any = self._hparams_initial
        try:
            return copy.deepcopy(initial)
        except Exception:  # an entry that cannot be copied
            return copy.copy(initial)


def save_hparams_to_yaml(config_yaml: str | Path, hparams: Mapping[str, Any] | Namespace) -> None:
    """Write hyper-parameters as YAML that a safe loader reads back; what cannot be written is left out, warning.

    Args:
        config_yaml: The file; its folder must exist.
        hparams: The values.

    Raises:
        RuntimeError: The folder is missing.
        TypeError: ``hparams`` is no mapping.
    """
    import yaml

    path = Path(config_yaml)
    if not path.parent.is_dir():
        raise RuntimeError(f"Missing folder: {path.parent}.")
    if isinstance(hparams, Namespace):
        hparams = vars(hparams)
    if not isinstance(hparams, Mapping):
        raise TypeError(f"hparams must be a dictionary, got {type(hparams).__name__}.")
    allowed: dict[str, Any] = {}
    for key, value in hparams.items():
        plain = to_plain(value)
        try:
            yaml.safe_dump(plain)
        except (yaml.YAMLError, TypeError, ValueError):
            warnings.warn(
                f"Skipping {key!r} parameter because it is not possible to safely dump to YAML.", stacklevel=2
            )
        else:
            allowed[str(key)] = plain
    path.write_text(yaml.safe_dump(allowed, allow_unicode=True), encoding="utf-8")


def load_hparams_from_yaml(config_yaml: str | Path) -> dict[str, Any]:
    """Read hyper-parameters from YAML with the safe loader; tags that would build objects are an error.

    Args:
        config_yaml: The file.

    Returns:
        The values; empty, with a warning, when there is no such file.

    Raises:
        ValueError: The file is not a mapping, or holds tags that are not plain data.
    """
    import yaml

    path = Path(config_yaml)
    if not path.exists():
        rank_zero_warn(f"Missing Tags: {path}.", category=RuntimeWarning)
        return {}
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"The hyper-parameter file {path} is not plain YAML and was not read: {error}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ValueError(f"The hyper-parameter file {path} must hold a mapping, got {type(loaded).__name__}.")
    return loaded


def load_hparams_from_tags_csv(tags_csv: str | Path) -> dict[str, Any]:
    """Read hyper-parameters from a CSV file with the columns key and value.

    Args:
        tags_csv: The file.

    Returns:
        The values, literals converted; empty, with a warning, when there is no such file.
    """
    path = Path(tags_csv)
    if not path.exists():
        rank_zero_warn(f"Missing Tags: {path}.", category=RuntimeWarning)
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))[1:]
    return {row[0]: _literal(row[1]) for row in rows if len(row) >= 2}


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def to_plain(value: Any) -> Any:
    """Turn a value into what YAML and loggers can show: enums by name, arrays of one element and numpy scalars as
    Python numbers, tuples as lists, paths and durations as text. Anything else stays as it is."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Namespace):
        value = vars(value)
    if isinstance(value, Mapping):
        return {key if isinstance(key, int | float | bool) else str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, _PRIMITIVES) and type(value) in _PRIMITIVES:
        return value
    if hasattr(value, "item") and getattr(value, "size", None) == 1:
        return value.item()
    return value
