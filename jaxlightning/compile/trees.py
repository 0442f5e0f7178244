"""Whole trees at once: copies that nobody else holds, and their leaves by path."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxlightning.utilities.host_memory import HostCopies, host_copies

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


def host_copy(tree: Any, copies: HostCopies | None = None) -> Any:
    """The tree with numpy arrays of its own; all of it is fetched at once.

    Args:
        tree: The tree.
        copies: Gives copies that live already once more; then the arrays must not be changed.
    """
    # Copies, because on a CPU the fetched array shares the device buffer, which is donated later.
    leaves, treedef = jax.tree.flatten(tree)
    return jax.tree.unflatten(treedef, host_copies(leaves) if copies is None else copies.of(leaves))
