"""How Orbax writes the arrays of a snapshot: not copied again, and few at a time."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

_GROUP_BYTES = 8_000_000


@functools.cache
def registry() -> Any:
    """Orbax's registry of type handlers for a tree of numpy arrays that nobody changes.

    Orbax's own handler copies every array first and writes all of them at once, so that a save takes three times the
    state beside the live one. This one takes the snapshot and what is under way: about 8 MB, or one array.
    """
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    class InGroups(ocp.type_handlers.NumpyHandler):  # type: ignore[misc]
        async def serialize(
            self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None
        ) -> Any:
            arguments = list(args) if args is not None else [ocp.SaveArgs() for _ in values]
            futures: Sequence[Any] = []
            for start, stop in _groups([value.nbytes for value in values]):
                for future in futures:
                    future.result()
                futures = await super().serialize(values[start:stop], infos[start:stop], arguments[start:stop])
            return futures

    return ocp.type_handlers.create_type_handler_registry(
        (np.ndarray, InGroups(deepcopy_host_arrays=False)),
        (jax.Array, ocp.type_handlers.ArrayHandler()),  # not used; Orbax warns when it is missing
    )


def _groups(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the bounds of consecutive groups of at most `_GROUP_BYTES`, or of one array."""
    start, total = 0, 0
    for index, size in enumerate(sizes):
        if index > start and total + size > _GROUP_BYTES:
            yield start, index
            start, total = index, 0
        total += size
    if start < len(sizes):
        yield start, len(sizes)
