"""The checkpoint dictionary that hooks see, and its parts on disk.

In memory a checkpoint is Lightning's dictionary: `state_dict` is flat, `{"net.Dense_0.kernel": array}`. On disk
parameters and other variables are two trees. Both forms are made from each other here, so that hooks may change the
flat one.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from typing import Any

#: Keys of the dictionary that are trees on disk.
STATE_DICT = "state_dict"
OPTIMIZER_STATES = "optimizer_states"
GRADIENTS = "gradients"

#: Where a leaf of `state_dict` belongs: the tree, and the keys inside it.
Place = tuple[str, tuple[str, ...]]


def state_dict_places(params: Mapping[str, Any], variables: Mapping[str, Any]) -> dict[str, tuple[Place, Any]]:
    """Flatten parameters and variables to dotted names.

    Args:
        params: `{network: nested}`.
        variables: `{network: {collection: nested}}`.

    Returns:
        Dotted name to the place and the leaf.

    Raises:
        ValueError: Two leaves get one name.
    """
    flat: dict[str, tuple[Place, Any]] = {}
    for section, tree in (("params", params), ("variables", variables)):
        for path, leaf in _leaves(tree, ()):
            # NNX has no collections of its own: one network has one flat list of names there.
            shown = (path[0], *path[2:]) if section == "variables" and path[1:2] == ("nnx",) else path
            name = ".".join(shown)
            if name in flat:
                raise ValueError(f"The {section} {path} and {flat[name][0]} would both be called {name!r}.")
            flat[name] = ((section, path), leaf)
    return flat


def flat_state_dict(params: Mapping[str, Any], variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flat `state_dict` of parameters and variables."""
    return {name: leaf for name, (_, leaf) in state_dict_places(params, variables).items()}


def nested_state(
    flat: Mapping[str, Any], places: Mapping[str, Place], networks: Iterable[str] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Turn a flat `state_dict` back into parameters and variables.

    Args:
        flat: Dotted name to array; hooks may have added, removed and renamed entries.
        places: Where the names that are known belong.
        networks: Names of the networks, to read names that are not known: what follows a network's name is a path
            among its parameters.

    Returns:
        `(params, variables)`.
    """
    trees: dict[str, dict[str, Any]] = {"params": {}, "variables": {}}
    known = sorted(networks, key=len, reverse=True)  # "net.0" before "net"
    for name, leaf in flat.items():
        section, path = places[name] if name in places else ("params", _guess(name, known))
        node = trees[section]
        for key in path[:-1]:
            child = node.setdefault(key, {})
            if not isinstance(child, dict):
                raise ValueError(f"The entry {name!r} of the state_dict lies below another entry.")
            node = child
        node[path[-1]] = leaf
    return trees["params"], trees["variables"]


def split_for_disk(
    checkpoint: Mapping[str, Any], places: Mapping[str, Place], networks: Iterable[str] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the dictionary into JSON-able values and trees of arrays.

    Args:
        checkpoint: The dictionary after all hooks.
        places: Where the entries of `state_dict` belong.
        networks: Names of the networks (see `nested_state`).

    Returns:
        `(body, trees)` for `_io.snapshot`.
    """
    body = {key: value for key, value in checkpoint.items() if key not in (STATE_DICT, GRADIENTS)}
    params, variables = nested_state(checkpoint.get(STATE_DICT) or {}, places, networks)
    trees: dict[str, Any] = {"params": params, "variables": variables}
    if checkpoint.get(GRADIENTS):
        trees[GRADIENTS] = checkpoint[GRADIENTS]
    optimizers = checkpoint.get(OPTIMIZER_STATES)
    if isinstance(optimizers, list) and all(isinstance(entry, Mapping) for entry in optimizers):
        trees[OPTIMIZER_STATES] = [entry.get("state", {}) for entry in optimizers]
        body[OPTIMIZER_STATES] = [{k: v for k, v in entry.items() if k != "state"} for entry in optimizers]
    return body, trees


def join_from_disk(body: Mapping[str, Any], trees: Mapping[str, Any]) -> dict[str, Any]:
    """Put the dictionary together again: the inverse of `split_for_disk`.

    Args:
        body: The JSON-able values.
        trees: Those trees that were read; None or missing ones are left out of the dictionary.

    Returns:
        The dictionary, with Lightning's order of keys.
    """
    checkpoint: dict[str, Any] = {}
    for key, value in body.items():
        if key == "loops":
            checkpoint[STATE_DICT] = flat_state_dict(trees.get("params") or {}, trees.get("variables") or {})
        if key == OPTIMIZER_STATES and trees.get(OPTIMIZER_STATES) is not None:
            value = [{"state": state, **host} for state, host in zip(trees[OPTIMIZER_STATES], value, strict=True)]
        checkpoint[key] = value
    if STATE_DICT not in checkpoint:
        checkpoint[STATE_DICT] = flat_state_dict(trees.get("params") or {}, trees.get("variables") or {})
    if trees.get(GRADIENTS) is not None:
        checkpoint[GRADIENTS] = trees[GRADIENTS]
    return checkpoint


def versions() -> dict[str, Any]:
    """Return what a checkpoint says about the software that wrote it."""
    import importlib.metadata as metadata

    import jaxlightning

    found = {}
    for package in ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    own = getattr(jaxlightning, "__version__", None)
    if own is None:
        try:
            own = metadata.version("jaxlightning")
        except metadata.PackageNotFoundError:
            own = "unknown"
    return {"jaxlightning_version": own, "versions": {"python": platform.python_version(), **found}}


def _leaves(tree: Any, path: tuple[str, ...]) -> Iterable[tuple[tuple[str, ...], Any]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves(value, (*path, str(key)))
    else:
        yield path, tree


def _guess(name: str, networks: list[str]) -> tuple[str, ...]:
    for network in networks:
        if name.startswith(network + "."):
            return (network, *name[len(network) + 1 :].split("."))
    return tuple(name.split("."))
