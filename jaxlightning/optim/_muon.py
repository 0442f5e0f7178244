"""Torch's Muon rule; optax's adds a bias correction and computes in the parameters' dtype."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax


def orthogonalise(x: jax.Array, coefficients: tuple[float, float, float], steps: int, eps: float) -> jax.Array:
    """Newton-Schulz iteration towards the nearest orthogonal matrix, in bfloat16 with float32 sums, as torch does.

    Args:
        x: A matrix.
        coefficients: Of the quintic polynomial.
        steps: Number of iterations.
        eps: Smallest norm to divide by.

    Returns:
        A bfloat16 matrix of the same shape.
    """
    a, b, c = coefficients
    half = jnp.bfloat16

    def product(left: jax.Array, right: jax.Array) -> jax.Array:
        return jnp.matmul(left, right, preferred_element_type=jnp.float32)

    y = x.astype(half)
    if x.shape[0] > x.shape[1]:
        y = y.T
    norm = jnp.sqrt(jnp.sum(jnp.square(y.astype(jnp.float32)))).astype(half)
    y = (y.astype(jnp.float32) / jnp.maximum(norm, half(eps)).astype(jnp.float32)).astype(half)
    for _ in range(steps):
        gram = product(y, y.T).astype(half)
        poly = (b * gram.astype(jnp.float32) + c * product(gram, gram)).astype(half)
        y = (a * y.astype(jnp.float32) + product(poly, y)).astype(half)
    return y.T if x.shape[0] > x.shape[1] else y


def _lerp(start: jax.Array, end: jax.Array, weight: Any, rest: Any) -> jax.Array:
    """`start + weight * (end - start)` as `torch.lerp` rounds it: from the nearer end; `rest` is 1 - weight."""
    return jnp.where(weight < 0.5, start + weight * (end - start), end - (end - start) * rest)


def scale_by_torch_muon(
    momentum: Any,
    complement: Any,
    nesterov: bool,
    coefficients: tuple[float, float, float],
    eps: float,
    steps: int,
    adjust: str | None,
) -> optax.GradientTransformation:
    """Momentum, then orthogonalisation, then a factor that depends on the shape.

    Args:
        momentum: Decay of the average of gradients.
        complement: 1 - momentum.
        nesterov: Whether to mix in the current gradient once more.
        coefficients: Of the Newton-Schulz polynomial.
        eps: Smallest norm to divide by.
        steps: Newton-Schulz iterations.
        adjust: How the step depends on a matrix' shape.

    Returns:
        The transformation.
    """

    def init(params: Any) -> optax.TraceState:
        for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
            if jnp.ndim(leaf) != 2:
                raise ValueError(
                    f"Muon only supports matrices, but {jax.tree_util.keystr(path)} has shape {jnp.shape(leaf)}. Give "
                    "the other parameters (biases, embeddings, convolutions) to another optimizer by a path pattern."
                )
        return optax.TraceState(trace=jax.tree.map(jnp.zeros_like, params))

    def factor(shape: tuple[int, ...]) -> float:
        rows, columns = shape
        if adjust is None or adjust == "original":
            return math.sqrt(max(1, rows / columns))
        if adjust == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(rows / columns)

    def update(grads: Any, state: optax.TraceState, params: Any = None) -> tuple[Any, optax.TraceState]:
        trace = jax.tree.map(lambda b, g: _lerp(b, g, complement, momentum), state.trace, grads)
        mixed = jax.tree.map(lambda g, b: _lerp(g, b, momentum, complement), grads, trace) if nesterov else trace
        out = jax.tree.map(
            lambda m: orthogonalise(m, coefficients, steps, eps).astype(m.dtype) * factor(m.shape), mixed
        )
        return out, optax.TraceState(trace=trace)

    return optax.GradientTransformation(init, update)
