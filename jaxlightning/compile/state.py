"""The training state as one pytree."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

__all__ = ["TrainState"]


@dataclasses.dataclass
class TrainState:
    """Everything that training steps read and change on the device.

    The order of the fields matters: evaluation takes the leading leaves (parameters, variables, attributes), and the
    packed accumulators come last, where the engine replaces them.

    Attributes:
        params: `{network: nested parameters}`.
        variables: `{network: {collection: nested}}`: batch statistics and the like.
        attributes: `{path: array or container of arrays}`: attributes of the module (and of its child modules, under
            dotted paths) that hold arrays and that a step reads.
        opt_state: One optax state per optimizer.
        grads: Accumulated gradients of the parameters that optimizers own, or None where no variant keeps any.
        scaler: The loss scale (`ScalerState`), None where the precision has none.
        nonfinite: Counts of updates that were not finite (`NonfiniteState`), None where nothing is checked.
        acc: Packed accumulators of the training epoch, shape [2, capacity].
    """

    params: dict[str, Any]
    variables: dict[str, Any]
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)
    opt_state: tuple[Any, ...] = ()
    grads: Any = None
    scaler: Any = None
    nonfinite: Any = None
    acc: Any = None

    def replace(self, **changes: Any) -> TrainState:
        """A copy with other values."""
        return dataclasses.replace(self, **changes)


jax.tree_util.register_dataclass(
    TrainState,
    data_fields=["params", "variables", "attributes", "opt_state", "grads", "scaler", "nonfinite", "acc"],
    meta_fields=[],
)
