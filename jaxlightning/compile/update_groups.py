"""Which leaves of the state a step updates in the same elementwise way: read from its jaxpr, for `merged_updates`.

What cannot be merged without changing a bit is no group: see `_EXACT`, `_SOURCES` and `Search`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, Var

__all__ = ["Group", "Program", "Search"]

_EXACT = frozenset([
    "abs", "add", "and", "ceil", "clamp", "convert_element_type", "copy", "div", "eq", "floor", "ge", "gt",
    "integer_pow", "is_finite", "le", "lt", "max", "min", "mul", "ne", "neg", "not", "or", "round", "rsqrt",
    "select_n", "sign", "sqrt", "square", "stop_gradient", "sub", "xor"
])  # fmt: skip
"""Elementwise primitives that give the same bits wherever an element lies. `exp`, `log`, `tanh` and their like do not:
XLA computes them in one way where a whole vector register is full, and in another for what is left over. Nor is
`add_any` here, the sum of gradients: it belongs to what an update is given."""

_SCALAR = _EXACT | {"exp", "log", "pow", "sin", "cos", "tanh"}
"""What is followed through numbers, to see that what every parameter computes for itself is the same number."""

_SOURCES = frozenset(["dot_general", "reduce_max", "reduce_min", "reduce_sum"])
"""Where a gradient may come from: what is computed by itself, whoever reads it. XLA puts other operations into one loop
with their reader, and there the processor adds something to a product with one rounding instead of two."""

_MOVES = frozenset(["reshape", "squeeze", "transpose"])
_CALLS = frozenset(["jit", "pjit"])


class Program:
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
            aval: Any = atom.aval
            value = np.asarray(atom.val)
            return self._known.setdefault((str(aval.dtype), value.tobytes()), len(self._known))
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


def _combines(equation: Any) -> bool:
    """Whether every element of the result comes from several of the operand; of one, XLA makes a plain product."""
    if equation.primitive.name not in _SOURCES:
        return False
    if equation.primitive.name == "dot_general":
        axes = equation.params["dimension_numbers"][0][0]
    else:
        axes = equation.params["axes"]
    return any(equation.invars[0].aval.shape[axis] > 1 for axis in axes)


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
class Group:
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


class Search:
    """Finds the groups of a program that can be merged.

    Args:
        program: The program.
        carried: How many of its arguments, and of its results, are the carried state.
        most: The most elements of a leaf.
    """

    def __init__(self, program: Program, carried: int, most: int) -> None:
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

    def groups(self) -> list[Group]:
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
        groups = [self._described(Group(sorted(slots))) for slots in members.values()]
        return [group for group in groups if group.key is not None]

    def _described(self, group: Group) -> Group:
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
                if not self._stands_alone(atom):
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

    def _is_closed(self, group: Group) -> bool:
        """Whether nothing but the update itself reads what lies between old and new values, nor the new ones."""
        inside = Counter(atom for equation in group.equations for atom in equation.invars if isinstance(atom, Var))
        inside.update(self.new[slot] for slot in group.slots)
        return all(inside[e.outvars[0]] == self.program.uses[e.outvars[0]] for e in group.equations)

    def _stands_alone(self, atom: Any) -> bool:
        """Whether a value comes from `_SOURCES` or from outside, perhaps moved about or added up."""
        left = [atom]
        while left:
            var = left.pop()
            equation = None if isinstance(var, Literal) else self.program.source.get(var)
            if equation is None or _combines(equation):
                continue
            name = equation.primitive.name
            if name not in _MOVES and name != "add_any" and name not in _SOURCES - {"dot_general"}:
                return False
            left += equation.invars
        return True

    def classes(self, groups: int, leaves: int) -> list[list[Group]]:
        """Groups to which the same is done: at least so many, with at least so many leaves in each."""
        alike: dict[Any, list[Group]] = {}
        for group in self.groups():
            if len(group.slots) >= leaves:
                alike.setdefault(group.key, []).append(group)
        return [each for each in alike.values() if len(each) >= groups]


def _fits(old: Any, new: Any, most: int) -> bool:
    aval = new.aval
    return (
        isinstance(new, Var)
        and not old.weak_type
        and not aval.weak_type
        and old.ndim > 0
        and 0 not in old.shape
        and 1 not in old.shape
        and old.size <= most
        and (aval.shape, aval.dtype) == (old.shape, old.dtype)
        and not jnp.issubdtype(old.dtype, jax.dtypes.extended)
    )
