"""What one compiled step gave back, as the loops take it."""

from __future__ import annotations

from typing import Any

from jaxlightning.compile.log_plan import LogPlan

__all__ = ["StepOutput", "real_rows"]


def real_rows(arrays: Any, size: int, rows: int) -> list[Any]:
    """The arrays with their padded rows cut off, where the first axis is the batch's.

    Args:
        arrays: Device arrays.
        size: Rows of the padded batch.
        rows: How many of them are real.
    """
    return [array[:rows] if array.ndim and array.shape[0] == size else array for array in arrays]


class StepOutput:
    """What one step gave back; arrays are still being computed.

    Attributes:
        plan: The keys that the variant logs.
        values: Step values, shape [capacity]; `values[slot]` belongs to the key with that slot.
        states: States of the metric objects that the step called, one for each of `plan.states`.
        skipped: Whether `training_step` returned None.
        manual: What a step with manual optimization did to optimizers and schedulers, None in automatic optimization.
    """

    __slots__ = ("_arrays", "_leaves", "_tree", "manual", "plan", "skipped", "states", "values")

    def __init__(
        self, plan: LogPlan, values: Any, states: Any, skipped: bool, tree: Any, arrays: Any, leaves: Any = None
    ) -> None:
        self.plan = plan
        self.values = values
        self.states = states
        self.skipped = skipped
        self._tree = tree
        self._arrays = arrays
        self._leaves = leaves  # of the batch, where some of them stay on the host
        self.manual: Any = None

    @property
    def outputs(self) -> Any:
        """The user's return value with device arrays (training: `{"loss": loss/N, ...}`), None when not asked for."""
        return None if self._tree is None else self._tree.rebuild(self._arrays, self._leaves)

    def shorten(self, size: int, rows: int) -> None:
        """Leaves padded rows out of `outputs`; see `real_rows`."""
        if self._tree is not None:
            self._tree = _Shortened(self._tree, size, rows)


class _Shortened:
    """How to rebuild a return value whose arrays have padded rows."""

    def __init__(self, tree: Any, size: int, rows: int) -> None:
        self._tree, self._size, self._rows = tree, size, rows

    def rebuild(self, arrays: Any, leaves: Any = None) -> Any:
        return self._tree.rebuild(real_rows(arrays, self._size, self._rows), leaves)
