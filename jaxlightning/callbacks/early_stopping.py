"""Stop training when a logged metric no longer improves."""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from jaxlightning.callbacks.callback import Callback
from jaxlightning.utilities.exceptions import MisconfigurationException
from jaxlightning.utilities.rank_zero import rank_zero_info, rank_zero_warn

if TYPE_CHECKING:
    from jaxlightning.module import JaxLightningModule
    from jaxlightning.trainer import Trainer

_log = logging.getLogger("jaxlightning.callbacks.early_stopping")


class EarlyStoppingReason(IntEnum):
    """Why `EarlyStopping` asked the Trainer to stop.

    Attributes:
        NOT_STOPPED: It did not.
        STOPPING_THRESHOLD: The metric reached `stopping_threshold`.
        DIVERGENCE_THRESHOLD: The metric became worse than `divergence_threshold`.
        PATIENCE_EXHAUSTED: The metric did not improve in `patience` checks.
        NON_FINITE_METRIC: The metric is NaN or infinite.
    """

    NOT_STOPPED = 0
    STOPPING_THRESHOLD = 1
    DIVERGENCE_THRESHOLD = 2
    PATIENCE_EXHAUSTED = 3
    NON_FINITE_METRIC = 4


class EarlyStopping(Callback):
    """Watch a logged metric and stop training when it no longer improves.

    The metric is read once per check, in one host read. While `Trainer(min_epochs=..., min_steps=...)` is not reached,
    checks go on and count, and the outcome of the latest one decides when it is reached: a metric that has recovered
    by then does not stop the run.

    Args:
        monitor: Name of the metric, as logged.
        min_delta: A change smaller than this is no improvement.
        patience: Number of checks without improvement after which training stops.
        verbose: Whether to log (level INFO) each improvement and the reason of the stop.
        mode: `"min"` when the metric should fall, `"max"` when it should rise.
        strict: Whether a metric that is not there is an error.
        check_finite: Whether NaN and infinity stop training at once.
        stopping_threshold: Stop at once when the metric is better than this.
        divergence_threshold: Stop at once when the metric is worse than this.
        check_on_train_epoch_end: Check at the end of the training epoch instead of after validation. By default this
            holds when validation runs exactly once, at the end of every epoch.
        log_rank_zero_only: Whether only the first process logs the messages of `verbose`.

    Raises:
        MisconfigurationException: `mode` is neither `"min"` nor `"max"`.
    """

    mode_dict: ClassVar[dict[str, Callable[[Any, Any], Any]]] = {"min": operator.lt, "max": operator.gt}
    order_dict: ClassVar[dict[str, str]] = {"min": "<", "max": ">"}

    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: int = 3,
        verbose: bool = False,
        mode: str = "min",
        strict: bool = True,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_on_train_epoch_end: bool | None = None,
        log_rank_zero_only: bool = False,
    ) -> None:
        super().__init__()
        if mode not in self.mode_dict:
            raise MisconfigurationException(f"`mode` can be {', '.join(self.mode_dict)}, got {mode}")
        self.monitor = monitor
        self.mode = mode
        # signed, so that "better by more than min_delta" is one comparison in both modes
        self.min_delta = min_delta * (1 if mode == "max" else -1)
        self.patience = patience
        self.verbose = verbose
        self.strict = strict
        self.check_finite = check_finite
        self.stopping_threshold = stopping_threshold
        self.divergence_threshold = divergence_threshold
        self.log_rank_zero_only = log_rank_zero_only
        self.wait_count = 0
        self.stopped_epoch = 0
        self.best_score: np.floating[Any] = np.float32(np.inf if mode == "min" else -np.inf)
        self.stopping_reason = EarlyStoppingReason.NOT_STOPPED
        self.stopping_reason_message: str | None = None
        self._check_on_train_epoch_end = check_on_train_epoch_end
        self._stop_is_due = False  # the latest check said stop, but min_epochs or min_steps was not reached

    @property
    def state_key(self) -> str:
        """The class name with `monitor` and `mode`."""
        return self._generate_state_key(monitor=self.monitor, mode=self.mode)

    @property
    def monitor_op(self) -> Callable[[Any, Any], Any]:
        """The comparison by which the first operand is better than the second."""
        return self.mode_dict[self.mode]

    def state_dict(self) -> dict[str, Any]:
        """Return counters, best score, patience and the reason of a stop."""
        return {
            "wait_count": self.wait_count,
            "stopped_epoch": self.stopped_epoch,
            "best_score": float(self.best_score),
            "patience": self.patience,
            "stopping_reason": self.stopping_reason.value,
            "stopping_reason_message": self.stopping_reason_message,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back a saved state; its `patience` replaces the one given to the constructor."""
        self.wait_count = state_dict["wait_count"]
        self.stopped_epoch = state_dict["stopped_epoch"]
        self.best_score = np.float64(state_dict["best_score"])
        self.patience = state_dict["patience"]
        self.stopping_reason = EarlyStoppingReason(
            state_dict.get("stopping_reason", EarlyStoppingReason.NOT_STOPPED.value)
        )
        self.stopping_reason_message = state_dict.get("stopping_reason_message")

    # hooks

    def setup(self, trainer: Trainer, pl_module: JaxLightningModule, stage: str) -> None:
        """Decide when to check, unless the user did."""
        self._stop_is_due = False
        if self._check_on_train_epoch_end is None:
            # several validations per epoch, or epochs without one: check after each validation
            self._check_on_train_epoch_end = trainer.val_check_interval == 1.0 and trainer.check_val_every_n_epoch == 1

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: JaxLightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Pass on a stop that waited for `min_steps`."""
        if self._stop_is_due:
            self._stop_when_allowed(trainer, epochs_done=trainer.current_epoch, announce=False)

    def quiet_batches(self, trainer: Trainer) -> tuple[float, float]:
        """For how many batches, and until which `time.monotonic()`, there is nothing to pass on."""
        return (0 if self._stop_is_due else math.inf), math.inf

    def on_train_epoch_end(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        """Check, when this is the time for it, and pass on a stop that waited for `min_epochs`."""
        if self._should_skip_check(trainer):
            return
        if self._check_on_train_epoch_end:
            self._run_early_stopping_check(trainer)
        if self._stop_is_due:
            self._stop_when_allowed(trainer, epochs_done=trainer.current_epoch + 1)

    def on_validation_end(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        """Check, when this is the time for it."""
        if self._check_on_train_epoch_end or self._should_skip_check(trainer):
            return
        self._run_early_stopping_check(trainer)
        if self._stop_is_due:
            self._stop_when_allowed(trainer, epochs_done=trainer.current_epoch)

    # the check

    @staticmethod
    def _should_skip_check(trainer: Trainer) -> bool:
        return bool(trainer.state.fn != "fit" or trainer.sanity_checking)

    def _run_early_stopping_check(self, trainer: Trainer) -> None:
        if trainer.fast_dev_run:
            return
        metrics = trainer.callback_metrics
        if not self._validate_condition_metric(metrics):
            return
        current = np.asarray(metrics[self.monitor]).squeeze()[()]
        should_stop, message = self._evaluate_stopping_criteria(current)
        reduce = getattr(trainer.strategy, "reduce_boolean_decision", None)
        if reduce is not None:  # one process that stops alone would leave the others waiting
            should_stop = reduce(should_stop, all=False)

        if should_stop:
            self.stopped_epoch = trainer.current_epoch
            self.stopping_reason_message = message
        elif self._stop_is_due:  # the metric recovered before the stop was allowed
            self.stopped_epoch = 0
            self.stopping_reason = EarlyStoppingReason.NOT_STOPPED
            self.stopping_reason_message = None
        self._stop_is_due = should_stop
        if message and self.verbose:
            self._log_info(trainer, message)

    def _stop_when_allowed(self, trainer: Trainer, epochs_done: int, announce: bool = True) -> None:
        min_epochs, min_steps = trainer.min_epochs, trainer.min_steps
        if (min_epochs and epochs_done < min_epochs) or (min_steps and trainer.global_step < min_steps):
            if announce:
                rank_zero_info(
                    f"EarlyStopping on `{self.monitor}` is due, but `min_epochs={min_epochs}` or "
                    f"`min_steps={min_steps}` has not been met. Training will continue..."
                )
            return
        self._stop_is_due = False
        trainer.should_stop = True

    def _validate_condition_metric(self, logs: Mapping[str, Any]) -> bool:
        if self.monitor in logs:
            return True
        message = (
            f"Early stopping conditioned on metric `{self.monitor}` which is not available. Pass in or modify your "
            f"`EarlyStopping` callback to use any of the following: `{'`, `'.join(logs)}`"
        )
        if self.strict:
            raise RuntimeError(message)
        if self.verbose:
            rank_zero_warn(message, category=RuntimeWarning)
        return False

    def _evaluate_stopping_criteria(self, current: Any) -> tuple[bool, str | None]:
        better = self.monitor_op
        if self.check_finite and not np.isfinite(current):
            self.stopping_reason = EarlyStoppingReason.NON_FINITE_METRIC
            return True, (
                f"Monitored metric {self.monitor} = {current} is not finite. "
                f"Previous best value was {self.best_score:.3f}. Signaling Trainer to stop."
            )
        if self.stopping_threshold is not None and better(current, self.stopping_threshold):
            self.stopping_reason = EarlyStoppingReason.STOPPING_THRESHOLD
            return True, (
                f"Stopping threshold reached: {self.monitor} = {current} {self.order_dict[self.mode]} "
                f"{self.stopping_threshold}. Signaling Trainer to stop."
            )
        if self.divergence_threshold is not None and better(-current, -self.divergence_threshold):
            self.stopping_reason = EarlyStoppingReason.DIVERGENCE_THRESHOLD
            worse = {"<": ">", ">": "<"}[self.order_dict[self.mode]]
            return True, (
                f"Divergence threshold reached: {self.monitor} = {current} {worse} "
                f"{self.divergence_threshold}. Signaling Trainer to stop."
            )
        if better(current - self.min_delta, self.best_score):
            message = self._improvement_message(current)
            self.best_score = current
            self.wait_count = 0
            return False, message
        self.wait_count += 1
        if self.wait_count < self.patience:
            return False, None
        self.stopping_reason = EarlyStoppingReason.PATIENCE_EXHAUSTED
        return True, (
            f"Monitored metric {self.monitor} did not improve in the last {self.wait_count} records. "
            f"Best score: {self.best_score:.3f}. Signaling Trainer to stop."
        )

    def _improvement_message(self, current: Any) -> str:
        if not np.isfinite(self.best_score):
            return f"Metric {self.monitor} improved. New best score: {current:.3f}"
        return (
            f"Metric {self.monitor} improved by {abs(self.best_score - current):.3f} >= "
            f"min_delta = {abs(self.min_delta)}. New best score: {current:.3f}"
        )

    def _log_info(self, trainer: Trainer, message: str) -> None:
        if trainer.world_size > 1:
            if self.log_rank_zero_only and trainer.global_rank != 0:
                return
            _log.info("[rank: %s] %s", trainer.global_rank, message)
        else:
            _log.info("%s", message)
