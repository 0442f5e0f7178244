"""The base of the torch-named optimizers: parameter groups on the host, one optax chain per group in the step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import optax

from jaxlightning.optim._groups import ParamGroup, Selection, _AnyOf, as_selection, assign_groups, leaf_paths
from jaxlightning.optim._handle import OptimizerHandle, as_number, settle
from jaxlightning.utilities.exceptions import MisconfigurationException


class Optimizer(OptimizerHandle):
    """Base of the optimizers that carry torch's names, arguments and update rules.

    A sub-class lists its numeric options in `_hyper_fields` (they become inputs of the compiled step; an entry
    `"betas.1"` means the second number of the tuple `betas`) and builds the optax chain of one group in `_rule`.

    Args:
        params: What the optimizer owns: `self.parameters()`, a path pattern, a list of these, or a list of
            dictionaries, one per parameter group, with `"params"` and values that differ from `defaults`.
        defaults: The options of a group that does not give its own.
    """

    _hyper_fields: ClassVar[tuple[str, ...]] = ("lr", "weight_decay")
    # Numbers m of which the step also gets 1 - m, taken in double precision: float32 loses digits in the difference.
    _complements: ClassVar[tuple[str, ...]] = ()
    # Options of torch's implementation: which kernel to launch. XLA always fuses, so only the default is meaningful.
    _implementation: ClassVar[frozenset[str]] = frozenset({"foreach", "fused", "capturable", "differentiable"})

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        super().__init__()
        self.name = type(self).__name__
        self.defaults = dict(defaults)
        self.param_groups = []
        self._needs: list[frozenset[str]] = []
        for group in _split_groups(params, self.name):
            self.add_param_group(group)

    # --- groups -------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: Mapping[str, Any]) -> None:
        """Adds a parameter group, as torch's method of this name.

        Args:
            param_group: A dictionary with `"params"`; missing options are the optimizer's defaults.

        Raises:
            TypeError: If it is not a dictionary, or holds something that does not name parameters.
            ValueError: If an option is out of range.
        """
        if not isinstance(param_group, Mapping):
            raise TypeError(f"A parameter group must be a dictionary, but got {type(param_group).__name__}.")
        if "params" not in param_group:
            raise ValueError(f"A parameter group of {self.name} needs the key 'params'; it has {list(param_group)}.")
        values = {**param_group, "params": as_selection(param_group["params"])}
        for key, default in self.defaults.items():
            values.setdefault(key, default)
        for field in self._hyper_fields:
            key, _, _ = field.partition(".")
            values[key] = self._clean(key, values[key])
        self._refuse_implementation(values)
        self._validate(values)
        self.param_groups.append(ParamGroup(values, self._on_change))
        selections: list[Selection] = [group["params"] for group in self.param_groups]
        self.owns = selections[0] if len(selections) == 1 else _AnyOf(tuple(selections))
        self.structure_version += 1
        self._initialised = False
        self._changed()

    def _refuse_implementation(self, values: Mapping[str, Any]) -> None:
        for key in self._implementation & set(values):
            if values[key]:
                raise MisconfigurationException(
                    f"{self.name}({key}={values[key]!r}): this option chooses between implementations inside torch. "
                    "Here XLA compiles and fuses the whole step, so there is nothing to choose; leave it out."
                )

    def _validate(self, group: Mapping[str, Any]) -> None:
        """Checks the options of one group; sub-classes add theirs.

        Raises:
            ValueError: If an option is out of range.
        """
        require(group["lr"] >= 0.0, self.name, "lr", group["lr"], "at least 0")
        if "weight_decay" in group:
            require(group["weight_decay"] >= 0.0, self.name, "weight_decay", group["weight_decay"], "at least 0")

    def _clean(self, key: str, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return tuple(as_number(item, f"{self.name}: {key!r}") for item in value)
        return as_number(value, f"{self.name}: {key!r}")

    def _on_change(self, group: ParamGroup, key: str, value: Any) -> Any:
        if key not in self.defaults:
            if key == "params" and value is not group.get("params"):
                raise MisconfigurationException(
                    f"The parameters of a group of {self.name} cannot be exchanged; use `add_param_group`."
                )
            return value
        if any(field == key or field.startswith(key + ".") for field in self._hyper_fields):
            value = self._clean(key, value)
        elif self._initialised and value != group[key]:
            raise MisconfigurationException(
                f"{self.name}: {key!r} is part of the compiled update rule and cannot change from {group[key]!r} to "
                f"{value!r} during a run. Set it in `configure_optimizers`."
            )
        if self._initialised:
            index = next(i for i, own in enumerate(self.param_groups) if own is group)
            more = self._pieces({**group, key: value}) - self._needs[index]
            if more:
                raise MisconfigurationException(
                    f"{self.name}: changing {key!r} from {group[key]!r} to {value!r} would need state "
                    f"({', '.join(sorted(more))}) that this run does not keep. Start with a value other than zero in "
                    "`configure_optimizers`."
                )
        self._changed()
        return value

    # --- hyper-parameters ---------------------------------------------------------------------------------------

    @property
    def hyper_names(self) -> list[str]:
        """A name for every entry of the hyper-parameter vector, for example `"0.lr"`."""
        names = (*self._hyper_fields, *(f"1-{key}" for key in self._complements))
        return [f"{index}.{name}" for index in range(len(self.param_groups)) for name in names]

    def _collect_hyper(self) -> list[float]:
        out: list[float] = []
        for group in self.param_groups:
            for field in self._hyper_fields:
                key, _, index = field.partition(".")
                out.append(float(group[key][int(index)] if index else group[key]))
            out.extend(1.0 - float(group[key]) for key in self._complements)
        return out

    def _options(self, group: Mapping[str, Any], hyper: Sequence[Any]) -> dict[str, Any]:
        """The options of a group with the numbers of `hyper` (traced in the step) in their places."""
        options = {key: group[key] for key in self.defaults}
        fields = len(self._hyper_fields)
        options.update(zip((f"1-{key}" for key in self._complements), hyper[fields:], strict=True))
        for field, value in zip(self._hyper_fields, hyper[:fields], strict=True):
            key, _, index = field.partition(".")
            if index:
                numbers = list(options[key])
                numbers[int(index)] = value
                options[key] = tuple(numbers)
            else:
                options[key] = value
        return options

    # --- the rule -----------------------------------------------------------------------------------------------

    def _pieces(self, group: Mapping[str, Any]) -> frozenset[str]:
        """Which optional pieces of state the options ask for; fixed once the state exists."""
        return frozenset()

    def _rule(self, options: Mapping[str, Any], pieces: frozenset[str]) -> optax.GradientTransformation:
        """The optax chain of one group.

        Args:
            options: The group's options; numeric ones may be traced.
            pieces: What `_pieces` said when the state was made.
        """
        raise NotImplementedError

    def init(self, params: Any) -> tuple[Any, ...]:
        """Makes the optimizer state: a tuple with one optax state per group.

        Args:
            params: Nested dictionary `{network: tree}` of the owned parameters.

        Returns:
            The state.

        Raises:
            ValueError: If there are no parameters, or one is in no group or in two.
        """
        parts = self._split(params)
        self._needs = [self._pieces(group) for group in self.param_groups]
        self._initialised = True
        hyper = self.host_hyper()
        return tuple(
            settle(self._rule(self._options(group, self._slice(hyper, index)), self._needs[index]).init(part))
            for index, (group, part) in enumerate(zip(self.param_groups, parts, strict=True))
        )

    def update(self, grads: Any, opt_state: Any, params: Any, hyper: Any, **extra: Any) -> tuple[Any, Any]:
        """Turns gradients into updates; pure, runs under a trace.

        Args:
            grads: Gradients, the same tree as `params`.
            opt_state: From `init` or the last `update`.
            params: The owned parameters.
            hyper: Float array `[n_hyper]`.
            **extra: `value`, `grad`, `value_fn`; only LBFGS uses them.

        Returns:
            `(updates, opt_state)`.
        """
        grad_parts, param_parts = self._split(grads), self._split(params)
        new_states: list[Any] = []
        new_parts: list[Any] = []
        for index, group in enumerate(self.param_groups):
            rule = self._rule(self._options(group, self._slice(hyper, index)), self._needs[index])
            updates, state = optax.with_extra_args_support(rule).update(
                grad_parts[index], opt_state[index], param_parts[index], **extra
            )
            new_parts.append(updates)
            new_states.append(settle(state, opt_state[index]))
        return _join(new_parts), tuple(new_states)

    def extend(self, opt_state: Any, params: Any) -> tuple[Any, ...]:
        """Makes the state for grown parameters or groups, keeping what exists.

        Args:
            opt_state: The current state.
            params: All parameters that the optimizer owns now.

        Returns:
            A fresh state in which every array that was there before keeps its value.
        """
        old = dict(zip(leaf_paths(opt_state), jax.tree.leaves(opt_state), strict=True))
        fresh = self.init(params)
        leaves = [
            old[path] if path in old and old[path].shape == leaf.shape else leaf
            for path, leaf in zip(leaf_paths(fresh), jax.tree.leaves(fresh), strict=True)
        ]
        out: tuple[Any, ...] = jax.tree.unflatten(jax.tree.structure(fresh), leaves)
        return out

    def _slice(self, hyper: Any, index: int) -> list[Any]:
        width = len(self._hyper_fields) + len(self._complements)
        return [hyper[index * width + offset] for offset in range(width)]

    def _split(self, tree: Any) -> list[Any]:
        """One tree per group; leaves of other groups are optax's empty node."""
        if not jax.tree.leaves(tree):
            raise ValueError(
                f"{self.name} got an empty parameter list: none of the module's parameters matches "
                f"{[group['params'] for group in self.param_groups]}."
            )
        labels = assign_groups([group["params"] for group in self.param_groups], leaf_paths(tree), self.name)
        if len(self.param_groups) == 1:
            return [tree]
        leaves, structure = jax.tree.flatten(tree)
        return [
            jax.tree.unflatten(
                structure,
                [leaf if label == index else optax.MaskedNode() for leaf, label in zip(leaves, labels, strict=True)],
            )
            for index in range(len(self.param_groups))
        ]

    def __repr__(self) -> str:
        lines = [f"{self.name} ("]
        for index, group in enumerate(self.param_groups):
            lines.append(f"Parameter Group {index}")
            lines.extend(f"    {key}: {group[key]}" for key in sorted(group) if key != "params")
        return "\n".join([*lines, ")"])


class MomentOptimizer(Optimizer):
    """Base of Adam and its relatives: two moments with decay rates `betas`, and `eps` beside the second."""

    _hyper_fields: ClassVar[tuple[str, ...]] = ("lr", "betas.0", "betas.1", "eps", "weight_decay")

    def _validate(self, group: Mapping[str, Any]) -> None:
        super()._validate(group)
        require(group["eps"] >= 0.0, self.name, "eps", group["eps"], "at least 0")
        check_betas(self.name, group["betas"])


def require(condition: bool, owner: str, name: str, value: Any, rule: str) -> None:
    """Raises ValueError unless an option obeys its rule.

    Args:
        condition: Whether it does.
        owner: The optimizer's or scheduler's name.
        name: The option's name.
        value: What was received.
        rule: What it must be, for example `"at least 0"`.

    Raises:
        ValueError: If `condition` is false.
    """
    if not condition:
        raise ValueError(f"{owner}: {name} must be {rule}, but got {value!r}.")


def check_betas(owner: str, betas: Any, count: int = 2) -> None:
    """Raises ValueError unless `betas` are numbers in [0, 1).

    Args:
        owner: The optimizer's name.
        betas: What was received.
        count: How many there must be.

    Raises:
        ValueError: If there are not `count` of them, or one is out of range.
    """
    require(isinstance(betas, tuple) and len(betas) == count, owner, "betas", betas, f"a tuple of {count} numbers")
    for index, beta in enumerate(betas):
        require(0.0 <= beta < 1.0, owner, f"betas[{index}]", beta, "in the range [0, 1)")


def _split_groups(params: Any, owner: str) -> list[Mapping[str, Any]]:
    if isinstance(params, Mapping):
        raise TypeError(
            f"{owner} got a dictionary as its parameters; wrap parameter groups in a list: [{{'params': ...}}, ...]."
        )
    if isinstance(params, Iterable) and not isinstance(params, str) and not isinstance(params, Selection):
        items: list[Any] = list(params)
        if not items:
            raise ValueError(f"{owner} got an empty parameter list.")
        if all(isinstance(item, Mapping) for item in items):
            return items
        params = items
        if any(isinstance(item, Mapping) for item in items):
            raise TypeError(f"{owner}: parameter groups (dictionaries) and parameters cannot be mixed in one list.")
    return [{"params": params}]


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def _join(parts: Sequence[Any]) -> Any:
    """Puts the trees of `Optimizer._split` together again."""
    first = parts[0]
    for other in parts[1:]:
        first = jax.tree.map(lambda a, b: b if _is_masked(a) else a, first, other, is_leaf=_is_masked)
    return first
