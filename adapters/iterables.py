"""Any iterable of batches: objects with `__iter__`, iterators, generators, and functions that return one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ._registry import find_factory
from ._source import BatchIterator, Source, SourceOptions, describe_object, discard, sized_length


class IterableSource(Source):
    """Read an iterable of pytrees; every array leaf is copied, since the owner may reuse its buffers."""

    def __init__(self, origin: Any, options: SourceOptions | None = None) -> None:
        super().__init__(origin, options)
        self._passes = 0
        self._own_state = all(callable(getattr(origin, name, None)) for name in ("state_dict", "load_state_dict"))

    @property
    def resumes_by(self) -> str:  # type: ignore[override]
        """How a mid-epoch resume finds its position."""
        return "by the loader's own state" if self._own_state else "by reading on"

    @property
    def length(self) -> int | None:
        """`len()` of the iterable, if it has one."""
        return sized_length(self.origin)

    @property
    def is_shuffled(self) -> bool | None:
        """Unknown."""
        return None

    def set_epoch(self, epoch: int) -> None:
        """Forward the epoch to the object and to its samplers."""
        super().set_epoch(epoch)
        forward_epoch(self.origin, epoch)

    def _fresh(self) -> Iterator[Any]:
        origin = self.origin
        if not hasattr(origin, "__iter__") and not hasattr(origin, "__getitem__") and callable(origin):
            origin = origin()
            if isinstance(origin, Source) or find_factory(type(origin)) is not None:
                raise TypeError(
                    f"The function {self.describe()} returned a {type(origin).__qualname__}. Pass the loader itself: "
                    "it makes a fresh iterator for every pass, and is read as what it is. (A hook such as "
                    "`datamodule.train_dataloader` has to be called.)"
                )
        return iter(origin)

    def _open(self, skip: int) -> BatchIterator:
        raw = self._fresh()
        if skip and not self._own_state:
            discard(raw, skip)
        first_pass = self._passes == 0
        self._passes += 1
        if raw is self.origin and not first_pass:
            raw = self._second_pass(raw)
        return BatchIterator(self, raw, self._converter(), self._closer(raw))

    def _closer(self, raw: Iterator[Any]) -> Callable[[], None] | None:
        # an iterator that the user made goes on in the next pass, so only ours are closed
        close = getattr(raw, "close", None)
        return close if callable(close) and raw is not self.origin else None

    def _second_pass(self, raw: Iterator[Any]) -> Iterator[Any]:
        empty = True
        for batch in raw:
            empty = False
            yield batch
        if empty:
            self._warn(
                f"{self.describe()} can be iterated only once and was used up in the pass before, so this pass has no "
                "batches. Pass a function that returns a fresh iterator, or an object with __iter__."
            )

    def state_dict(self) -> dict[str, Any]:
        """Position; with the loader's own state where it has one."""
        state = super().state_dict()
        if self._own_state:
            state["loader"] = self.origin.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position."""
        super().load_state_dict(state)
        if self._own_state and "loader" in state:
            self.origin.load_state_dict(state["loader"])


def forward_epoch(loader: Any, epoch: int) -> None:
    """Call `set_epoch` on a loader, its sampler, its batch sampler and that one's sampler, each once.

    Args:
        loader: Any loader.
        epoch: Zero-based epoch number.
    """
    batch_sampler = getattr(loader, "batch_sampler", None)
    candidates = [loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
    seen: set[int] = set()
    for candidate in candidates:
        if candidate is None or id(candidate) in seen:
            continue
        seen.add(id(candidate))
        set_epoch = getattr(candidate, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


def make_source(obj: Any, options: SourceOptions) -> Source:
    """Make a source from an iterable, an iterator, or a function that returns one.

    Args:
        obj: The user's object.
        options: How to read it.

    Returns:
        The source.

    Raises:
        TypeError: If the object can be neither iterated nor called.
    """
    if isinstance(obj, (str, bytes, type)):
        raise TypeError(f"Received {obj!r} where a loader is expected. Pass an iterable of batches.")
    iterable = hasattr(obj, "__iter__") or hasattr(obj, "__getitem__")
    if not iterable and not callable(obj):
        raise TypeError(
            f"Received an object of type {describe_object(obj)} where a loader is expected; it cannot be iterated. "
            "Pass a torch DataLoader, a tf.data.Dataset, a jaxlightning.ArrayLoader, or any iterable of batches."
        )
    return IterableSource(obj, options)
