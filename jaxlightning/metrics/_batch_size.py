"""The number of samples in a batch: the weight of an epoch mean."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jaxlightning.metrics._values import is_torch
from jaxlightning.utilities.exceptions import MisconfigurationException
from jaxlightning.utilities.warnings import WarningCache, warn_once

__all__ = ["extract_batch_size", "first_batch_size"]

_HINT = (
    "We could not infer the batch_size from the batch. Either simplify its structure or say it: "
    "`self.log(..., batch_size=batch_size)`."
)
_SCALAR = object()


def extract_batch_size(batch: Any, cache: WarningCache | None = None) -> int:
    """Find the batch size: the length of the first array of the batch, in depth-first order.

    0-d arrays are passed over wherever they stand (in Lightning the first of them would set the size to 1).

    Args:
        batch: Any nesting of mappings, sequences, dataclasses and iterables with arrays as leaves.
        cache: Where the warning about an ambiguous batch is remembered; without it, per process.

    Returns:
        The number of samples; 1 if the batch holds 0-d arrays only.

    Raises:
        MisconfigurationException: If there is no array in the batch.
        RecursionError: If the batch contains itself.
    """
    found: int | None = None
    scalars = False
    try:
        for size in _sizes(batch):
            if size is _SCALAR:
                scalars = True
            elif found is None:
                found = size
            elif size != found:
                warn_once(
                    "batch-size-ambiguous",
                    "Trying to infer the `batch_size` from an ambiguous collection. The first array of the batch has "
                    f"{found} samples, a later leaf {'is no array' if size is None else f'has {size}'}: {found} is "
                    "used. Say `self.log(..., batch_size=batch_size)` if that is wrong.",
                    cache=cache,
                )
                break
    except RecursionError:
        raise RecursionError(f"{_HINT} It contains itself.") from None
    if found is None:
        if scalars:
            return 1
        raise MisconfigurationException(f"{_HINT} Received a `{type(batch).__name__}` without any array.")
    return found


def first_batch_size(batch: Any) -> int:
    """The length of the first array of a batch, in depth-first order, without a look at the others; 1 without one."""
    for size in _sizes(batch):
        if size is not None and size is not _SCALAR:
            return int(size)
    return 1


def _sizes(batch: Any) -> Iterator[Any]:
    """Yields for every leaf its length, None if it is no array, `_SCALAR` if it is a 0-d one."""
    if isinstance(batch, jax.Array | np.ndarray) or is_torch(batch):
        yield int(batch.shape[0]) if len(batch.shape) else _SCALAR
    elif isinstance(batch, np.generic):
        # What was a 0-d array before something indexed it; strings are no numbers.
        yield None if isinstance(batch, np.character) else _SCALAR
    elif isinstance(batch, str | bytes):
        yield None
    elif isinstance(batch, Mapping):
        for item in batch.values():
            yield from _sizes(item)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for field in dataclasses.fields(batch):
            yield from _sizes(getattr(batch, field.name))
    elif isinstance(batch, Iterable):
        for item in batch:
            yield from _sizes(item)
    else:
        yield None
