"""The source protocol: what every adapter gives to the loops, and nothing about the loops themselves.

Ownership: `Source` owns position and life time (epoch, batches delivered, open iterator); `_convert.Converter` owns
what a batch looks like; the adapter modules own reading from one framework; `_registry.py` owns choosing the adapter.
"""

from __future__ import annotations

import abc
import copy
import dataclasses
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal, Self

from ._convert import Converter
from .in_memory import RowReader

logger = logging.getLogger("jaxlightning")

Vectorize = Literal["auto", "distribution"] | bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """What a user may choose about reading, independent of the framework.

    Attributes:
        channels_last: Turn NCHW image leaves into NHWC.
        vectorize: Fast path for loaders over in-memory datasets: "auto" uses it where it is exact, True raises where it
            cannot be used, False never uses it, "distribution" also takes random crops and flips over whole batches,
            which matches in distribution only.
        ragged: What to do with ragged and sparse TensorFlow tensors: "error", or "pad" with zeros plus lengths.
        record_indices: Keep the dataset indices of each batch (`Source.last_batch_indices`).
    """

    channels_last: bool = False
    vectorize: Vectorize = "auto"
    ragged: Literal["error", "pad"] = "error"
    record_indices: bool = False

    def __post_init__(self) -> None:
        if self.vectorize not in ("auto", "distribution", True, False):
            raise ValueError(
                f'vectorize must be "auto", "distribution", True or False. Received: vectorize={self.vectorize!r}'
            )
        if self.ragged not in ("error", "pad"):
            raise ValueError(f'ragged must be "error" or "pad". Received: ragged={self.ragged!r}')


class BatchIterator(Iterator[Any]):
    """Iterator over converted batches that can be closed before its end.

    Closing, reaching the end and an exception all release what the iterator holds; closing again does nothing.
    """

    def __init__(
        self,
        source: Source,
        raw: Iterator[Any],
        convert: Callable[[Any], Any] | None,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self._source = source
        self._raw: Iterator[Any] | None = raw
        if isinstance(convert, Converter):
            convert.refresh()  # JAX's 64-bit mode does not change within a pass
            convert = convert.again
        self._convert = convert
        self._on_close = on_close

    def __iter__(self) -> BatchIterator:
        return self

    def __next__(self) -> Any:
        raw = self._raw
        if raw is None:
            raise StopIteration
        try:
            batch = next(raw)
            if self._convert is not None:
                batch = self._convert(batch)
        except StopIteration:
            self.close()
            raise
        except BaseException:
            # the traceback is the loader's own; only release what it holds
            self.close()
            raise
        self._source._delivered += 1
        return batch

    def close(self) -> None:
        """Release the underlying iterator (worker processes included)."""
        if self._raw is None:
            return
        self._raw = None
        on_close, self._on_close = self._on_close, None
        try:
            if on_close is not None:
                on_close()
        finally:
            self._source._iterator_closed(self)

    def __enter__(self) -> BatchIterator:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        # an iterator that was dropped (an exception between two batches) must not leave workers behind
        try:
            self.close()
        except Exception:
            logger.debug("closing a dropped batch iterator failed", exc_info=True)


class Source(abc.ABC):
    """Batches as pytrees of numpy arrays, from whatever the user gave.

    A source is iterated once per epoch; only the newest iterator is live. Batches are fresh: nobody writes to their
    arrays later. Leaves that JAX cannot hold (strings, objects) stay in place as they are.

    Attributes:
        origin: The user's object.
        options: How to read it.
        last_batch_indices: Dataset indices of the batch delivered last, when the loader has indices and
            `options.record_indices` is set; else None.
        row_reader: Set while a pass is opened by a loop that gathers rows by itself (see `in_memory`). Sources that do
            not read arrays in memory never look at it.
    """

    resumes_by = "by reading on"
    row_reader: RowReader | None = None

    def __init__(self, origin: Any, options: SourceOptions | None = None) -> None:
        self.origin = origin
        self.options = options or SourceOptions()
        self.last_batch_indices: list[int] | None = None
        self._delivered = 0  # batches of the open iteration
        self._epoch = 0
        self._skip = 0  # batches to leave out of the next iteration
        self._iterator: BatchIterator | None = None
        self._warned: set[str] = set()

    # what adapters write

    @abc.abstractmethod
    def _open(self, skip: int) -> BatchIterator:
        """Start one pass.

        Args:
            skip: Number of leading batches to leave out, for a resume.

        Returns:
            A fresh iterator.
        """

    # what the loops use

    @property
    def length(self) -> int | None:
        """Number of batches of one pass, or None if unknown or infinite."""
        return None

    @property
    def batch_size(self) -> int | None:
        """Number of samples of a full batch, or None if unknown."""
        size = getattr(self.origin, "batch_size", None)
        return size if isinstance(size, int) else None

    @property
    def num_workers(self) -> int:
        """Number of processes or threads that the loader was asked to read with."""
        workers = getattr(self.origin, "num_workers", 0)
        return workers if isinstance(workers, int) else 0

    @property
    def is_shuffled(self) -> bool | None:
        """Whether the order is random, or None if that cannot be told."""
        return None

    def __iter__(self) -> BatchIterator:
        if self._iterator is not None:
            self._iterator.close()
        skip, self._skip = self._skip, 0
        if skip:
            logger.info(f"{self.describe()}: resuming at batch {skip} {self.resumes_by}.")
        self.last_batch_indices = None
        iterator = self._open(skip)
        self._delivered = skip
        self._iterator = iterator
        return iterator

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes next, for loaders whose order depends on it.

        A position loaded for another epoch is dropped.

        Args:
            epoch: Zero-based epoch number.
        """
        if epoch != self._epoch:
            self._skip = 0
        self._epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """Describe the position, in JSON types.

        Returns:
            `epoch`, `batch` (batches delivered of a pass that is still open, else 0) and what the adapter adds.
        """
        batch = self._delivered if self._iterator is not None else self._skip
        return {"kind": type(self).__name__, "epoch": self._epoch, "batch": batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position: the next iteration leaves out the batches that were delivered.

        Args:
            state: What `state_dict` gave.

        Raises:
            ValueError: If the state is of another kind of source.
        """
        if state.get("kind") != type(self).__name__:
            raise ValueError(
                f"The saved data position is of a {state.get('kind')}, but the loader is now {self.describe()} "
                f"({type(self).__name__}). Resume with the loader that the checkpoint was written with, or drop the "
                "position."
            )
        if self._iterator is not None:
            self._iterator.close()
        self._epoch = int(state["epoch"])
        self._skip = int(state["batch"])

    def load_streams(self, state: dict[str, Any]) -> None:  # noqa: B027  (most sources have none)
        """Take back what lasts from pass to pass, and no position: the saved pass was over.

        Args:
            state: What `state_dict` gave.
        """

    def finish_pass(self) -> None:  # noqa: B027
        """After the last batch of a pass: ask the loader once more, as a `for` statement does, where that matters."""

    def sequential(self) -> Source:
        """Give the same data without shuffling.

        Returns:
            A new source, or this one (with a warning) where the order is the object's own.
        """
        if self.is_shuffled is not False:
            self._warn(
                f"The order of {self.describe()} is its own and cannot be made sequential; passes read it as it is."
            )
        return self

    def with_options(self, options: SourceOptions) -> Source:
        """Give the same source read with other options.

        Args:
            options: The options wanted. Those that are not at their defaults replace the source's own, which the user
                chose with `as_source`.

        Returns:
            This source, or a copy with the options.
        """
        wanted = {
            field.name: getattr(options, field.name)
            for field in dataclasses.fields(options)
            if getattr(options, field.name) != field.default
        }
        merged = dataclasses.replace(self.options, **wanted)
        if merged == self.options:
            return self
        new = self._copy()
        new.options = merged
        return new

    def close(self) -> None:
        """Release everything: open iterators, worker processes. The source can be iterated again."""
        if self._iterator is not None:
            self._iterator.close()

    def describe(self) -> str:
        """Name the user's object, for messages."""
        return describe_object(self.origin)

    # helpers for adapters

    def _converter(self, *, copy: bool = True) -> Converter:
        return Converter(copy=copy, channels_last=self.options.channels_last)

    def _copy(self) -> Self:
        new = copy.copy(self)
        new._iterator, new._warned, new.last_batch_indices = None, set(), None
        new._delivered = new._skip = 0
        return new

    def _iterator_closed(self, iterator: BatchIterator) -> None:
        if self._iterator is iterator:
            self._iterator = None

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, UserWarning, stacklevel=3)


def describe_object(value: Any) -> str:
    """Name an object by its class and, for torch-like loaders, by its dataset's class."""
    cls = type(value)
    if cls.__name__ in ("function", "method", "builtin_function_or_method"):
        return str(value.__qualname__)
    dataset = getattr(value, "dataset", None)
    return cls.__qualname__ if dataset is None else f"{cls.__qualname__} over {type(dataset).__qualname__}"


def sized_length(value: Any) -> int | None:
    """Ask an object for its length; None if it has none or refuses."""
    try:
        return len(value)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def discard(iterator: Iterator[Any], count: int) -> None:
    """Read and drop a number of items; stop silently at the end."""
    for _ in range(count):
        try:
            next(iterator)
        except StopIteration:
            return
