"""What a hand-written step carries from batch to batch, and how it is cut up for checkpoints and views.

A carry may be a TrainState, a tree of parameters, an Equinox module or a pair of NNX objects. Inside a compiled
function only its arrays travel; `rebuild` makes of them what the user's function expects.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlightning.utilities.host_memory import HostCopies, host_copies

__all__ = ["Held", "NnxHeld", "is_array", "is_key", "make_held"]


class Held:
    """A carry that is a pytree, an optimizer state beside it, and a random key.

    Args:
        carry: What is trained.
        opt: The optimizer state that is passed beside it, or None.
        key: The key of the next split, or None.
        kind: What the step calls the carry: `"state"`, `"params"` or `"model"`.
    """

    def __init__(self, carry: Any, opt: Any, key: Any, kind: str) -> None:
        self.kind = kind
        self.opt = opt
        self.key = key
        leaves, treedef = jax.tree_util.tree_flatten(carry)
        self.treedef: Any = treedef
        self.static = None if all(map(is_array, leaves)) else [None if is_array(leaf) else leaf for leaf in leaves]
        self.carry = carry if self.static is None else self.strip(carry)

    def strip(self, carry: Any) -> Any:
        """The arrays of a carry: what may enter a compiled function."""
        if self.static is None:
            return carry
        return [leaf for leaf in jax.tree_util.tree_leaves(carry) if is_array(leaf)]

    def rebuild(self, arrays: Any) -> Any:
        """The inverse of `strip`, also for traced arrays."""
        if self.static is None:
            return arrays
        given = iter(arrays)
        leaves = [next(given) if static is None else static for static in self.static]
        return jax.tree_util.tree_unflatten(self.treedef, leaves)

    def require_same_static(self, carry: Any, where: str) -> None:
        """Refuses a carry that a step changed in a place that is no array, because nothing would keep the change.

        Args:
            carry: What the step returned.
            where: The step's name.

        Raises:
            TypeError: If such a leaf is another one now; the message names it.
        """
        if self.static is None:
            return
        changed = [
            f"{jax.tree_util.keystr(path) or 'the state itself'} ({type(leaf).__name__})"
            for (path, leaf), static in zip(_flat(carry), self.static, strict=True)
            if (static is None) != is_array(leaf) or not (static is None or _same(leaf, static))
        ]
        if changed:
            raise TypeError(
                f"{where} returned another object for {', '.join(changed[:10])}. JAX sees no arrays in it, so that it "
                "cannot be carried from step to step. Register its class as a pytree (`flax.struct.dataclass`, "
                "`jax.tree_util.register_dataclass`), or keep it out of the state."
            )

    def dynamic(self) -> tuple[Any, Any, Any]:
        """Everything that changes, as a pytree of arrays; live, for use before the next step only."""
        return self.carry, self.opt, self.key

    def set_dynamic(self, value: tuple[Any, Any, Any]) -> None:
        """Replaces what changes."""
        self.carry, self.opt, self.key = value

    def user_carry(self) -> Any:
        """The carry as the user knows it."""
        return self.rebuild(self.carry)

    def places(self) -> list[tuple[str, tuple[str, ...]]]:
        """For every leaf of `dynamic()` the section of a checkpoint where it belongs, and its path there."""
        carry = self.user_carry()
        fields = {str(_word(path[0])) for path, _ in _flat(carry) if path}
        structured = "params" in fields and self.kind != "params"
        found = []
        for path, leaf in _flat(carry):
            if not is_array(leaf):
                continue
            words = tuple(map(_word, path))
            if not structured:
                found.append(("params", words or ("value",)))
            elif words[0] == "params":
                found.append(("params", words[1:] or ("value",)))
            elif words[0] == "opt_state":
                found.append(("optimizer", ("state", *words[1:])))
            elif len(words) > 1:
                found.append(("variables", words))
            else:
                found.append(("variables", ("state", *words)))
        found += [("optimizer", ("beside", *map(_word, path))) for path, _ in _flat(self.opt)]
        found += [("variables", ("state", "next_key")) for _ in jax.tree_util.tree_leaves(self.key)]
        return found


class NnxHeld(Held):
    """A model and an optimizer of NNX, kept as their state; the objects get it when somebody looks.

    Args:
        model: The `nnx.Module`.
        optimizer: The `nnx.Optimizer`, or None.
        key: The key of the next split, or None.
        live: Whether the objects themselves are changed by every step (a step that is jitted by `nnx.jit`).
    """

    def __init__(self, model: Any, optimizer: Any, key: Any, *, live: bool) -> None:
        from flax import nnx

        self._nnx = nnx
        self.objects = (model, optimizer)
        self.live = live
        self.graphdef, state = nnx.split(self.objects)
        self._variable_types = {
            tuple(map(str, path)): type(variable) for path, variable in nnx.to_flat_state(nnx.state(model))
        }
        super().__init__(state, None, key, "model")

    def rebuild(self, arrays: Any) -> Any:
        """The model and the optimizer on these arrays; new objects, also inside a trace."""
        return self._nnx.merge(self.graphdef, arrays)

    def strip(self, carry: Any) -> Any:
        """The state of a `(model, optimizer)` pair.

        Raises:
            RuntimeError: If the step added or removed a part of one of them.
        """
        _, state = self._nnx.split(carry)
        structure: Any = jax.tree_util.tree_structure(state)
        if structure != self.treedef:
            raise RuntimeError(
                "The NNX step added or removed a Variable or a sub-module. Create all of them before training, in "
                f"`__init__`.\nBefore: {self.treedef}\nAfter: {structure}"
            )
        return state

    def dynamic(self) -> tuple[Any, Any, Any]:
        """The present state; read from the objects when these are what a step changes."""
        if self.live:
            self.graphdef, self.carry = self._nnx.split(self.objects)
        return self.carry, self.opt, self.key

    def set_dynamic(self, value: tuple[Any, Any, Any]) -> None:
        """Replaces the state, in the objects too."""
        super().set_dynamic(value)
        self.refresh()

    def refresh(self) -> None:
        """Writes copies of the present arrays into the user's objects."""
        self._nnx.update(self.objects, jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), self.carry))

    def user_carry(self) -> Any:
        """The user's model, up to date."""
        if not self.live:
            self.refresh()
        return self.objects[0]

    def places(self) -> list[tuple[str, tuple[str, ...]]]:
        """As in `Held`; parameters are the `nnx.Param` of the model."""
        found: list[tuple[str, tuple[str, ...]]] = []
        for path, _ in _flat(self.carry):
            words = tuple(word for word in map(_word, path) if word != "value")
            if words[0] == "1":
                found.append(("optimizer", ("state", *words[1:])))
                continue
            kind = self._variable_types.get(words[1:])
            section = "params" if kind is not None and issubclass(kind, self._nnx.Param) else "variables"
            found.append((section, words[1:] if section == "params" else ("nnx", *words[1:])))
        found += [("variables", ("state", "next_key")) for _ in jax.tree_util.tree_leaves(self.key)]
        return found


def make_held(state: Any, opt: Any, key: Any, kind: str, *, live: bool) -> Held:
    """The right kind of `Held` for what the user passed to `fit`."""
    if is_nnx_module(state):
        return NnxHeld(state, opt, key, live=live)
    return Held(state, opt, key, kind)


def is_nnx_module(value: Any) -> bool:
    """Whether the object is an NNX module; by name, because importing nnx costs others time."""
    return any(c.__module__.startswith("flax.nnx") and c.__name__ == "Module" for c in type(value).__mro__)


def is_key(leaf: Any) -> bool:
    """Whether a leaf is a typed random key."""
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def to_host(leaf: Any, copies: HostCopies | None = None) -> Any:
    """A numpy copy of a leaf; a typed key as its data.

    Args:
        leaf: The leaf.
        copies: Gives a copy that lives already once more.
    """
    if is_key(leaf):
        leaf = jax.random.key_data(leaf)
    return (host_copies([leaf]) if copies is None else copies.of([leaf]))[0]


def like(value: Any, template: Any) -> Any:
    """An array for the place of `template`, made from what `to_host` gave."""
    if is_key(template):
        return jax.random.wrap_key_data(jnp.array(value), impl=jax.random.key_impl(template))
    return jnp.array(value, jnp.result_type(template))


def nested(entries: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """Nested dictionaries from paths."""
    tree: dict[str, Any] = {}
    for path, value in entries.items():
        node = tree
        for word in path[:-1]:
            node = node.setdefault(word, {})
        node[path[-1]] = value
    return tree


def _flat(tree: Any) -> list[tuple[Any, Any]]:
    return list(jax.tree_util.tree_flatten_with_path(tree)[0])


def _word(entry: Any) -> str:
    return jax.tree_util.keystr((entry,), simple=True)


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array or a number: what a compiled function carries from step to step."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float | complex)


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    try:
        return bool(a == b)
    except Exception:  # a comparison of the user's own that does not give a truth value
        return False
