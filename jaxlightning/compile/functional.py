"""The way out for people who write their own loop: a module's steps as pure functions of an explicit state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlightning.compile import core
from jaxlightning.compile.core import FLOATS, EvalOptions, TrainOptions
from jaxlightning.compile.engine import Engine
from jaxlightning.compile.packing import BLOCK, SlotTable, float_dtype
from jaxlightning.compile.precision import Precision, make_precision
from jaxlightning.compile.run_step import StepInfo
from jaxlightning.compile.state import TrainState
from jaxlightning.compile.trace import RetraceError, Scalars
from jaxlightning.utilities.exceptions import MisconfigurationException

__all__ = ["Functional", "FunctionalState", "functionalize"]


@dataclasses.dataclass
class FunctionalState:
    """What the pure steps carry.

    Attributes:
        step: Batches so far, 0-d int32; `batch_idx` and `global_step` of the user's step, and its random keys, follow
        it.
        seed: Seed of the random keys, 0-d uint32.
        params: `{network: nested parameters}`.
        variables: `{network: {collection: nested}}`.
        attributes: `{path: array or container}`: attributes of the module that hold arrays and that the step reads.
        opt_state: One optax state per optimizer.
        hyper: Learning rates and other hyper-parameters of the optimizers that are inputs of the step, a float vector.
        scaler: The loss scale of "16-mixed", None for other precisions.
    """

    step: Any
    seed: Any
    params: Any
    variables: Any
    attributes: Any
    opt_state: Any
    hyper: Any
    scaler: Any = None

    def replace(self, **changes: Any) -> FunctionalState:
        """A copy with other values."""
        return dataclasses.replace(self, **changes)


jax.tree_util.register_dataclass(
    FunctionalState,
    data_fields=["step", "seed", "params", "variables", "attributes", "opt_state", "hyper", "scaler"],
    meta_fields=[],
)


class Functional(NamedTuple):
    """What `functionalize` returns; unpacks as `state, train_step, eval_step, predict_step`.

    Attributes:
        state: The initial state.
        train_step: `(state, batch) -> (state, logs)`; logs has `"loss"` and every logged key.
        eval_step: `(state, batch) -> logs` of `validation_step`.
        predict_step: `(state, batch) -> predictions`.
    """

    state: FunctionalState
    train_step: Callable[[FunctionalState, Any], tuple[FunctionalState, dict[str, Any]]]
    eval_step: Callable[[FunctionalState, Any], dict[str, Any]]
    predict_step: Callable[[FunctionalState, Any], Any]


def functionalize(
    module: Any,
    batch: Any,
    *,
    seed: int = 0,
    gradient_clip_val: float | None = None,
    gradient_clip_algorithm: str = "norm",
    precision: str | Precision = "32-true",
) -> Functional:
    """Turns a module into pure functions, for `jit`, `vmap` (an ensemble over seeds), `lax.scan` or a loop of one's
    own.

    The functions are those that the trainer compiles, so a loop over them gives what `fit` gives. Callbacks, loggers
    and hooks are not part of them.

    Args:
        module: A `JaxLightningModule`. When it has weights already (trained, loaded, `init`) the state begins with
            them.
        batch: An example batch; its shapes create the variables.
        seed: Seed of parameters and random keys.
        gradient_clip_val: As in `Trainer`.
        gradient_clip_algorithm: As in `Trainer`.
        precision: As in `Trainer`; a policy with float64 needs `jax.enable_x64(True)` around everything.

    Returns:
        The initial state and the pure step functions.

    Raises:
        MisconfigurationException: If `configure_optimizers` gives several optimizers, or float64 is asked for outside
            of JAX's x64 mode.
        NotImplementedError: If a step wants something done on the host (an append, a logger call), when it is traced.
    """
    from jaxlightning.optim import parse_optimizers

    policy = precision if isinstance(precision, Precision) else make_precision(precision)
    if policy.needs_x64 and float_dtype() is not np.float64:
        raise MisconfigurationException(
            f"`functionalize(precision={policy.precision!r})` works in JAX's x64 mode only: call it, and the functions "
            "that it returns, inside `with jax.enable_x64(True):`."
        )
    engine = Engine(module, seed=seed, precision=policy)
    engine.effect_facts.pure = True
    engine.attach()
    setup = parse_optimizers(module, module.configure_optimizers())
    engine.set_optimizers(setup.optimizers)
    engine.require_single_optimizer()
    engine.ensure_created("train", batch, Scalars(0, 0, 0, 0))
    engine.ensure_optimizer_states()
    binding = engine.binding
    options = TrainOptions(clip=gradient_clip_algorithm if gradient_clip_val else None, outputs=True)
    floating = float_dtype()
    hyper = [value for handle in binding.optimizers for value in handle.host_hyper()]
    _discover(engine, options, batch)
    tree = engine.tree
    state = jax.tree.map(
        jnp.array,
        FunctionalState(
            step=np.int32(0),
            seed=np.uint32(seed % (1 << 32)),
            params=tree.params,
            variables=tree.variables,
            attributes=tree.attributes,
            opt_state=tree.opt_state,
            hyper=np.array(hyper, floating),
            scaler=tree.scaler,
        ),
    )
    lead = np.array([1.0, 1.0, gradient_clip_val or 0.0], floating)
    if lead.shape != (FLOATS,):
        raise RuntimeError("The float inputs of a step changed their layout.")

    def run(stage: str, step: Callable[[SlotTable, StepInfo, Any], Any]) -> tuple[Any, StepInfo, SlotTable]:
        """Runs a step, once more with larger packed vectors when it logs more keys than fit."""
        table = SlotTable()
        table.capacity = BLOCK
        while True:
            info = StepInfo()
            result = step(table, info, jnp.asarray(table.identity(floating)))
            if info.plan.states:
                raise NotImplementedError(
                    f"`functionalize`: the {stage} step of {type(module).__name__} calls metric objects, whose "
                    "states a "
                    "pure step cannot keep. Use `metric.functional()` (init, update, merge, compute) beside the step."
                )
            if info.effects is not None:
                raise NotImplementedError(
                    f"`functionalize`: the {stage} step of {type(module).__name__} wants something done on the host "
                    f"after each call: {info.effects.text}. A pure step has no host: return the values from the step."
                )
            if table.needed <= table.capacity:
                return result, info, table
            table.capacity = table.needed

    def logs_of(info: StepInfo, values: Any) -> dict[str, Any]:
        return {meta.name: values[slot] for meta, slot in zip(info.plan.metas, info.plan.slots, strict=True)}

    def train_step(state: FunctionalState, batch: Any) -> tuple[FunctionalState, dict[str, Any]]:
        scalars = Scalars(state.step, jnp.zeros((), jnp.int32), state.step, state.step)

        def step(table: SlotTable, info: StepInfo, acc: Any) -> Any:
            floats = jnp.concatenate([jnp.asarray(lead), state.hyper])
            train_state = TrainState(
                state.params, state.variables, state.attributes, state.opt_state, acc=acc, scaler=state.scaler
            )
            return core.train_step(binding, table, info, options, train_state, batch, scalars, state.seed, floats)

        (new, values, _, arrays, _, _), info, _ = run("train", step)
        outputs = info.outputs.rebuild(arrays) if info.outputs is not None else {}
        logs = {**outputs, **logs_of(info, values)}
        return (
            state.replace(
                step=state.step + 1,
                params=new.params,
                variables=new.variables,
                attributes=new.attributes,
                opt_state=new.opt_state,
                scaler=new.scaler,
            ),
            logs,
        )

    def evaluate(stage: str, state: FunctionalState, batch: Any) -> tuple[Any, dict[str, Any]]:
        scalars = Scalars.of([jnp.zeros((), jnp.int32)] * 4)

        def step(table: SlotTable, info: StepInfo, acc: Any) -> Any:
            return core.eval_step(
                binding, table, info, EvalOptions(stage, outputs=True), state.params, state.variables,
                state.attributes, acc, batch, scalars, state.seed,
            )  # fmt: skip

        mode, modes = module.training, binding.modes()
        module.eval()
        try:
            (_, values, _, arrays, _), info, _ = run(stage, step)
        finally:
            module.training = mode
            binding.restore_modes(modes)
        return info.outputs.rebuild(arrays) if info.outputs is not None else None, logs_of(info, values)

    def eval_step(state: FunctionalState, batch: Any) -> dict[str, Any]:
        outputs, logs = evaluate("validate", state, batch)
        if isinstance(outputs, dict):
            return {**outputs, **logs}
        return logs if outputs is None or "loss" in logs else {"loss": outputs, **logs}

    def predict_step(state: FunctionalState, batch: Any) -> Any:
        return evaluate("predict", state, batch)[0]

    return Functional(state, train_step, eval_step, predict_step)


def _discover(engine: Engine, options: TrainOptions, batch: Any) -> None:
    """Traces the training step until everything that it carries is known."""
    floating = float_dtype()

    def step(state: TrainState, batch: Any) -> Any:
        table, info = SlotTable(), StepInfo()
        table.capacity = BLOCK
        floats = jnp.zeros((FLOATS + sum(len(h.host_hyper()) for h in engine.binding.optimizers),), floating)
        state = state.replace(acc=jnp.asarray(table.identity(floating)))
        zero = jnp.zeros((), jnp.int32)
        return core.train_step(
            engine.binding, table, info, options, state, batch, Scalars(zero, zero, zero, zero), zero, floats
        )[1]

    def evaluate(state: TrainState, batch: Any) -> Any:
        table, zero = SlotTable(), jnp.zeros((), jnp.int32)
        table.capacity = BLOCK
        acc = jnp.asarray(table.identity(floating))
        return core.eval_step(
            engine.binding, table, StepInfo(), EvalOptions("validate"), state.params, state.variables,
            state.attributes, acc, batch, Scalars(zero, zero, zero, zero), zero,
        )[1]  # fmt: skip

    for function in (step, evaluate):
        for _ in range(_MAX_TRACES):
            try:
                jax.eval_shape(function, engine.tree.replace(acc=None), batch)
                break
            except RetraceError as error:
                error.learn(engine.effect_facts)
            except Exception:
                if function is step:
                    raise
                break  # the validation step says what is wrong with it when it is used


_MAX_TRACES = 20
