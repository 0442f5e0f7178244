"""Attributes of a module that hold arrays, while a step is traced.

A step reads `self.queue` as a traced value and assigns it anew; the engine carries the value from step to step
(`TrainState.attributes`, `engine_attributes`). Here is what happens within one run of a step: the traced values stand
on the module, and what stands there at the end is the new state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlightning.compile.containers import Carried, array_paths, is_container, take_apart
from jaxlightning.compile.outputs import is_array
from jaxlightning.compile.trace import RetraceError

if TYPE_CHECKING:
    from jaxlightning.compile.engine_attributes import EngineAttributes

__all__ = ["TracedAttributes", "as_leaf", "same_carried"]

_MISSING = object()


def as_leaf(value: Any) -> Any:
    """An array as the state carries it: of JAX, strongly typed."""
    array = jnp.asarray(value)
    if getattr(array, "weak_type", False):
        array = jax.lax.convert_element_type(array, array.dtype)
    return array


def same_carried(old: Any, new: Any) -> bool:
    """Whether a step left a carried attribute as it was."""
    if isinstance(old, Carried) and isinstance(new, Carried):
        return (
            len(old.arrays) == len(new.arrays)
            and all(a is b for a, b in zip(old.arrays, new.arrays, strict=True))
            and old.skeleton == new.skeleton
        )
    return old is new


class TracedAttributes:
    """The carried attributes of one run of a step.

    Args:
        values: `{path: array or Carried}`, as traced values.
        engine: Carries them; None where nothing may be discovered.

    Attributes:
        values: The same after the step.
        found: Paths that turned out to be state, with the value from which they start, None for their own.
        filled: Paths of containers that turned out to be filled by the step.
    """

    def __init__(self, values: Mapping[str, Any], engine: EngineAttributes) -> None:
        self.engine = engine
        self.start = dict(values)
        self.values = dict(values)
        self.found: dict[str, Any] = {}
        self.filled: set[str] = set()

    @contextmanager
    def standing(self, owners: Mapping[str, Any], *, take: bool) -> Iterator[None]:
        """Lets the module's attributes be the traced values; afterwards takes what stands there.

        Args:
            owners: The module and its child modules by prefix.
            take: Whether what stands there at the end is the new state.
        """
        placed = [
            (owner.__dict__, name, prefix + name)
            for prefix, owner in owners.items()
            for name in owner.__dict__.get("_carried", ())
        ]
        for instance, name, path in placed:
            value = self.values[path]
            instance[name] = value.container() if isinstance(value, Carried) else value
        try:
            yield
            for instance, name, path in placed if take else ():
                self.values[path] = self._taken(path, instance.get(name, _MISSING))
        finally:
            for instance, name, _ in placed:
                instance.pop(name, None)

    def _taken(self, path: str, value: Any) -> Any:
        before = self.start[path]
        if not isinstance(before, Carried):
            if isinstance(value, bool | int | float | complex) and not is_array(value):
                return jnp.asarray(value, before.dtype)
            if is_array(value) and np.dtype(value.dtype).kind not in "OSUMm":
                value = before if value is before else as_leaf(value)
                if value.shape != before.shape or value.dtype != before.dtype:
                    self.engine.attribute_changes(path, before, value)
                return value
        if value is _MISSING or value is None or not (is_array(value) or is_container(value)):
            raise TypeError(
                f"The step {'deleted' if value is _MISSING else 'set'} `self.{path}`, which held an array"
                + ("" if value is _MISSING else f", to {value!r:.60} of type {type(value).__name__}")
                + ". An attribute that a compiled step reads as an array stays one: assign zeros, or keep a second "
                "array that says whether it is valid (`jnp.where(self.valid, ...)`)."
            )
        taken = take_apart(value, self._convert(path))
        if isinstance(before, Carried) and taken.skeleton != before.skeleton:
            self._settle(path, before, taken)
        return taken

    def _convert(self, path: str) -> Any:
        numbers = self.engine.effect_facts.converted.get(path, {})

        def convert(inner: str, leaf: Any) -> Any:
            if inner in numbers and isinstance(leaf, bool | int | float) and not is_array(leaf):
                return jnp.asarray(leaf, numbers[inner])
            if is_array(leaf) and getattr(leaf, "dtype", np.dtype(object)).kind not in "OSUMm":
                return as_leaf(leaf)
            return leaf

        return convert

    def _settle(self, path: str, before: Carried, after: Carried) -> None:
        """Makes numbers in a carried container arrays when the step changes them; other changes are new variants."""
        changed: dict[str, Any] = {}

        def compare(old: Any, new: Any, inner: str) -> None:
            if old.kind == "constant" and isinstance(old.meta, bool | int | float) and old != new:
                if new.kind == "array":
                    changed[inner] = None
                elif new.kind == "constant" and isinstance(new.meta, bool | int | float):
                    changed[inner] = jnp.result_type(type(old.meta), type(new.meta))
            elif old.kind == new.kind and len(old.children) == len(new.children):
                keys: Any = range(len(old.children))
                if old.kind == "dict":
                    keys = old.meta[2]
                elif old.kind == "object":
                    keys = old.meta[1]
                for key, a, b in zip(keys, old.children, new.children, strict=True):
                    compare(a, b, f"{inner}/{key}" if inner else str(key))

        compare(before.skeleton, after.skeleton, "")
        if not changed:
            self.engine.attribute_changes(path, before, after)
            return
        dtypes = dict(zip(array_paths(after.skeleton), (a.dtype for a in after.arrays), strict=True))
        for inner, dtype in changed.items():
            changed[inner] = dtypes[inner] if dtype is None else dtype
        engine = self.engine
        raise RetraceError(
            f"numbers in `self.{path}` that the step changes", lambda facts: engine.convert_numbers(path, changed)
        )

    def conclude(self) -> None:
        """Ends a run that found out something.

        Raises:
            RetraceError: If it did.
        """
        if not self.found and not self.filled:
            return
        engine, found, filled = self.engine, self.found, self.filled

        def learn(facts: Any) -> None:
            facts.recorded |= filled
            for path, start in found.items():
                engine.adopt_attribute(path, start)

        names = ", ".join(f"`self.{path}`" for path in (*found, *sorted(filled)))
        raise RetraceError(f"{names}, which the step reads or changes", learn)
