"""Norms of gradients under Lightning's names."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxlightning.optim._groups import leaf_paths


def grad_norm(grads: Any, norm_type: float | str, group_separator: str = "/") -> dict[str, jax.Array]:
    """The p-norm of every gradient, and of all of them together as if they were one vector.

    Args:
        grads: A pytree of gradients, or a module in a hook that sits between gradient and update, such
            as `on_before_optimizer_step`.
        norm_type: The p of the norm: a positive number or `"inf"`.
        group_separator: What stands between the group and the parameter's name in the keys; loggers make a folder
            of it.

    Returns:
        `{"grad_2.0_norm/net.layer.kernel": scalar, ..., "grad_2.0_norm_total": scalar}`; empty if there are no
        gradients. The scalars stay on the device and can be logged.

    Raises:
        ValueError: If `norm_type` is not positive.
        TypeError: If there are no gradients to be found in `grads`.
    """
    p = float(norm_type)
    if not p > 0:
        raise ValueError(f"`norm_type` must be a positive number or 'inf', but got {norm_type!r}.")
    tree = _gradients_of(grads)
    norms = {
        f"grad_{p}_norm{group_separator}{path.replace('/', '.')}": _norm(leaf, p)
        for path, leaf in zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True)
    }
    if norms:
        norms[f"grad_{p}_norm_total"] = _norm(jnp.stack(list(norms.values())), p)
    return norms


def _norm(x: jax.Array, p: float) -> jax.Array:
    size = jnp.abs(x)
    size = size.astype(jnp.promote_types(size.dtype, jnp.float32)).ravel()
    norm: jax.Array = jnp.linalg.norm(size, ord=jnp.inf if p == float("inf") else p)
    return norm


def _gradients_of(source: Any) -> Any:
    """The gradients of a module, or the pytree itself."""
    engine = getattr(source, "_engine", None)
    if engine is not None:
        return engine.grads or {}
    if not all(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(source)):
        raise TypeError(
            f"`grad_norm` wants a pytree of gradients or a module that a Trainer runs, but got {type(source).__name__}."
        )
    return source
