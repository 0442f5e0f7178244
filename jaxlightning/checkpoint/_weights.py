"""From a checkpoint on disk into a module: the dictionary that hooks see, and the weights."""

from __future__ import annotations

from typing import Any

from jaxlightning.checkpoint import _contents, _io
from jaxlightning.utilities.rank_zero import rank_zero_warn


def load_dictionary(stored: _io.StoredCheckpoint, *, training_state: bool) -> dict[str, Any]:
    """Read a checkpoint into Lightning's dictionary.

    Args:
        stored: The checkpoint.
        training_state: Whether optimizer states, gradients and metric sums are read too.

    Returns:
        The dictionary; arrays are numpy.
    """
    names = _io.TREES if training_state else ("params", "variables")
    return _contents.join_from_disk(stored.body(), {name: stored.tree(name) for name in names})


def load_weights_into(module: Any, flat: dict[str, Any], *, stored: _io.StoredCheckpoint | None, strict: bool) -> None:
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
    if not strict and own:
        missing, unexpected = [name for name in own if name not in flat], [name for name in flat if name not in own]
        if missing:
            rank_zero_warn(f"Found keys that are in the model state dict but not in the checkpoint: {missing}")
        if unexpected:
            rank_zero_warn(f"Found keys that are not in the model state dict but in the checkpoint: {unexpected}")
    engine.load_state_dict({"params": params, "variables": variables}, strict=strict, weights_only=True)
