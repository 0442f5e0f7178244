"""The base of the schedulers: torch's counters and words over an optimizer's parameter groups."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from jaxlightning.optim._closures import find_injections
from jaxlightning.optim._handle import OptimizerHandle
from jaxlightning.optim._observed import listener
from jaxlightning.optim._optax_handle import OptaxOptimizer, handle_for, is_transformation
from jaxlightning.utilities.exceptions import MisconfigurationException
from jaxlightning.utilities.rank_zero import rank_zero_warn

T = TypeVar("T")


class LRScheduler:
    """Base of all schedulers, and of a user's own ones, which override `get_lr`.

    A scheduler lives on the host and writes float64 numbers into the optimizer's parameter groups; the compiled step
    takes their rounding as an input. Making a scheduler takes its first step, as in torch.

    Args:
        optimizer: One of `jaxlightning.optim`, or an optax transformation whose learning rate can be set
            (`optax.inject_hyperparams`).
        last_epoch: Steps already taken; -1 starts anew.

    Attributes:
        optimizer: The optimizer.
        base_lrs: The groups' learning rates at the start.
        last_epoch: How many steps were taken since the start.
    """

    _get_lr_called_within_step = False
    _is_initial = False

    def __init__(self, optimizer: Any, last_epoch: int = -1) -> None:
        self.optimizer = as_optimizer(optimizer)
        for index, group in enumerate(self.optimizer.param_groups):
            if last_epoch == -1:
                group.setdefault("initial_lr", group["lr"])
            elif "initial_lr" not in group:
                raise KeyError(
                    f"Parameter group {index} of {self.optimizer.name} has no 'initial_lr', which a scheduler needs to "
                    f"go on from last_epoch={last_epoch}. Load the optimizer's state first, or start with -1."
                )
        self.base_lrs: list[float] = [group["initial_lr"] for group in self.optimizer.param_groups]
        self.last_epoch = last_epoch
        self._last_lr: list[float] = []
        self._step_count = 0
        self._initial_step()

    def _initial_step(self) -> None:
        self._step_count = 0
        self._is_initial = True
        try:
            self.step()
        finally:
            self._is_initial = False

    # --- what sub-classes write ---------------------------------------------------------------------------------

    def get_lr(self) -> list[float]:
        """Computes the next learning rate of every group from `last_epoch`, `base_lrs` or the groups' own values."""
        raise NotImplementedError(f"{type(self).__name__} must override `get_lr`.")

    # --- what users call ----------------------------------------------------------------------------------------

    def step(self, epoch: Any = None) -> None:
        """Takes one step.

        Args:
            epoch: Deprecated in torch: go to this step instead of the next one.
        """
        self._step_count += 1
        if epoch is not None:
            rank_zero_warn(f"`{type(self).__name__}.step(epoch)` is deprecated, as in torch; call `step()` alone.")
        self._update_lr(epoch)

    def _update_lr(self, epoch: int | None = None) -> None:
        self._get_lr_called_within_step = True
        try:
            if epoch is None:
                self.last_epoch += 1
                values = self.get_lr()
            else:
                self.last_epoch = epoch
                closed_form: Callable[[], list[float]] = getattr(self, "_get_closed_form_lr", self.get_lr)
                values = closed_form()
        finally:
            self._get_lr_called_within_step = False
        self._write(values)

    def get_last_lr(self) -> list[float]:
        """The learning rates that the last step set."""
        listen = listener()
        return self._last_lr if listen is None else listen(self, "get_last_lr", self._last_lr, lambda: self._last_lr)

    def state_dict(self) -> dict[str, Any]:
        """Everything but the optimizer, JSON-able unless a sub-class keeps other things."""
        return {key: value for key, value in vars(self).items() if key != "optimizer"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what `state_dict` gave.

        Args:
            state_dict: From `state_dict`.
        """
        vars(self).update({key: value for key, value in state_dict.items() if key != "optimizer"})

    # --- helpers ------------------------------------------------------------------------------------------------

    def _current(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def _scaled(self, factor: float) -> list[float]:
        return [group["lr"] * factor for group in self.optimizer.param_groups]

    def _write(self, values: Sequence[float]) -> None:
        groups = self.optimizer.param_groups
        if len(values) != len(groups):
            raise ValueError(
                f"{type(self).__name__}.get_lr() gave {len(values)} learning rates for the {len(groups)} parameter "
                f"groups of {self.optimizer.name}."
            )
        for index, (group, value) in enumerate(zip(groups, values, strict=True)):
            try:
                group["lr"] = value
            except (TypeError, ValueError) as error:
                raise MisconfigurationException(
                    f"{type(self).__name__} computed the learning rate {value!r} for parameter group {index} of "
                    f"{self.optimizer.name} at its step {self.last_epoch}."
                ) from error
        self._last_lr = self._current()


class ScheduleLR(LRScheduler):
    """An optax schedule as a scheduler: step `n` sets the learning rate of every group to `schedule(n)`.

    Args:
        optimizer: The optimizer.
        schedule: A function of the step count, or one per parameter group.
        last_epoch: Steps already taken; -1 starts anew.
    """

    def __init__(
        self,
        optimizer: Any,
        schedule: Callable[[int], Any] | Sequence[Callable[[int], Any]],
        last_epoch: int = -1,
    ) -> None:
        optimizer = as_optimizer(optimizer)
        self.schedules = per_group(schedule, optimizer, "schedule")
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float]:
        """The schedules' values at `last_epoch`."""
        return [float(schedule(self.last_epoch)) for schedule in self.schedules]

    def state_dict(self) -> dict[str, Any]:
        """Everything but the optimizer and the functions."""
        return without(super().state_dict(), "schedules")


def as_optimizer(optimizer: Any) -> OptimizerHandle:
    """The handle of what a user passes to a scheduler.

    Args:
        optimizer: A handle, or an optax transformation.

    Returns:
        The handle.

    Raises:
        TypeError: If it is no optimizer.
        MisconfigurationException: If its learning rate is unknown, so that no scheduler can change it.
    """
    handle = handle_for(optimizer) if is_transformation(optimizer) else optimizer
    if not isinstance(handle, OptimizerHandle):
        raise TypeError(
            f"A scheduler wants an optimizer of `jaxlightning.optim` or an optax transformation, but got "
            f"{type(optimizer).__module__}.{type(optimizer).__name__}."
        )
    if any(group.get("lr") is None for group in handle.param_groups):
        if isinstance(handle, OptaxOptimizer) and find_injections(handle.tx):
            raise MisconfigurationException(
                f"The hyper-parameters that `optax.inject_hyperparams` put into the optax transformation {handle.name} "
                "cannot be told apart before the parameters exist, because a mask or label tree in it fits only the "
                "real parameters. Use a mask or label function instead of a tree."
            )
        raise MisconfigurationException(
            f"A scheduler cannot change the learning rate of the optax transformation {handle.name}, because it is "
            f"fixed inside its functions. Build it with `optax.inject_hyperparams(optax.{handle.name})"
            "(learning_rate=...)`, give optax a schedule instead, or use an optimizer of `jaxlightning.optim`."
        )
    return handle


def per_group(value: T | Sequence[T], optimizer: OptimizerHandle, name: str) -> list[T]:
    """One value per parameter group.

    Args:
        value: One value for all groups, or a list or tuple with one for each.
        optimizer: The optimizer.
        name: The argument's name, for the message.

    Returns:
        A list as long as the groups.

    Raises:
        ValueError: If a list has another length.
    """
    count = len(optimizer.param_groups)
    if isinstance(value, (list, tuple)):
        if len(value) != count:
            raise ValueError(
                f"{name} must have one value for each of the {count} parameter groups, but has {len(value)}."
            )
        return list(value)
    one: Any = value
    return [one] * count


def without(state: dict[str, Any], *keys: str) -> dict[str, Any]:
    """A dictionary without some of its keys."""
    return {key: value for key, value in state.items() if key not in keys}


def save_callables(functions: Sequence[Any]) -> list[dict[str, Any] | None]:
    """The state of callable objects (their attributes); None for plain functions, which are not saved."""
    plain = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
    return [None if isinstance(fn, plain) or not hasattr(fn, "__dict__") else dict(vars(fn)) for fn in functions]


def load_callables(functions: Sequence[Any], states: Sequence[dict[str, Any] | None]) -> None:
    """Restores what `save_callables` gave."""
    for fn, state in zip(functions, states, strict=True):
        if state is not None:
            vars(fn).update(state)
