"""Creation of the variables of linen networks by the first step that calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxlightning.compile import batch as batches
from jaxlightning.compile.attributes import TracedAttributes
from jaxlightning.compile.checks import checked
from jaxlightning.compile.explain import explained
from jaxlightning.compile.flat_steps import weak_integers
from jaxlightning.compile.paths import flatten, merge
from jaxlightning.compile.persistent_cache import healing
from jaxlightning.compile.run_step import run_user_step, step_key
from jaxlightning.compile.trace import Scalars, Trace
from jaxlightning.utilities.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from jaxlightning.compile.engine_steps import EngineSteps

__all__ = ["create_variables", "verify_restored"]


def create_variables(
    engine: EngineSteps, stage: str, batch: Any, scalars: Scalars, *, forward: bool = False
) -> tuple[Any, Any]:
    """Runs the step of `stage` once to make what it lacks; everything else that it does is dropped.

    Only the new variables leave the compiled function, so XLA removes the forward pass where initialisers do not need
    it.

    Args:
        engine: The engine.
        stage: Which step.
        batch: Its batch; with `forward` the input of the module's `forward`.
        scalars: Host numbers of the step.
        forward: Whether to call `forward` and not a step.

    Returns:
        Full parameters and variables, `(None, None)` when the step calls no network without variables.
    """
    create, args, created = _creator(engine, stage, batch, scalars, forward)
    params, variables = engine.params_live, engine.variables_live
    new_params, new_variables = _run(engine, create)(params, variables, *args)
    if not created:
        return None, None
    return {**params, **new_params}, {**variables, **new_variables}


def verify_restored(
    engine: EngineSteps, stage: str, batch: Any, scalars: Scalars, names: set[str], *, strict: bool
) -> set[str]:
    """Compares restored variables with those that the step of `stage` would create.

    A linen network has no shapes of its own before it is called, so a checkpoint can only be judged then.

    Args:
        engine: The engine.
        stage: Which step.
        batch: Its batch.
        scalars: Host numbers of the step.
        names: Networks whose variables came from a checkpoint and were not compared yet.
        strict: Whether missing paths are errors; without it they are created.

    Returns:
        The networks that the step called.

    Raises:
        RuntimeError: If paths are missing or shapes differ; the message lists them.
    """
    create, args, created = _creator(engine, stage, batch, scalars, False)
    params, variables = engine.params_live, engine.variables_live
    rest = {name: tree for name, tree in params.items() if name not in names}
    rest_variables = {name: tree for name, tree in variables.items() if name not in names}
    made = jax.eval_shape(create, rest, rest_variables, *args) if engine.jit else create(rest, rest_variables, *args)
    judged = created & names  # what the checkpoint does not have at all is created later, like without a checkpoint
    want = flatten({"params": {n: made[0][n] for n in judged}, "variables": {n: made[1].get(n, {}) for n in judged}})
    have = flatten({"params": {n: params[n] for n in judged}, "variables": {n: variables.get(n, {}) for n in judged}})
    missing = [f"missing: {path} {tuple(want[path].shape)}" for path in want if path not in have]
    differing = [
        f"differing: {path} is {tuple(have[path].shape)} in the checkpoint, {tuple(want[path].shape)} here"
        for path in want
        if path in have and tuple(have[path].shape) != tuple(want[path].shape)
    ]
    unexpected = [f"unexpected: {path} {tuple(have[path].shape)}" for path in have if path not in want]
    owner = type(engine.module).__name__
    if differing or (missing and strict):
        lines = differing + missing + unexpected
        raise RuntimeError(f"The checkpoint does not fit {owner}:\n  " + "\n  ".join(lines[:40]))
    if unexpected and strict:
        rank_zero_warn(
            f"The checkpoint has variables that the {stage} step of {owner} does not use:\n  "
            + "\n  ".join(unexpected[:20])
        )
    if missing:
        fresh = _run(engine, create)(rest, rest_variables, *args)
        engine.take_created(
            {**params, **{n: merge(fresh[0][n], params[n]) for n in judged}},
            {**variables, **{n: merge(fresh[1][n], variables.get(n, {})) for n in judged}},
        )
    return judged


def _creator(
    engine: EngineSteps, stage: str, batch: Any, scalars: Scalars, forward: bool
) -> tuple[Callable[..., Any], tuple[Any, Any], set[str]]:
    """A pure function that makes missing variables, its further arguments, and the set it fills with network names."""
    leaves, treedef = jax.tree_util.tree_flatten(batch)
    arrays, positions = batches.split(leaves)
    created: set[str] = set()
    ints = np.array(
        [engine.seed32, scalars.micro_step, scalars.batch_idx, scalars.current_epoch, scalars.global_step], np.int32
    )

    def create(params: Any, variables: Any, arrays: Any, ints: Any) -> Any:
        seed, micro_step, *_ = weak_integers(ints)
        trace = Trace(
            kind=stage,
            key=step_key(seed, micro_step, stage),
            scalars=scalars,  # plain numbers: whatever Python decides by them holds for this run only
            params=dict(params),
            variables=dict(variables),
            creating=True,
            silent=True,
            attributes=TracedAttributes(engine.tree.attributes, engine) if engine.jit else None,
            init_seed=jax.numpy.asarray(seed).astype(jax.numpy.uint32),
        )
        # Leaves that stay on the host are there: nothing of this run stays but the variables.
        joined = batches.joined(treedef, arrays, range(len(leaves)) if positions is None else positions, leaves)
        run_user_step(engine.binding, trace, joined, None, strict=False, forward=forward)
        for path in trace.asked:
            if path not in trace.params:  # a copy that the step does not call, of a network that it called later
                engine.binding.linen[path]._create_as_copy(trace)
        created.update(trace.created)
        return {n: trace.params[n] for n in trace.created}, {n: trace.variables.get(n, {}) for n in trace.created}

    pure: Callable[..., Any] = create
    if engine.variants.checks:
        with_errors = checked(create, engine.variants.checks)
        pure = lambda *args: with_errors(*args)[1]  # noqa: E731  (what is wrong is found when the step runs)
    # Eagerly the step is to see JAX arrays and Python numbers, as when it runs.
    return pure, (arrays if engine.jit else [jax.numpy.array(a) for a in arrays], ints), created


def _run(engine: EngineSteps, create: Callable[..., Any]) -> Callable[..., Any]:
    if not engine.jit:
        return create
    compiled = explained(jax.jit(create), type(engine.module).__name__)

    def run(*args: Any) -> Any:
        with healing():
            return compiled(*args)

    return run
