"""When a ModelCheckpoint saves: at epochs, at steps, after an interval of time, and what waits for a validation."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from jaxlightning.callbacks.checkpoint import Checkpoint
from jaxlightning.checkpoint._naming import is_inside
from jaxlightning.utilities.exceptions import MisconfigurationException

if TYPE_CHECKING:
    from jaxlightning.module import JaxLightningModule
    from jaxlightning.trainer import Trainer


class SaveMoments(Checkpoint):
    """Base of `ModelCheckpoint`: the hooks that decide whether this is a moment to save.

    A save at a step whose validation is still due waits for it, so that it is ranked and named by its own metric. One
    whose metric is not known at all waits for the first value. None is lost.

    Args:
        every_n_train_steps: See `ModelCheckpoint`.
        every_n_epochs: See `ModelCheckpoint`.
        train_time_interval: See `ModelCheckpoint`.
        save_on_train_epoch_end: See `ModelCheckpoint`.

    Raises:
        MisconfigurationException: A number is negative, or two kinds of moments are given.
    """

    monitor: str | None
    save_last: Any
    dirpath: str | None

    def __init__(
        self,
        every_n_train_steps: int | None,
        every_n_epochs: int | None,
        train_time_interval: timedelta | None,
        save_on_train_epoch_end: bool | None,
    ) -> None:
        super().__init__()
        if every_n_train_steps is None and every_n_epochs is None and train_time_interval is None:
            every_n_epochs = 1
        self._every_n_train_steps = every_n_train_steps or 0
        self._every_n_epochs = every_n_epochs or 0
        self._train_time_interval = train_time_interval
        self._save_on_train_epoch_end = save_on_train_epoch_end
        for name in ("every_n_train_steps", "every_n_epochs"):
            value = getattr(self, f"_{name}")
            if value < 0:
                raise MisconfigurationException(f"Invalid value for {name}={value}. Must be >= 0")
        kinds = (self._every_n_train_steps >= 1, self._every_n_epochs >= 1, train_time_interval is not None)
        if sum(kinds) > 1:
            raise MisconfigurationException(
                f"Combination of parameters every_n_train_steps={self._every_n_train_steps}, "
                f"every_n_epochs={self._every_n_epochs} and train_time_interval={train_time_interval} should be "
                "mutually exclusive."
            )
        self._last_global_step_saved = 0  # nothing to save before the first step
        self._last_checkpoint_saved = ""
        self._last_time_checked: float | None = None
        self._waits_for_metric = False
        self._validation_ran = False
        self._outranked: list[str] = []  # what is deleted once the present save is committed

    def __getstate__(self) -> dict[str, Any]:
        # While attached a callback has the module's `log`, and with it the module and its devices.
        return {key: value for key, value in self.__dict__.items() if key not in ("log", "log_dict")}

    def moments(self) -> dict[str, Any]:
        """What decides about the next save besides the state that Lightning keeps; the fit loop saves it."""
        return {
            "dirpath": self.dirpath,
            "last_step": self._last_global_step_saved,
            "waits_for_metric": self._waits_for_metric,
            "outranked": list(self._outranked),
        }

    def load_moments(self, trainer: Trainer, state: Mapping[str, Any]) -> None:
        """Take back what `moments` gave, if the run goes on in the same directory.

        Args:
            trainer: The trainer, which has loaded the checkpoint.
            state: What `moments` gave.
        """
        resumed = str(trainer.ckpt_path)  # the newest of this callback if it lies in its directory
        if self.dirpath is not None and state.get("dirpath") == self.dirpath:
            self._last_global_step_saved = int(state["last_step"])
            self._last_checkpoint_saved = resumed if is_inside(resumed, self.dirpath) else ""
            self._waits_for_metric = bool(state["waits_for_metric"])
            if trainer._checkpoint_connector.auto_resumed:
                for path in state.get("outranked", ()):  # killed after the commit, before the deletion that follows it
                    self._remove_checkpoint(trainer, str(path), resumed)

    @property
    def every_n_epochs(self) -> int:
        """How many epochs lie between two saves; 0 for other moments."""
        return self._every_n_epochs

    # --- hooks ------------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        """Start the clock."""
        self._validation_ran = False
        self._last_time_checked = time.monotonic()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: JaxLightningModule,
        outputs: Mapping[str, Any] | Any | None,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Save when the number of steps or the time says so."""
        if not self._is_due_in_epoch(trainer) or not self._may_save(trainer):
            return
        if self.monitor is not None and self._metric_is_coming(trainer):
            self._waits_for_metric = True
        else:
            self._save_both(trainer)

    def quiet_batches(self, trainer: Trainer) -> tuple[float, float]:
        """For how many batches, and until which `time.monotonic()`, no save within the epoch can be due."""
        every, deadline = self._every_n_train_steps, math.inf
        if self._train_time_interval is not None and self._last_time_checked is not None:
            deadline = self._last_time_checked + self._train_time_interval.total_seconds()
        return (every - trainer.global_step % every - 1 if every >= 1 else math.inf), deadline

    def on_train_epoch_end(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        """Save after an epoch, where validation does not come later."""
        if not self._may_save(trainer):
            return
        if self._waits_for_metric and self.monitor in self._monitor_candidates(trainer):
            self._save_both(trainer)  # a metric that training logs once per epoch
        elif self._saves_on_train_epoch_end(trainer):
            self._save_epoch(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        """Save after a validation run, and what waited for its metric."""
        self._validation_ran = self._validation_ran or (
            _value(trainer.state.fn) == "fit" and not trainer.sanity_checking
        )
        if not self._may_save(trainer):
            return
        at_epoch_end = self._saves_on_train_epoch_end(trainer)
        if self._waits_for_metric and (not at_epoch_end or self.monitor in self._monitor_candidates(trainer)):
            self._save_both(trainer)
        elif not at_epoch_end:  # otherwise the metric may still come, with the epoch's end
            self._save_epoch(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        """With `save_last`, make sure that something is there in the end."""
        if self.save_last and not self._last_checkpoint_saved and not trainer.fast_dev_run:
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))

    # --- decisions --------------------------------------------------------------------------------------------------

    def _is_due_in_epoch(self, trainer: Trainer) -> bool:
        due = self._every_n_train_steps >= 1 and trainer.global_step % self._every_n_train_steps == 0
        if self._train_time_interval is not None:
            now = time.monotonic()
            before = self._last_time_checked
            if before is not None and now - before >= self._train_time_interval.total_seconds():
                self._last_time_checked = now
                due = True
        return due

    def _may_save(self, trainer: Trainer) -> bool:
        return (
            not trainer.fast_dev_run
            and _value(trainer.state.fn) == "fit"
            and not trainer.sanity_checking
            and self._last_global_step_saved != trainer.global_step
        )

    def _metric_is_coming(self, trainer: Trainer) -> bool:
        """Say whether the monitored metric gets its value for this step later than now."""
        if self.monitor in ("epoch", "step"):
            return False
        if self.monitor not in trainer.callback_metrics:
            return True
        from jaxlightning.loops.validation_schedule import validation_due

        epoch_loop = trainer.fit_loop.epoch_loop
        if not (epoch_loop._should_check_val_epoch() and validation_due(epoch_loop)):
            return False
        return not trainer._logger_connector.is_logged_by("train", self.monitor)

    def _saves_on_train_epoch_end(self, trainer: Trainer) -> bool:
        if self._save_on_train_epoch_end is not None:
            return self._save_on_train_epoch_end
        # With another rhythm of validation nobody can say whether this epoch has one.
        if getattr(trainer, "_val_check_time_interval", None) is not None or trainer.check_val_every_n_epoch != 1:
            return False
        batches = trainer.num_val_batches
        if (sum(batches) if isinstance(batches, list) else batches) == 0:
            return True
        return bool(trainer.val_check_interval == 1.0)

    # --- what to do -------------------------------------------------------------------------------------------------

    def _save_both(self, trainer: Trainer) -> None:
        self._waits_for_metric = False
        candidates = self._monitor_candidates(trainer)
        self._save_topk_checkpoint(trainer, candidates)
        self._save_last_checkpoint(trainer, candidates)

    def _save_epoch(self, trainer: Trainer) -> None:
        candidates = self._monitor_candidates(trainer)
        if self._every_n_epochs >= 1 and (trainer.current_epoch + 1) % self._every_n_epochs == 0:
            self._save_topk_checkpoint(trainer, candidates)
        # `last` follows whatever was saved at this step, and a link always follows the newest.
        saved_now = self._last_global_step_saved == trainer.global_step
        if saved_now or (self.save_last == "link" and self._last_checkpoint_saved):
            self._save_last_checkpoint(trainer, candidates)

    def _monitor_candidates(self, trainer: Trainer) -> dict[str, Any]:
        raise NotImplementedError

    def _save_topk_checkpoint(self, trainer: Trainer, candidates: dict[str, Any]) -> None:
        raise NotImplementedError

    def _save_last_checkpoint(self, trainer: Trainer, candidates: dict[str, Any]) -> None:
        raise NotImplementedError

    def _remove_checkpoint(self, trainer: Trainer, previous: str, current: str) -> None:
        raise NotImplementedError


def _value(enum: Any) -> Any:
    return getattr(enum, "value", enum)
