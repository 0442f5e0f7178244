"""Turns a traced manual step into one without events: reverse-mode differentiation over its list of equations.

The equations between two events are differentiated together with `jax.vjp`, each once, and the results are kept until
a later backward call walks back over them, as a framework with a tape does. So a forward pass is computed once and used
by every backward call that needs it, also when it contains a scan or a `cond`, which a compiler does not merge when
they appear twice.

An equation takes part in a backward call when it lies between a read of a parameter and the loss. Which calls those are
is known for every equation before anything is evaluated: equations in a row with the same set of calls form a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, DebugInfo, Jaxpr, Literal, Var, jaxpr_as_fun

from jaxlightning.compile.manual_base import independent_loss
from jaxlightning.compile.manual_events import (
    Backward,
    Clip,
    Cut,
    Event,
    Forget,
    HostCall,
    Keep,
    Read,
    RetraceManualError,
    Update,
    emit,
    event_p,
)
from jaxlightning.optim import clip_gradients

__all__ = ["function_of", "probe", "resolve"]


class _Nothing:
    """Stands for a gradient that is not there."""

    def __repr__(self) -> str:
        return "<no gradient>"


NOTHING = _Nothing()


def resolve(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function without events from one that emits them.

    Args:
        function: A pure function of pytrees of arrays.

    Returns:
        A pure function with the same arguments and results; it is traced with the first when it is called.
    """

    def resolved(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        results = _Tape(closed).run(jax.tree_util.tree_leaves(args))
        return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(shape), results)

    return resolved


class _Run:
    """Equations in a row that the same backward calls differentiate."""

    def __init__(self, mask: int) -> None:
        self.mask = mask
        self.equations: list[Any] = []
        self.bound: set[Any] = set()
        self.after: list[Any] = []
        self.after_bound: set[Any] = set()

    def add(self, equation: Any) -> None:
        self.equations.append(equation)
        self.bound.update(equation.outvars)


class _Entry:
    """A run that was evaluated: how cotangents of its results become cotangents of its operands."""

    def __init__(
        self, mask: int, operands: list[Any], results: list[Any], pull: Callable[..., Any], reached: set[int]
    ) -> None:
        self.mask = mask
        self.operands = operands
        self.results = results
        self.pull = pull
        self.reached = reached


class _Tape:
    def __init__(self, closed: Any) -> None:
        self.jaxpr = closed.jaxpr
        self.consts = closed.consts
        self.env: dict[Any, Any] = {}
        self.entries: list[_Entry] = []
        self.roots: dict[Any, int] = {}  # results of reads -> number of the parameter
        self.active: set[Any] = set()
        self.masks: dict[Any, int] = {}
        self.equation_masks: list[int] = []
        self.numbers: dict[int, int] = {}  # position of a backward equation -> its number
        self.uses: dict[Any, int] = {}  # how many equations (and the end) read a variable
        self._analyse()

    # --- before anything is evaluated ---------------------------------------------------------------------------

    def _analyse(self) -> None:
        equations = self.jaxpr.eqns
        for position, equation in enumerate(equations):
            for var in set(_vars(equation.invars)):
                self.uses[var] = self.uses.get(var, 0) + 1
            event = _event(equation)
            if isinstance(event, Read):
                self.roots.update(zip(equation.outvars, event.leaves, strict=True))
                self.active.update(equation.outvars)
            elif isinstance(event, Backward):
                self.numbers[position] = len(self.numbers)
            elif (
                event is None
                and equation.primitive.name != "stop_gradient"
                and any(v in self.active for v in _vars(equation.invars))
            ):
                self.active.update(v for v in equation.outvars if _is_float(v))
        for var in _vars(self.jaxpr.outvars):
            self.uses[var] = self.uses.get(var, 0) + 1
        masks = self.masks
        self.equation_masks = [0] * len(equations)
        for position in range(len(equations) - 1, -1, -1):
            equation = equations[position]
            if position in self.numbers:
                loss = equation.invars[0]
                if isinstance(loss, Var) and loss in self.active:
                    masks[loss] = masks.get(loss, 0) | 1 << self.numbers[position]
                continue
            if _event(equation) is not None:
                continue
            mask = 0
            for var in equation.outvars:
                mask |= masks.get(var, 0)
            if mask:
                self.equation_masks[position] = mask
                for var in _vars(equation.invars):
                    if var in self.active:
                        masks[var] = masks.get(var, 0) | mask

    # --- evaluation -----------------------------------------------------------------------------------------------

    def run(self, arguments: Sequence[Any]) -> list[Any]:
        jaxpr, env = self.jaxpr, self.env
        env.update(zip(jaxpr.constvars, self.consts, strict=True))
        env.update(zip(jaxpr.invars, arguments, strict=True))
        run: _Run | None = None
        waiting: list[Any] = []  # equations that take no part and that the open run does not feed
        for position, equation in enumerate(jaxpr.eqns):
            event, mask = _event(equation), self.equation_masks[position]
            if event is not None:
                self._finish(waiting, run)
                run = None
                results = self._event(event, position, [self._read(atom) for atom in equation.invars])
                env.update(zip(equation.outvars, results, strict=True))
                continue
            operands = list(_vars(equation.invars))
            if not mask:
                if run is not None and any(v in run.bound or v in run.after_bound for v in operands):
                    run.after.append(equation)
                    run.after_bound.update(equation.outvars)
                else:
                    waiting.append(equation)
                continue
            if run is not None and (run.mask != mask or any(v in run.after_bound for v in operands)):
                self._finish(waiting, run)
                run = None
            if run is None:
                run = _Run(mask)
            run.add(equation)
        self._finish(waiting, run)
        return [self._read(atom) for atom in jaxpr.outvars]

    def _read(self, atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else self.env[atom]

    def _plain(self, equations: list[Any]) -> None:
        """Evaluates equations that no backward call goes through."""
        if not equations:
            return
        bound = {var for equation in equations for var in equation.outvars}
        operands = _unique(v for e in equations for v in _vars(e.invars) if v not in bound)
        results = self._used_later(equations)
        values = function_of(equations, operands, results, self.jaxpr.effects)(*(self.env[v] for v in operands))
        self.env.update(zip(results, values, strict=True))

    def _finish(self, waiting: list[Any], run: _Run | None) -> None:
        """Evaluates what a run may need, the run, and what needs it; keeps how to go back over the run."""
        self._plain(waiting)
        waiting.clear()
        if run is None:
            return
        operands = _unique(v for e in run.equations for v in _vars(e.invars) if v not in run.bound)
        inputs = [v for v in operands if v in self.active]
        constants = [v for v in operands if v not in self.active]
        used = self._used_later(run.equations)
        results = [v for v in used if self.masks.get(v, 0)]
        others = [v for v in used if not self.masks.get(v, 0)]
        function = function_of(run.equations, [*inputs, *constants], [*results, *others], self.jaxpr.effects)
        constant_values = [self.env[v] for v in constants]
        reached: set[int] = set()

        def primal(*values: Any) -> Any:
            out = function(*(probe(reached, i)(value) for i, value in enumerate(values)), *constant_values)
            return tuple(out[: len(results)]), tuple(out[len(results) :])

        values, pull, rest = jax.vjp(primal, *(self.env[v] for v in inputs), has_aux=True)
        self.env.update(zip(results, values, strict=True))
        self.env.update(zip(others, rest, strict=True))
        self.entries.append(_Entry(run.mask, inputs, results, pull, reached))
        self._plain(run.after)

    def _used_later(self, equations: list[Any]) -> list[Any]:
        """Results of some equations that something outside them reads."""
        inside: dict[Any, int] = {}
        for equation in equations:
            for var in set(_vars(equation.invars)):
                inside[var] = inside.get(var, 0) + 1
        return _unique(v for e in equations for v in e.outvars if self.uses.get(v, 0) > inside.get(v, 0))

    # --- events -----------------------------------------------------------------------------------------------------

    def _event(self, event: Event, position: int, operands: list[Any]) -> Sequence[Any]:
        if isinstance(event, Read):
            return operands
        if isinstance(event, Forget):
            return [NOTHING] * len(event.avals)
        if isinstance(event, Backward):
            return self._backward(event, position, operands)
        if isinstance(event, Clip):
            return _clip(event, operands)
        if isinstance(event, Update):
            return _update(event, operands)
        if isinstance(event, Cut):
            return _cut(event, operands)
        if isinstance(event, HostCall):
            return emit(event, *operands)
        if isinstance(event, Keep):
            return _keep(event, operands)
        raise TypeError(f"An unknown event: {event!r}.")

    def _backward(self, event: Backward, position: int, operands: list[Any]) -> list[Any]:
        loss, *rest = operands
        cotangent = rest.pop(0) if event.has_cotangent else jnp.ones((), loss.dtype)
        scale = rest.pop(0) if event.scaled else None
        if scale is not None:
            cotangent = cotangent * scale.astype(loss.dtype)
        number = self.numbers[position]
        found = self._gradients(self.jaxpr.eqns[position].invars[0], number, cotangent)
        if scale is not None:
            found = {leaf: gradient * (1.0 / scale).astype(gradient.dtype) for leaf, gradient in found.items()}
        if not any(leaf in found and allowed for leaf, allowed in zip(event.leaves, event.allowed, strict=True)):
            raise independent_loss(number + 1, event.where)
        results = []
        for leaf, allowed, old in zip(event.leaves, event.allowed, rest, strict=True):
            gradient = found.get(leaf) if allowed else None
            if gradient is None:
                results.append(old)
            else:
                results.append(gradient if old is NOTHING else old + gradient)
        if event.check:
            checked = [loss, *(found.get(leaf, jnp.zeros(())) for leaf in event.leaves)]
            results.append(jnp.stack([jnp.all(jnp.isfinite(value)) for value in checked]))
        return results

    def _gradients(self, loss: Any, number: int, cotangent: Any) -> dict[int, Any]:
        """Gradients of a loss by number of the parameter; those that it does not depend on are absent."""
        if not isinstance(loss, Var) or loss not in self.active:
            return {}
        cotangents: dict[Any, Any] = {loss: cotangent}
        for entry in reversed(self.entries):
            if not entry.mask >> number & 1 or not any(v in cotangents for v in entry.results):
                continue
            given = tuple(
                cotangents[v] if v in cotangents else jnp.zeros(v.aval.shape, v.aval.dtype) for v in entry.results
            )
            entry.reached.clear()
            for i, value in enumerate(entry.pull(given)):
                if i in entry.reached:
                    var = entry.operands[i]
                    cotangents[var] = cotangents[var] + value if var in cotangents else value
        found: dict[int, Any] = {}
        for var, leaf in self.roots.items():
            if var in cotangents:
                found[leaf] = found[leaf] + cotangents[var] if leaf in found else cotangents[var]
        return found


def _clip(event: Clip, operands: list[Any]) -> list[Any]:
    limit, *gradients = operands
    present = [g for g in gradients if g is not NOTHING]
    clipped = iter(clip_gradients(present, jnp.asarray(limit), event.algorithm))
    return [g if g is NOTHING else next(clipped) for g in gradients]


def _filled(values: Sequence[Any], avals: Sequence[Any]) -> list[Any]:
    return [jnp.zeros(aval.shape, aval.dtype) if v is NOTHING else v for v, aval in zip(values, avals, strict=True)]


def _update(event: Update, operands: list[Any]) -> Sequence[Any]:
    gradients, rest = operands[: event.gradients], operands[event.gradients :]
    kept, further = rest[: event.kept], rest[event.kept :]
    if all(g is NOTHING for g in gradients):
        return kept  # as in torch, where a step without any gradient changes nothing
    event.plan.applied[event.index] = event.plan.applied.get(event.index, 0) + 1
    # The first results are the parameters that the gradients belong to.
    return event.apply(_filled(gradients, event.avals[: event.gradients]), kept, further)


def _cut(event: Cut, operands: list[Any]) -> list[Any]:
    count = event.gradients
    present = [g is not NOTHING for g in operands[:count]]
    results = emit(replace(event, present=present), *_filled(operands[:count], event.avals[:count]), *operands[count:])
    return [r if there else NOTHING for r, there in zip(results[:count], present, strict=True)] + results[count:]


def _keep(event: Keep, operands: list[Any]) -> list[Any]:
    gradients, buffers = operands[: len(event.owners)], operands[len(event.owners) :]
    holding = frozenset(o for o, g in zip(event.owners, gradients, strict=True) if g is not NOTHING)
    event.plan.dropped = holding & event.forgotten
    event.plan.live = holding - event.forgotten
    without = frozenset(o for o, b in zip(event.owners, event.buffers, strict=True) if b is None)
    if event.plan.live & without:
        raise RetraceManualError(buffers=event.plan.live & without)
    results = list(buffers)
    for owner, place, gradient in zip(event.owners, event.buffers, gradients, strict=True):
        if place is not None and owner in event.plan.live:
            results[place] = jnp.zeros_like(buffers[place]) if gradient is NOTHING else gradient
    return results


# --- equations ----------------------------------------------------------------------------------------------------


def probe(reached: set[int], index: int) -> Callable[[Any], Any]:
    """The identity, which notes when a cotangent comes back to it: zeros that nobody computed do not."""

    @jax.custom_vjp
    def identity(value: Any) -> Any:
        return value

    def forward(value: Any) -> tuple[Any, None]:
        return value, None

    def backward(_: None, cotangent: Any) -> tuple[Any]:
        reached.add(index)
        return (cotangent,)

    identity.defvjp(forward, backward)
    return identity


def _event(equation: Any) -> Event | None:
    return equation.params["event"] if equation.primitive is event_p else None


def _vars(atoms: Iterable[Any]) -> Iterable[Any]:
    return (atom for atom in atoms if not isinstance(atom, Literal))


def _unique(items: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(items))


def _is_float(var: Any) -> bool:
    dtype = getattr(var.aval, "dtype", None)
    return dtype is not None and bool(jnp.issubdtype(dtype, jnp.inexact))


def function_of(
    equations: list[Any], operands: list[Any], results: list[Any], effects: Any
) -> Callable[..., Sequence[Any]]:
    """Equations as a function of some of their variables."""
    info = DebugInfo("manual optimization", "training_step", ("",) * len(operands), ("",) * len(results))
    jaxpr = Jaxpr((), operands, results, equations, effects, info)
    function: Callable[..., Sequence[Any]] = jaxpr_as_fun(ClosedJaxpr(jaxpr, ()))
    return function
