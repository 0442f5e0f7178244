"""One report when the batches of a step come in many shapes, each of which is a compilation."""

from __future__ import annotations

from typing import Any

import jax

from jaxlightning.compile.batch_mask import PaddedBatch
from jaxlightning.utilities.rank_zero import rank_zero_warn
from jaxlightning.utilities.warnings import PossibleUserWarning

__all__ = ["SHAPES", "ShapeReport"]

SHAPES = 8
"""So many shapes of one step's batches are taken without a word: a short last batch and a handful of buckets."""

_SHOWN = 6


class ShapeReport:
    """Remembers the shapes of a module's batches.

    Args:
        owner: Class name of the module.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._seen: dict[str, dict[Any, dict[str, tuple[Any, str]]]] = {}
        self._told: set[str] = set()

    def note(self, kind: str, batch: Any) -> None:
        """Take note of a batch that the step of the last batch does not fit; warn once when there are too many.

        Args:
            kind: Which step: `"train"`, `"validate"`, ...
            batch: Its batch.
        """
        if kind in self._told:
            return
        if type(batch) is PaddedBatch:
            batch = batch.batch
        leaves, treedef = jax.tree_util.tree_flatten_with_path(batch)
        shapes = {
            jax.tree_util.keystr(path): (tuple(leaf.shape), str(leaf.dtype))
            for path, leaf in leaves
            if hasattr(leaf, "shape") and hasattr(leaf, "dtype")
        }
        seen = self._seen.setdefault(kind, {})
        seen.setdefault((treedef, tuple(shapes.items())), shapes)
        if len(seen) > SHAPES:
            self._told.add(kind)
            rank_zero_warn(_report(self._owner, kind, list(seen.values())), category=PossibleUserWarning)
            self._seen[kind] = {}


def _report(owner: str, kind: str, seen: list[dict[str, tuple[Any, str]]]) -> str:
    lines: list[str] = []
    axes: set[int] = set()
    for path in seen[0]:
        found = list(dict.fromkeys(shapes[path] for shapes in seen if path in shapes))
        if len(found) < 2:
            continue
        ranks = {len(shape) for shape, _ in found}
        if len(ranks) == 1:
            varying = {axis for axis in range(ranks.pop()) if len({shape[axis] for shape, _ in found}) > 1}
            axes |= varying
        names = ", ".join(f"{dtype}{list(shape)}" for shape, dtype in found[:_SHOWN])
        lines.append(f"batch{path}: {names}{', ...' if len(found) > _SHOWN else ''}")
    if len({tuple(shapes) for shapes in seen}) > 1:
        lines.append("the structure of the batch: its leaves have other names or numbers from batch to batch")
    ways = []
    if 0 in axes:
        ways.append("`Trainer(pad_batches=True)` gives short batches the full size (or use `drop_last=True`)")
    if axes - {0}:
        ways.append(
            "`jaxlightning.adapters.bucketed(loader, boundaries, axis=...)` pads sequences to a few lengths, and "
            "`jaxlightning.adapters.BucketLoader` makes batches of similar ones"
        )
    if not ways:
        ways.append("give every batch the same containers and dtypes in the dataset or its collate function")
    return (
        f"The {kind} step of {owner} has met {len(seen)} shapes of batches, and every new one is compiled anew. What "
        f"varies: {'; '.join(lines)}. What helps: {'; '.join(ways)}."
    )
