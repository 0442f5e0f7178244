"""Log the learning rates, and on request momentum and weight decay, of all optimizers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from jaxlightning.callbacks.callback import Callback
from jaxlightning.utilities.exceptions import MisconfigurationException
from jaxlightning.utilities.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from jaxlightning.optim import OptimizerHandle
    from jaxlightning.trainer import Trainer


@dataclass(frozen=True)
class _Watched:
    """One optimizer under the keys of its parameter groups.

    Attributes:
        optimizer: The handle.
        names: One key per parameter group.
        interval: The interval of its scheduler, None without a scheduler.
    """

    optimizer: OptimizerHandle
    names: list[str]
    interval: str | None


class LearningRateMonitor(Callback):
    """Send the learning rate of every optimizer to the loggers.

    Keys are `lr-<optimizer>`, with `-1`, `-2` for more optimizers of the same name and `/pg1`, `/pg2` or the group's
    `name` for parameter groups. `{"scheduler": ..., "name": "my_lr"}` replaces the first part.

    The values come from the optimizers' parameter groups on the host. Only a learning rate that lives in the optimizer
    state (`optax.inject_hyperparams`) is read from the device, at the points where it is logged.

    Args:
        logging_interval: `"step"` logs with every logged step, `"epoch"` at the start of every epoch. With None the
            scheduler's interval decides, and an optimizer without a scheduler is logged at both.
        log_momentum: Whether to log `<key>-momentum` as well (`betas[0]` for Adam and its like).
        log_weight_decay: Whether to log `<key>-weight_decay` as well.

    Attributes:
        lrs: For each key the learning rates logged so far.
        last_momentum_values: For each key the last momentum.
        last_weight_decay_values: For each key the last weight decay.

    Raises:
        MisconfigurationException: Another interval.
    """

    def __init__(
        self,
        logging_interval: Literal["step", "epoch"] | None = None,
        log_momentum: bool = False,
        log_weight_decay: bool = False,
    ) -> None:
        super().__init__()
        if logging_interval not in (None, "step", "epoch"):
            raise MisconfigurationException(
                f"logging_interval should be `step` or `epoch` or `None`. Received: {logging_interval!r}"
            )
        self.logging_interval = logging_interval
        self.log_momentum = log_momentum
        self.log_weight_decay = log_weight_decay
        self.lrs: dict[str, list[float]] = {}
        self.last_momentum_values: dict[str, Any] = {}
        self.last_weight_decay_values: dict[str, Any] = {}
        self._warned: set[str] = set()

    # hooks

    def on_train_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Find the keys.

        Raises:
            MisconfigurationException: There is no logger, or two parameter groups of an optimizer have one name.
        """
        if not trainer.loggers:
            raise MisconfigurationException(
                "Cannot use `LearningRateMonitor` callback with `Trainer` that has no logger."
            )
        self._warned.clear()
        watched = list(_watch(trainer))
        if self.log_momentum and not all(_has_momentum(each.optimizer) for each in watched):
            rank_zero_warn(
                "You have set log_momentum=True, but some optimizers do not have momentum. "
                "This will log a value 0 for the momentum.",
                category=RuntimeWarning,
            )
        names = [name for each in watched for name in each.names]
        self.lrs = {name: [] for name in names}
        self.last_momentum_values = {f"{name}-momentum": None for name in names}
        self.last_weight_decay_values = {f"{name}-weight_decay": None for name in names}

    def on_train_batch_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Log what is due with a step, when this step is logged."""
        if self.logging_interval != "epoch" and trainer._logger_connector.should_update_logs:
            self._log(trainer, "step")

    def quiet_batches(self, trainer: Trainer) -> tuple[float, float]:
        """For how many batches, and until which `time.monotonic()`, nothing is due: all but those of log points."""
        every = trainer.log_every_n_steps
        if self.logging_interval == "epoch" or not every:
            return math.inf, math.inf
        return every - trainer.fit_loop.epoch_loop._batches_that_stepped % every - 1, math.inf

    def on_train_epoch_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Log what is due with an epoch."""
        if self.logging_interval != "step":
            self._log(trainer, "epoch")

    # details

    def _log(self, trainer: Trainer, interval: str) -> None:
        stats: dict[str, Any] = {}
        for each in _watch(trainer):
            if self.logging_interval is None and each.interval not in (None, interval):
                continue
            stats.update(self._stats(each))
        if not stats:
            return
        connector = trainer._logger_connector
        connector.update_callback_metrics(stats)
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        connector.flush()  # metrics of the step before may still be on their way
        for logger in trainer.loggers:
            logger.log_metrics(stats, step=step)

    def _stats(self, watched: _Watched) -> dict[str, Any]:
        stats: dict[str, Any] = {}
        optimizer = watched.optimizer
        groups = optimizer.param_groups
        rates = [group.get("lr") for group in groups]
        if any(rate is None or callable(rate) for rate in rates):
            rates = list(optimizer.read_lr())
        for group, name, rate in zip(groups, watched.names, rates, strict=True):
            if rate is None:
                self._warn_unknown(name, optimizer)
            else:
                self.lrs.setdefault(name, []).append(rate)
                stats[name] = rate
            if self.log_momentum:
                stats[f"{name}-momentum"] = self.last_momentum_values[f"{name}-momentum"] = _momentum(group)
            if self.log_weight_decay:
                decay = group.get("weight_decay", 0)
                stats[f"{name}-weight_decay"] = self.last_weight_decay_values[f"{name}-weight_decay"] = decay
        return stats

    def _warn_unknown(self, name: str, optimizer: OptimizerHandle) -> None:
        if name in self._warned:
            return
        self._warned.add(name)
        rank_zero_warn(
            f"LearningRateMonitor cannot know the learning rate `{name}` of `{optimizer.name}`: a plain optax "
            "transformation keeps it inside. Nothing is logged for it. Make it with `optax.inject_hyperparams`, "
            "or use an optimizer of `jaxlightning.optim`."
        )


def _watch(trainer: Trainer) -> Iterator[_Watched]:
    """Yield every optimizer with its keys: those of the schedulers first, then those without one."""
    counts: Counter[str] = Counter()
    seen: list[int] = []
    for config in trainer.lr_scheduler_configs:
        optimizer = config.scheduler.optimizer
        seen.append(id(optimizer))
        if config.name is None:
            counts[optimizer.name] += 1
        base = f"lr-{optimizer.name}" if config.name is None else config.name
        yield _Watched(optimizer, _names(base, optimizer, counts), config.interval)
    for optimizer in trainer.optimizers:
        if id(optimizer) not in seen:
            seen.append(id(optimizer))
            counts[optimizer.name] += 1
            yield _Watched(optimizer, _names(f"lr-{optimizer.name}", optimizer, counts), None)


def _names(base: str, optimizer: OptimizerHandle, counts: Counter[str]) -> list[str]:
    """Return one key per parameter group.

    Raises:
        MisconfigurationException: Two groups have one name.
    """
    groups = optimizer.param_groups
    labels = [group.get("name", f"pg{i}") for i, group in enumerate(groups, start=1)]
    duplicates = {label for label in labels if labels.count(label) > 1}
    if duplicates:
        raise MisconfigurationException(
            "A single `Optimizer` cannot have multiple parameter groups with identical `name` values. "
            f"{base} has duplicated parameter group names {duplicates}"
        )
    # Lightning numbers a scheduler's custom name too, once its optimizer class has occurred twice
    if counts[optimizer.name] > 1:
        base = f"{base}-{counts[optimizer.name] - 1}"
    if len(groups) > 1:
        return [f"{base}/{label}" for label in labels]
    own = groups[0].get("name") if groups else None
    return [f"{base}/{own}" if own else base for _ in groups]


def _has_momentum(optimizer: OptimizerHandle) -> bool:
    return all("momentum" in group or "betas" in group for group in optimizer.param_groups)


def _momentum(group: dict[str, Any]) -> Any:
    betas = group.get("betas")
    return betas[0] if betas is not None else group.get("momentum", 0)
