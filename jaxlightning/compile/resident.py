"""Batches whose data is on the device already: what travels are row numbers, and the compiled step gathers the rows.

Inside a step such a batch is an ordinary one before any code of the user's sees it (`expanded`). Who decides that data
goes to the device, and which loops hand out such batches, is in `loops.resident`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

__all__ = ["ResidentBatch", "RowLayout", "expanded", "on_host"]


class _Unnamed:
    """A key that adds nothing to a path, so that messages name leaves as the user does."""

    def __str__(self) -> str:
        return ""


@dataclass(frozen=True)
class RowLayout:
    """What batches of one data set have in common.

    Attributes:
        structure: `PyTreeDef` of a batch.
        sharding: Sharding of a batch's leaves whose rows divide evenly among the devices, None on one device.
    """

    structure: Any
    sharding: Any = None


class ResidentBatch:
    """A batch that is rows of arrays on the device.

    Args:
        rows: int32 `[n]`, none negative, none beyond the last.
        columns: The leaves of a batch of all rows.
        layout: Structure and sharding.
    """

    __slots__ = ("columns", "layout", "rows")

    def __init__(self, rows: Any, columns: tuple[Any, ...], layout: RowLayout) -> None:
        self.rows = rows
        self.columns = columns
        self.layout = layout

    def __iter__(self) -> Iterator[Any]:
        # What looks for the size of a batch finds one leaf as long as the real ones.
        yield self.rows

    def gathered(self) -> Any:
        """The batch; in a trace its leaves are traced values."""
        leaves = [column.at[self.rows].get(mode="promise_in_bounds") for column in self.columns]
        sharding = self.layout.sharding
        if sharding is not None and self.rows.shape[0] % sharding.num_devices == 0:
            leaves = [jax.lax.with_sharding_constraint(leaf, sharding) for leaf in leaves]  # type: ignore[no-untyped-call]
        return jax.tree_util.tree_unflatten(self.layout.structure, leaves)

    def __repr__(self) -> str:
        return f"ResidentBatch({len(self.rows)} rows of {len(self.columns)} arrays on the device)"


def _put_together(layout: RowLayout, children: Any) -> ResidentBatch:
    rows, columns = children
    return ResidentBatch(rows, columns, layout)


jax.tree_util.register_pytree_with_keys(
    ResidentBatch,
    lambda batch: (((_Unnamed(), batch.rows), (jax.tree_util.GetAttrKey("columns"), batch.columns)), batch.layout),
    _put_together,
    lambda batch: ((batch.rows, batch.columns), batch.layout),
)


def expanded(batch: Any) -> Any:
    """The batch that a step sees: rows are gathered, other batches are as they are."""
    return batch.gathered() if type(batch) is ResidentBatch else batch


def on_host(batch: Any) -> Any:
    """The batch as numpy arrays, for whoever looks at it outside of a step."""
    if type(batch) is not ResidentBatch:
        return batch
    alone = RowLayout(batch.layout.structure)
    return jax.tree.map(np.asarray, ResidentBatch(batch.rows, batch.columns, alone).gathered())
