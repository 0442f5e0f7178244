"""ReduceLROnPlateau."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jaxlightning.optim.lr_scheduler._base import LRScheduler, as_optimizer, per_group
from jaxlightning.utilities.rank_zero import rank_zero_warn


class ReduceLROnPlateau(LRScheduler):
    """Reduces the learning rate when a metric has stopped improving; `step` takes the metric's value.

    Args:
        optimizer: The optimizer.
        mode: `"min"` or `"max"`: which direction is better.
        factor: What the learning rate is multiplied with, below 1.
        patience: How many steps without improvement are allowed.
        threshold: How much better counts as better.
        threshold_mode: `"rel"` (a share of the best value) or `"abs"`.
        cooldown: How many steps to wait after a reduction.
        min_lr: Lower bound, one number or one per group.
        eps: Smaller changes are not made.

    Raises:
        ValueError: If an option is out of range.
    """

    def __init__(
        self,
        optimizer: Any,
        mode: str = "min",
        factor: float = 0.1,
        patience: int = 10,
        threshold: float = 1e-4,
        threshold_mode: str = "rel",
        cooldown: int = 0,
        min_lr: float | Sequence[float] = 0,
        eps: float = 1e-8,
    ) -> None:
        if factor >= 1.0:
            raise ValueError(f"ReduceLROnPlateau: factor must be below 1, but got {factor}.")
        if mode not in ("min", "max"):
            raise ValueError(f"ReduceLROnPlateau: mode must be 'min' or 'max', but got {mode!r}.")
        if threshold_mode not in ("rel", "abs"):
            raise ValueError(f"ReduceLROnPlateau: threshold_mode must be 'rel' or 'abs', but got {threshold_mode!r}.")
        self.optimizer = as_optimizer(optimizer)
        self.default_min_lr: float | None = None if isinstance(min_lr, (list, tuple)) else float(min_lr)  # type: ignore[arg-type]
        self.min_lrs: list[float] = per_group(min_lr, self.optimizer, "min_lr")
        self.mode, self.threshold, self.threshold_mode = mode, threshold, threshold_mode
        self.factor, self.patience, self.cooldown, self.eps = factor, patience, cooldown, eps
        self.last_epoch = 0
        self._last_lr = self._current()
        self._reset()

    @property
    def mode_worse(self) -> float:
        """The worst value that a metric can have."""
        return math.inf if self.mode == "min" else -math.inf

    @property
    def in_cooldown(self) -> bool:
        """Whether a reduction was made less than `cooldown` steps ago."""
        return self.cooldown_counter > 0

    def _reset(self) -> None:
        self.best: float = self.mode_worse
        self.cooldown_counter = 0
        self.num_bad_epochs = 0

    def is_better(self, value: float, best: float) -> bool:
        """Whether `value` is better than `best` by more than the threshold."""
        sign = -1.0 if self.mode == "min" else 1.0
        margin = best * (1.0 + sign * self.threshold) if self.threshold_mode == "rel" else best + sign * self.threshold
        return value < margin if self.mode == "min" else value > margin

    def step(self, metrics: Any, epoch: Any = None) -> None:  # type: ignore[override]
        """Takes one step.

        Args:
            metrics: The metric's value.
            epoch: Deprecated in torch: the number to give to this step.
        """
        if epoch is not None:
            rank_zero_warn("`ReduceLROnPlateau.step(metrics, epoch)` is deprecated, as in torch; leave `epoch` out.")
        current = float(metrics)
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        if self.is_better(current, self.best):
            self.best, self.num_bad_epochs = current, 0
        else:
            self.num_bad_epochs += 1
        if self.in_cooldown:
            self.cooldown_counter -= 1
            self.num_bad_epochs = 0
        if self.num_bad_epochs > self.patience:
            self._reduce()
            self.cooldown_counter, self.num_bad_epochs = self.cooldown, 0
        self._last_lr = self._current()

    def _reduce(self) -> None:
        groups = self.optimizer.param_groups
        if len(groups) != len(self.min_lrs):
            if self.default_min_lr is None:
                raise RuntimeError(
                    f"ReduceLROnPlateau was made with {len(self.min_lrs)} lower bounds, but {self.optimizer.name} has "
                    f"{len(groups)} parameter groups now. Set `min_lrs` to one number per group."
                )
            self.min_lrs = [self.default_min_lr] * len(groups)
        for group, lowest in zip(groups, self.min_lrs, strict=True):
            new = max(group["lr"] * self.factor, lowest)
            if group["lr"] - new > self.eps:
                group["lr"] = new
