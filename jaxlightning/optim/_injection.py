"""Hyper-parameters that `optax.inject_hyperparams` keeps in an optimizer state, and groups that show them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxlightning.optim._groups import ParamGroup, path_text

LEARNING_RATE = "learning_rate"
"""What optax calls it; `group["lr"]` is the same number."""


class _Numbers(Protocol):
    def has_number(self, index: int, key: str) -> bool: ...
    def get_number(self, index: int, key: str) -> float | None: ...
    def set_number(self, index: int, key: str, value: Any) -> None: ...


class OptaxGroup(ParamGroup):
    """A parameter group whose numbers live in the optax state."""

    def __init__(self, values: Mapping[str, Any], handle: _Numbers, index: int) -> None:
        super().__init__({**values, "lr": None}, lambda group, key, value: value)
        self._handle = handle
        self.index = index

    def _optax_name(self, key: str) -> str | None:
        name = LEARNING_RATE if key == "lr" else key
        return name if key == "lr" or self._handle.has_number(self.index, name) else None

    def __getitem__(self, key: str) -> Any:
        if key == "betas" and key in self:
            return self["b1"], self["b2"]
        name = self._optax_name(key)
        return super().__getitem__(key) if name is None else self._handle.get_number(self.index, name)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `key`, `default` if there is none."""
        return self[key] if key in self else default  # noqa: SIM401  (dict.get would not ask __getitem__)

    def __iter__(self) -> Iterator[str]:
        return super().__iter__()  # its presence makes dict(group) and {**group} ask __getitem__

    def items(self) -> Any:
        """The pairs of the group, with current numbers."""
        return {key: self[key] for key in self}.items()

    def values(self) -> Any:
        """The values of the group, with current numbers."""
        return [self[key] for key in self]

    def __setitem__(self, key: str, value: Any) -> None:
        name = self._optax_name(key)
        if key == "betas" and key in self:
            self["b1"], self["b2"] = value
        elif name is None:
            super().__setitem__(key, value)
        else:
            self._handle.set_number(self.index, name, value)


def is_injection(node: Any) -> bool:
    """Whether a node of a state was made by `optax.inject_hyperparams`."""
    return hasattr(node, "hyperparams") and hasattr(node, "inner_state") and hasattr(node, "_replace")


def injections(state: Any) -> Iterator[tuple[str | None, Any]]:
    """The outermost `inject_hyperparams` states inside a state, each with its label in `optax.partition`, if any."""
    for path, node in jax.tree_util.tree_flatten_with_path(state, is_leaf=is_injection)[0]:
        if is_injection(node):
            parts = path_text(path).split("/")
            label = parts[parts.index("inner_states") + 1] if "inner_states" in parts[:-1] else None
            yield label, node


def map_injections(state: Any, fn: Callable[[int, Any], Any]) -> Any:
    """Replaces the outermost `inject_hyperparams` states, numbered as `injections` gives them, by `fn(i, node)`."""
    leaves, structure = jax.tree.flatten(state, is_leaf=is_injection)
    position = 0
    for place, leaf in enumerate(leaves):
        if is_injection(leaf):
            leaves[place] = fn(position, leaf)
            position += 1
    return jax.tree.unflatten(structure, leaves)


def is_float_scalar(value: Any) -> bool:
    """Whether a hyper-parameter is a single float, which the host may set."""
    return jnp.shape(value) == () and jnp.issubdtype(jnp.result_type(value), jnp.floating)


def shortest(value: Any) -> float:
    """A float32 as the decimal number that a user would have written: 0.1 and not 0.10000000149."""
    array = np.asarray(value)
    return float(array) if array.dtype == np.float64 else float(str(array.astype(np.float32)))
