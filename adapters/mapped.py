"""A source whose batches pass through a function on the host: the base of the padding adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Self

from ._registry import as_source
from ._source import Source, SourceOptions


class MappedSource(Source):
    """Batches of another loader after a function; position, length and order stay the loader's.

    Args:
        loader: Anything that `as_source` takes.
        function: From a converted batch (numpy leaves) to a batch.
    """

    def __init__(self, loader: Any, function: Callable[[Any], Any]) -> None:
        self._inner = as_source(loader)
        super().__init__(self._inner.origin, self._inner.options)
        self._function = function
        self._open_iterator: _MappedIterator | None = None

    @property
    def resumes_by(self) -> str:  # type: ignore[override]
        """How a mid-epoch resume finds its position."""
        return self._inner.resumes_by

    @property
    def length(self) -> int | None:
        """Number of batches of one pass."""
        return self._inner.length

    @property
    def batch_size(self) -> int | None:
        """Samples of a full batch; unknown, since the function may change it."""
        return None

    @property
    def num_workers(self) -> int:
        """Number of processes or threads that the loader reads with."""
        return self._inner.num_workers

    @property
    def is_shuffled(self) -> bool | None:
        """Whether the order is random."""
        return self._inner.is_shuffled

    @property
    def last_batch_indices(self) -> list[int] | None:
        """Dataset indices of the batch delivered last, where they are known."""
        return self._inner.last_batch_indices

    @last_batch_indices.setter
    def last_batch_indices(self, value: list[int] | None) -> None:
        self._inner.last_batch_indices = value

    def _open(self, skip: int) -> Any:
        raise NotImplementedError("a mapped source is opened by its `__iter__`")

    def __iter__(self) -> Any:
        if self._open_iterator is not None:
            self._open_iterator.close()
        convert = self._converter(copy=False)
        self._open_iterator = _MappedIterator(self, iter(self._inner), self._function, convert)
        return self._open_iterator

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes next."""
        self._inner.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The loader's position."""
        return self._inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position."""
        self._inner.load_state_dict(state)

    def load_streams(self, state: dict[str, Any]) -> None:
        """Take back what lasts from pass to pass."""
        self._inner.load_streams(state)

    def finish_pass(self) -> None:
        """Ask the loader once more after its last batch."""
        self._inner.finish_pass()

    def sequential(self) -> Self:
        """The same batches without shuffling."""
        return self._with(self._inner.sequential())

    def with_options(self, options: SourceOptions) -> Self:
        """The same source read with other options."""
        inner = self._inner.with_options(options)
        return self if inner is self._inner else self._with(inner)

    def close(self) -> None:
        """Release what the loader holds."""
        if self._open_iterator is not None:
            self._open_iterator.close()
        self._inner.close()

    def _with(self, inner: Source) -> Self:
        new = self._copy()
        new._inner, new.options, new._open_iterator = inner, inner.options, None
        return new

    def _copy(self) -> Self:
        # `Source._copy` resets `last_batch_indices`, which is the inner source's here
        before = self._inner.last_batch_indices
        new = super()._copy()
        self._inner.last_batch_indices = before
        return new


class _MappedIterator(Iterator[Any]):
    def __init__(
        self, owner: MappedSource, batches: Any, function: Callable[[Any], Any], convert: Callable[[Any], Any]
    ) -> None:
        self._owner, self._batches = owner, batches
        self._function, self._convert = function, convert

    def __next__(self) -> Any:
        batch = next(self._batches)
        try:
            return self._convert(self._function(batch))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the loader's iterator."""
        close = getattr(self._batches, "close", None)
        if callable(close):
            close()
        if self._owner._open_iterator is self:
            self._owner._open_iterator = None


def mapped(loader: Any, function: Callable[[Any], Any]) -> MappedSource:
    """Pass every batch of a loader through a function on the host, for example one that pads a pytree of your own.

    Args:
        loader: A torch DataLoader, a tf.data pipeline, or anything else that the Trainer takes as a loader.
        function: Gets the batch with numpy arrays in place of tensors, returns the batch that hooks and steps see.

    Returns:
        A loader for the Trainer, with the position and order of the one given.
    """
    return MappedSource(loader, function)
