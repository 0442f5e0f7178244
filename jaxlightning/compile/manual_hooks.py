"""The host in the middle of a manual step: it is cut into compiled segments, and hooks and schedulers run between them.

Nobody pays for it whose hooks are not overridden: then a manual step is one compiled call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
from jax.extend.core import Literal

from jaxlightning.compile.manual_events import Cut, HostCall, event_p
from jaxlightning.compile.manual_replay import set_aside
from jaxlightning.compile.manual_tape import function_of
from jaxlightning.compile.paths import flatten, merge, unflatten
from jaxlightning.compile.trace import outside_of_traces

if TYPE_CHECKING:
    from jaxlightning.compile.binding import Binding
    from jaxlightning.compile.engine_steps import EngineSteps

__all__ = ["HookState", "SegmentedStep", "run_hook", "undisturbed"]


@dataclass
class HookState:
    """What a hook may read and change.

    Attributes:
        params: `{network: nested}`.
        variables: `{network: {collection: nested}}`.
        opt_states: One state per optimizer.
        gradients: Those that are there, by path.
    """

    params: dict[str, Any]
    variables: dict[str, Any]
    opt_states: tuple[Any, ...]
    gradients: dict[str, Any]


def run_hook(engine: EngineSteps, hook: str, state: HookState, index: int | None, loss: Any, steps: int) -> HookState:
    """Runs a hook with the engine's state as it is at this moment of the step.

    Args:
        engine: The engine; it has gradient buffers for every optimizer.
        hook: Name of the hook.
        state: The moment's state.
        index: Number of the optimizer that is about to step, or None.
        loss: The loss of the backward call, or None.
        steps: How many steps of optimizers came before it in this batch.

    Returns:
        The state after the hook.
    """
    before = engine.tree
    zeros = jax.tree.map(jax.numpy.zeros_like, before.grads)
    engine._set_tree(
        before.replace(
            params=state.params, variables=state.variables, opt_state=state.opt_states,
            grads=merge(zeros, unflatten(state.gradients)),
        )
    )  # fmt: skip
    engine._nnx_stale = True
    engine.manual.call(hook, index, loss, steps)
    if engine._nnx_exposed:
        engine._adopt_nnx()
    after = engine.tree
    gradients = flatten(after.grads)
    return HookState(
        after.params, after.variables, after.opt_state, {path: gradients[path] for path in state.gradients}
    )


@contextmanager
def undisturbed(binding: Binding) -> Iterator[None]:
    """Lets a hook that an eager step calls see the module as outside of a step."""
    with set_aside(binding), outside_of_traces():
        yield


class SegmentedStep:
    """A step that was cut at its hooks; called like a compiled step.

    Args:
        traced: The `jax.stages.Traced` of the whole step.
        engine: Runs the hooks.
        example: The arguments of one call.
        batch: Index of the argument that holds the batch's arrays.
    """

    def __init__(self, traced: Any, engine: EngineSteps, example: tuple[Any, ...], batch: int | None) -> None:
        closed = traced.jaxpr
        jaxpr = closed.jaxpr
        self._engine = engine
        self._out = jax.tree_util.tree_structure(traced.out_info)
        self._outvars = list(jaxpr.outvars)
        self._consts = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        pieces: list[list[Any]] = [[]]
        self._cuts: list[Any] = []
        for equation in jaxpr.eqns:
            if equation.primitive is event_p:
                self._cuts.append(equation)
                pieces.append([])
            else:
                pieces[-1].append(equation)
        needed = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
        self._segments: list[tuple[list[Any], list[Any], Any]] = []
        known = list(jaxpr.invars)
        plans = []
        for piece, cut in zip(reversed(pieces), [*reversed(self._cuts), None], strict=True):
            made = {v for equation in piece for v in equation.outvars}
            results = [v for v in dict.fromkeys(v for e in piece for v in e.outvars) if v in needed]
            operands = {v for e in piece for v in e.invars if not isinstance(v, Literal)} - made
            needed = (needed - made) | operands
            plans.append((piece, list(operands), results))
            if cut is not None:
                needed = needed - set(cut.outvars) | {v for v in cut.invars if not isinstance(v, Literal)}
        strategy = engine.strategy
        for number, (piece, operands, results) in enumerate(reversed(plans)):
            inner = function_of(piece, operands, results, jaxpr.effects)
            if number == 0:
                compiled = strategy.jit(
                    _with_inputs(inner, known, operands, self._consts), example, donate=(), batch=batch
                )
                compiled = compiled.trace(*example).lower().compile()
            else:
                struct: Any = jax.ShapeDtypeStruct
                shapes = tuple(struct(v.aval.shape, v.aval.dtype) for v in operands)
                compiled = strategy.jit(_tuple(inner), shapes, donate=(), batch=None).lower(*shapes).compile()
            self._segments.append((operands, results, compiled))
        self._invars = known

    def __call__(self, *args: Any) -> Any:
        """Runs the segments and the hooks between them.

        Raises:
            TypeError: If the arguments have other shapes; nothing has happened then.
        """
        env: dict[Any, Any] = dict(self._consts)
        env.update(zip(self._invars, jax.tree_util.tree_leaves(args), strict=True))
        for number, (operands, results, compiled) in enumerate(self._segments):
            values = compiled(*args) if number == 0 else compiled(*(env[v] for v in operands))
            env.update(zip(results, values, strict=True))
            if number < len(self._cuts):
                self._cut(self._cuts[number], env)
        values = [v.val if isinstance(v, Literal) else env[v] for v in self._outvars]
        return jax.tree_util.tree_unflatten(self._out, values)

    def _cut(self, equation: Any, env: dict[Any, Any]) -> None:
        event: Cut | HostCall = equation.params["event"]
        operands = [v.val if isinstance(v, Literal) else env[v] for v in equation.invars]
        if isinstance(event, HostCall):
            results = [self._engine.strategy.put(value) for value in event.call(operands)]
            env.update(zip(equation.outvars, results, strict=True))
            return
        loss = operands.pop() if event.has_loss else None
        count = event.gradients
        params, variables, opt_states = jax.tree_util.tree_unflatten(event.treedef, operands[count:])
        gradients = {
            path: value
            for path, value, there in zip(event.paths, operands[:count], event.present, strict=True)
            if there
        }
        state = HookState(params, variables, opt_states, gradients)
        after = run_hook(self._engine, event.hook, state, event.index, loss, event.steps)
        rest = jax.tree_util.tree_leaves((after.params, after.variables, after.opt_states))
        found = [after.gradients.get(path, old) for path, old in zip(event.paths, operands[:count], strict=True)]
        env.update(zip(equation.outvars, [*found, *rest], strict=True))

    def cost_analysis(self) -> dict[str, float]:
        """XLA's figures, added up over the segments."""
        total: dict[str, float] = {}
        for _, _, compiled in self._segments:
            for name, value in (compiled.cost_analysis() or {}).items():
                total[name] = total.get(name, 0.0) + value
        return total

    def memory_analysis(self) -> Any:
        """XLA's memory analysis of the largest segment."""
        found = [compiled.memory_analysis() for _, _, compiled in self._segments]
        return max(found, key=lambda each: getattr(each, "temp_size_in_bytes", 0))

    def as_text(self) -> str:
        """The optimised HLO of all segments."""
        return "\n\n".join(str(compiled.as_text()) for _, _, compiled in self._segments)


def _with_inputs(
    inner: Callable[..., Sequence[Any]], invars: list[Any], operands: list[Any], consts: dict[Any, Any]
) -> Callable[..., Any]:
    def first(*args: Any) -> Any:
        env = {**consts, **dict(zip(invars, jax.tree_util.tree_leaves(args), strict=True))}
        return tuple(inner(*(env[v] for v in operands)))

    return first


def _tuple(inner: Callable[..., Sequence[Any]]) -> Callable[..., Any]:
    return lambda *operands: tuple(inner(*operands))
