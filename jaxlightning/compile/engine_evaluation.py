"""Evaluation and prediction steps of an engine."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxlightning.compile import batch as batches
from jaxlightning.compile.core import EvalOptions
from jaxlightning.compile.engine_steps import EngineSteps
from jaxlightning.compile.step_output import StepOutput
from jaxlightning.compile.trace import Scalars

__all__ = ["EngineEvaluation"]


class EngineEvaluation(EngineSteps):
    """Adds the steps that read the state only."""

    def eval_step(
        self,
        stage: str,
        batch: Any,
        *,
        batch_idx: int,
        dataloader_idx: int | None = None,
        current_epoch: int = 0,
        global_step: int = 0,
        want_outputs: bool = False,
    ) -> StepOutput:
        """Runs one evaluation batch; `stage` is `"validate"`, `"test"`, `"sanity_check"` or `"predict"`."""
        leaves, treedef = jax.tree_util.tree_flatten(batch)
        arrays, positions = batches.split(leaves)
        self.batch_leaves = None if positions is None else leaves
        if self._dirty or self._nnx_exposed:
            self.check_constants()
        ints = np.array((self._seed32, batch_idx, batch_idx, current_epoch, global_step), np.int32)
        flags = (stage, dataloader_idx, want_outputs)
        state = self.evaluation_leaves()
        acc = self._eval_acc.get(stage)
        variant, env = self._hot_eval.get(flags), None
        host: tuple[Any, ...] = ()
        if variant is not None and variant.info.host is not None:
            env = self.environment(batch_idx, current_epoch, global_step)
            variant, host = self._choose(variant, env)
        if variant is not None and variant.treedef == treedef and variant.positions == positions:
            try:
                self._eval_acc[stage], values, states, outputs, effects = variant.call(state, acc, arrays, ints, *host)
            except TypeError:
                variant = None
        else:
            variant = None
        if variant is None:
            self.ensure_created(stage, batch, Scalars.of([int(i) for i in ints[1:]], dataloader_idx))
            state = self.evaluation_leaves()
            table = self._table(stage)
            env = self.environment(batch_idx, current_epoch, global_step)
            variant = self.variants.evaluate(
                self,
                EvalOptions(stage, dataloader_idx, want_outputs),
                table,
                batch,
                arrays,
                treedef,
                positions,
                ints,
                env,
            )
            state = self.evaluation_leaves()  # the trace may have found more of it
            self._hot_eval[flags] = variant
            host = () if variant.info.host is None else variant.info.host.inputs(env)
            self._eval_acc[stage], values, states, outputs, effects = variant.call(
                state, self._eval_acc[stage], arrays, ints, *host
            )
        if variant.info.needs_host:
            self._after_call(variant.info, effects, env)
        if variant.info.host is not None and env is not None:
            variant.info.host.finish(env)
        info = variant.info
        return StepOutput(info.plan, values, states, False, info.outputs, outputs, self.batch_leaves)

    def predict_step(
        self,
        batch: Any,
        *,
        batch_idx: int,
        dataloader_idx: int | None = None,
        current_epoch: int = 0,
        global_step: int = 0,
    ) -> StepOutput:
        """Runs one prediction batch."""
        return self.eval_step(
            "predict", batch, batch_idx=batch_idx, dataloader_idx=dataloader_idx, current_epoch=current_epoch,
            global_step=global_step, want_outputs=True,
        )  # fmt: skip
