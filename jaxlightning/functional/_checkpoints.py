"""The two checkpoints of a `fit`: the best one by a metric that evaluation gives, and the last one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxlightning.callbacks import ModelCheckpoint
from jaxlightning.checkpoint._naming import default_directory
from jaxlightning.utilities.exceptions import MisconfigurationException

__all__ = ["BestCheckpoint", "LastCheckpoint", "newest_last"]

_LOWER_IS_BETTER = ("loss", "error", "err", "mse", "mae", "rmse", "nll", "perplexity", "kl", "fid", "wer", "cer")


class _Quiet(ModelCheckpoint):
    """A ModelCheckpoint that may continue in the folder of an earlier run."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Decide where checkpoints go."""
        if self.dirpath is None:
            self.dirpath = default_directory(trainer)


class LastCheckpoint(_Quiet):
    """Keeps `last.ckpt`, written after every epoch.

    Args:
        dirpath: Where; by default beside the logs.
    """

    def __init__(self, dirpath: str | None = None) -> None:
        super().__init__(dirpath, save_top_k=0, save_last=True, save_on_train_epoch_end=True)

    @property
    def state_key(self) -> str:
        """A name of its own, beside other checkpoint callbacks."""
        return "LastCheckpoint"


class BestCheckpoint(_Quiet):
    """Keeps the best checkpoint; what is best is decided when evaluation says which metrics there are.

    Args:
        monitor: The metric; by default `accuracy`, else the first that evaluation gives.
        mode: `"min"` or `"max"`; by default by the name.
        dirpath: Where; by default beside the logs.
    """

    def __init__(self, monitor: str | None, mode: str | None, dirpath: str | None = None) -> None:
        super().__init__(dirpath, monitor=None, mode=mode or "max", save_top_k=1, filename="best-{epoch}-{step}")
        if monitor is not None:
            self._choose(monitor, mode)
        self._asked, self._asked_mode = monitor, mode

    @property
    def state_key(self) -> str:
        """The same whether or not the metric is known already."""
        return "BestCheckpoint"

    def metrics_known(self, names: Sequence[str]) -> None:
        """Chooses the metric.

        Args:
            names: What evaluation gives.

        Raises:
            MisconfigurationException: If the metric that was asked for is not among them.
        """
        if self._asked is not None:
            if self._asked not in names:
                raise MisconfigurationException(
                    f"`fit(monitor={self._asked!r})`: `eval_step` gives {list(names)}. Choose one of these."
                )
        elif self.monitor is None:
            self._choose("accuracy" if "accuracy" in names else names[0], self._asked_mode)

    def _choose(self, monitor: str, mode: str | None) -> None:
        words = "".join(c.lower() if c.isalnum() else " " for c in monitor).split()
        lower = any(word in _LOWER_IS_BETTER for word in words)
        self.monitor, self.mode = monitor, mode or ("min" if lower else "max")
        self.kth_value = np.float32(np.inf if self.mode == "min" else -np.inf)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what was known, the metric too."""
        if self.monitor is None and state_dict.get("monitor"):
            self._choose(state_dict["monitor"], self._asked_mode)
        super().load_state_dict(state_dict)


def newest_last(folder: str | os.PathLike[str]) -> str | None:
    """The newest `last.ckpt` in a run's folder, or in a version below it; None if there is none."""
    places = ("checkpoints/last*.ckpt", "*/checkpoints/last*.ckpt")
    found = [path for place in places for path in Path(folder).glob(place)] if os.path.isdir(folder) else []
    newest = max(found, key=lambda path: (path.stat().st_mtime, path.name), default=None)
    return None if newest is None else os.fspath(newest)
