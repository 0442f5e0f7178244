"""Where the loaders come from, what is checked about them, and how they become sources of numpy batches."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxlightning.loops.call import call_lightning_datamodule_hook, call_lightning_module_hook, is_overridden
from jaxlightning.loops.prefetching import PrefetchedSource, to_device
from jaxlightning.loops.resident import ResidentSource, resident
from jaxlightning.loops.stream import GroupedSource, SizedView
from jaxlightning.utilities.combined_loader import CombinedLoader, as_combined_loader
from jaxlightning.utilities.exceptions import MisconfigurationException
from jaxlightning.utilities.rank_zero import rank_zero_warn
from jaxlightning.utilities.states import RunningStage, TrainerFn
from jaxlightning.utilities.warnings import PossibleUserWarning

if TYPE_CHECKING:
    from jaxlightning.trainer import Trainer


@dataclass
class LoaderSource:
    """Remembers who gives the loaders of one kind.

    Attributes:
        name: The hook that returns them, for example `"train_dataloader"`.
        loaders: Loaders that the user passed, None when a hook is asked.
        owner: The module or datamodule whose hook is asked.
        is_datamodule: Whether `owner` is a datamodule.
    """

    name: str
    loaders: Any = None
    owner: Any = None
    is_datamodule: bool = False

    @property
    def is_hook(self) -> bool:
        """Whether a hook is asked."""
        return self.loaders is None

    def is_defined(self) -> bool:
        """Whether loaders can be had: they were passed, or the hook is overridden."""
        return not self.is_hook or is_overridden(self.name, self.owner)

    def request(self, trainer: Trainer) -> Any:
        """Return the loaders, calling the hook if there is one.

        Raises:
            MisconfigurationException: When nobody implements the hook.
        """
        if not self.is_hook:
            return self.loaders
        if not is_overridden(self.name, self.owner):
            raise MisconfigurationException(
                f"`{self.name}` must be implemented to be used with the Lightning Trainer: neither loaders were passed"
                f" nor does `{type(self.owner).__name__}` define `def {self.name}(self)`."
            )
        if self.is_datamodule:
            return call_lightning_datamodule_hook(trainer, self.name)
        return call_lightning_module_hook(trainer, self.name)


@dataclass
class Feed:
    """Loaders that are ready to be iterated.

    Attributes:
        combined: The user's loaders.
        sources: One source per loader.
        inner: The sources, combined in the same way.
        lengths: Batches of each loader after its limit; infinity without a length.
        resident: The source whose data may be on the device, None where there is none.
    """

    combined: CombinedLoader
    sources: list[Any]
    inner: CombinedLoader
    lengths: list[int | float]
    resident: ResidentSource | None = None

    def set_limits(self, limits: list[int | float]) -> None:
        """Say how many batches of each loader a pass takes; what reads ahead reads no further."""
        self.inner.limits = list(limits)
        for source, limit in zip(self.sources, limits, strict=True):
            if isinstance(source, PrefetchedSource):
                source.limit = limit

    def set_epoch(self, epoch: int) -> None:
        """Tell every sampler which epoch begins."""
        for source in self.sources:
            source.set_epoch(epoch)

    def state_dicts(self) -> list[dict[str, Any]]:
        """Return where each source stands."""
        return [source.state_dict() for source in self.sources]

    def load_state_dicts(self, states: list[dict[str, Any]]) -> None:
        """Bring each source to where it stood.

        Raises:
            RuntimeError: When the number of loaders has changed.
        """
        if len(states) != len(self.sources):
            raise RuntimeError(
                f"The CombinedLoader has {len(self.sources)} stateful loaders, but found {len(states)} states in the"
                " checkpoint. Please make sure you define the same dataloaders that were used when saving the"
                " checkpoint."
            )
        for source, state in zip(self.sources, states, strict=True):
            source.load_state_dict(state)

    def load_streams(self, states: list[dict[str, Any]]) -> None:
        """Bring to each source what lasts beyond a pass: the states were saved between two passes."""
        for source, state in zip(self.sources, states, strict=False):
            source.load_streams(state)

    def finish_pass(self) -> None:
        """Ask each loader once more after its last batch, where that changes something."""
        for source in self.sources:
            source.finish_pass()

    def close(self) -> None:
        """Release iterators and worker processes."""
        self.inner.reset()
        for source in self.sources:
            source.close()


def make_feed(
    trainer: Trainer, source: LoaderSource, fn: TrainerFn, stage: RunningStage, limit: int | float, default_mode: str
) -> Feed:
    """Request the loaders of a stage, check them and adapt them.

    Args:
        trainer: The trainer.
        source: Who gives the loaders.
        fn: The verb that is running.
        stage: What the loaders are for.
        limit: `limit_*_batches` of this stage.
        default_mode: How a plain collection is combined.

    Returns:
        The loaders with their sources; the limits of the inner combination are not set yet.
    """
    from jaxlightning.adapters import as_source

    combined = as_combined_loader(source.request(trainer), default_mode)
    prefix = stage.dataloader_prefix
    sources: list[Any] = []
    lengths: list[int | float] = []
    on_device: ResidentSource | None = None
    group = trainer.strategy.batches_per_step
    record_indices = stage == RunningStage.PREDICTING and has_prediction_writer(trainer)
    for loader in combined.flattened:
        check_iterable(loader, source, fn)
        each = as_source(
            loader,
            channels_last=trainer.channels_last,
            vectorize=trainer._vectorize,
            record_indices=record_indices,
        )
        if fn == TrainerFn.FITTING and trainer.overfit_batches > 0 and each.is_shuffled is not False:
            if each.is_shuffled:
                rank_zero_warn(
                    f"You requested to overfit but enabled {prefix} dataloader shuffling."
                    f" We are turning off the {prefix} dataloader shuffling for you."
                )
            each = each.sequential()
        elif stage != RunningStage.TRAINING and each.is_shuffled:
            rank_zero_warn(
                f"Your `{prefix}_dataloader`'s sampler has shuffling enabled, it is strongly recommended that you turn"
                " shuffling off for val/test dataloaders.",
                category=PossibleUserWarning,
            )
        if stage == RunningStage.TRAINING:
            each = resident(trainer, each, len(combined.flattened))
            on_device = each if isinstance(each, ResidentSource) else None
        if group > 1:
            each = GroupedSource(each, group)  # type: ignore[assignment]
        if trainer._prefetch_batches:
            each = PrefetchedSource(each, trainer._prefetch_batches, to_device(trainer.strategy))  # type: ignore[assignment]
        check_workers(trainer, loader, each, f"{prefix}_dataloader")
        if fn != TrainerFn.FITTING:  # a fit tells its samplers at every pass
            each.set_epoch(trainer.fit_loop.epoch_progress.current.processed)
        sources.append(each)
        lengths.append(count_batches(stage, _length(each, loader), limit))
    inner = CombinedLoader(combined._unflatten([SizedView(each) for each in sources]), combined.mode)
    return Feed(combined, sources, inner, lengths, on_device)


def has_prediction_writer(trainer: Trainer) -> bool:
    """Tell whether a callback writes predictions, for which the samples of every batch are noted."""
    from jaxlightning.callbacks._foreign import is_prediction_writer

    return any(map(is_prediction_writer, trainer.callbacks))


def _length(source: Any, loader: object) -> int | float:
    length = source.length
    if length is None:
        return float("inf")
    if length == 0:
        rank_zero_warn(
            f"Total length of `{type(loader).__name__}` across ranks is zero. Please make sure this was your intention."
        )
    if _is_iterable_dataset(getattr(loader, "dataset", None)):
        rank_zero_warn(
            "Your `IterableDataset` has `__len__` defined. In combination with multi-process data loading (when"
            " num_workers > 1), `__len__` could be inaccurate if each worker is not configured independently to avoid"
            " having duplicate data."
        )
    return int(length)


def _is_iterable_dataset(dataset: object) -> bool:
    return hasattr(dataset, "__len__") and any(
        cls.__name__ == "IterableDataset" and cls.__module__.startswith("torch.") for cls in type(dataset).__mro__
    )


def check_iterable(loader: object, source: LoaderSource, fn: TrainerFn) -> None:
    """Refuse a loader that cannot be iterated, without starting its workers.

    Raises:
        TypeError: Saying who gave it.
    """
    if hasattr(type(loader), "__iter__") or hasattr(type(loader), "__getitem__"):
        return
    if callable(loader) and not isinstance(loader, type):
        return  # a function that returns the batches of a pass, such as one with `yield`
    if not source.is_hook:
        prefix = "train_" if fn == TrainerFn.FITTING else ""
        raise TypeError(
            f"An invalid dataloader was passed to `Trainer.{fn.value}({prefix}dataloaders=...)`. Found {loader}."
            " A loader is anything that can be iterated, or a function that returns such a thing for every pass; a"
            " list, tuple or dict is a collection of loaders."
        )
    raise TypeError(
        f"An invalid dataloader was returned from `{type(source.owner).__name__}.{source.name}()`. Found {loader}."
    )


def check_workers(trainer: Trainer, loader: Any, source: Any, name: str) -> None:
    """Warn about a torch DataLoader that is likely to be a bottleneck."""
    workers = source.num_workers
    if workers is None or not hasattr(loader, "persistent_workers"):
        return
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    context = getattr(loader, "multiprocessing_context", None)
    method = context.get_start_method() if context is not None else None
    if workers > 0 and method == "spawn" and not loader.persistent_workers:
        rank_zero_warn(
            f"Consider setting `persistent_workers=True` in '{name}' to speed up the dataloader worker initialization."
        )
    elif workers < 2 and cpus > 1:
        rank_zero_warn(
            f"The '{name}' does not have many workers which may be a bottleneck. Consider increasing the value of the"
            f" `num_workers` argument` to `num_workers={cpus}` in the `DataLoader` to improve performance.",
            category=PossibleUserWarning,
        )


def count_batches(stage: RunningStage, length: int | float, limit: int | float) -> int | float:
    """Apply a `limit_*_batches` to a loader's length.

    Args:
        stage: What the loader is for.
        length: Its number of batches, infinity without a length.
        limit: An int is a number of batches, a float a fraction.

    Raises:
        MisconfigurationException: For a fraction of an unknown length, or one that leaves no batch.
    """
    if length == 0:
        return 0
    prefix = stage.dataloader_prefix
    batches = length
    if isinstance(limit, int):
        batches = min(length, limit)
    elif length != math.inf:
        batches = int(length * limit)
    elif limit != 1.0:
        raise MisconfigurationException(
            f"When using an `IterableDataset`, `Trainer(limit_{prefix}_batches)` must be `1.0` or an int. An int"
            f" specifies `num_{prefix}_batches` to use."
        )
    if batches == 0 and isinstance(limit, float) and limit > 0.0:
        raise MisconfigurationException(
            f"You requested to check {limit} of the `{prefix}_dataloader` but {limit} * {length} < 1. Please increase"
            f" the `limit_{prefix}_batches` argument. Try at least `limit_{prefix}_batches={1.0 / length}`"
        )
    return batches
