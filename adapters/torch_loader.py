"""torch DataLoaders of every kind (torchdata's StatefulDataLoader included).

The loader's own sampler and random streams decide the order, always: batches come from iterating the user's loader
itself, or from its index batches drawn in torch's order (`fast_path.py`).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

from . import _torch_sampling as sampling
from . import _torch_workers as workers
from ._convert import from_library
from ._json_state import decode_state, encode_state
from ._source import BatchIterator, Source, SourceOptions, discard, logger, sized_length
from .iterables import forward_epoch


@contextlib.contextmanager
def _patched(loader: Any, attributes: dict[str, Any]) -> Iterator[None]:
    # DataLoader guards some attributes against assignment; the values are put back before the user can see them
    saved = {name: loader.__dict__.get(name, _MISSING) for name in attributes}
    loader.__dict__.update(attributes)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is _MISSING:
                loader.__dict__.pop(name, None)
            else:
                loader.__dict__[name] = value


_MISSING = object()
_RANDOM_SAMPLERS = ("RandomSampler", "SubsetRandomSampler", "WeightedRandomSampler")


class TorchSource(Source):
    """Read a torch DataLoader."""

    def __init__(self, origin: Any, options: SourceOptions | None = None) -> None:
        super().__init__(origin, options)
        self._stateful = from_library(type(origin), "torchdata", "StatefulDataLoader")
        self._in_process: bool | None = None  # None: not decided yet
        self._passes = 0
        self._start: tuple[Any, Any] | None = None  # random streams at the start of the open pass
        self._resume: dict[str, Any] | None = None
        self._told_reason = False
        self._fast_cache: dict[Any, Any] = {}

    # what is known without reading

    @property
    def resumes_by(self) -> str:  # type: ignore[override]
        """How a mid-epoch resume finds its position."""
        if self._resume is not None and "loader" in self._resume:
            return "by the loader's own state"
        return "by reading on" if self._is_iterable_style else "by skipping at the sampler (no data is read)"

    @property
    def _is_iterable_style(self) -> bool:
        return from_library(type(self.origin.dataset), "torch.utils.data", "IterableDataset")

    @property
    def length(self) -> int | None:
        """`len()` of the loader, if it has one."""
        return sized_length(self.origin)

    @property
    def batch_size(self) -> int | None:
        """Samples of a full batch."""
        for holder in (self.origin, getattr(self.origin, "batch_sampler", None)):
            size = getattr(holder, "batch_size", None)
            if isinstance(size, int):
                return size
        return None

    @property
    def is_shuffled(self) -> bool | None:
        """Whether the sampler is random; None for iterable-style datasets and samplers that are not torch's."""
        if self._is_iterable_style:
            return None
        batch_sampler = getattr(self.origin, "batch_sampler", None)
        sampler = self.origin.sampler
        if batch_sampler is not None:
            sampler = getattr(batch_sampler, "sampler", batch_sampler)
        if from_library(type(sampler), "torch.utils.data", "SequentialSampler"):
            return False
        if from_library(type(sampler), "torch.utils.data", *_RANDOM_SAMPLERS):
            return True
        shuffle = getattr(sampler, "shuffle", None)  # DistributedSampler
        return shuffle if isinstance(shuffle, bool) else None

    def set_epoch(self, epoch: int) -> None:
        """Forward the epoch to the sampler and the batch sampler's sampler."""
        super().set_epoch(epoch)
        forward_epoch(self.origin, epoch)

    # reading

    def _open(self, skip: int) -> BatchIterator:
        loader = self.origin
        if getattr(loader, "pin_memory", False):
            self._warn(
                f"pin_memory=True of {self.describe()} is left out: batches go to JAX as numpy arrays, and pinning "
                "would start a second CUDA context in torch. Set pin_memory=False to silence this."
            )
        resume, self._resume = self._resume, None
        after_skip = self._restore(resume, skip)
        self._start = (sampling.capture_global(), sampling.capture_own(loader))
        plan = self._plan()
        tap: sampling.IndexTap | None = None
        if (plan is not None or skip or self.options.record_indices) and not self._is_iterable_style:
            tap = sampling.IndexTap(
                loader.batch_sampler if loader.batch_sampler is not None else loader.sampler,
                skip=skip,
                record=self.options.record_indices and getattr(loader, "in_order", True),
                after_skip=after_skip,
            )
        first_pass, self._passes = self._passes == 0, self._passes + 1
        if plan is not None and tap is not None:
            indices = sampling.TorchLikeIndices(loader, tap, first_pass=first_pass)
            reads_rows = self.row_reader is not None and plan.size > 0 and not plan.is_random
            make = self.row_reader(plan) if reads_rows else None  # type: ignore[misc]
            return BatchIterator(self, self._noting(plan.batches(indices, skip, make), tap), None)
        own_state = resume.get("loader") if resume is not None and skip else None
        if own_state is not None:
            loader.load_state_dict(decode_state(own_state))
            tap = None
        raw, release = self._raw_iterator(tap)
        if skip and tap is None:
            if own_state is None:
                discard(raw, skip)
            if after_skip is not None:
                after_skip()
        converter = self._converter(copy=not self._batches_are_fresh())
        return BatchIterator(self, self._noting(raw, tap), converter, release)

    def _noting(self, raw: Iterator[Any], tap: sampling.IndexTap | None) -> Iterator[Any]:
        return raw if tap is None or not self.options.record_indices else _IndexNotingIterator(self, raw, tap)

    def _batches_are_fresh(self) -> bool:
        # default_collate stacks into new memory; any other function may give out a buffer that it keeps
        from torch.utils.data import default_collate

        return self.origin.batch_sampler is not None and self.origin.collate_fn is default_collate

    def _plan(self) -> Any:
        wish = self.options.vectorize
        if wish is False:
            return None
        from . import fast_path

        try:
            return fast_path.make_plan(
                self.origin, self._converter(copy=True), self._fast_cache, random=wish == "distribution"
            )
        except fast_path.NotVectorizableError as reason:
            if wish is True:
                raise ValueError(
                    f"vectorize=True, but {self.describe()} cannot use the fast path: {reason}. Use vectorize='auto' "
                    "to read it sample by sample."
                ) from None
            if not self._told_reason:
                self._told_reason = True
                logger.info(f"{self.describe()} is read sample by sample, not by the fast path: {reason}.")
            return None

    def _raw_iterator(self, tap: sampling.IndexTap | None) -> tuple[Iterator[Any], Callable[[], None]]:
        loader = self.origin
        patches: dict[str, Any] = {"pin_memory": False}
        if tap is not None:
            patches["batch_sampler" if loader.batch_sampler is not None else "sampler"] = tap
        with contextlib.ExitStack() as stack:
            live = getattr(loader, "_iterator", None)
            if live is not None:  # persistent workers: their iterator keeps the sampler of its first pass
                live._index_sampler = loader._index_sampler if tap is None else tap
            elif loader.num_workers > 0:
                if self._decide_in_process():
                    patches.update(num_workers=0, timeout=0)
                else:
                    stack.enter_context(self._worker_processes())
            stack.enter_context(_patched(loader, patches))
            raw = iter(loader)
            if not _is_torch_iterator(raw):
                # a subclass whose __iter__ is a generator: it asks for its iterator at the first batch
                raw = _Primed(raw, stack.pop_all())
        return raw, lambda: _release(raw, keep=bool(getattr(loader, "persistent_workers", False)))

    @contextlib.contextmanager
    def _worker_processes(self) -> Iterator[None]:
        loader = self.origin
        before = loader.multiprocessing_context
        if workers.available() and not _is_chosen_and_safe(before):
            loader.multiprocessing_context = workers.make_context()
        try:
            with workers.cpu_only_environment():
                yield
        finally:
            loader.multiprocessing_context = before

    def _decide_in_process(self) -> bool:
        if self._in_process is not None:
            return self._in_process
        self._in_process = False
        if not workers.available() or _is_chosen_and_safe(self.origin.multiprocessing_context):
            return False
        try:
            workers.probe(self.origin)
        except workers.CannotSend as error:
            self._in_process = True
            name = getattr(error.value, "__qualname__", type(error.value).__qualname__)
            more = "" if workers.sends_by_value() else " Installing cloudpickle lets scripts send what they define."
            note = " Its samples come in the order of a single worker." if self._is_iterable_style else ""
            self._warn(
                f"{self.describe()} has num_workers={self.origin.num_workers}, but its {error.part} ({name}) cannot be "
                f"sent to worker processes: {error.reason}. Batches are loaded in this process instead.{note} Define "
                "it at the top level of a module without open files, locks or lambdas, or set num_workers=0 to silence "
                f"this.{more}"
            )
        return self._in_process

    # position

    def _restore(self, resume: dict[str, Any] | None, skip: int) -> Callable[[], None] | None:
        """Set random streams for a resumed pass; give what to do once the skipped indices are drawn."""
        if resume is None:
            return None
        now = resume["streams"]
        if not skip:
            sampling.restore_global(now["global"])
            sampling.restore_own(self.origin, now["own"])
            return None
        start = resume["start"]
        sampling.restore_global(start["global"])
        sampling.restore_own(self.origin, start["own"])
        return lambda: sampling.restore_global(now["global"])

    def state_dict(self) -> dict[str, Any]:
        """Position and random streams, so that the order after a resume is that of an uninterrupted run."""
        state = super().state_dict()
        if self._iterator is None and self._resume is not None:
            return {**state, **self._resume}
        own = sampling.encode_own(sampling.capture_own(self.origin))
        state["streams"] = {"global": sampling.encode_global(sampling.capture_global()), "own": own}
        if self._iterator is not None and self._start is not None:
            state["start"] = {
                "global": sampling.encode_global(self._start[0]),
                "own": sampling.encode_own(self._start[1]),
            }
        if self._stateful and self._iterator is not None:  # asked between passes it would start a pass
            with contextlib.suppress(TypeError):  # a state of other types: skip at the sampler instead
                state["loader"] = encode_state(self.origin.state_dict())
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position."""
        super().load_state_dict(state)
        self._resume = {name: state[name] for name in ("streams", "start", "loader") if name in state}

    def load_streams(self, state: dict[str, Any]) -> None:
        """Put the loader's own generators where they were; the global ones are the run's."""
        if state.get("kind") == type(self).__name__ and "streams" in state:
            sampling.restore_own(self.origin, state["streams"]["own"])

    def finish_pass(self) -> None:
        """Exhaust the sampler.

        torch's RandomSampler draws one more permutation when it is asked for an index after the last one, from the
        generator of the loader if it has one. A loop that counts batches never asks; a `for` statement does.
        """
        length = self.length
        if self._iterator is not None and not self._is_iterable_style and length and self._delivered >= length:
            next(self._iterator, None)

    # variants

    def sequential(self) -> Source:
        """Give the same samples in their order, by a SequentialSampler."""
        if self.is_shuffled is False:
            return self
        loader = self.origin
        if self._is_iterable_style:
            return super().sequential()
        from torch.utils.data import BatchSampler, SequentialSampler

        new = copy.copy(loader)
        attributes: dict[str, Any] = {"sampler": SequentialSampler(loader.dataset), "_iterator": None}
        batch_sampler = loader.batch_sampler
        if type(batch_sampler) is BatchSampler:
            attributes["batch_sampler"] = BatchSampler(
                attributes["sampler"], batch_sampler.batch_size, batch_sampler.drop_last
            )
        elif batch_sampler is not None:
            if not hasattr(batch_sampler, "sampler"):
                return super().sequential()
            attributes["batch_sampler"] = copy.copy(batch_sampler)
            attributes["batch_sampler"].sampler = attributes["sampler"]
        new.__dict__.update(attributes)
        return TorchSource(new, self.options)

    def close(self) -> None:
        """Shut down the open iterator and persistent workers."""
        super().close()
        persistent = getattr(self.origin, "_iterator", None)
        if persistent is not None and getattr(self.origin, "persistent_workers", False):
            self.origin._iterator = None
            _release(persistent, keep=False)

    def _copy(self) -> TorchSource:
        new = super()._copy()
        new._resume, new._start, new._fast_cache = None, None, {}
        return new


class _IndexNotingIterator(Iterator[Any]):
    def __init__(self, source: Source, raw: Iterator[Any], tap: sampling.IndexTap) -> None:
        self._source = source
        self._raw = raw
        self._tap = tap

    def __next__(self) -> Any:
        batch = next(self._raw)
        self._source.last_batch_indices = sampling.index_list(self._tap.seen.popleft()) if self._tap.seen else None
        return batch


class _Primed(Iterator[Any]):
    """Hold patches of a loader until its generator made the first batch."""

    def __init__(self, raw: Iterator[Any], patches: contextlib.ExitStack) -> None:
        self._raw = raw
        self._patches: contextlib.ExitStack | None = patches

    def __next__(self) -> Any:
        try:
            return next(self._raw)
        finally:
            self._unpatch()

    def _unpatch(self) -> None:
        patches, self._patches = self._patches, None
        if patches is not None:
            patches.close()

    def close(self) -> None:
        self._unpatch()
        close = getattr(self._raw, "close", None)
        if callable(close):
            close()


def _is_torch_iterator(raw: Any) -> bool:
    return from_library(type(raw), "torch.utils.data") or from_library(type(raw), "torchdata")


def _is_chosen_and_safe(context: Any) -> bool:
    return context is not None and getattr(context, "_name", None) in ("spawn", "forkserver")


def _release(raw: Any, *, keep: bool) -> None:
    """End what an iterator holds: worker processes (unless persistent), their queues, a dataset's generator."""
    shutdown = getattr(raw, "_shutdown_workers", None)
    if callable(shutdown):
        if keep:
            return
        shutdown()
        # index queues are closed by their feeder threads; nothing was ever put into this one, so nobody closes it
        results = getattr(raw, "_worker_result_queue", None)
        for end in (getattr(results, "_reader", None), getattr(results, "_writer", None)):
            if end is not None:
                end.close()
        return
    fetcher = getattr(raw, "_dataset_fetcher", None)
    for holder in (raw, getattr(fetcher, "dataset_iter", None)):
        close = getattr(holder, "close", None)
        if callable(close):
            close()


def make_source(obj: Any, options: SourceOptions) -> Source:
    """Make a source from a DataLoader.

    Args:
        obj: A `torch.utils.data.DataLoader` or subclass.
        options: How to read it.

    Returns:
        The source.
    """
    return TorchSource(obj, options)
