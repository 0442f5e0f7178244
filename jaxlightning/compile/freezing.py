"""Which parameters are frozen: decisions made by `freeze` and `unfreeze`, and what they mean for a training step.

A frozen parameter is not differentiated, and neither it nor its part of the optimizer state is touched. Decisions are
patterns over paths, so that they can be made before the parameters exist; the last one that matches a path counts.
"""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax

from jaxlightning.compile.paths import flatten, merge, select, unflatten

if TYPE_CHECKING:
    from jaxlightning.compile.binding import Binding

__all__ = [
    "Decision",
    "Frozen",
    "decide",
    "decisions_of",
    "frozen_of",
    "initial_mode",
    "is_frozen",
    "keep_frozen",
    "keep_statistics",
    "norm_layers",
    "patterns_of",
    "without_frozen",
]

_order = itertools.count()


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One call of `freeze` or `unfreeze`.

    Attributes:
        patterns: `fnmatch` patterns over parameter paths; one also selects everything below it.
        frozen: Whether the parameters are frozen by it.
        train_norms: Whether batch normalisation layers are left out of a freezing, and made trainable.
        statistics: Whether the running statistics of these layers are still updated in training mode.
        mode: The mode in which networks are put that are meant as a whole; None leaves it.
        order: Grows with every call.
    """

    patterns: tuple[str, ...]
    frozen: bool
    train_norms: bool = False
    statistics: bool = True
    mode: bool | None = None
    order: int = 0

    def matches(self, path: str) -> bool:
        """Whether the parameter at `path` is meant."""
        return any(
            pattern == "*" or path == pattern or path.startswith(pattern + "/") or fnmatch.fnmatchcase(path, pattern)
            for pattern in self.patterns
        )


@dataclass(frozen=True, kw_only=True)
class Frozen:
    """What the decisions mean for existing variables.

    Attributes:
        params: Paths of frozen parameters.
        statistics: Paths of running statistics that stay as they are, `network/collection/.../name`.
    """

    params: frozenset[str]
    statistics: frozenset[str]


def decide(module: Any, decision: Decision) -> None:
    """Adds a decision to a module and tells its engine."""
    known: list[Decision] = module.__dict__.setdefault("_freezing", [])
    if "*" in decision.patterns and not decision.train_norms:
        known.clear()  # it overrules everything before
    known.append(replace(decision, order=next(_order)))
    engine = module.__dict__.get("_engine")
    if engine is not None:
        engine.modes_changed()


def decisions_of(owners: Mapping[str, Any]) -> tuple[Decision, ...]:
    """The decisions of a module and its child modules, as `owners_of` gives them, in the order of their making."""
    found = [
        replace(decision, patterns=tuple(prefix + pattern for pattern in decision.patterns))
        for prefix, owner in owners.items()
        for decision in owner.__dict__.get("_freezing", ())
    ]
    return tuple(sorted(found, key=lambda decision: decision.order))


def initial_mode(decisions: Iterable[Decision], network: str, training: bool) -> bool:
    """The mode in which a network starts: the module's, or what freezing it as a whole said."""
    for decision in decisions:
        if decision.mode is not None and any(fnmatch.fnmatchcase(network, pattern) for pattern in decision.patterns):
            training = decision.mode
    return training


def norm_layers(variables: Mapping[str, Any]) -> dict[str, list[str]]:
    """Batch normalisation layers, known by their running `mean` and `var`.

    Args:
        variables: `{network: {collection: nested}}`.

    Returns:
        For each layer's path among the parameters (`network/.../layer`) the paths of its statistics.
    """
    flat = flatten(variables)
    layers: dict[str, list[str]] = {}
    for path in flat:
        network, _, rest = path.partition("/")
        _, _, inner = rest.partition("/")
        layer, _, name = inner.rpartition("/")
        if name in ("mean", "var"):
            place = f"{network}/{layer}" if layer else network
            layers.setdefault(place, []).append(path)
    return {place: paths for place, paths in layers.items() if len(paths) == 2}


def frozen_of(binding: Binding, params: Mapping[str, Any], variables: Mapping[str, Any]) -> Frozen | None:
    """What is frozen among existing variables; None if nothing was ever frozen."""
    decisions = decisions_of(binding.owners)
    if not any(decision.frozen for decision in decisions):
        return None
    layers = norm_layers(variables)
    frozen, still = set(), set()
    for path in [*flatten(params), *(f"{layer}/" for layer in layers)]:
        layer = path.rpartition("/")[0]
        held, tracked = _judge(decisions, path, layer in layers)
        if held:
            frozen.add(path)
        if layer in layers and not tracked:
            still.update(layers[layer])
    return Frozen(params=frozenset(frozen), statistics=frozenset(still))


def _judge(decisions: Iterable[Decision], path: str, is_norm: bool) -> tuple[bool, bool]:
    """Whether a parameter is frozen, and whether the statistics of its layer are updated."""
    held, tracked = False, True
    for decision in decisions:
        if decision.matches(path):
            held = decision.frozen and not (is_norm and decision.train_norms)
            tracked = decision.statistics or not held
    return held, tracked


def is_frozen(decisions: Iterable[Decision], path: str, layers: Mapping[str, Any]) -> bool:
    """Whether the parameter at `path` is frozen.

    Args:
        decisions: From `decisions_of`.
        path: Its path.
        layers: Batch normalisation layers, from `norm_layers`.
    """
    return _judge(decisions, path, path.rpartition("/")[0] in layers)[0]


def without_frozen(frozen: Frozen | None, params: Mapping[str, Any], grads: Any) -> Any:
    """Gradients with zeros where parameters are frozen, so that their structure never changes."""
    if frozen is None or grads is None:
        return grads
    held = select(params, frozen.params.__contains__)
    return merge(jax.tree.map(jax.numpy.zeros_like, held), grads)


def keep_statistics(frozen: Frozen | None, new: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    """Variables after a step with the frozen statistics as they were."""
    if frozen is None or not frozen.statistics:
        return new
    before = flatten(old)
    return merge(new, unflatten({path: before[path] for path in frozen.statistics}))


def keep_frozen(frozen: Frozen, params: Mapping[str, Any], new: Any, old: Any, *, grouped: bool) -> Any:
    """An optimizer state after an update with everything that belongs to frozen parameters as it was.

    Leaves that mirror a parameter end with its path. What an optimizer counts for all of its parameters (or for all of
    a group) stands still when all of them are frozen.

    Args:
        frozen: What is frozen.
        params: The parameters that the optimizer owns.
        new: The state after the update.
        old: The state before it.
        grouped: Whether the state is a tuple with one state per parameter group.

    Returns:
        The state to go on with.
    """
    own = set(flatten(params))
    if own <= frozen.params:
        return old
    if grouped and len(new) > 1:
        pairs = zip(new, old, strict=True)
        return tuple(_keep(frozen, own, after, before, all_of=True) for after, before in pairs)
    return _keep(frozen, own, new, old, all_of=False)


def _keep(frozen: Frozen, own: set[str], new: Any, old: Any, *, all_of: bool) -> Any:
    leaves, treedef = jax.tree_util.tree_flatten_with_path(new)
    before = jax.tree.leaves(old)
    owners = [_owner(jax.tree_util.keystr(path, simple=True, separator="/"), own) for path, _ in leaves]
    if all_of and {owner for owner in owners if owner} <= frozen.params:
        return old
    return jax.tree_util.tree_unflatten(
        treedef,
        [
            past if owner in frozen.params else leaf
            for owner, (_, leaf), past in zip(owners, leaves, before, strict=True)
        ],
    )


def _owner(path: str, own: set[str]) -> str | None:
    """The parameter whose path ends the path of a leaf of an optimizer state, the longest if there are several."""
    parts = path.split("/")
    for start in range(len(parts)):
        tail = "/".join(parts[start:])
        if tail in own:
            return tail
    return None


def patterns_of(module: Any, what: Any) -> tuple[str, ...]:
    """The path patterns that a user's choice of networks means.

    Args:
        module: The Lightning module that holds them.
        what: A network on the module, a path pattern, a selection, a (child) Lightning module, or a list or dictionary
            of these.

    Returns:
        Patterns over parameter paths.

    Raises:
        TypeError: If a part is none of these, or a network that the module does not hold.
    """
    if isinstance(what, str):
        return (what,)
    if isinstance(what, Mapping):
        return tuple(pattern for item in what.values() for pattern in patterns_of(module, item))
    patterns = getattr(what, "patterns", None)
    if patterns is not None:
        return tuple(patterns)
    from jaxlightning.compile.networks import LinenNetwork, is_network, walk
    from jaxlightning.compile.owners import owners_of

    for prefix, owner in owners_of(module).items():
        if owner is what:
            return (f"{prefix}*",)
    if isinstance(what, LinenNetwork):
        return (what._path,)
    if is_network(what):
        for prefix, owner in owners_of(module).items():
            held = {**owner.__dict__, **owner.__dict__.get("_nnx_attributes", {})}
            for name, value in held.items():
                for path, network in walk(value, prefix + name) if name != "_nnx_attributes" else ():
                    if network is what:
                        return (path,)
                    inside = _inside_nnx(network, what)
                    if inside is not None:
                        return (f"{path}/{inside}",)
    elif isinstance(what, Iterable):
        return tuple(pattern for item in what for pattern in patterns_of(module, item))
    raise TypeError(
        f"{type(what).__name__} is no network that {type(module).__name__} holds. Name networks such as "
        "`self.backbone`, path patterns such as 'net/Dense_0', `net.parameters()`, or a list of these."
    )


def _inside_nnx(network: Any, part: Any) -> str | None:
    """The path of an NNX module inside another one."""
    from jaxlightning.compile.networks import is_nnx

    if not (is_nnx(network) and is_nnx(part)):
        return None
    from flax import nnx

    for path, found in nnx.iter_modules(network):
        if found is part:
            return "/".join(map(str, path))
    return None
