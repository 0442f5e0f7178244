"""From a checkpoint on disk into a module: the dictionary that hooks see, and the weights."""

from __future__ import annotations

from typing import Any

from jaxlightning.checkpoint import _contents, _io, _stored
from jaxlightning.utilities.rank_zero import rank_zero_warn


def load_dictionary(stored: _stored.StoredCheckpoint, *, training_state: bool) -> dict[str, Any]:
    """Read a checkpoint into Lightning's dictionary.

    Args:
        stored: The checkpoint.
        training_state: Whether optimizer states, gradients and metric sums are read too.

    Returns:
        The dictionary; arrays are numpy.
    """
    names = _io.TREES if training_state else ("params", "variables")
    return _contents.join_from_disk(stored.body(), {name: stored.tree(name) for name in names})


def load_weights_into(
    module: Any, flat: dict[str, Any], *, stored: _stored.StoredCheckpoint | None, strict: bool
) -> None:
    """Set a module's parameters and variables from a flat `state_dict`, whether they exist already or not.

    Args:
        module: The module.
        flat: Dotted names to arrays, perhaps changed by hooks.
        stored: The checkpoint that they come from, which knows where each belongs.
        strict: Whether missing and unexpected names are errors; otherwise they are warnings.

    Raises:
        RuntimeError: The names or shapes do not fit.
    """
    engine = module._require_engine()
    here = engine.state_dict()
    own = _contents.state_dict_places(here["params"], here["variables"])
    places = {name: place for name, (place, _) in own.items()}
    if stored is not None:
        saved = _contents.state_dict_places(stored.tree("params") or {}, stored.tree("variables") or {})
        places = {**{name: place for name, (place, _) in saved.items()}, **places}
    networks = [network.name for network in engine.networks()]
    params, variables = _contents.nested_state(flat, places, networks)
    if not strict:
        _warn_about_differences(flat, own, networks, params, variables)
    bare = None if stored is None else stored.body().get("networks_without_variables")
    engine.load_state_dict({"params": params, "variables": variables}, strict=strict, weights_only=True, bare=bare)


def _warn_about_differences(
    flat: dict[str, Any], own: dict[str, Any], networks: list[str], params: dict[str, Any], variables: dict[str, Any]
) -> None:
    """Say what a loading that is not strict leaves as it is."""
    created = {path[0] for (_, path), _ in own.values()}
    # A network that gets its variables from its first call has no names yet, only its own.
    missing = [name for name in own if name not in flat]
    missing += [f"{n}.*" for n in networks if n not in created and n not in params and n not in variables]
    known = [network for network in networks if network not in created]
    unexpected = [name for name in flat if name not in own and not any(name.startswith(f"{n}.") for n in known)]
    if missing:
        rank_zero_warn(f"Found keys that are in the model state dict but not in the checkpoint: {missing}")
    if unexpected:
        rank_zero_warn(f"Found keys that are not in the model state dict but in the checkpoint: {unexpected}")
