"""Index batches of a torch DataLoader: recording them, skipping them, and drawing them as torch does."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ._json_state import decode_state, encode_state


class IndexTap:
    """Stand in for a DataLoader's (batch) sampler for one pass: same indices, some left out, all noted.

    Drawing stays as lazy or eager as the sampler's own `__iter__` is, so random streams are consumed in torch's order.

    Attributes:
        seen: Index batches drawn and not yet delivered, oldest first.
    """

    def __init__(
        self, sampler: Any, *, skip: int = 0, record: bool = False, after_skip: Callable[[], None] | None = None
    ) -> None:
        self.sampler = sampler
        self.seen: collections.deque[Any] = collections.deque()
        self._skip = skip
        self._record = record
        self._after_skip = after_skip

    def __iter__(self) -> Iterator[Any]:
        return self._drawn(iter(self.sampler))

    def _drawn(self, indices: Iterator[Any]) -> Iterator[Any]:
        # torch makes two iterators when it has workers and draws from the second only, so the skip is claimed lazily
        skip, self._skip = self._skip, 0
        for _ in range(skip):
            next(indices, None)
        if skip and self._after_skip is not None:
            self._after_skip()
        for index in indices:
            if self._record:
                self.seen.append(index)
            yield index

    def __len__(self) -> int:
        return len(self.sampler)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "sampler":
            raise AttributeError(name)
        return getattr(self.sampler, name)


def index_list(index: Any) -> list[int] | None:
    """Give an index batch as a list of int, or None if it holds something else.

    Args:
        index: What a sampler yields: a list, a tensor or a single index.
    """
    try:
        array = np.asarray(index)
    except (TypeError, ValueError):
        return None
    if array.dtype.kind not in "iu" or array.ndim > 1:
        return None
    indices: list[int] = array.reshape(-1).tolist()
    return indices


class TorchLikeIndices:
    """Iterate over a loader's index batches, consuming random streams exactly as a DataLoader iterator does.

    Args:
        loader: A `torch.utils.data.DataLoader` with a batch sampler.
        sampler: What to draw index batches from (usually an `IndexTap` over the loader's batch sampler).
        first_pass: Whether the loader was not iterated before; persistent workers draw a seed only then.

    Attributes:
        base_seed: What torch would have seeded its workers with.
    """

    def __init__(self, loader: Any, sampler: Any, *, first_pass: bool) -> None:
        import torch

        self.base_seed = torch.initial_seed()
        workers = loader.num_workers
        persistent = workers > 0 and loader.persistent_workers
        indices = iter(sampler)
        if first_pass or not persistent:
            # the seed of the workers, which torch draws with zero workers too
            self.base_seed = int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator).item())
            if workers > 0:
                indices = iter(sampler)
        self._indices = indices
        self._ahead: collections.deque[Any] = collections.deque()
        self._workers = workers > 0
        for _ in range((loader.prefetch_factor or 0) * workers):
            self._draw()

    def _draw(self) -> bool:
        try:
            self._ahead.append(next(self._indices))
        except StopIteration:
            return False
        return True

    def __iter__(self) -> TorchLikeIndices:
        return self

    def __next__(self) -> Any:
        if not self._workers:
            return next(self._indices)
        if not self._ahead:
            raise StopIteration
        index = self._ahead.popleft()
        self._draw()
        return index


# random streams, for exact resumes: capture is cheap and done at every pass, encoding only for a checkpoint


def capture_global() -> tuple[Any, Any, Any]:
    """Copy the states of the global generators of torch, numpy and Python."""
    import torch

    return torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate()


def restore_captured(states: tuple[Any, Any, Any]) -> None:
    """Set the global generators to states from `capture_global`."""
    import torch

    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


def encode_global(states: tuple[Any, Any, Any]) -> dict[str, Any]:
    """Turn states from `capture_global` into JSON types."""
    torch_state, numpy_state, (version, internal, gauss) = states
    python_state = (version, np.array(internal, "<u4"), gauss)
    encoded: dict[str, Any] = encode_state({"torch": torch_state, "numpy": numpy_state, "python": python_state})
    return encoded


def restore_global(encoded: dict[str, Any]) -> None:
    """Set the global generators of torch, numpy and Python to states from `encode_global`."""
    import torch

    states = decode_state(encoded)
    torch.set_rng_state(states["torch"])
    np.random.set_state(states["numpy"])
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words.tolist()), gauss))


def own_generators(loader: Any) -> list[Any]:
    """List the torch generators that a loader and its samplers were given, each once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    holders = [loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
    found: dict[int, Any] = {}
    for holder in holders:
        generator = getattr(holder, "generator", None)
        if generator is not None and hasattr(generator, "get_state"):
            found.setdefault(id(generator), generator)
    return list(found.values())


def capture_own(loader: Any) -> list[Any]:
    """Copy the states of a loader's own generators."""
    return [generator.get_state() for generator in own_generators(loader)]


def encode_own(states: list[Any]) -> Any:
    """Turn states from `capture_own` into JSON types."""
    return encode_state(states)


def restore_own(loader: Any, encoded: Any) -> None:
    """Set a loader's own generators to states from `encode_own`."""
    for generator, state in zip(own_generators(loader), decode_state(encoded), strict=False):
        generator.set_state(state)
