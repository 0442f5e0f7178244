"""Several loaders as one: the four ways to combine them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

Limits: TypeAlias = list[int | float] | None
Triplet: TypeAlias = tuple[Any, int, int]
"""(batch, batch_idx, dataloader_idx)"""
_END = object()


def flatten(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Take a nested collection apart, in the order in which it is written.

    Args:
        tree: Lists, tuples, named tuples and dicts, nested; everything else is a leaf.

    Returns:
        The leaves, and a function that puts as many values back into the same structure.
    """
    leaves: list[Any] = []

    def walk(node: Any) -> Callable[[Iterator[Any]], Any]:
        if isinstance(node, dict):
            parts = {key: walk(value) for key, value in node.items()}
            return lambda values: _same_dict(node, {key: part(values) for key, part in parts.items()})
        if isinstance(node, (list, tuple)):
            items = [walk(value) for value in node]
            if hasattr(node, "_fields"):
                return lambda values: type(node)(*(item(values) for item in items))
            kind: type = list if isinstance(node, list) else tuple
            return lambda values: kind(item(values) for item in items)
        leaves.append(node)
        return next

    rebuild = walk(tree)
    return leaves, lambda values: rebuild(iter(values))


def _same_dict(model: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    return values if type(model) is dict else _like(model, values)


def _like(model: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    try:
        return type(model)(values)  # type: ignore[call-arg]
    except TypeError:  # for example a defaultdict, whose first argument is something else
        return values


def sized_len(value: object) -> int | None:
    """Return `len(value)`, or None for an object without a usable length."""
    try:
        return len(value)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError, AttributeError):
        return None


class _Combination(Iterator[Triplet]):
    """Iterates over several iterables; `limits` bounds the batches taken from each."""

    def __init__(self, iterables: list[Iterable[Any]], limits: Limits = None) -> None:
        if limits is not None and len(limits) != len(iterables):
            raise ValueError(f"Mismatch in number of limits ({len(limits)}) and number of iterables ({len(iterables)})")
        self.iterables = iterables
        self.limits = limits
        self.iterators: list[Iterator[Any]] = []
        self._idx = 0

    def start(self) -> None:
        """Make fresh iterators."""
        self.iterators = [iter(iterable) for iterable in self.iterables]
        self._idx = 0

    def lengths(self) -> list[int | float]:
        """Return the batches of every iterable, cut by its limit; infinity for one without a length."""
        lengths: list[int | float] = []
        for position, iterable in enumerate(self.iterables):
            length = sized_len(iterable)
            limit = float("inf") if self.limits is None else self.limits[position]
            lengths.append(min(float("inf") if length is None else length, limit))
        return lengths

    def total(self) -> int | float:
        """Return the number of combined batches."""
        raise NotImplementedError

    def _numbered(self, batch: Any) -> Triplet:
        index = self._idx
        self._idx += 1
        return batch, index, 0

    def close(self) -> None:
        """Release the iterators."""
        for iterator in self.iterators:
            close = getattr(iterator, "close", None)
            if callable(close):
                close()
        self.iterators = []


class _MinSize(_Combination):
    def __next__(self) -> Triplet:
        return self._numbered([next(iterator) for iterator in self.iterators])

    def total(self) -> int | float:
        return min(self.lengths(), default=0)


class _MaxSize(_Combination):
    def __next__(self) -> Triplet:
        parts = [next(iterator, _END) for iterator in self.iterators]
        if all(part is _END for part in parts):
            raise StopIteration
        return self._numbered([None if part is _END else part for part in parts])

    def total(self) -> int | float:
        return max(self.lengths(), default=0)


class _MaxSizeCycle(_Combination):
    def start(self) -> None:
        super().start()
        self._exhausted = [False] * len(self.iterables)

    def __next__(self) -> Triplet:
        batch: list[Any] = []
        for position, iterator in enumerate(self.iterators):
            try:
                batch.append(next(iterator))
            except StopIteration:
                self._exhausted[position] = True
                if all(self._exhausted):
                    raise
                self.iterators[position] = iter(self.iterables[position])
                batch.append(next(self.iterators[position]))
        return self._numbered(batch)

    def total(self) -> int | float:
        return max(self.lengths(), default=0)


class _Sequential(_Combination):
    def start(self) -> None:
        self._position = 0
        self._open()

    def _open(self) -> None:
        # One at a time: opening a loader may start its worker processes.
        self._idx = 0
        self.iterators = [iter(self.iterables[self._position])] if self._position < len(self.iterables) else []

    def _advance(self) -> None:
        self.close()
        self._position += 1
        self._open()

    def __next__(self) -> Triplet:
        while self._position < len(self.iterables):
            if self.limits is None or self._idx < self.limits[self._position]:
                try:
                    batch = next(self.iterators[0])
                except StopIteration:
                    pass
                else:
                    index = self._idx
                    self._idx += 1
                    return batch, index, self._position
            self._advance()
        raise StopIteration

    def total(self) -> int | float:
        return sum(self.lengths())


_MODES: dict[str, type[_Combination]] = {
    "min_size": _MinSize,
    "max_size_cycle": _MaxSizeCycle,
    "max_size": _MaxSize,
    "sequential": _Sequential,
}
SUPPORTED_MODES = tuple(_MODES)


class CombinedLoader(Iterable[Triplet]):
    """Combines loaders; iterating gives `(batch, batch_idx, dataloader_idx)`.

    Args:
        iterables: A loader or a nested collection of loaders; a batch has the same structure.
        mode: `"min_size"` stops with the shortest, `"max_size_cycle"` with the longest while the others start again,
            `"max_size"` with the longest while the others give None, `"sequential"` runs them one after the other.

    Raises:
        ValueError: For an unknown mode.
    """

    def __init__(self, iterables: Any, mode: str = "min_size") -> None:
        if mode not in _MODES:
            raise ValueError(f"Unsupported mode {mode!r}, please select one of: {list(_MODES)}.")
        self._iterables = iterables
        self._flattened, self._unflatten = flatten(iterables)
        self._mode = mode
        self._limits: Limits = None
        self._iterator: _Combination | None = None

    @property
    def iterables(self) -> Any:
        """The collection as it was given."""
        return self._iterables

    @property
    def mode(self) -> str:
        """How the loaders are combined."""
        return self._mode

    @property
    def flattened(self) -> list[Any]:
        """The loaders in order; assign a list of the same length to replace them."""
        return self._flattened

    @flattened.setter
    def flattened(self, flattened: list[Any]) -> None:
        if len(flattened) != len(self._flattened):
            raise ValueError(
                f"Mismatch in flattened length ({len(flattened)}) and existing length ({len(self._flattened)})"
            )
        self._iterables = self._unflatten(list(flattened))
        self._flattened = flattened

    @property
    def sampler(self) -> Any:
        """The samplers of the loaders, in the same structure."""
        return self._unflatten([getattr(loader, "sampler", None) for loader in self._flattened])

    @property
    def batch_sampler(self) -> Any:
        """The batch samplers of the loaders, in the same structure."""
        return self._unflatten([getattr(loader, "batch_sampler", None) for loader in self._flattened])

    @property
    def limits(self) -> Limits:
        """The most batches to take from each loader."""
        return self._limits

    @limits.setter
    def limits(self, limits: int | float | Limits) -> None:
        if isinstance(limits, (int, float)):
            limits = [limits] * len(self._flattened)
        elif limits is not None and len(limits) != len(self._flattened):
            raise ValueError(
                f"Mismatch in number of limits ({len(limits)}) and number of iterables ({len(self._flattened)})"
            )
        self._limits = limits

    def __iter__(self) -> CombinedLoader:
        iterator = _MODES[self._mode](self._flattened, self._limits)
        iterator.start()
        self._iterator = iterator
        return self

    def __next__(self) -> Triplet:
        if self._iterator is None:
            raise RuntimeError("Please call `iter(combined_loader)` first.")
        batch, batch_idx, dataloader_idx = next(self._iterator)
        if self._mode == "sequential":
            return batch, batch_idx, dataloader_idx
        return self._unflatten(batch), batch_idx, dataloader_idx

    def total(self) -> int | float:
        """Return the number of combined batches under the limits, infinity when it cannot be known."""
        return _MODES[self._mode](self._flattened, self._limits).total()

    def __len__(self) -> int:
        if self._iterator is None:
            raise RuntimeError("Please call `iter(combined_loader)` first.")
        total = self._iterator.total()
        if total == float("inf"):
            raise TypeError("This combination of loaders has no length: one that decides it has none.")
        return int(total)

    def reset(self) -> None:
        """Forget the iterators and release what they hold."""
        if self._iterator is not None:
            self._iterator.close()
            self._iterator = None

    def _state_dicts(self) -> list[dict[str, Any]]:
        return [loader.state_dict() for loader in self._flattened if _is_stateful(loader)]

    def _load_state_dicts(self, states: list[dict[str, Any]]) -> None:
        if not states:
            return
        loaders = [loader for loader in self._flattened if _is_stateful(loader)]
        if len(loaders) != len(states):
            raise RuntimeError(
                f"The CombinedLoader has {len(loaders)} stateful loaders, but found {len(states)} states in the"
                " checkpoint. Please make sure you define the same dataloaders that were used when saving the"
                " checkpoint."
            )
        for loader, state in zip(loaders, states, strict=True):
            loader.load_state_dict(state)


def _is_stateful(loader: object) -> bool:
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))


def as_combined_loader(loaders: Any, default_mode: str) -> CombinedLoader:
    """Wrap what the user gave: a CombinedLoader of ours or of Lightning's keeps its mode.

    Args:
        loaders: A loader, a collection of loaders, or a CombinedLoader.
        default_mode: The mode for everything but a CombinedLoader.
    """
    if isinstance(loaders, CombinedLoader):
        return loaders
    foreign = any(
        cls.__name__ == "CombinedLoader" and cls.__module__.startswith(("lightning.", "pytorch_lightning."))
        for cls in type(loaders).__mro__
    )
    if foreign:
        return CombinedLoader(loaders.iterables, loaders._mode)
    return CombinedLoader(loaders, default_mode)
