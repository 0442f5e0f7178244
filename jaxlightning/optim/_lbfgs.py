"""One torch step of L-BFGS, several iterations long, around `optax.scale_by_lbfgs`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class LbfgsState(NamedTuple):
    """State of `lbfgs_steps`.

    Attributes:
        iterations: Iterations so far over all steps, int32, shape ().
        inner: State of `optax.scale_by_lbfgs`.
        search: State of the line search; empty without one.
    """

    iterations: Any
    inner: Any
    search: Any


class _Loop(NamedTuple):
    params: Any
    state: LbfgsState
    value: Any
    grad: Any
    n: Any
    evaluations: Any
    done: Any


def _largest(tree: Any) -> jax.Array:
    return jnp.max(jnp.stack([jnp.max(jnp.abs(leaf)) for leaf in jax.tree.leaves(tree)]))


def lbfgs_steps(
    lr: Any,
    *,
    max_iter: int,
    max_eval: int,
    tolerance_grad: float,
    tolerance_change: float,
    history_size: int,
    strong_wolfe: bool,
    maximize: bool,
) -> optax.GradientTransformationExtraArgs:
    """Up to `max_iter` iterations of L-BFGS; directions and line search are optax's, the rest is torch's.

    Args:
        lr: Step length (without a line search; with one, the first length to try).
        max_iter: Iterations per update.
        max_eval: Evaluations of the loss per update.
        tolerance_grad: Stop when no gradient is larger.
        tolerance_change: Stop when loss or parameters change less.
        history_size: Pairs of differences to keep.
        strong_wolfe: Whether to search along the direction (optax's zoom line search, Wolfe conditions).
        maximize: Whether to climb.

    Returns:
        A transformation whose update needs `value`, `grad` and `value_fn`.
    """
    direction_of = optax.scale_by_lbfgs(memory_size=history_size, scale_init_precond=True)
    search = optax.scale_by_zoom_linesearch(max_linesearch_steps=max(max_eval, 1), initial_guess_strategy="one")

    def init(params: Any) -> LbfgsState:
        return LbfgsState(
            iterations=jnp.zeros([], jnp.int32),
            inner=direction_of.init(params),
            search=search.init(params) if strong_wolfe else (),
        )

    def update(
        grads: Any, state: LbfgsState, params: Any = None, *, value: Any, value_fn: Callable[..., Any], **_: Any
    ) -> tuple[Any, LbfgsState]:
        sign = -1.0 if maximize else 1.0

        def loss(p: Any) -> Any:
            return sign * value_fn(p)

        def direction(loop: _Loop) -> tuple[Any, Any]:
            scaled, inner = direction_of.update(loop.grad, loop.state.inner, loop.params)
            # Torch's very first direction is the gradient, its length at most 1 in the sum of absolute values.
            total = sum(jnp.sum(jnp.abs(g)) for g in jax.tree.leaves(loop.grad))
            first = jnp.minimum(1.0, 1.0 / total)
            is_first = loop.state.iterations == 0
            scaled = jax.tree.map(lambda s, g: jnp.where(is_first, first * g, s), scaled, loop.grad)
            return jax.tree.map(lambda s: -lr * s, scaled), inner

        def iterate(loop: _Loop) -> _Loop:
            step, inner = direction(loop)
            slope = optax.tree.vdot(loop.grad, step)
            flat = slope > -tolerance_change * lr
            searched = loop.state.search
            value_before = loop.value
            if strong_wolfe:
                step, searched = search.update(
                    step, searched, loop.params, value=loop.value, grad=loop.grad, value_fn=loss
                )
            moved = jax.tree.map(lambda p, s: jnp.where(flat, p, p + s).astype(p.dtype), loop.params, step)
            n = loop.n + 1
            # The loss after the last iteration is not needed: the next update brings its own.
            more = (n < max_iter) & ~flat
            new_value, new_grad = jax.lax.cond(
                more, jax.value_and_grad(loss), lambda p: (value_before, loop.grad), moved
            )
            evaluations = loop.evaluations + more
            stop = (
                ~more
                | (evaluations >= max_eval)
                | (_largest(new_grad) <= tolerance_grad)
                | (_largest(step) <= tolerance_change)
                | (jnp.abs(new_value - value_before) < tolerance_change)
            )
            new_state = LbfgsState(loop.state.iterations + 1, inner, searched)
            return _Loop(moved, new_state, new_value, new_grad, n, evaluations, stop)

        start = _Loop(
            params=params,
            state=state,
            value=sign * value,
            grad=jax.tree.map(lambda g: sign * g, grads),
            n=jnp.zeros([], jnp.int32),
            evaluations=jnp.ones([], jnp.int32),
            done=_largest(grads) <= tolerance_grad,
        )
        end = jax.lax.while_loop(lambda loop: ~loop.done, iterate, start)
        return jax.tree.map(lambda new, old: new - old, end.params, params), end.state

    return optax.GradientTransformationExtraArgs(init, update)
