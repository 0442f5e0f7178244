"""Gradient clipping with torch's formulas."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxlightning.utilities.exceptions import MisconfigurationException

ALGORITHMS = ("value", "norm")


def global_norm(tree: Any) -> jax.Array:
    """The 2-norm of all leaves as if they were one vector.

    Args:
        tree: A pytree of float arrays.

    Returns:
        A scalar, at least float32 (half precision would overflow at 256 squared).
    """
    squares = [
        jnp.sum(jnp.square(jnp.abs(leaf).astype(jnp.promote_types(jnp.abs(leaf).dtype, jnp.float32))))
        for leaf in jax.tree.leaves(tree)
    ]
    return jnp.sqrt(sum(squares, start=jnp.zeros([], jnp.float32)))


def check_clip(value: Any, algorithm: Any = None) -> tuple[float | None, str]:
    """Checks a pair of clipping options.

    Args:
        value: The limit; None and 0 mean no clipping.
        algorithm: `"norm"`, `"value"` (in any case) or None, which means `"norm"`.

    Returns:
        The limit, None if there is none, and the algorithm in lower case.

    Raises:
        TypeError: If `value` is not a number.
        MisconfigurationException: If `value` is negative or `algorithm` unknown.
    """
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise TypeError(f"`gradient_clip_val` must be an int or a float, but got {type(value).__name__}: {value!r}.")
    name = "norm" if algorithm is None else str(algorithm).lower()
    if name not in ALGORITHMS:
        raise MisconfigurationException(
            f"`gradient_clip_algorithm` {algorithm} is unknown; it must be one of {list(ALGORITHMS)}."
        )
    if value is not None and not value >= 0:
        raise MisconfigurationException(
            f"`gradient_clip_val` must be positive, or 0 or None for no clipping, but got {value}."
        )
    return (float(value) if value else None), name


def clip_gradients(grads: Any, value: float | jax.Array | None, algorithm: str | None = "norm") -> Any:
    """Clips gradients; pure, runs under a trace.

    By norm, all gradients are multiplied with `min(1, value / (norm + 1e-6))`, as `torch.nn.utils.clip_grad_norm_`
    does; by value, each number is limited to `[-value, value]`.

    Args:
        grads: A pytree of gradients.
        value: The limit; None and 0 mean no clipping. A 0-d array (an input of a compiled step) is taken as it is.
        algorithm: `"norm"`, `"value"` or None, which means `"norm"`.

    Returns:
        The clipped gradients, dtypes unchanged.

    Raises:
        TypeError: If `value` is not a number.
        MisconfigurationException: If `value` is negative or `algorithm` unknown.
    """
    limit: Any
    if isinstance(value, jax.Array):
        limit, name = value, check_clip(None, algorithm)[1]
    else:
        limit, name = check_clip(value, algorithm)
    if limit is None or not jax.tree.leaves(grads):
        return grads
    if name == "value":
        return jax.tree.map(lambda g: jnp.clip(g, -limit, limit), grads)
    factor = jnp.minimum(1.0, limit / (global_norm(grads) + 1e-6))
    return jax.tree.map(lambda g: (g * factor).astype(g.dtype), grads)
