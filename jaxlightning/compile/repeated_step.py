"""The same compiled training step again and again, for runs of batches between which nothing can change.

What `Engine.train_batch` looks at before every call (hyper-parameters, attributes, modes) is looked at once here, so
that a call costs little more than the compiled step itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

if TYPE_CHECKING:
    from jaxlightning.compile.engine import Engine, StepOutput
    from jaxlightning.compile.variants import CompiledStep

__all__ = ["RepeatedStep"]


class RepeatedStep:
    """Runs one variant on batch after batch.

    Attributes:
        engine: The engine whose state it carries on.
        variant: A variant without anything that the host has to do or to decide between two steps.
    """

    def __init__(self, engine: Engine, variant: CompiledStep) -> None:
        self.engine = engine
        self.variant = variant
        self._call = variant.call
        self._floats = engine.floats
        self._treedef = variant.treedef
        # A tuple or list of arrays, the commonest batch, needs no general flattening.
        self._flat: type | None = None
        for kind in (tuple, list):
            if variant.treedef == jax.tree_util.tree_structure(kind([0] * variant.treedef.num_leaves)):
                self._flat = kind
        self._last: tuple[Any, ...] = ()

    @property
    def still_valid(self) -> bool:
        """Whether nothing was changed on the module since."""
        return not self.engine._dirty

    def integers(self, batch_idx: int, current_epoch: int, global_step: int, micro_step: int, count: int) -> Any:
        """The integer inputs of `count` steps, int32 `[count, 5]`."""
        table = np.empty((count, 5), np.int32)
        steps = np.arange(count, dtype=np.int32)
        table[:, 0] = self.engine.seed32
        table[:, 1] = micro_step + steps
        table[:, 2] = batch_idx + steps
        table[:, 3] = current_epoch
        table[:, 4] = global_step + steps
        return table

    def __call__(self, batch: Any, integers: Any) -> bool:
        """Runs a batch.

        Args:
            batch: What the loader gave.
            integers: A row of `integers`.

        Returns:
            False when the batch is not like the others; nothing has happened then.
        """
        if type(batch) is self._flat:
            leaves = list(batch)
        else:
            leaves, treedef = jax.tree_util.tree_flatten(batch)
            if treedef != self._treedef:
                return False
        engine = self.engine
        try:
            result = self._call(engine._leaves, leaves, integers, self._floats)
        except TypeError:  # another shape or kind of leaf; the compiled call checks before it consumes anything
            return False
        engine._leaves = result[0]
        self._last = result
        return True

    def take(self, result: tuple[Any, ...]) -> None:
        """Carries on from what a call gave that did the work of several."""
        self.engine._leaves = result[0]
        self._last = result

    def finish(self, count: int) -> StepOutput:
        """Books `count` steps and gives the output of the last."""
        engine = self.engine
        engine._nnx_stale = True
        for handle in engine.binding.optimizers:
            handle.updates += count
        _, values, states, outputs, *_ = self._last
        self._last = ()
        return engine.output_of(self.variant, values, states, outputs)
