"""Whole trees at once: copies that nobody else holds, and their leaves by path."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["by_path", "device_copy", "host_copy"]


def by_path(tree: Any) -> dict[str, Any]:
    """The leaves of any pytree by their path, `"0/mu/kernel"`."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def device_copy(tree: Any) -> Any:
    """The tree with every leaf in a device buffer of its own, so that the original may be donated."""
    return jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), tree)


def host_copy(tree: Any) -> Any:
    """The tree with numpy arrays of its own, fetched in one read."""
    # A copy, because on a CPU the fetched array shares the device buffer, which is donated later.
    return jax.tree.map(lambda leaf: np.array(leaf, copy=True), jax.device_get(tree))
