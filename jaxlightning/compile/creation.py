"""Creation of the variables of linen networks by the first step that calls them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxlightning.compile import batch as batches
from jaxlightning.compile.core import run_user_step, step_key
from jaxlightning.compile.trace import Scalars, Trace
from jaxlightning.compile.variants import weak_integers

if TYPE_CHECKING:
    from jaxlightning.compile.engine import Engine

__all__ = ["create_variables"]


def create_variables(
    engine: Engine, stage: str, batch: Any, scalars: Scalars, *, forward: bool = False
) -> tuple[Any, Any]:
    """Runs the step of `stage` once to make what it lacks; everything else that it does is dropped.

    Args:
        engine: The engine.
        stage: Which step.
        batch: Its batch; with `forward` the input of the module's `forward`.
        scalars: Host numbers of the step.
        forward: Whether to call `forward` and not a step.

    Only the new variables leave the compiled function, so XLA removes the forward pass where initialisers do not need
    it.

    Returns:
        Full parameters and variables, `(None, None)` when the step calls no network without variables.
    """
    leaves, treedef = jax.tree_util.tree_flatten(batch)
    arrays, positions = batches.split(leaves)
    paths = batches.leaf_paths(batch)
    kinds = [type(leaf).__name__ for leaf in leaves]
    binding = engine.binding
    created: set[str] = set()
    ints = np.array(
        [engine.seed32, scalars.micro_step, scalars.batch_idx, scalars.current_epoch, scalars.global_step], np.int32
    )

    def create(params: Any, variables: Any, arrays: Any, ints: Any) -> Any:
        seed, *numbers = weak_integers(ints)
        key = step_key(seed, numbers[0], stage)
        trace = Trace(
            kind=stage, key=key, scalars=Scalars.of(numbers, scalars.dataloader_idx),
            params=dict(params), variables=dict(variables), creating=True, silent=True,
            init_seed=jax.numpy.asarray(seed).astype(jax.numpy.uint32),
        )  # fmt: skip
        run_user_step(
            binding, trace, batches.join(treedef, arrays, positions, paths, kinds), None, strict=False, forward=forward
        )
        created.update(trace.created)
        return {n: trace.params[n] for n in trace.created}, {n: trace.variables.get(n, {}) for n in trace.created}

    params, variables = engine.params_live, engine.variables_live
    new_params, new_variables = jax.jit(create)(params, variables, arrays, ints)
    if not created:
        return None, None
    return {**params, **new_params}, {**variables, **new_variables}
