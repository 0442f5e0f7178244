"""What one compiled variant of a step logs: static options of every key and its place in the packed vectors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

LogKey: TypeAlias = tuple[str, str, int | None]
"""(hook name, metric name, dataloader index): what makes two calls of `self.log` the same metric."""


@dataclass(frozen=True, kw_only=True)
class LogMeta:
    """The resolved options of one logged key; two equal objects mean "logged with the same arguments".

    Attributes:
        fx: Name of the hook that logged, for example `"training_step"`.
        name: The key as the user gave it.
        on_step: Whether the value of each step is kept.
        on_epoch: Whether the values are reduced over the epoch.
        reduce_fx: One of `"mean"`, `"sum"`, `"min"`, `"max"`; `"state"` for the state of a metric object, which is
            returned whole and merged by its owner.
        prog_bar: Whether the progress bar shows it.
        logger: Whether the loggers get it.
        add_dataloader_idx: Whether the key gets a `/dataloader_idx_N` suffix with several loaders.
        dataloader_idx: Index of the loader, or None with a single loader.
        rank_zero_only: Whether only the first process logs it.
        sync_dist: Whether the value is reduced over processes.
        metric: Where on the module the metric object lives whose value is the epoch's; None for plain values.
    """

    fx: str
    name: str
    on_step: bool
    on_epoch: bool
    reduce_fx: str = "mean"
    prog_bar: bool = False
    logger: bool = True
    add_dataloader_idx: bool = True
    dataloader_idx: int | None = None
    rank_zero_only: bool = False
    sync_dist: bool = False
    metric: str | None = None

    @property
    def key(self) -> LogKey:
        """The identity of the metric."""
        return (self.fx, self.name, self.dataloader_idx)


@dataclass(frozen=True)
class LogPlan:
    """The distinct keys that one compiled variant logs, in the order of their first call.

    Attributes:
        metas: The options of each key.
        slots: For each key its index in the step-value vector and in the accumulators.
        states: What the metric states are that the variant returns (entries with `reduce_fx="state"`), in call order.
    """

    metas: tuple[LogMeta, ...] = field(default=())
    slots: tuple[int, ...] = field(default=())
    states: tuple[LogMeta, ...] = field(default=())
