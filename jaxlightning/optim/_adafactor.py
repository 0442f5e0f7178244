"""Torch's Adafactor rule; `optax.adafactor` keeps other state and other constants."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class AdafactorState(NamedTuple):
    """State of `scale_by_torch_adafactor`.

    Attributes:
        count: Updates so far, int32, shape ().
        row: Mean squares over the last axis (kept with length 1); empty for vectors.
        column: Mean squares over the last axis but one (kept with length 1); empty for vectors.
        full: Mean squares of vectors and scalars; empty for everything else.
    """

    count: Any
    row: Any
    column: Any
    full: Any


def _rms(x: jax.Array) -> Any:
    return jnp.sqrt(jnp.sum(x * x)) / x.size**0.5


def _mean_square(x: jax.Array, axis: int) -> jax.Array:
    return jnp.sum(x * x, axis=axis, keepdims=True) / x.shape[axis]


def scale_by_torch_adafactor(
    lr: Any, beta2_decay: Any, eps: tuple[float | None, float], d: Any
) -> optax.GradientTransformation:
    """Adafactor (Shazeer and Stern, 2018) with torch's constants, learning rate included.

    The second moment of a matrix is the product of one row and one column; the step is relative to the size of the
    parameters.

    Args:
        lr: Upper bound of the relative step.
        beta2_decay: The weight of a new square in update `t` is `t ** beta2_decay`.
        eps: Smallest mean square (the dtype's epsilon if None) and smallest size of a parameter.
        d: Largest root mean square of an update before scaling.

    Returns:
        The transformation.
    """

    def init(params: Any) -> AdafactorState:
        def zeros(p: Any, axis: int) -> jax.Array:
            if p.ndim < 2:
                return jnp.zeros((0,), p.dtype)
            shape = list(p.shape)
            shape[axis] = 1
            return jnp.zeros(shape, p.dtype)

        return AdafactorState(
            count=jnp.zeros([], jnp.int32),
            row=jax.tree.map(lambda p: zeros(p, -1), params),
            column=jax.tree.map(lambda p: zeros(p, -2), params),
            full=jax.tree.map(lambda p: jnp.zeros_like(p) if p.ndim < 2 else jnp.zeros((0,), p.dtype), params),
        )

    def update(grads: Any, state: AdafactorState, params: Any = None) -> tuple[Any, AdafactorState]:
        count = optax.safe_increment(state.count)
        t = count.astype(jnp.result_type(float))
        weight, relative = t**beta2_decay, jnp.minimum(lr, 1.0 / jnp.sqrt(t))

        def mix(old: Any, new: Any) -> Any:
            return old + weight * (new - old)

        def one(g: jax.Array, p: jax.Array, row: jax.Array, column: jax.Array, full: jax.Array) -> tuple[Any, ...]:
            smallest = float(jnp.finfo(p.dtype).eps) if eps[0] is None else eps[0]  # type: ignore[no-untyped-call]
            if g.ndim > 1:
                row, column = mix(row, _mean_square(g, -1)), mix(column, _mean_square(g, -2))
                mean_row = jnp.maximum(jnp.mean(row, axis=-2, keepdims=True), smallest)
                estimate = row * column / mean_row
            else:
                estimate = full = mix(full, g * g)
            step = g / jnp.sqrt(jnp.maximum(estimate, smallest * smallest))
            size = jnp.maximum(eps[1], _rms(p)) * relative
            return -size / jnp.maximum(1.0, _rms(step) / d) * step, row, column, full

        parts = jax.tree.map(one, grads, params, state.row, state.column, state.full)
        out, row, column, full = (jax.tree.map(lambda _, part, k=k: part[k], grads, parts) for k in range(4))
        return out, AdafactorState(count, row, column, full)

    return optax.GradientTransformation(init, update)
