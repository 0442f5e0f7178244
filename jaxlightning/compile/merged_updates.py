"""Elementwise updates of many small leaves, done as one: what an optimizer does to each parameter, for all of them at once.

On a CPU every operation that XLA starts costs about 0.1 us, and a loop over a few dozen numbers runs badly. An
optimizer that goes over its parameters one by one starts several of them for each, although it does the same to all.
Here that is found in the jaxpr of a step: leaves of the carried state whose new values are the same elementwise
function of their old ones and of as many other arrays (the gradients) are carried through the loop as one vector.

Every bit of the results stays: see `_EXACT` and `_is_product` for what is left alone because of that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, DebugInfo, Jaxpr, Literal, Var, jaxpr_as_fun

__all__ = ["MOST_ELEMENTS", "MergedBody"]

MOST_ELEMENTS = 8192
"""Larger leaves stay as they are: taking them out of the vector and back costs more than starting an operation."""

_EXACT = frozenset(
    "abs add and ceil clamp convert_element_type copy div eq floor ge gt integer_pow is_finite le lt max min mul "
    "ne neg not or round rsqrt select_n sign sqrt square stop_gradient sub xor".split()
)
"""Elementwise primitives that give the same bits wherever an element lies. `exp`, `log`, `tanh` and their like do not:
XLA computes them in one way where a whole vector register is full, and in another for what is left over. Nor is
`add_any` here, the sum of gradients: it belongs to what an update is given."""

_SCALAR = _EXACT | {"exp", "log", "pow", "sin", "cos", "tanh"}
"""What is followed through numbers, to see that what every parameter computes for itself is the same number."""

_MOVES = frozenset(
    "broadcast_in_dim concatenate copy convert_element_type dynamic_slice expand_dims gather neg pad "
    "reduce_precision reshape rev select_n slice squeeze transpose".split()
)
_PRODUCTS = frozenset(["div", "integer_pow", "mul", "square"])
_CALLS = frozenset(["jit", "pjit"])


class _Program:
    """The equations of a step without calls of small jitted functions, and where each value comes from.

    Args:
        closed: The traced step.

    Attributes:
        equations: All of them, in order.
        source: The equation that makes a variable.
        consts: Values of the constants.
        invars: Variables of the arguments.
        outs: What is returned: variables or literals.
        numbers: For scalars, equal numbers where the values are certainly equal.
    """

    def __init__(self, closed: Any) -> None:
        self.equations: list[Any] = []
        self.consts: dict[Any, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        self.invars = list(closed.jaxpr.invars)
        self.outs = self._inline(closed.jaxpr, {})
        self.source = {var: equation for equation in self.equations for var in equation.outvars}
        reads = (atom for equation in self.equations for atom in equation.invars)
        self.uses = Counter(atom for atom in (*reads, *self.outs) if isinstance(atom, Var))
        self.numbers: dict[Any, int] = {}
        self._known: dict[Any, int] = {}
        for equation in self.equations:
            self._number(equation)

    def _inline(self, jaxpr: Any, known: dict[Any, Any]) -> list[Any]:
        def value(atom: Any) -> Any:
            return atom if isinstance(atom, Literal) else known.get(atom, atom)

        for equation in jaxpr.eqns:
            operands = [value(atom) for atom in equation.invars]
            if _is_elementwise_call(equation):
                inner = equation.params["jaxpr"]
                # Its variables are shared by all calls of the same function, so each call gets its own.
                own = dict(zip(inner.jaxpr.invars, operands, strict=True))
                for var, const in zip(inner.jaxpr.constvars, inner.consts, strict=True):
                    own[var] = Var(var.aval)
                    self.consts[own[var]] = const
                results = self._inline(inner.jaxpr, own)
                known.update(zip(equation.outvars, results, strict=True))
                continue
            made = [Var(var.aval) for var in equation.outvars]
            known.update(zip(equation.outvars, made, strict=True))
            self.equations.append(equation.replace(invars=operands, outvars=made))
        return [value(atom) for atom in jaxpr.outvars]

    def number(self, atom: Any) -> int:
        """The number of a scalar."""
        if isinstance(atom, Literal):
            value = np.asarray(atom.val)
            return self._known.setdefault((str(atom.aval.dtype), value.tobytes()), len(self._known))
        return self.numbers.get(atom, -id(atom))

    def divides_several(self, equation: Any, atom: Any) -> bool:
        """Whether something is divided by a number here that is used elsewhere too.

        XLA multiplies by the inverse of a number that is used only once, which rounds differently.
        """
        return equation.primitive.name == "div" and atom is equation.invars[1] and self.uses[atom] > 1

    def _number(self, equation: Any) -> None:
        if equation.primitive.name not in _SCALAR or any(a.aval.shape != () for a in equation.invars):
            return
        key = _key_of(equation)
        if key is not None:
            operands = tuple(self.number(atom) for atom in equation.invars)
            self.numbers[equation.outvars[0]] = self._known.setdefault((*key, operands), len(self._known))


def _is_elementwise_call(equation: Any) -> bool:
    """Whether an equation calls a jitted function (`jnp.where` is one) that could be part of an update."""
    if equation.primitive.name not in _CALLS or equation.effects:
        return False
    return all(
        inner.primitive.name in _SCALAR or inner.primitive.name == "broadcast_in_dim" or _is_elementwise_call(inner)
        for inner in equation.params["jaxpr"].jaxpr.eqns
    )


def _key_of(equation: Any) -> tuple[Any, ...] | None:
    """What two equations have in common that do the same to arrays of different shapes; None where that is unclear."""
    params = []
    for name, value in sorted(equation.params.items()):
        if name.endswith("sharding"):
            if value is not None:
                return None
        elif not (equation.primitive.name == "broadcast_in_dim" and name == "shape"):
            params.append((name, value))
    key = (equation.primitive.name, tuple(params), str(equation.outvars[0].aval.dtype))
    try:
        hash(key)
    except TypeError:
        return None
    return key


@dataclass(eq=False)
class _Group:
    """Carried leaves that are updated together: a parameter and what its optimizer keeps for it.

    Attributes:
        slots: Their positions in the carried state, ascending.
        equations: What computes their new values, operands first.
        others: Arrays of the same shape that go in: the gradient.
        scalars: Numbers that go in.
    divisors: Those of them that divide something here and are used elsewhere too.
        key: Equal for groups to which the same is done.
    """

    slots: list[int]
    equations: list[Any] = field(default_factory=list)
    others: list[Any] = field(default_factory=list)
    scalars: list[Any] = field(default_factory=list)
    divisors: list[Any] = field(default_factory=list)
    key: Any = None


class _Search:
    """Finds the groups of a program that can be merged.

    Args:
        program: The program.
        carried: How many of its arguments, and of its results, are the carried state.
        most: The most elements of a leaf.
    """

    def __init__(self, program: _Program, carried: int, most: int) -> None:
        self.program = program
        self.new = dict(enumerate(program.outs[:carried]))
        self.old = {var: slot for slot, var in enumerate(program.invars[:carried])}
        fit = [slot for var, slot in self.old.items() if _fits(var.aval, self.new[slot], most)]
        self.inner = {slot: self._reach(self.new[slot]) for slot in fit}

    def _is_step(self, atom: Any, shape: Any) -> bool:
        """Whether a value is computed elementwise from arrays of its own shape and from numbers."""
        equation = None if isinstance(atom, Literal) else self.program.source.get(atom)
        if equation is None or len(equation.outvars) > 1 or _key_of(equation) is None:
            return False
        shapes = {operand.aval.shape for operand in equation.invars}
        if equation.primitive.name == "broadcast_in_dim":
            return shapes == {()}
        return equation.primitive.name in _EXACT and shapes <= {(), shape}

    def _reach(self, root: Any) -> set[Any]:
        """All variables of this shape from which the root is computed elementwise, with itself."""
        found, left = {root}, [root]
        while left:
            atom = left.pop()
            if self._is_step(atom, root.aval.shape):
                for operand in self.program.source[atom].invars:
                    if operand.aval.shape == root.aval.shape and operand not in found:
                        found.add(operand)
                        left.append(operand)
        return found

    def groups(self) -> list[_Group]:
        """All groups whose update is elementwise, each with its key."""
        owner = {slot: slot for slot in self.inner}

        def root(slot: int) -> int:
            while owner[slot] != slot:
                slot = owner[slot]
            return slot

        for slot, inner in self.inner.items():
            for var in inner:
                other = self.old.get(var)
                if other in owner:
                    owner[root(other)] = root(slot)
        members: dict[int, list[int]] = {}
        for slot in self.inner:
            members.setdefault(root(slot), []).append(slot)
        groups = [self._described(_Group(sorted(slots))) for slots in members.values()]
        return [group for group in groups if group.key is not None]

    def _described(self, group: _Group) -> _Group:
        """Writes the group's update down as a list in which only the arrays are left open."""
        numbers: dict[Any, Any] = {}
        shape = self.program.invars[group.slots[0]].aval.shape
        lines: list[Any] = []
        left = [self.new[slot] for slot in reversed(group.slots)]
        while left:
            atom = left[-1]
            if atom in numbers:
                left.pop()
                continue
            slot = self.old.get(atom)
            if slot is not None and slot in self.inner:
                numbers[atom] = ("old", group.slots.index(slot))
            elif not self._is_step(atom, shape):
                if self._is_product(atom):
                    return group
                numbers[atom] = ("other", len(group.others), str(atom.aval.dtype))
                group.others.append(atom)
            else:
                equation = self.program.source[atom]
                arrays = [a for a in equation.invars if a.aval.shape == shape and a not in numbers]
                if arrays:
                    left.extend(reversed(arrays))
                    continue
                line: list[Any] = []
                for operand in equation.invars:
                    if operand.aval.shape == shape:
                        line.append(numbers[operand])
                        continue
                    several = self.program.divides_several(equation, operand)
                    line.append(("scalar", self.program.number(operand), str(operand.aval.dtype), several))
                    group.scalars += [operand] if isinstance(operand, Var) else []
                    group.divisors += [operand] if several else []
                lines.append((_key_of(equation), tuple(line)))
                group.equations.append(equation)
                numbers[atom] = ("line", len(lines))
        if lines and (group.others or not group.divisors) and self._is_closed(group):
            slots = tuple((str(self.program.invars[s].aval.dtype), numbers[self.new[s]]) for s in group.slots)
            group.key = (slots, tuple(lines))
        return group

    def _is_closed(self, group: _Group) -> bool:
        """Whether nothing but the update itself reads what lies between old and new values, nor the new ones."""
        inside = Counter(atom for equation in group.equations for atom in equation.invars if isinstance(atom, Var))
        inside.update(self.new[slot] for slot in group.slots)
        return all(inside[e.outvars[0]] == self.program.uses[e.outvars[0]] for e in group.equations)

    def _is_product(self, atom: Any) -> bool:
        """Whether a value is a product, perhaps moved about.

        The processor adds something to a product with one rounding instead of two where the compiler puts both into
        one loop. So what adds to a product must not be moved away from it.
        """
        left, seen = [atom], set()
        while left:
            equation = self.program.source.get(left.pop())
            if equation is None or id(equation) in seen:
                continue
            seen.add(id(equation))
            if equation.primitive.name in _PRODUCTS:
                return True
            if equation.primitive.name in _MOVES:
                left += [operand for operand in equation.invars if isinstance(operand, Var)]
        return False

    def classes(self, fewest: int) -> list[list[_Group]]:
        """Groups to which the same is done, two or more each, with at least so many leaves in each."""
        alike: dict[Any, list[_Group]] = {}
        for group in self.groups():
            if len(group.slots) >= fewest:
                alike.setdefault(group.key, []).append(group)
        return [groups for groups in alike.values() if len(groups) > 1]


def _fits(old: Any, new: Any, most: int) -> bool:
    plain = isinstance(new, Var) and not old.weak_type and not new.aval.weak_type
    return (
        plain
        and old.ndim > 0
        and 0 not in old.shape and 1 not in old.shape
        and old.size <= most
        and (new.aval.shape, new.aval.dtype) == (old.shape, old.dtype)
        and not jax.dtypes.issubdtype(old.dtype, jax.dtypes.extended)
    )


class _Vectors:
    """One class of groups: each of their slots as one vector.

    Args:
        program: The program that they are part of.
        search: What found them.
        groups: Two or more groups with equal keys.
    """

    def __init__(self, program: _Program, search: _Search, groups: list[_Group]) -> None:
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
    return list(jax.lax.optimization_barrier(arrays))


def _function(equations: list[Any], operands: list[Any], results: list[Any]) -> Callable[..., Any]:
    info = DebugInfo("merged updates", "training_step", ("",) * len(operands), ("",) * len(results))
    return jaxpr_as_fun(ClosedJaxpr(Jaxpr((), operands, results, equations, frozenset(), info), ()))


class _Plan:
    """A program whose carried state is partly packed into vectors.

    Args:
        program: The program.
        search: What found the classes.
        classes: Groups that are merged.
    """

    def __init__(self, program: _Program, search: _Search, classes: list[list[_Group]]) -> None:
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
        read = dict.fromkeys(atom for e in equations for atom in e.invars if isinstance(atom, Var))
        self.operands = [var for var in read if var not in set(self.rest)]
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
        env.update((var, self._leaf(columns, slot)) for var, slot in self.old.items())
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

    Attributes:
        merged: How many leaves of the carried state went into how many vectors.
    """

    def __init__(
        self, body: Callable[[Any, Any], Any], carry: Any, inputs: Any, *, merge: bool = True, most: int = MOST_ELEMENTS, fewest: int = 1
    ) -> None:
        self._body, self._plan = body, None
        closed, shape = jax.make_jaxpr(body, return_shape=True)(carry, inputs)
        self._treedef = jax.tree_util.tree_structure(carry)
        count = self._treedef.num_leaves
        old, new = closed.in_avals[:count], closed.out_avals
        self._call: Callable[..., Any] | None = None
        if jax.tree_util.tree_structure(shape) == self._treedef and all(map(_stays, old, new)):
            self._call = jaxpr_as_fun(closed)
            if merge and not closed.effects:
                program = _Program(closed)
                search = _Search(program, count, most)
                classes = search.classes(fewest)
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
