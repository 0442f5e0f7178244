"""Schedulers that go up and down: cycles, warm restarts, the one-cycle policy, and SWA's annealing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from jaxlightning.optim._handle import OptimizerHandle
from jaxlightning.optim.lr_scheduler._base import (
    LRScheduler,
    as_optimizer,
    load_callables,
    per_group,
    save_callables,
    without,
)

Numbers = float | Sequence[float]


def _uses_betas(optimizer: OptimizerHandle, scheduler: str) -> bool:
    """Whether the momentum to cycle is the first beta; an error if the optimizer has neither."""
    if "momentum" not in optimizer.defaults and "betas" not in optimizer.defaults:
        raise ValueError(
            f"{scheduler}(cycle_momentum=True) needs an optimizer with `momentum` or `betas`, but {optimizer.name} has "
            f"{sorted(optimizer.defaults)}. Pass cycle_momentum=False."
        )
    return "betas" in optimizer.defaults


def _set_momentum(group: Any, value: float, use_beta1: bool) -> None:
    if use_beta1:
        group["betas"] = (value, *group["betas"][1:])
    else:
        group["momentum"] = value


class CyclicLR(LRScheduler):
    """Goes from `base_lr` to `max_lr` and back in cycles, momentum the other way round.

    Args:
        optimizer: The optimizer.
        base_lr: The lowest learning rate, one number or one per group.
        max_lr: The highest, before scaling.
        step_size_up: Steps of the rising half.
        step_size_down: Steps of the falling half; `step_size_up` if None.
        mode: `"triangular"`, `"triangular2"` (halved in every cycle) or `"exp_range"` (times `gamma ** step`).
        gamma: Constant of `"exp_range"`.
        scale_fn: Own scaling in place of `mode`.
        scale_mode: Whether `scale_fn` gets the number of the `"cycle"` or of the step (`"iterations"`).
        cycle_momentum: Whether to cycle the momentum as well.
        base_momentum: The lowest momentum.
        max_momentum: The highest momentum.
        last_epoch: Steps already taken; -1 starts anew.
    """

    def __init__(
        self,
        optimizer: Any,
        base_lr: Numbers,
        max_lr: Numbers,
        step_size_up: int = 2000,
        step_size_down: int | None = None,
        mode: str = "triangular",
        gamma: float = 1.0,
        scale_fn: Callable[[float], float] | None = None,
        scale_mode: str = "cycle",
        cycle_momentum: bool = True,
        base_momentum: Numbers = 0.8,
        max_momentum: Numbers = 0.9,
        last_epoch: int = -1,
    ) -> None:
        optimizer = as_optimizer(optimizer)
        if mode not in ("triangular", "triangular2", "exp_range") and scale_fn is None:
            raise ValueError(
                "CyclicLR: mode must be 'triangular', 'triangular2' or 'exp_range', or scale_fn must be given, but got "
                f"mode={mode!r}."
            )
        lowest: list[float] = per_group(base_lr, optimizer, "base_lr")
        self.max_lrs: list[float] = per_group(max_lr, optimizer, "max_lr")
        up = float(step_size_up)
        self.total_size = up + (up if step_size_down is None else float(step_size_down))
        self.step_ratio = up / self.total_size
        self.mode, self.gamma, self._scale_fn = mode, gamma, scale_fn
        self.scale_mode = scale_mode if scale_fn is not None else "iterations" if mode == "exp_range" else "cycle"
        self.cycle_momentum = cycle_momentum
        if last_epoch == -1:
            for group, lr in zip(optimizer.param_groups, lowest, strict=True):
                group["lr"] = lr
        if cycle_momentum:
            self.use_beta1 = _uses_betas(optimizer, "CyclicLR")
            self.base_momentums: list[float] = per_group(base_momentum, optimizer, "base_momentum")
            self.max_momentums: list[float] = per_group(max_momentum, optimizer, "max_momentum")
            if last_epoch == -1:
                bounds = zip(optimizer.param_groups, self.base_momentums, self.max_momentums, strict=True)
                for group, low, high in bounds:
                    _set_momentum(group, high, self.use_beta1)
                    group["max_momentum"], group["base_momentum"] = high, low
        super().__init__(optimizer, last_epoch)
        self.base_lrs = lowest

    def scale_fn(self, x: float) -> float:
        """The factor of a cycle's height.

        Args:
            x: The number of the cycle (from 1) or of the step, see `scale_mode`.
        """
        if self._scale_fn is not None:
            return self._scale_fn(x)
        if self.mode == "triangular2":
            return float(1 / (2.0 ** (x - 1)))
        return float(self.gamma**x) if self.mode == "exp_range" else 1.0

    def get_lr(self) -> list[float]:
        """The next learning rates; sets the momentum on the way."""
        turns = self.last_epoch / self.total_size
        cycle = math.floor(1 + turns)
        x = 1.0 + turns - cycle
        height = x / self.step_ratio if x <= self.step_ratio else (x - 1) / (self.step_ratio - 1)
        scale = self.scale_fn(cycle if self.scale_mode == "cycle" else self.last_epoch)
        # During the first step, base_lrs are the groups' own learning rates, which the constructor has just set.
        if self.cycle_momentum:
            bounds = zip(self.optimizer.param_groups, self.base_momentums, self.max_momentums, strict=True)
            for group, low, high in bounds:
                _set_momentum(group, high - (high - low) * height * scale, self.use_beta1)
        return [low + (high - low) * height * scale for low, high in zip(self.base_lrs, self.max_lrs, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """Everything but the optimizer; of `scale_fn` only the attributes of a callable object."""
        return {**without(super().state_dict(), "_scale_fn"), "_scale_fn": save_callables([self._scale_fn])[0]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what `state_dict` gave."""
        super().load_state_dict(without(state_dict, "_scale_fn"))
        load_callables([self._scale_fn], [state_dict["_scale_fn"]])


class CosineAnnealingWarmRestarts(LRScheduler):
    """Cosine annealing that starts again after `T_0` steps, then after `T_0 * T_mult`, and so on.

    Args:
        optimizer: The optimizer.
        T_0: Steps until the first restart.
        T_mult: What the period is multiplied with at a restart.
        eta_min: The lowest value.
        last_epoch: Steps already taken; -1 starts anew.
    """

    def __init__(self, optimizer: Any, T_0: int, T_mult: int = 1, eta_min: float = 0.0, last_epoch: int = -1) -> None:
        name = "CosineAnnealingWarmRestarts"
        if not isinstance(T_0, int) or T_0 <= 0:
            raise ValueError(f"{name}: T_0 must be a positive integer, but got {T_0!r}.")
        if not isinstance(T_mult, int) or T_mult < 1:
            raise ValueError(f"{name}: T_mult must be an integer of at least 1, but got {T_mult!r}.")
        if not isinstance(eta_min, (int, float)):
            raise ValueError(f"{name}: eta_min must be a number, but got {type(eta_min).__name__}: {eta_min!r}.")
        self.T_0, self.T_i, self.T_mult, self.eta_min = T_0, T_0, T_mult, eta_min
        self.T_cur: float = last_epoch
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float]:
        """The learning rates at `T_cur` of the current period."""
        height = 1 + math.cos(math.pi * self.T_cur / self.T_i)
        return [self.eta_min + (base - self.eta_min) * height / 2 for base in self.base_lrs]

    def step(self, epoch: Any = None) -> None:
        """Takes one step.

        Args:
            epoch: Go to this step, which may be a fraction, instead of the next one (torch documents this form).
        """
        if epoch is None and self.last_epoch >= 0:
            epoch = self.last_epoch + 1
            self.T_cur += 1
            if self.T_cur >= self.T_i:
                self.T_cur %= self.T_i
                self.T_i *= self.T_mult
        else:
            epoch = 0 if epoch is None else epoch
            if epoch < 0:
                raise ValueError(f"CosineAnnealingWarmRestarts.step: epoch must not be negative, but got {epoch}.")
            self._go_to(epoch)
        self.last_epoch = math.floor(epoch)
        self._write(self.get_lr())

    def _go_to(self, epoch: float) -> None:
        if epoch < self.T_0:
            self.T_i, self.T_cur = self.T_0, epoch
        elif self.T_mult == 1:
            self.T_cur = epoch % self.T_0
        else:
            period = int(math.log(epoch / self.T_0 * (self.T_mult - 1) + 1, self.T_mult))
            self.T_cur = epoch - self.T_0 * (self.T_mult**period - 1) / (self.T_mult - 1)
            self.T_i = self.T_0 * self.T_mult**period


class OneCycleLR(LRScheduler):
    """One cycle: up to `max_lr`, then down far below the start; momentum the other way round. Step it every batch.

    Args:
        optimizer: The optimizer.
        max_lr: The highest learning rate, one number or one per group.
        total_steps: Steps of the whole cycle.
        epochs: Together with `steps_per_epoch`, in place of `total_steps`.
        steps_per_epoch: Together with `epochs`.
        pct_start: Share of the rising part.
        anneal_strategy: `"cos"` or `"linear"`.
        cycle_momentum: Whether to cycle the momentum as well.
        base_momentum: The lowest momentum.
        max_momentum: The highest momentum.
        div_factor: `max_lr / div_factor` is the first learning rate.
        final_div_factor: The first learning rate over this number is the last one.
        three_phase: Whether to go down to the start as steeply as up, and only then to the end.
        last_epoch: Steps already taken; -1 starts anew.
    """

    def __init__(
        self,
        optimizer: Any,
        max_lr: Numbers,
        total_steps: int | None = None,
        epochs: int | None = None,
        steps_per_epoch: int | None = None,
        pct_start: float = 0.3,
        anneal_strategy: str = "cos",
        cycle_momentum: bool = True,
        base_momentum: Numbers = 0.85,
        max_momentum: Numbers = 0.95,
        div_factor: float = 25.0,
        final_div_factor: float = 1e4,
        three_phase: bool = False,
        last_epoch: int = -1,
    ) -> None:
        optimizer = as_optimizer(optimizer)
        if total_steps is None and (epochs is None or steps_per_epoch is None):
            raise ValueError("OneCycleLR needs total_steps, or epochs and steps_per_epoch.")
        self.total_steps = 1
        given = {"epochs": epochs, "steps_per_epoch": steps_per_epoch}
        for name, length in given.items() if total_steps is None else [("total_steps", total_steps)]:
            if not isinstance(length, int) or length <= 0:
                raise ValueError(f"OneCycleLR: {name} must be a positive integer, but got {length!r}.")
            self.total_steps *= length
        if not isinstance(pct_start, float) or not 0 <= pct_start <= 1:
            raise ValueError(f"OneCycleLR: pct_start must be a float between 0 and 1, but got {pct_start!r}.")
        if anneal_strategy not in ("cos", "linear"):
            raise ValueError(f"OneCycleLR: anneal_strategy must be 'cos' or 'linear', but got {anneal_strategy!r}.")
        self.anneal_strategy, self.cycle_momentum = anneal_strategy, cycle_momentum
        top = float(pct_start * self.total_steps) - 1
        last = self.total_steps - 1
        # (end of the phase, learning rates, momenta): names of entries of the parameter groups.
        rise: list[Any] = [top, "initial_lr", "max_lr", "max_momentum", "base_momentum"]
        if three_phase:
            middle = float(2 * pct_start * self.total_steps) - 2
            fall: list[Any] = [middle, "max_lr", "initial_lr", "base_momentum", "max_momentum"]
            self.phases: list[list[Any]] = [rise, fall, [last, "initial_lr", "min_lr", "max_momentum", "max_momentum"]]
        else:
            self.phases = [rise, [last, "max_lr", "min_lr", "base_momentum", "max_momentum"]]
        highest: list[float] = per_group(max_lr, optimizer, "max_lr")
        if last_epoch == -1:
            for group, high in zip(optimizer.param_groups, highest, strict=True):
                group["initial_lr"], group["max_lr"] = high / div_factor, high
                group["min_lr"] = group["initial_lr"] / final_div_factor
        if cycle_momentum:
            self.use_beta1 = _uses_betas(optimizer, "OneCycleLR")
            if last_epoch == -1:
                low: list[float] = per_group(base_momentum, optimizer, "base_momentum")
                up: list[float] = per_group(max_momentum, optimizer, "max_momentum")
                for group, least, most in zip(optimizer.param_groups, low, up, strict=True):
                    _set_momentum(group, most, self.use_beta1)
                    group["max_momentum"], group["base_momentum"] = most, least
        super().__init__(optimizer, last_epoch)

    def _anneal(self, start: float, end: float, share: float) -> float:
        if self.anneal_strategy == "linear":
            return (end - start) * share + start
        return end + (start - end) / 2.0 * (math.cos(math.pi * share) + 1)

    def get_lr(self) -> list[float]:
        """The next learning rates; sets the momentum on the way."""
        step, begin = self.last_epoch, 0.0
        if step > self.total_steps:
            raise ValueError(
                f"OneCycleLR was stepped {step} times, but its cycle has total_steps={self.total_steps}. Give it the "
                "number of optimizer steps of the whole run (`trainer.estimated_stepping_batches`)."
            )
        end, lr_from, lr_to, momentum_from, momentum_to = self.phases[-1]
        for phase in self.phases[:-1]:
            if step <= phase[0]:
                end, lr_from, lr_to, momentum_from, momentum_to = phase
                break
            begin = phase[0]
        share = (step - begin) / (end - begin)
        groups = self.optimizer.param_groups
        if self.cycle_momentum:
            for group in groups:
                _set_momentum(group, self._anneal(group[momentum_from], group[momentum_to], share), self.use_beta1)
        return [self._anneal(group[lr_from], group[lr_to], share) for group in groups]


class SWALR(LRScheduler):
    """Anneals every group to a fixed learning rate, as `torch.optim.swa_utils.SWALR`.

    Args:
        optimizer: The optimizer.
        swa_lr: The learning rate to reach, one number or one per group.
        anneal_epochs: Over how many steps.
        anneal_strategy: `"cos"` or `"linear"`.
        last_epoch: Steps already taken; -1 starts anew.
    """

    def __init__(
        self,
        optimizer: Any,
        swa_lr: Numbers,
        anneal_epochs: int = 10,
        anneal_strategy: str = "cos",
        last_epoch: int = -1,
    ) -> None:
        optimizer = as_optimizer(optimizer)
        if anneal_strategy not in ("cos", "linear"):
            raise ValueError(f"SWALR: anneal_strategy must be 'cos' or 'linear', but got {anneal_strategy!r}.")
        if not isinstance(anneal_epochs, int) or anneal_epochs < 0:
            raise ValueError(f"SWALR: anneal_epochs must be an integer of at least 0, but got {anneal_epochs!r}.")
        for group, value in zip(optimizer.param_groups, per_group(swa_lr, optimizer, "swa_lr"), strict=True):
            group["swa_lr"] = value
        self.anneal_epochs, self.anneal_strategy = anneal_epochs, anneal_strategy
        super().__init__(optimizer, last_epoch)

    def _share(self, step: int) -> float:
        """How much of the way is done at a step, in [0, 1]."""
        t = max(0.0, min(1.0, step / max(1, self.anneal_epochs)))
        return (1 - math.cos(math.pi * t)) / 2 if self.anneal_strategy == "cos" else t

    def get_lr(self) -> list[float]:
        """The next learning rates: where each group would start without annealing, then mixed with `swa_lr`."""
        step = self._step_count - 1
        if self.anneal_epochs == 0:
            step = max(1, step)
        before, now = self._share(step - 1), self._share(step)
        out = []
        for group in self.optimizer.param_groups:
            target = group["swa_lr"]
            start = target if before == 1 else (group["lr"] - before * target) / (1 - before)
            out.append(target * now + start * (1 - now))
        return out
