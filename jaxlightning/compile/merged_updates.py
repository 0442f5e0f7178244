"""Elementwise updates of many small leaves, done as one: what an optimizer does to each parameter.

On a CPU every operation that XLA starts costs about 0.1 us, and a loop over a few dozen numbers runs badly. An
optimizer that goes over its parameters one by one starts several of them for each, although it does the same to all.
Here that is found in the jaxpr of a step: leaves of the carried state whose new values are the same elementwise
function of their old ones and of as many other arrays (the gradients) are carried through the loop as one vector.

Every bit of the results stays; what is left alone because of that, `update_groups` knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, DebugInfo, Jaxpr, Literal, Var, jaxpr_as_fun

from jaxlightning.compile.update_groups import Group, Program, Search

__all__ = ["FEWEST_GROUPS", "FEWEST_LEAVES", "MOST_ELEMENTS", "MergedBody"]

MOST_ELEMENTS = 256
"""Larger leaves stay as they are: taking them out of the vector and back costs more than starting an operation, and
XLA may work on several of them at a time."""

FEWEST_GROUPS = 8
"""So many parameters are merged at least: packing and unpacking has its price in every call."""

FEWEST_LEAVES = 3
"""Of each parameter; with fewer (SGD, with or without momentum) there is less to gain than the vectors cost."""


class _Vectors:
    """One class of groups: each of their slots as one vector.

    Args:
        program: The program that they are part of.
        search: What found them.
        groups: Two or more groups with equal keys.
    """

    def __init__(self, program: Program, search: Search, groups: list[Group]) -> None:
        first = groups[0]
        shapes = [program.invars[group.slots[0]].aval.shape for group in groups]
        self.groups = groups
        self.width = len(first.slots)
        self.ends = [0, *np.cumsum([int(np.prod(shape)) for shape in shapes]).tolist()]
        self.shapes = shapes
        # A number that divides the leaves is used several times as long as they are apart. So that it still is, it
        # goes to the end of a vector, where nobody looks.
        self.divisors = list(dict.fromkeys(first.divisors))
        shape = (self.ends[-1] + len(self.divisors),)
        olds = [program.invars[slot] for slot in first.slots]
        news: dict[Any, Any] = {}
        for var in (*olds, *first.others, *(equation.outvars[0] for equation in first.equations)):
            news[var] = Var(jax.core.ShapedArray(shape, var.aval.dtype))
        equations = []
        for equation in first.equations:
            params = {**equation.params, "shape": shape} if "shape" in equation.params else equation.params
            operands = [atom if isinstance(atom, Literal) else news.get(atom, atom) for atom in equation.invars]
            made = [news[var] for var in equation.outvars]
            equations.append(equation.replace(invars=operands, outvars=made, params=params))
        self.scalars = list(dict.fromkeys(first.scalars))
        operands = [*(news[var] for var in (*olds, *first.others)), *self.scalars]
        self._update = _function(equations, operands, [news[search.new[slot]] for slot in first.slots])

    def joined(self, leaves: Iterable[Any], ends: Iterable[Any] | None = None) -> Any:
        """One vector of the leaves of all groups, and of numbers at its end: ones unless others are given."""
        parts = [leaf.reshape(-1) for leaf in leaves]
        dtype = parts[0].dtype
        if self.divisors:
            parts += [np.ones(len(self.divisors), dtype)] if ends is None else [e.astype(dtype)[None] for e in ends]
        return jnp.concatenate(parts)

    def part(self, vector: Any, number: int) -> Any:
        """The leaf of one group out of a vector."""
        return jax.lax.slice(vector, (self.ends[number],), (self.ends[number + 1],)).reshape(self.shapes[number])

    def update(self, old: list[Any], env: dict[Any, Any]) -> list[Any]:
        """New vectors from old ones and from what goes in."""
        columns = zip(*(group.others for group in self.groups), strict=True)
        others = [
            self.joined(_apart([env[var] for var in column]), None if place else [env[var] for var in self.divisors])
            for place, column in enumerate(columns)
        ]
        return list(self._update(*old, *others, *(env[var] for var in self.scalars)))


def _apart(arrays: list[Any]) -> list[Any]:
    """The same arrays, computed by themselves and not inside of what reads them."""
    return list(jax.lax.optimization_barrier(arrays))  # type: ignore[no-untyped-call]


def _function(equations: list[Any], operands: list[Any], results: list[Any]) -> Callable[..., Any]:
    info = DebugInfo("merged updates", "training_step", ("",) * len(operands), ("",) * len(results))
    jaxpr = Jaxpr((), operands, results, equations, frozenset(), info)
    function: Callable[..., Any] = jaxpr_as_fun(ClosedJaxpr(jaxpr, ()))
    return function


class _Plan:
    """A program whose carried state is partly packed into vectors.

    Args:
        program: The program.
        search: What found the classes.
        classes: Groups that are merged.
    """

    def __init__(self, program: Program, search: Search, classes: list[list[Group]]) -> None:
        self.program = program
        self.vectors = [_Vectors(program, search, groups) for groups in classes]
        # Where a leaf went: the class, the vector in it, the place in that.
        self.place = {
            slot: (vectors, index, number)
            for vectors in self.vectors
            for number, group in enumerate(vectors.groups)
            for index, slot in enumerate(group.slots)
        }
        self.carried = len(search.new)
        self.others = [slot for slot in range(self.carried) if slot not in self.place]
        made = {e.outvars[0] for groups in classes for group in groups for e in group.equations}
        equations = [e for e in program.equations if made.isdisjoint(e.outvars)]
        self.rest = [var for equation in equations for var in equation.outvars]
        computed = set(self.rest)
        read = dict.fromkeys(atom for e in equations for atom in e.invars if isinstance(atom, Var))
        self.operands = [var for var in read if var not in computed]
        self._call = _function(equations, self.operands, self.rest)
        reads = {*self.operands, *(var for groups in classes for group in groups for var in group.others)}
        self.old = {program.invars[slot]: slot for slot in self.place if program.invars[slot] in reads}

    def pack(self, carry: list[Any]) -> list[Any]:
        """The carried state with vectors at its end."""
        packed = [carry[slot] for slot in self.others]
        for vectors in self.vectors:
            for index in range(vectors.width):
                packed.append(vectors.joined(carry[group.slots[index]] for group in vectors.groups))
        return packed

    def unpack(self, packed: list[Any]) -> list[Any]:
        """The carried state as it was."""
        carry = dict(zip(self.others, packed, strict=False))
        columns = self._columns(packed)
        return [carry[slot] if slot in carry else self._leaf(columns, slot) for slot in range(self.carried)]

    def _columns(self, packed: list[Any]) -> dict[int, list[Any]]:
        columns, start = {}, len(self.others)
        for vectors in self.vectors:
            columns[id(vectors)] = packed[start : start + vectors.width]
            start += vectors.width
        return columns

    def _leaf(self, columns: dict[int, list[Any]], slot: int) -> Any:
        vectors, index, number = self.place[slot]
        return vectors.part(columns[id(vectors)][index], number)

    def step(self, packed: list[Any], inputs: list[Any]) -> list[Any]:
        """One step on packed state."""
        program, columns = self.program, self._columns(packed)
        env = dict(program.consts)
        env.update(zip(program.invars[self.carried :], inputs, strict=True))
        env.update((program.invars[slot], value) for slot, value in zip(self.others, packed, strict=False))
        leaves = _apart([self._leaf(columns, slot) for slot in self.old.values()])
        env.update(zip(self.old, leaves, strict=True))
        env.update(zip(self.rest, self._call(*(env[var] for var in self.operands)), strict=True))
        rest = [atom.val if isinstance(atom, Literal) else env[atom] for atom in (program.outs[s] for s in self.others)]
        return [*rest, *(vector for each in self.vectors for vector in each.update(columns[id(each)], env))]


class MergedBody:
    """The body of a loop, traced once, with the elementwise updates of its carried state merged where that pays.

    Called in place of the body, inside the loop; before it goes `pack`, after it `unpack`.

    Args:
        body: Gives the next carried state from the carried state and the inputs of one step.
        carry: The carried state before the first step.
        inputs: Arrays, or their shapes and dtypes, of one step.
        merge: Whether to merge at all.
        most: The most elements of a leaf that is merged.
        fewest: The fewest parameters that are merged, and the fewest leaves of each (itself, and what its optimizer
            keeps for it).

    Attributes:
        merged: How many leaves of the carried state went into how many vectors.
    """

    def __init__(
        self,
        body: Callable[[Any, Any], Any],
        carry: Any,
        inputs: Any,
        *,
        merge: bool = True,
        most: int = MOST_ELEMENTS,
        fewest: tuple[int, int] = (FEWEST_GROUPS, FEWEST_LEAVES),
    ) -> None:
        self._body, self._plan = body, None
        closed, shape = jax.make_jaxpr(body, return_shape=True)(carry, inputs)
        treedef: Any = jax.tree_util.tree_structure(carry)
        self._treedef = treedef
        count = treedef.num_leaves
        old, new = closed.in_avals[:count], closed.out_avals
        self._call: Callable[..., Any] | None = None
        if treedef == jax.tree_util.tree_structure(shape) and all(map(_stays, old, new)):
            self._call = jaxpr_as_fun(closed)
            if merge and not closed.effects:
                program = Program(closed)
                search = Search(program, count, most)
                classes = search.classes(*fewest)
                self._plan = _Plan(program, search, classes) if classes else None
        plan: Any = self._plan
        self.merged = (0, 0) if plan is None else (len(plan.place), sum(each.width for each in plan.vectors))

    def pack(self, carry: Any) -> Any:
        """What the loop carries."""
        return carry if self._plan is None else self._plan.pack(jax.tree_util.tree_leaves(carry))

    def unpack(self, packed: Any) -> Any:
        """The carried state from what the loop carried."""
        if self._plan is None:
            return packed
        return jax.tree_util.tree_unflatten(self._treedef, self._plan.unpack(packed))

    def __call__(self, packed: Any, inputs: Any) -> Any:
        """One step."""
        leaves = jax.tree_util.tree_leaves(inputs)
        if self._plan is not None:
            return self._plan.step(packed, leaves)
        if self._call is None:
            return self._body(packed, inputs)
        return jax.tree_util.tree_unflatten(self._treedef, self._call(*jax.tree_util.tree_leaves(packed), *leaves))


def _stays(old: Any, new: Any) -> bool:
    """Whether a loop carries a value as it is; one that is weakly typed only at first is traced again by the loop."""
    return (old.shape, old.dtype) == (new.shape, new.dtype) and old.weak_type <= new.weak_type
