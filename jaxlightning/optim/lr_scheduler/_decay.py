"""Schedulers that follow a fixed curve: steps, exponentials, lines, polynomials, cosines, functions."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxlightning.optim.lr_scheduler._base import (
    LRScheduler,
    as_optimizer,
    load_callables,
    per_group,
    save_callables,
    without,
)

Factor = Callable[[int], float]


class _FunctionLR(LRScheduler):
    """Shared by the schedulers that take one function, or one per group."""

    def __init__(self, optimizer: Any, lr_lambda: Factor | Sequence[Factor], last_epoch: int = -1) -> None:
        optimizer = as_optimizer(optimizer)
        self.lr_lambdas: list[Factor] = per_group(lr_lambda, optimizer, "lr_lambda")
        for fn in self.lr_lambdas:
            if not callable(fn):
                raise TypeError(f"{type(self).__name__}: lr_lambda must be a function, but got {type(fn).__name__}.")
        super().__init__(optimizer, last_epoch)

    def state_dict(self) -> dict[str, Any]:
        """Everything but the optimizer; of the functions only the attributes of callable objects."""
        return {**without(super().state_dict(), "lr_lambdas"), "lr_lambdas": save_callables(self.lr_lambdas)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what `state_dict` gave."""
        super().load_state_dict(without(state_dict, "lr_lambdas"))
        load_callables(self.lr_lambdas, state_dict["lr_lambdas"])


class LambdaLR(_FunctionLR):
    """The initial learning rate times a function of the step.

    Args:
        optimizer: The optimizer.
        lr_lambda: Maps the step to a factor; one function, or one per group.
        last_epoch: Steps already taken; -1 starts anew.
    """

    def get_lr(self) -> list[float]:
        """The initial learning rates times the functions' values."""
        return [base * fn(self.last_epoch) for base, fn in zip(self.base_lrs, self.lr_lambdas, strict=True)]


class MultiplicativeLR(_FunctionLR):
    """The current learning rate times a function of the step, again at every step.

    Args:
        optimizer: The optimizer.
        lr_lambda: Maps the step to a factor; one function, or one per group.
        last_epoch: Steps already taken; -1 starts anew.
    """

    def get_lr(self) -> list[float]:
        """The current learning rates times the functions' values."""
        if self._is_initial:
            return self._current()
        return [lr * fn(self.last_epoch) for lr, fn in zip(self._current(), self.lr_lambdas, strict=True)]


class StepLR(LRScheduler):
    """Multiplies the learning rate with `gamma` every `step_size` steps.

    Args:
        optimizer: The optimizer.
        step_size: Steps between two reductions.
        gamma: The factor.
        last_epoch: Steps already taken; -1 starts anew.
    """

    def __init__(self, optimizer: Any, step_size: int, gamma: float = 0.1, last_epoch: int = -1) -> None:
        self.step_size, self.gamma = step_size, gamma
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float]:
        """The next learning rates."""
        due = self.last_epoch > 0 and self.last_epoch % self.step_size == 0
        return self._scaled(self.gamma) if due else self._current()

    def _get_closed_form_lr(self) -> list[float]:
        return [base * self.gamma ** (self.last_epoch // self.step_size) for base in self.base_lrs]


class MultiStepLR(LRScheduler):
    """Multiplies the learning rate with `gamma` at given steps.

    Args:
        optimizer: The optimizer.
        milestones: The steps; one that is named twice counts twice.
        gamma: The factor.
        last_epoch: Steps already taken; -1 starts anew.
    """

    def __init__(self, optimizer: Any, milestones: Iterable[int], gamma: float = 0.1, last_epoch: int = -1) -> None:
        self.milestones = Counter(milestones)
        self.gamma = gamma
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float]:
        """The next learning rates."""
        times = self.milestones.get(self.last_epoch, 0)
        return self._scaled(self.gamma**times) if times else self._current()

    def _get_closed_form_lr(self) -> list[float]:
        passed = bisect_right(sorted(self.milestones.elements()), self.last_epoch)
        return [base * self.gamma**passed for base in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        """Everything but the optimizer, the milestones as a sorted list (JSON has no integer keys)."""
        return {**super().state_dict(), "milestones": sorted(self.milestones.elements())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what `state_dict` gave."""
        saved = state_dict["milestones"]
        milestones = Counter({int(k): v for k, v in saved.items()}) if isinstance(saved, dict) else Counter(saved)
        super().load_state_dict({**state_dict, "milestones": milestones})


class ConstantLR(LRScheduler):
    """A fixed factor for the first `total_iters` steps.

    Args:
        optimizer: The optimizer.
        factor: The factor, in [0, 1].
        total_iters: For how many steps.
        last_epoch: Steps already taken; -1 starts anew.
    """

    def __init__(self, optimizer: Any, factor: float = 1.0 / 3, total_iters: int = 5, last_epoch: int = -1) -> None:
        if not 0 <= factor <= 1:
            raise ValueError(f"ConstantLR: factor must be between 0 and 1, but got {factor}.")
        self.factor, self.total_iters = factor, total_iters
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float]:
        """The next learning rates."""
        if self.last_epoch == 0:
            return self._scaled(self.factor)
        return self._scaled(1.0 / self.factor) if self.last_epoch == self.total_iters else self._current()

    def _get_closed_form_lr(self) -> list[float]:
        factor = 1.0 if self.last_epoch >= self.total_iters else self.factor
        return [base * factor for base in self.base_lrs]


class LinearLR(LRScheduler):
    """A factor that goes in a line from `start_factor` to `end_factor` over `total_iters` steps.

    Args:
        optimizer: The optimizer.
        start_factor: The first factor, in (0, 1].
        end_factor: The last factor, in [0, 1].
        total_iters: Over how many steps.
        last_epoch: Steps already taken; -1 starts anew.
    """

    def __init__(
        self,
        optimizer: Any,
        start_factor: float = 1.0 / 3,
        end_factor: float = 1.0,
        total_iters: int = 5,
        last_epoch: int = -1,
    ) -> None:
        if not 0 < start_factor <= 1:
            raise ValueError(f"LinearLR: start_factor must be above 0 and at most 1, but got {start_factor}.")
        if not 0 <= end_factor <= 1:
            raise ValueError(f"LinearLR: end_factor must be between 0 and 1, but got {end_factor}.")
        self.start_factor, self.end_factor, self.total_iters = start_factor, end_factor, total_iters
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float]:
        """The next learning rates: the current ones times the ratio of two neighbouring factors."""
        step, rise = self.last_epoch, self.end_factor - self.start_factor
        if step == 0:
            return self._scaled(self.start_factor)
        if self._is_initial or step > self.total_iters:
            return self._current()
        return self._scaled(1.0 + rise / (self.total_iters * self.start_factor + (step - 1) * rise))

    def _get_closed_form_lr(self) -> list[float]:
        share = min(self.total_iters, self.last_epoch) / self.total_iters
        factor = self.start_factor + (self.end_factor - self.start_factor) * share
        return [base * factor for base in self.base_lrs]


class ExponentialLR(LRScheduler):
    """Multiplies the learning rate with `gamma` at every step.

    Args:
        optimizer: The optimizer.
        gamma: The factor.
        last_epoch: Steps already taken; -1 starts anew.
    """

    def __init__(self, optimizer: Any, gamma: float, last_epoch: int = -1) -> None:
        self.gamma = gamma
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float]:
        """The next learning rates."""
        return self._current() if self._is_initial else self._scaled(self.gamma)

    def _get_closed_form_lr(self) -> list[float]:
        return [base * self.gamma**self.last_epoch for base in self.base_lrs]


class PolynomialLR(LRScheduler):
    """Goes to zero over `total_iters` steps along `(1 - step / total_iters) ** power`.

    Args:
        optimizer: The optimizer.
        total_iters: Over how many steps.
        power: The exponent.
        last_epoch: Steps already taken; -1 starts anew.
    """

    def __init__(self, optimizer: Any, total_iters: int = 5, power: float = 1.0, last_epoch: int = -1) -> None:
        self.total_iters, self.power = total_iters, power
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float]:
        """The next learning rates."""
        step, total = self.last_epoch, self.total_iters
        if self._is_initial or step > total:
            return self._current()
        return self._scaled(((1.0 - step / total) / (1.0 - (step - 1) / total)) ** self.power)

    def _get_closed_form_lr(self) -> list[float]:
        share = min(self.total_iters, self.last_epoch) / self.total_iters
        return [base * (1.0 - share) ** self.power for base in self.base_lrs]


class CosineAnnealingLR(LRScheduler):
    """Swings between the initial learning rate and `eta_min` along a cosine with half period `T_max`.

    Args:
        optimizer: The optimizer.
        T_max: Steps from the highest to the lowest value.
        eta_min: The lowest value.
        last_epoch: Steps already taken; -1 starts anew.
    """

    def __init__(self, optimizer: Any, T_max: int, eta_min: float = 0.0, last_epoch: int = -1) -> None:
        self.T_max, self.eta_min = T_max, eta_min
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float]:
        """The next learning rates, from the current ones, so that the scheduler may be chained with others."""
        step, half, low = self.last_epoch, self.T_max, self.eta_min
        if self._is_initial:
            return self._current()
        if self._step_count == 1 and step > 0:
            return self._get_closed_form_lr()
        if (step - 1 - half) % (2 * half) == 0:  # the step after the lowest point, where the ratio below is 0 / 0
            rise = (1 - math.cos(math.pi / half)) / 2
            return [lr + (base - low) * rise for lr, base in zip(self._current(), self.base_lrs, strict=True)]
        ratio = (1 + math.cos(math.pi * step / half)) / (1 + math.cos(math.pi * (step - 1) / half))
        return [ratio * (lr - low) + low for lr in self._current()]

    def _get_closed_form_lr(self) -> list[float]:
        height = (1 + math.cos(math.pi * self.last_epoch / self.T_max)) / 2
        return [self.eta_min + (base - self.eta_min) * height for base in self.base_lrs]
