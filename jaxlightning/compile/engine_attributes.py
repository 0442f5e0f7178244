"""Attributes of a module that hold arrays, between the steps: who owns their values, and how host code sees them.

A carried attribute leaves the module's `__dict__`: its value is a leaf of the state, which every step donates. Reading
`self.queue` in a hook gives a copy made then; assigning it puts the value into the state. Containers stay the user's
own objects: a read brings them up to date, and because the reader may change them they are looked at again before the
next step.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlightning.compile.attributes import as_leaf
from jaxlightning.compile.containers import Carried, array_paths, is_container, rebuild, take_apart, transplant
from jaxlightning.compile.engine_optimizers import EngineOptimizers
from jaxlightning.compile.outputs import is_array
from jaxlightning.compile.trace import path_hash
from jaxlightning.compile.trees import device_copy, host_copy
from jaxlightning.utilities.host_memory import HostCopies

if TYPE_CHECKING:
    from jaxlightning.compile.facts import EffectFacts

__all__ = ["EngineAttributes"]

_MAX_SHAPES = 3
"""Shapes that a carried attribute may take on in steps before it is taken for one that grows."""


class EngineAttributes(EngineOptimizers):
    """Adds the array attributes of the module to the carried state."""

    effect_facts: EffectFacts
    _dirty: bool

    def _owner(self, path: str) -> tuple[Any, str]:
        prefix, _, name = path.rpartition(".")
        return self.binding.owners[f"{prefix}." if prefix else ""], name

    # --- in and out of the state ------------------------------------------------------------------------------------

    def adopt_attribute(self, path: str, start: Any = None) -> None:
        """Makes an attribute part of the carried state.

        Args:
            path: `"queue"`, `"child.queue"`.
            start: The value from which it starts; None for the one that it has.
        """
        owner, name = self._owner(path)
        if name in owner.__dict__.get("_carried", {}):
            return
        value = owner.__dict__.pop(name, None)
        if value is None:
            value = getattr(type(owner), name, None)
        if start is not None:
            value = start
        owner.__dict__.setdefault("_carried", {})[name] = value
        self._put_attribute(path, value)

    def _put_attribute(self, path: str, value: Any) -> None:
        leaf = self._as_carried(path, value)
        # Copies: a buffer of the user's must not be donated.
        placed = self.strategy.put(device_copy(leaf))
        state = self.tree
        self._set_tree(state.replace(attributes={**state.attributes, path: placed}))

    def _as_carried(self, path: str, value: Any) -> Any:
        if is_array(value) or isinstance(value, bool | int | float | complex):
            return as_leaf(value)
        numbers = self.effect_facts.converted.get(path, {})

        def convert(inner: str, leaf: Any) -> Any:
            if inner in numbers and isinstance(leaf, bool | int | float) and not is_array(leaf):
                return jnp.asarray(leaf, numbers[inner])
            return as_leaf(leaf) if is_array(leaf) and leaf.dtype.kind not in "OSUMm" else leaf

        return take_apart(value, convert)

    def convert_numbers(self, path: str, dtypes: Mapping[str, Any]) -> None:
        """Numbers at these paths within a carried container are arrays from now on."""
        self.effect_facts.converted.setdefault(path, {}).update(dtypes)
        self._put_attribute(path, self._current(path, self.tree.attributes[path]))

    def carry_recorded(self, path: str) -> None:
        """Carries a container that steps were thought only to fill."""
        self.effect_facts.recorded.discard(path)
        self.adopt_attribute(path)

    def drop_attribute(self, path: str) -> None:
        """Takes an attribute out of the carried state; its owner holds nothing under the name then."""
        owner, name = self._owner(path)
        owner.__dict__["_carried"].pop(name)
        state = self.tree
        self._set_tree(state.replace(attributes={p: v for p, v in state.attributes.items() if p != path}))

    def release_attributes(self, module: Any) -> None:
        """Gives the carried attributes of a module back to it as plain ones: another engine takes it over."""
        for path in list(self.tree.attributes):
            owner, name = self._owner(path)
            if owner is module and name in owner.__dict__.get("_carried", {}):
                value = self._current(path, self.tree.attributes[path])
                owner.__dict__["_carried"].pop(name)
                owner.__dict__[name] = value

    def adopt_returned(self) -> None:
        """Carries attributes again that another engine had taken over in between, with the values they have now."""
        for path in list(self.tree.attributes):
            owner, name = self._owner(path)
            if name not in owner.__dict__.get("_carried", {}) and name in owner.__dict__:
                self.adopt_attribute(path)

    def attribute_changes(self, path: str, before: Any, after: Any) -> None:
        """Notes that a step changes the shape, dtype or structure of a carried attribute.

        Raises:
            RuntimeError: If it does so again and again: every change is another compilation.
        """
        seen = self.effect_facts.changes.setdefault(path, [])
        kind = _describe(after)
        if kind in seen:
            return
        if not seen:
            seen.append(_describe(before))
        seen.append(kind)
        limit = _MAX_STRUCTURES if isinstance(after, Carried) else _MAX_SHAPES
        if len(seen) > limit:
            raise RuntimeError(
                f"`self.{path}` changes its shape or dtype from step to step: {', then '.join(seen[:4])}"
                f"{', ...' if len(seen) > 4 else ''}. Every shape is another compilation, so an attribute that a "
                "compiled step reads must settle. Keep a fixed size (a ring buffer: "
                "`self.buffer = self.buffer.at[i % n].set(x)`), give it its final dtype in `__init__`, or collect with "
                "`self.outputs.append(x)` and read the list in a hook."
            )

    # --- what host code sees ----------------------------------------------------------------------------------------

    def _current(self, path: str, value: Any) -> Any:
        """A value with copies of its arrays, a container of the user's brought up to date."""
        if not isinstance(value, Carried):
            return jnp.array(value, copy=True)
        owner, name = self._owner(path)
        fresh = rebuild(value.skeleton, iter([jnp.array(array, copy=True) for array in value.arrays]))
        mine = owner.__dict__["_carried"][name] = transplant(owner.__dict__["_carried"][name], fresh)
        return mine

    def read_attribute(self, owner: Any, name: str) -> Any:
        """What reading a carried attribute gives outside a step."""
        path = self._path(owner, name)
        value = self._current(path, self.tree.attributes[path])
        if isinstance(self.tree.attributes[path], Carried):
            self._exposed.add(path)
            self._dirty = True  # the reader may change it; looked at before the next step
        return value

    def write_attribute(self, owner: Any, name: str, value: Any) -> bool:
        """Takes an assignment of host code to a carried attribute.

        Returns:
            False when the attribute is not carried any more, because the value is of another kind.
        """
        path = self._path(owner, name)
        self._exposed.discard(path)
        old = self.tree.attributes[path]
        fits = is_container(value) if isinstance(old, Carried) else is_array(value)
        if not fits and not isinstance(old, Carried) and isinstance(value, bool | int | float):
            value, fits = jnp.asarray(value, old.dtype), True
        if not fits:
            self.drop_attribute(path)
            return False
        owner.__dict__["_carried"][name] = value
        self._put_attribute(path, value)
        return True

    def delete_attribute(self, owner: Any, name: str) -> None:
        """Takes `del self.queue` of host code."""
        self.drop_attribute(self._path(owner, name))

    def prefix_of(self, owner: Any) -> str:
        """Where a module lies on the top one: `""` for that itself, `"child."` for a child."""
        return next((prefix for prefix, known in self.binding.owners.items() if known is owner), "")

    def _path(self, owner: Any, name: str) -> str:
        for prefix, known in self.binding.owners.items():
            if known is owner:
                return prefix + name
        raise AttributeError(f"'{type(owner).__name__}' object has no attribute '{name}'")

    def adopt_exposed(self) -> None:
        """Takes over what host code may have changed in carried containers."""
        exposed, self._exposed = self._exposed, set()
        for path in exposed:
            owner, name = self._owner(path)
            if path in self.tree.attributes:
                self._put_attribute(path, owner.__dict__["_carried"][name])

    def set_attributes(self, changed: Mapping[str, Any]) -> None:
        """Puts new values of carried attributes into the state, as a step left them."""
        state = self.tree
        self._set_tree(state.replace(attributes={**state.attributes, **changed}))

    # --- parameters and buffers that belong to no network -----------------------------------------------------------

    def path_of(self, owner: Any, name: str) -> str:
        """The path of an attribute of the module or of one of its child modules."""
        return self._path(owner, name)

    def adopt_parameters(self) -> None:
        """Creates the parameters of `register_parameter` that do not exist yet."""
        from jaxlightning.module_arrays import initial_value

        state, new = self.tree, {}
        for path, (owner, name) in self.binding.raw.items():
            if path not in state.params:
                init = owner.__dict__["_raw_parameters"][name]
                new[path] = initial_value(path, init, lambda path=path: self._key_for(path))  # type: ignore[misc]
        if new:
            self.take_created({**state.params, **new}, state.variables)
        for owner in self.binding.owners.values():
            for name in owner.__dict__.get("_buffers", ()):
                value = owner.__dict__.get(name)
                if isinstance(value, np.ndarray):
                    owner.__dict__[name] = jnp.asarray(value)

    def _key_for(self, path: str) -> Any:
        return jax.random.fold_in(jax.random.key(np.uint32(self._seed32 & 0xFFFFFFFF)), path_hash(path))

    def _buffers(self) -> list[tuple[str, Any, str]]:
        """Path, owner and name of the buffers that are part of `state_dict`."""
        return [
            (prefix + name, owner, name)
            for prefix, owner in self.binding.owners.items()
            for name, persistent in owner.__dict__.get("_buffers", {}).items()
            if persistent
        ]

    def buffer_values(self) -> dict[str, Any]:
        """Copies of the persistent buffers by path."""
        values = {path: getattr(owner, name) for path, owner, name in self._buffers()}
        return {path: value for path, value in values.items() if value is not None}

    def set_buffers(self, values: Mapping[str, Any]) -> None:
        """Sets persistent buffers.

        Raises:
            RuntimeError: If a shape differs.
        """
        for path, owner, name in self._buffers():
            if path in values:
                old, new = getattr(owner, name), values[path]
                if old is not None and np.shape(old) != np.shape(new):
                    raise RuntimeError(
                        f"differing: the buffer {path} is {np.shape(new)} in what is loaded, {np.shape(old)} here"
                    )
                setattr(owner, name, jnp.asarray(new, None if old is None else old.dtype))

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def attribute_values(self, copies: HostCopies | None = None) -> dict[str, dict[str, Any]]:
        """Every attribute of the module that holds an array, for a checkpoint.

        Args:
            copies: Gives copies that live already once more; then the arrays must not be changed.

        Returns:
            `{path: {path within a container, or "": numpy array}}`.
        """
        out: dict[str, dict[str, Any]] = {}
        for path, value in self.tree.attributes.items():
            if isinstance(value, Carried):
                out[path] = dict(zip(array_paths(value.skeleton), value.arrays, strict=True))
            else:
                out[path] = {"": value}
        for prefix, owner in self.binding.owners.items():
            left_out = [name for name, kept in owner.__dict__.get("_buffers", {}).items() if not kept]
            for name in left_out:
                out.pop(prefix + name, None)
            for name, value in owner.__dict__.items():
                if isinstance(value, jax.Array) and name not in left_out:
                    out[prefix + name] = {"": value}
        values: dict[str, dict[str, Any]] = host_copy(out, copies)
        return values

    def load_attributes(self, values: Mapping[str, Mapping[str, Any]]) -> None:
        """Restores what `attribute_values` gave, before or after steps were traced.

        Args:
            values: `{path: {path within a container, or "": array}}`; paths of modules that are not here are left out.

        Raises:
            RuntimeError: If shapes differ, or a container has other arrays.
        """
        for path, arrays in values.items():
            prefix, _, name = path.rpartition(".")
            owner = self.binding.owners.get(f"{prefix}." if prefix else "")
            if owner is None:
                continue
            held: Any = getattr(owner, name, None)
            if "" in arrays and not is_container(held):
                new = jnp.array(arrays[""])
                # An array of no axes may be a placeholder that the first step replaces.
                if is_array(held) and np.ndim(held) and np.shape(held) != new.shape:
                    raise RuntimeError(
                        f"The checkpoint does not fit {type(owner).__name__}: `self.{path}` is {new.shape} in the "
                        f"checkpoint, {np.shape(held)} here."
                    )
                setattr(owner, name, new)
            else:
                setattr(owner, name, self._filled(path, held, arrays))

    def _filled(self, path: str, held: Any, arrays: Mapping[str, Any]) -> Any:
        """A container with arrays of a checkpoint in their places."""
        found: set[str] = set()

        def convert(inner: str, leaf: Any) -> Any:
            if inner in arrays:
                found.add(inner)
                return jnp.array(arrays[inner])
            return leaf

        filled = take_apart(held, convert).container() if is_container(held) else held
        left = sorted(set(arrays) - found)
        if left and not (isinstance(held, list | collections.deque) and all(inner.isdigit() for inner in left)):
            raise RuntimeError(
                f"The checkpoint has arrays {left[:10]} of `self.{path}`, which is {type(held).__name__} without a "
                "place for them. Give the attribute the structure that it had when the checkpoint was written."
            )
        for inner in sorted(left, key=int):  # a list that steps had filled
            filled.append(jnp.array(arrays[inner]))
        return filled


_MAX_STRUCTURES = 24
"""Structures that a carried container may take on in steps before it is taken for one that grows."""


def _describe(value: Any) -> str:
    if not isinstance(value, Carried):
        return f"{value.dtype}{list(value.shape)}"
    return (
        f"{len(value.arrays)} arrays {[f'{a.dtype}{list(a.shape)}' for a in value.arrays[:3]]} {value.skeleton!r:.80}"
    )
