"""Evaluation with a hand-written `eval_step`: its call, the means over the epoch and their names in one program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxlightning.compile import packing
from jaxlightning.compile.log_plan import LogMeta, LogPlan
from jaxlightning.compile.trace import LogEntry
from jaxlightning.functional._forms import FORMS, Form, entries_of, read_logs
from jaxlightning.functional._held import Held, NnxHeld
from jaxlightning.functional._program import caller

__all__ = ["EvalProgram"]


class EvalProgram:
    """Runs evaluation batches of one loader.

    Args:
        function: The user's `eval_step`.
        form: Its form.
        held: What training carries.
        view: Makes of the carry what the function wants to see.
        taken: Names that training logs; an equal name here gets the prefix `val_`.
        dataloader_idx: Index of the loader, None if there is only one.
        jit: Whether to compile.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        form: Form,
        held: Held,
        view: Callable[[Any, Any], Any],
        *,
        taken: set[str],
        dataloader_idx: int | None,
        jit: bool,
    ) -> None:
        self.form = form
        self.held = held
        self.view = view
        self.taken = taken
        self.dataloader_idx = dataloader_idx
        self.metas: dict[str, LogMeta] = {}
        self._table: Any = None
        self.plan = LogPlan()
        self._step = caller(function, form)
        self._compiled = jax.jit(self._run, donate_argnums=(1,)) if jit else self._run

    def prepare(self, dynamic: Any, batch: Any, table: packing.SlotTable) -> list[str]:
        """Learns the names of the metrics, by tracing the step on the shapes of a batch.

        Args:
            dynamic: What `Held.dynamic` gives.
            batch: The first batch.
            table: Where the keys get their slots.

        Returns:
            The names.
        """
        shapes = jax.eval_shape(self._metrics, dynamic, batch, jnp.zeros((), jnp.int32))
        for name in shapes:
            self.metas[name] = LogMeta(
                fx="validation_step",
                name=name,
                on_step=False,
                on_epoch=True,
                prog_bar=True,
                dataloader_idx=self.dataloader_idx,
            )
        self._table = table
        self.plan = LogPlan(tuple(self.metas.values()), tuple(table.add(meta) for meta in self.metas.values()))
        return list(self.metas)

    def _metrics(self, dynamic: Any, batch: Any, batch_idx: Any) -> dict[str, Any]:
        carry, opt, key = dynamic
        built = self.held.rebuild(carry)
        model = built[0] if isinstance(self.held, NnxHeld) else self.view(built, opt)
        if key is not None:
            key = jax.random.fold_in(key, batch_idx)
        out = self._step(model, batch, opt, key)
        if isinstance(out, tuple | list) and entries_of(out) is None:
            raise TypeError(
                f"{self.form.where} returned a {type(out).__name__} of {len(out)}, which does not say what is what. "
                f'Return a dict, for example `{{"accuracy": accuracy, "loss": loss}}`. The forms are:\n{FORMS}'
            )
        metrics = read_logs((out,), self.form, first="accuracy")
        if not metrics:
            raise TypeError(f"{self.form.where} returned nothing to log. Return a scalar or a dict of scalars.")
        return {f"val_{name}" if name in self.taken else name: value for name, value in metrics.items()}

    def _run(self, dynamic: Any, acc: Any, batch: Any, weight: Any, batch_idx: Any) -> Any:
        metrics = self._metrics(dynamic, batch, batch_idx)
        logs = [LogEntry(self.metas[name], value, weight) for name, value in metrics.items()]
        values, acc = packing.pack(self._table, logs, acc)
        return acc, values

    def __call__(self, dynamic: Any, acc: Any, batch: Any, weight: int, batch_idx: int) -> Any:
        """One batch; returns the new accumulators and the packed step values."""
        return self._compiled(dynamic, acc, batch, weight, batch_idx)
