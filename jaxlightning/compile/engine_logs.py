"""Where logged values live on the device: packed accumulators of each stage, read once per epoch or at a log point."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxlightning.compile.engine_checkpoint import EngineCheckpoint
from jaxlightning.compile.log_plan import LogKey, LogMeta
from jaxlightning.compile.packing import BLOCK, SlotTable, float_dtype

__all__ = ["EngineLogs"]


def _table_name(stage: str) -> str:
    """The sanity check runs the validation step, so both share the places of its keys."""
    return "validate" if stage == "sanity_check" else stage


class EngineLogs(EngineCheckpoint):
    """Adds the accumulators of logged values to the carried state."""

    tables: dict[str, SlotTable]
    _eval_acc: dict[str, Any]

    def _table(self, stage: str) -> SlotTable:
        name = _table_name(stage)
        table = self.tables.get(name)
        if table is None:
            table = self.tables[name] = SlotTable()
            table.capacity = BLOCK
            self._neutralize(stage, table)
        elif stage != "train" and self._eval_acc.get(stage) is None:
            self._neutralize(stage, table)
        return table

    def slots(self, stage: str) -> dict[LogKey, tuple[int, LogMeta]]:
        """The keys that steps of a stage have logged so far, with their slots."""
        table = self.tables.get(_table_name(stage))
        return {} if table is None else table.slots

    def read_accumulators(self, stage: str) -> np.ndarray[Any, Any]:
        """The epoch accumulators of a stage, shape [2, capacity], in one device read; row 1 holds weights or counts."""
        acc = self.acc if stage == "train" else self._eval_acc.get(stage)
        if acc is None:
            return np.zeros((2, 0), np.float32)
        return np.asarray(jax.device_get(acc))

    def reset_accumulators(self, stage: str) -> None:
        """Starts an epoch: every accumulator of the stage is neutral again."""
        table = self.tables.get(_table_name(stage))
        if table is None or not any(meta.on_epoch for _, meta in table.slots.values()):
            return  # a transfer is a tenth of a millisecond; steps write only where epochs are wanted
        self._neutralize(stage, table)

    def _neutralize(self, stage: str, table: SlotTable) -> None:
        self._set_accumulators(stage, self.strategy.put(table.identity(float_dtype())))

    def _set_accumulators(self, stage: str, value: Any) -> None:
        if stage == "train":
            self.acc = value
        else:
            self._eval_acc[stage] = value

    def grow_accumulators(self, table: SlotTable) -> None:
        """Makes room for new keys; what is accumulated stays."""
        table.capacity = table.needed
        dtype = float_dtype()
        for stage in ("train", *self._eval_acc):
            if self.tables.get(_table_name(stage)) is table:
                old = self.read_accumulators(stage)
                fresh = table.identity(dtype)
                fresh[:, : old.shape[1]] = old
                self._set_accumulators(stage, self.strategy.put(fresh))

    def preload_accumulators(self, stage: str, rows: list[tuple[LogMeta, Any, Any]]) -> list[int]:
        """Starts a stage's accumulators from saved numbers.

        Args:
            stage: The stage.
            rows: For each key its options, its sum (or extreme value) and its weight.

        Returns:
            The slots of the keys.
        """
        table = self._table(stage)
        slots = [table.add(meta) for meta, _, _ in rows]
        table.capacity = max(table.capacity, table.needed)
        acc = table.identity(float_dtype())
        for slot, (_, value, weight) in zip(slots, rows, strict=True):
            acc[:, slot] = value, weight
        self._set_accumulators(stage, self.strategy.put(acc))
        return slots

    def evaluation_stages(self) -> list[tuple[str, Any]]:
        """Evaluation stages with their live accumulators."""
        return list(self._eval_acc.items())

    def evaluation_accumulators(self, stage: str) -> Any:
        """The live accumulators of an evaluation stage."""
        return self._eval_acc[stage]
