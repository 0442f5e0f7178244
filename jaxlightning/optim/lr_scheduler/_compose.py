"""Schedulers made of schedulers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from jaxlightning.optim.lr_scheduler._base import LRScheduler, as_optimizer, without
from jaxlightning.optim.lr_scheduler._plateau import ReduceLROnPlateau


class _Composite(LRScheduler):
    """Shared: a list of schedulers of one optimizer, saved and restored together."""

    _schedulers: list[Any]

    def _check(self, schedulers: Sequence[Any]) -> None:
        name = type(self).__name__
        for index, scheduler in enumerate(schedulers):
            kind = type(scheduler).__name__
            if not hasattr(scheduler, "optimizer"):
                raise TypeError(f"{name}: the object at index {index} ({kind}) has no attribute `optimizer`.")
            if isinstance(scheduler, ReduceLROnPlateau):
                raise ValueError(
                    f"{name} cannot hold the ReduceLROnPlateau at index {index}, whose `step` needs a metric."
                )
            if scheduler.optimizer is not self.optimizer:
                raise ValueError(
                    f"{name}: all schedulers must belong to the same optimizer, but the {kind} at index {index} "
                    f"belongs to another one ({scheduler.optimizer.name})."
                )

    def state_dict(self) -> dict[str, Any]:
        """Everything but the optimizer, the schedulers by their own state."""
        return {
            **without(super().state_dict(), "_schedulers"),
            "_schedulers": [scheduler.state_dict() for scheduler in self._schedulers],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what `state_dict` gave."""
        super().load_state_dict(without(state_dict, "_schedulers"))
        for scheduler, state in zip(self._schedulers, state_dict["_schedulers"], strict=True):
            scheduler.load_state_dict(state)


class SequentialLR(_Composite):
    """One scheduler after the other.

    Args:
        optimizer: The optimizer.
        schedulers: The schedulers.
        milestones: At which step the next scheduler takes over; one less than schedulers.
        last_epoch: Steps already taken; -1 starts anew.
    """

    def __init__(self, optimizer: Any, schedulers: list[Any], milestones: list[int], last_epoch: int = -1) -> None:
        if len(schedulers) < 1:
            raise ValueError("SequentialLR needs at least one scheduler.")
        self.optimizer = as_optimizer(optimizer)
        self._check(schedulers)
        if len(milestones) != len(schedulers) - 1:
            raise ValueError(
                f"SequentialLR needs one milestone less than schedulers, but got {len(milestones)} milestones for "
                f"{len(schedulers)} schedulers."
            )
        self._schedulers, self._milestones = schedulers, milestones
        self.last_epoch = last_epoch + 1
        self._step_count = 0
        # Every scheduler has taken its first step while it was made; only the first one's should count.
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"]
        _take_back(self)
        first = schedulers[bisect_right(milestones, 0)]
        first._initial_step()
        self._last_lr = first.get_last_lr()

    def step(self, epoch: Any = None) -> None:
        """Takes one step.

        Args:
            epoch: Not supported, as in torch.
        """
        if epoch is not None:
            raise TypeError("SequentialLR.step() takes no step number.")
        self.last_epoch += 1
        index = bisect_right(self._milestones, self.last_epoch)
        scheduler = self._schedulers[index]
        if index > 0 and self._milestones[index - 1] == self.last_epoch:
            scheduler._update_lr(0)
        else:
            scheduler.step()
        self._last_lr = scheduler.get_last_lr()


def _take_back(scheduler: Any) -> None:
    inner = getattr(scheduler, "_schedulers", None)
    if inner is not None:
        for child in inner:
            _take_back(child)
    elif hasattr(scheduler, "last_epoch"):
        scheduler.last_epoch -= 1


class ChainedScheduler(_Composite):
    """Several schedulers that are all stepped, each on what the one before left.

    Args:
        schedulers: The schedulers.
        optimizer: Their optimizer; the first scheduler's if None.
    """

    def __init__(self, schedulers: Sequence[Any], optimizer: Any = None) -> None:
        if len(schedulers) < 1:
            raise ValueError("ChainedScheduler needs at least one scheduler.")
        if optimizer is None and not hasattr(schedulers[0], "optimizer"):
            raise TypeError("ChainedScheduler: the object at index 0 has no attribute `optimizer`.")
        self.optimizer = schedulers[0].optimizer if optimizer is None else as_optimizer(optimizer)
        self._check(schedulers)
        self._schedulers = list(schedulers)
        self._last_lr = self._current()

    def step(self, epoch: Any = None) -> None:
        """Steps every scheduler.

        Args:
            epoch: Not supported, as in torch.
        """
        if epoch is not None:
            raise TypeError("ChainedScheduler.step() takes no step number.")
        for scheduler in self._schedulers:
            scheduler.step()
        self._last_lr = self._current()
