"""Steps as functions of flat lists of arrays: what is traced and compiled in place of the pure functions of `core`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlightning.compile import batch as batches
from jaxlightning.compile import core
from jaxlightning.compile.core import EvalOptions, TrainOptions
from jaxlightning.compile.guarded_update import guarded_update
from jaxlightning.compile.host_proxy import weak
from jaxlightning.compile.manual_tape import resolve
from jaxlightning.compile.packing import SlotTable
from jaxlightning.compile.resident import expanded
from jaxlightning.compile.run_step import StepInfo
from jaxlightning.compile.state import TrainState
from jaxlightning.compile.trace import Scalars

if TYPE_CHECKING:
    from jaxlightning.compile.engine_steps import EngineSteps

__all__ = [
    "evaluation_function",
    "fused_function",
    "joiner",
    "run_eagerly",
    "shapes_of",
    "train_function",
    "update_function",
    "weak_integers",
]


def weak_integers(ints: Any) -> list[Any]:
    """The integers of a vector as weakly typed scalars: arithmetic with them keeps the other operand's dtype."""
    if isinstance(ints, np.ndarray):
        return [int(i) for i in ints]
    return [weak(ints[i]) for i in range(ints.shape[0])]


def train_function(
    engine: EngineSteps, options: TrainOptions, table: SlotTable, join: Callable[[Any], Any], info: StepInfo
) -> Callable[..., Any]:
    """One training step on flat leaves."""
    state_treedef = engine.state_treedef

    def step(leaves: Any, arrays: Any, ints: Any, floats: Any, *host: Any) -> Any:
        state: TrainState = jax.tree_util.tree_unflatten(state_treedef, leaves)
        seed, scalars = _inputs(info, ints, host)
        state, values, states, outputs, finite, effects = core.train_step(
            engine.binding, table, info, options, state, join(arrays), scalars, seed, floats
        )
        after = _flat(state, state_treedef, info)
        info.reshapes = info.treedef_after is not None or shapes_of(after) != shapes_of(leaves)
        info.needs_host = info.needs_host or info.reshapes
        # An output costs microseconds, also an empty one.
        return after, values if info.plan.metas else None, states, outputs, finite, effects

    return step if options.manual is None or not engine.jit else resolve(step)


def fused_function(
    engine: EngineSteps,
    options: TrainOptions,
    table: SlotTable,
    join: Callable[[Any], Any],
    unroll: int,
    shared: tuple[bool, ...],
    counted: bool,
    info: StepInfo,
) -> Callable[..., Any]:
    """Several training steps in one call; arrays, integers and numbers of the host are stacked along a new first axis.

    Args:
        engine: The engine.
        options: As for one step.
        table: Slots of the logged keys.
        join: Puts one batch together.
        unroll: Steps that are written out.
        shared: Which leaves of a batch are the same for all steps, so that they are not stacked.
        counted: Whether the call says how many of the stacked steps run, from the first: the integers have one more
            row then, which begins with that number.
        info: Takes what tracing finds.
    """
    step = train_function(engine, options, table, join, info)

    def many(leaves: Any, stacked: Any, ints: Any, floats: Any, *host: Any) -> Any:
        def body(carry: Any, inputs: Any) -> Any:
            own, ints, host = inputs
            each = iter(own)
            arrays = [leaf if same else next(each) for leaf, same in zip(stacked, shared, strict=True)]
            leaves, values, *_ = step(carry[0], arrays, ints, floats, *host)
            return leaves, carry[1] if values is None else values

        first = leaves, jnp.zeros((table.capacity,), engine.tree.acc.dtype)
        own = [leaf for leaf, same in zip(stacked, shared, strict=True) if not same]
        if counted:
            rows = own, ints[:-1], host

            def row(index: Any) -> Any:
                return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, 0, keepdims=False), rows)

            leaves, values = jax.lax.fori_loop(0, ints[-1, 0], lambda i, carry: body(carry, row(i)), first)
        else:
            (leaves, values), _ = jax.lax.scan(
                lambda carry, inputs: (body(carry, inputs), None), first, (own, ints, host), unroll=unroll
            )
        return leaves, values, (), (), None, ()

    return many


def evaluation_function(
    engine: EngineSteps, options: EvalOptions, table: SlotTable, join: Callable[[Any], Any], info: StepInfo
) -> Callable[..., Any]:
    """One evaluation or prediction step on flat leaves."""
    state_treedef = engine.evaluation_treedef

    def step(leaves: Any, acc: Any, arrays: Any, ints: Any, *host: Any) -> Any:
        params, variables, attributes = jax.tree_util.tree_unflatten(state_treedef, leaves)
        seed, scalars = _inputs(info, ints, host)
        return core.eval_step(
            engine.binding, table, info, options, params, variables, attributes, acc, join(arrays), scalars, seed
        )

    return step


def update_function(engine: EngineSteps, info: StepInfo) -> Callable[..., Any]:
    """The update half of a split step on flat leaves."""
    state_treedef = engine.state_treedef

    def step(leaves: Any, floats: Any) -> Any:
        state: TrainState = jax.tree_util.tree_unflatten(state_treedef, leaves)
        grads = jax.tree.map(lambda g: g * floats[1].astype(g.dtype), state.grads)
        new = core.update(engine.binding, state, grads, core.hyper_of(engine.binding, floats))
        return _flat(guarded_update(engine.binding, state, new, grads), state_treedef, info)

    return step


def _inputs(info: StepInfo, ints: Any, host: Any) -> tuple[Any, Scalars]:
    """The seed and the host numbers of a step from its integer inputs."""
    seed, micro_step, *base = weak_integers(ints)
    if info.host is None:
        return seed, Scalars.of((micro_step, *base))
    info.host.bind(base, host)
    return seed, info.host.scalars(micro_step)


def _flat(state: TrainState, treedef: Any, info: StepInfo) -> tuple[Any, ...]:
    """The leaves of the state after a step, which has the structure that it had before."""
    leaves, got = jax.tree_util.tree_flatten(state)
    if got != treedef:
        before = jax.tree_util.tree_unflatten(treedef, list(range(treedef.num_leaves))).replace(attributes={})
        rest: Any = jax.tree_util.tree_structure(before)
        if rest == jax.tree_util.tree_structure(state.replace(attributes={})):
            # A container of arrays on the module has other contents after this step.
            info.treedef_after, info.needs_host = got, True
            return tuple(leaves)
        raise RuntimeError(
            f"The step changed the structure of the training state.\nBefore: {treedef}\nAfter: {got}\nA network or "
            "optimizer must keep the names and nesting of its variables."
        )
    return tuple(leaves)


def shapes_of(arrays: Any) -> tuple[Any, ...]:
    """Shape and dtype of each array: what tells apart variants that differ in nothing else."""
    return tuple((tuple(a.shape), a.dtype) for a in arrays)


def joiner(engine: EngineSteps, batch: Any, treedef: Any, positions: Any) -> Callable[[Any], Any]:
    """What puts a batch together again, in a trace; leaves that stayed on the host say so when they are used."""
    if positions is None:
        return lambda arrays: expanded(jax.tree_util.tree_unflatten(treedef, arrays))
    if not engine.jit:
        return lambda arrays: batches.joined(treedef, arrays, positions, engine.batch_leaves or ())
    paths = batches.leaf_paths(batch)
    kinds = [type(leaf).__name__ for leaf in jax.tree_util.tree_leaves(batch)]
    return lambda arrays: batches.join(treedef, arrays, positions, paths, kinds)


def run_eagerly(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a step on concrete JAX arrays; integers stay numpy, so that host numbers are Python numbers in the step."""
    converted = [
        a
        if isinstance(a, np.ndarray) and a.dtype == np.int32 and a.ndim == 1 and a.shape[0] == 5
        else jax.tree.map(jax.numpy.array, a)
        for a in args
    ]
    return function(*converted)
