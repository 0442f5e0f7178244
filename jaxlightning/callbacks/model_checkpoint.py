"""Save checkpoints during training and keep the best, the last, or all of them."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from weakref import proxy

import numpy as np

from jaxlightning.callbacks._checkpoint_moments import SaveMoments
from jaxlightning.checkpoint._layout import is_remote
from jaxlightning.checkpoint._naming import default_directory, fill_template, find_last, is_inside, plain_number
from jaxlightning.utilities.exceptions import MisconfigurationException
from jaxlightning.utilities.rank_zero import rank_zero_info, rank_zero_warn
from jaxlightning.utilities.warnings import PossibleUserWarning, WarningCache

if TYPE_CHECKING:
    from jaxlightning.module import JaxLightningModule
    from jaxlightning.trainer import Trainer

_SCORES = ("acc", "auroc", "auc", "f1", "precision", "recall", "iou", "dice", "bleu", "rouge", "psnr", "ssim", "r2")


class ModelCheckpoint(SaveMoments):
    """Save a checkpoint after every epoch, every `n` steps or every interval of time, and keep the best `k`.

    A checkpoint is a directory whose name ends in `.ckpt`. An old one is deleted only after the new one is complete,
    and only inside `dirpath`.

    Args:
        dirpath: Where checkpoints go; by default the first logger's directory, or the trainer's root directory.
        filename: Template of the name, such as `"{epoch}-{val_loss:.2f}"`; without one `"{epoch}-{step}"`.
        monitor: The logged metric to rank by; None keeps the latest.
        verbose: Whether each decision is written to the log.
        save_last: True also saves `last.ckpt` whenever something is saved; `"link"` makes it a link.
        save_top_k: How many to keep: -1 all, 0 none.
        save_on_exception: Whether a run that fails saves before it ends.
        save_weights_only: Leave out what only a continued training needs.
        mode: `"min"` or `"max"`: which values of `monitor` are better.
        auto_insert_metric_name: Whether `{name}` becomes `name=value` or just the value.
        every_n_train_steps: Save when the number of optimizer steps is a multiple.
        train_time_interval: Save when so much time has gone by.
        every_n_epochs: Save after every n-th epoch; 1 when no moment is given.
        save_on_train_epoch_end: Whether epoch saves happen at the end of the training epoch or of validation;
            decided from the validation interval by default.
        enable_version_counter: Whether a name that exists gets `-v1`, `-v2`, ...; otherwise it is overwritten.

    Raises:
        MisconfigurationException: The arguments contradict each other.
    """

    CHECKPOINT_JOIN_CHAR = "-"
    CHECKPOINT_EQUALS_CHAR = "="
    CHECKPOINT_NAME_LAST = "last"
    FILE_EXTENSION = ".ckpt"
    STARTING_VERSION = 1

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | Literal["link"] | None = None,
        save_top_k: int = 1,
        save_on_exception: bool = False,
        save_weights_only: bool = False,
        mode: str = "min",
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        enable_version_counter: bool = True,
    ) -> None:
        super().__init__(every_n_train_steps, every_n_epochs, train_time_interval, save_on_train_epoch_end)
        if mode not in ("min", "max"):
            raise MisconfigurationException(f"`mode` can be min, max but got {mode}")
        if save_top_k < -1:
            raise MisconfigurationException(f"Invalid value for save_top_k={save_top_k}. Must be >= -1")
        if monitor is None and save_top_k not in (-1, 0, 1):
            raise MisconfigurationException(
                f"ModelCheckpoint(save_top_k={save_top_k}, monitor=None) is not a valid configuration. No quantity for "
                "top_k to track."
            )
        self.monitor = monitor
        self.verbose = verbose
        self.save_last = save_last
        self.save_top_k = save_top_k
        self.save_on_exception = save_on_exception
        self.save_weights_only = save_weights_only
        self.mode = mode
        self.auto_insert_metric_name = auto_insert_metric_name
        self._enable_version_counter = enable_version_counter
        if dirpath and not is_remote(dirpath):
            dirpath = os.path.realpath(os.path.expanduser(dirpath))
        self.dirpath = os.fspath(dirpath) if dirpath else None
        self.filename = filename
        self.current_score: Any = None
        self.best_k_models: dict[str, Any] = {}
        self.kth_best_model_path = ""
        self.kth_value: Any = np.float32(math.inf if mode == "min" else -math.inf)
        self.best_model_score: Any = None
        self.best_model_path = ""
        self.last_model_path = ""
        self._warnings = WarningCache()

    @property
    def state_key(self) -> str:
        """Tells several of these apart: class, monitor, mode and moments."""
        return self._generate_state_key(
            monitor=self.monitor,
            mode=self.mode,
            every_n_train_steps=self._every_n_train_steps,
            every_n_epochs=self._every_n_epochs,
            train_time_interval=self._train_time_interval,
        )

    # --- hooks (when to save is in `SaveMoments`) -------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: JaxLightningModule, stage: str) -> None:
        """Decide where checkpoints go."""
        if self.dirpath is None:
            self.dirpath = default_directory(trainer)
        if self.save_last == "link" and is_remote(self.dirpath):
            raise ValueError(
                "`ModelCheckpoint(save_last='link')` is only supported for local file paths, got "
                f"`dirpath={self.dirpath}`."
            )
        if trainer.is_global_zero and stage == "fit":
            own = trainer._checkpoint_connector.auto_resumed
            if self.save_top_k != 0 and not own and os.path.isdir(self.dirpath) and os.listdir(self.dirpath):
                rank_zero_warn(f"Checkpoint directory {self.dirpath} exists and is not empty.")
            if self.mode == "min" and self.monitor is not None and _looks_like_a_score(self.monitor):
                rank_zero_warn(
                    f"ModelCheckpoint(monitor={self.monitor!r}, mode='min') keeps the checkpoints with the lowest "
                    "value. The name looks like a score, where higher is better; use mode='max' for that.",
                    category=PossibleUserWarning,
                )

    def on_exception(self, trainer: Trainer, pl_module: JaxLightningModule, exception: BaseException) -> None:
        """Save what there is when a run fails."""
        if (
            not self.save_on_exception
            or trainer.fast_dev_run
            or trainer.sanity_checking
            or self._last_global_step_saved == trainer.global_step
        ):
            return
        candidates = self._monitor_candidates(trainer)
        filepath = self.format_checkpoint_name(candidates)
        self._save_checkpoint(trainer, filepath)
        self._save_last_checkpoint(trainer, candidates)
        rank_zero_info("%s was raised (%s), saved checkpoint to %s", type(exception).__name__, exception, filepath)

    def state_dict(self) -> dict[str, Any]:
        """Return what is known about the checkpoints so far."""
        return {
            "monitor": self.monitor,
            "best_model_score": self.best_model_score,
            "best_model_path": self.best_model_path,
            "current_score": self.current_score,
            "dirpath": self.dirpath,
            "best_k_models": dict(self.best_k_models),
            "kth_best_model_path": self.kth_best_model_path,
            "kth_value": self.kth_value,
            "last_model_path": self.last_model_path,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` gave; in another directory only the path of the best checkpoint counts."""
        saved_in = state_dict.get("dirpath", self.dirpath)
        if self.dirpath == saved_in:
            self.best_model_score = state_dict["best_model_score"]
            self.current_score = state_dict.get("current_score", self.current_score)
            self.kth_best_model_path = state_dict.get("kth_best_model_path", self.kth_best_model_path)
            self.kth_value = state_dict.get("kth_value", self.kth_value)
            self.best_k_models = dict(state_dict.get("best_k_models", self.best_k_models))
            self.last_model_path = state_dict.get("last_model_path", self.last_model_path)
        else:
            warnings.warn(
                f"The dirpath has changed from {saved_in!r} to {self.dirpath!r}, therefore `best_model_score`, "
                "`kth_best_model_path`, `kth_value`, `last_model_path` and `best_k_models` won't be reloaded. Only "
                "`best_model_path` will be reloaded.",
                stacklevel=2,
            )
        self.best_model_path = state_dict["best_model_path"]

    # --- names ------------------------------------------------------------------------------------------------------

    def format_checkpoint_name(
        self,
        metrics: Mapping[str, Any],
        filename: str | None = None,
        ver: int | None = None,
        prefix: str | None = None,
    ) -> str:
        """Return the path that a checkpoint gets.

        Args:
            metrics: Values for the fields of the template.
            filename: A template in place of the callback's own.
            ver: Number of the version suffix.
            prefix: Put before the name.

        Returns:
            The path, inside `dirpath` when that is known.
        """
        template = filename or self.filename or f"{{epoch}}{self.CHECKPOINT_JOIN_CHAR}{{step}}"
        name = fill_template(
            template, metrics, equals=self.CHECKPOINT_EQUALS_CHAR, insert_names=self.auto_insert_metric_name
        )
        parts = ([prefix] if prefix is not None else []) + [name] + ([f"v{ver}"] if ver is not None else [])
        name = self.CHECKPOINT_JOIN_CHAR.join(parts) + self.FILE_EXTENSION
        return os.path.join(self.dirpath, name) if self.dirpath else name

    def file_exists(self, filepath: str | os.PathLike[str], trainer: Trainer) -> bool:
        """Say whether a name is taken, counting checkpoints that are still being written."""
        return bool(trainer._checkpoint_connector.writer.exists(filepath))

    def _free_name(self, trainer: Trainer, metrics: dict[str, Any], template: str | None, may_replace: str) -> str:
        path = self.format_checkpoint_name(metrics, template)
        version = self.STARTING_VERSION
        while self._enable_version_counter and path != may_replace and self.file_exists(path, trainer):
            path = self.format_checkpoint_name(metrics, template, ver=version)
            version += 1
        return path

    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        directory = self.dirpath if self.dirpath is not None else default_directory(trainer)
        return find_last(directory, name=self.CHECKPOINT_NAME_LAST, extension=self.FILE_EXTENSION)

    # --- saving -----------------------------------------------------------------------------------------------------

    def _monitor_candidates(self, trainer: Trainer) -> dict[str, Any]:
        candidates = dict(trainer.callback_metrics)
        for name, value in (("epoch", trainer.current_epoch), ("step", trainer.global_step)):
            logged = candidates.get(name)
            candidates[name] = int(plain_number(logged)) if hasattr(logged, "item") else value
        return candidates

    def _save_topk_checkpoint(self, trainer: Trainer, candidates: dict[str, Any]) -> None:
        if self.save_top_k == 0:
            return
        if self.monitor is None:
            self._save_latest(trainer, candidates)
            return
        if self.monitor not in candidates:
            message = (
                f"`ModelCheckpoint(monitor={self.monitor!r})` could not find the monitored key in the returned "
                f"metrics: {list(candidates)}. HINT: Did you call `log({self.monitor!r}, value)` in the "
                "`LightningModule`?"
            )
            if self._validation_ran:
                raise MisconfigurationException(message)
            self._warnings.warn(message)
            return
        current = candidates[self.monitor]
        if self.check_monitor_top_k(trainer, current):
            self._save_ranked(trainer, current, candidates)
        elif self.verbose:
            rank_zero_info(
                f"Epoch {candidates['epoch']:d}, global step {candidates['step']:d}: {self.monitor!r} was not in top "
                f"{self.save_top_k}"
            )

    def check_monitor_top_k(self, trainer: Trainer, current: Any = None) -> bool:
        """Say whether a value is good enough to be kept."""
        if current is None:
            return False
        if self.save_top_k == -1 or len(self.best_k_models) < self.save_top_k:
            return True
        worst = float(self.best_k_models[self.kth_best_model_path])
        return float(current) < worst if self.mode == "min" else float(current) > worst

    def _save_latest(self, trainer: Trainer, candidates: dict[str, Any]) -> None:
        filepath = self._free_name(trainer, candidates, None, self.best_model_path)
        # Before saving, because it is part of the state that is saved.
        previous, self.best_model_path = self.best_model_path, filepath
        self._outranked = [previous] if self.save_top_k == 1 and previous else []
        self._save_checkpoint(trainer, filepath)
        if self.save_top_k == 1 and previous:
            self._remove_checkpoint(trainer, previous, filepath)

    def _save_ranked(self, trainer: Trainer, current: Any, candidates: dict[str, Any]) -> None:
        k = len(self.best_k_models) + 1 if self.save_top_k == -1 else self.save_top_k
        outranked = ""
        if len(self.best_k_models) == k and k > 0:
            outranked = self.kth_best_model_path
            self.best_k_models.pop(outranked)
        if math.isnan(float(current)):
            current = np.float32(math.inf if self.mode == "min" else -math.inf)
        filepath = self._free_name(trainer, candidates, None, outranked)
        self.current_score = current
        self.best_k_models[filepath] = current
        best, worst = (min, max) if self.mode == "min" else (max, min)
        if len(self.best_k_models) == k:
            self.kth_best_model_path = worst(self.best_k_models, key=self._score)
            self.kth_value = self.best_k_models[self.kth_best_model_path]
        self.best_model_path = best(self.best_k_models, key=self._score)
        self.best_model_score = self.best_k_models[self.best_model_path]
        if self.verbose:
            rank_zero_info(
                f"Epoch {candidates['epoch']:d}, global step {candidates['step']:d}: {self.monitor!r} reached "
                f"{float(current):0.5f} (best {float(self.best_model_score):0.5f}), saving model to {filepath!r} as "
                f"top {k}"
            )
        self._outranked = [outranked] if outranked else []
        self._save_checkpoint(trainer, filepath)
        if outranked:
            self._remove_checkpoint(trainer, outranked, filepath)

    def _score(self, path: str) -> float:
        return float(self.best_k_models[path])

    def _save_last_checkpoint(self, trainer: Trainer, candidates: dict[str, Any]) -> None:
        if not self.save_last:
            return
        filepath = self._free_name(trainer, candidates, self.CHECKPOINT_NAME_LAST, self.last_model_path)
        previous, self.last_model_path = self.last_model_path, filepath
        if self.save_last == "link" and self._last_checkpoint_saved and self.save_top_k != 0:
            if trainer.is_global_zero:
                trainer._checkpoint_connector.writer.link(self._last_checkpoint_saved, filepath)
        else:
            self._save_checkpoint(trainer, filepath)
        if previous:
            self._remove_checkpoint(trainer, previous, filepath)

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        before = self._last_global_step_saved, self._last_checkpoint_saved
        # Before saving, because a run that resumes there must know that this step is saved.
        self._last_global_step_saved, self._last_checkpoint_saved = trainer.global_step, filepath
        try:
            trainer.save_checkpoint(filepath, self.save_weights_only)
        except BaseException:
            self._last_global_step_saved, self._last_checkpoint_saved = before
            raise
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.after_save_checkpoint(proxy(self))

    def _remove_checkpoint(self, trainer: Trainer, previous: str, current: str) -> None:
        """Delete an old checkpoint, unless it is the new one, lies elsewhere, or is the one that the run resumed."""
        if previous == current or self.dirpath is None or not is_inside(previous, self.dirpath):
            return
        # A file that the user named is kept; one that `auto_resume` found is this run's own, and goes when its time has
        # come, as if nothing had happened.
        resumed = None if trainer._checkpoint_connector.auto_resumed else trainer.ckpt_path
        if resumed is not None and not is_remote(previous) and os.path.realpath(previous) == os.path.realpath(resumed):
            return
        if resumed is not None and is_remote(previous) and os.fspath(resumed).rstrip("/") == previous.rstrip("/"):
            return
        trainer._checkpoint_connector.remove_checkpoint(previous, within=self.dirpath)

    def to_yaml(self, filepath: str | os.PathLike[str] | None = None) -> None:
        """Write the paths of the kept checkpoints with their scores.

        Args:
            filepath: The file; `best_k_models.yaml` in `dirpath` by default.

        Raises:
            ValueError: Neither a file nor `dirpath` is known.
        """
        import yaml

        if filepath is None:
            if self.dirpath is None:
                raise ValueError("`dirpath` is not known before a run; pass the file's path to `to_yaml`.")
            filepath = os.path.join(self.dirpath, "best_k_models.yaml")
        scores = {path: float(score) for path, score in self.best_k_models.items()}
        Path(filepath).parent.mkdir(parents=True, exist_ok=True)
        Path(filepath).write_text(yaml.safe_dump(scores), encoding="utf-8")


def _looks_like_a_score(monitor: str) -> bool:
    words = "".join(c.lower() if c.isalnum() else " " for c in monitor).split()
    return any(word == score or word.startswith("accuracy") for word in words for score in _SCORES)
