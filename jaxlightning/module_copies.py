"""What `copy.deepcopy`, `copy.copy` and `pickle` take of a module: everything but the trainer and the engine.

The engine holds compiled steps, device arrays and the optimizer states of a run. A copy is a module of its own: its
networks are plain again, as before it met a trainer, and it carries the weights until an engine of its own takes them.
"""

from __future__ import annotations

from typing import Any

from jaxlightning.compile.foreign_networks import ForeignNetwork
from jaxlightning.compile.networks import LinenNetwork, rebuild, walk

__all__ = ["detached_state", "take_copied_weights", "weights_of"]

_WEIGHTS = "_copied_weights"


def detached_state(module: Any) -> dict[str, Any]:
    """The attributes of a module without its trainer and engine, with the present weights beside them.

    Args:
        module: A module, or a module that is an attribute of another one.
    """
    state: dict[str, Any] = dict(module.__dict__)
    engine = state.get("_engine")
    state["_trainer"] = state["_engine"] = None
    if engine is None:
        return state
    engine.refresh_nnx()
    state.update(state.pop("_nnx_attributes", {}))
    for name in state.pop("_carried", ()):
        state[name] = engine.read_attribute(module, name)
    for name, value in list(state.items()):
        if any(isinstance(network, LinenNetwork) for _, network in walk(value, "")):
            state[name] = rebuild(value, _plain)
    state[_WEIGHTS] = weights_of(module, engine)
    return state


def weights_of(module: Any, engine: Any) -> dict[str, Any]:
    """What an engine holds of a module: parameters, other variables and modes, by their names on the module.

    Args:
        module: The engine's module, or a module on that.
        engine: An engine.
    """
    prefix = engine.prefix_of(module)
    names = [name for name in engine.binding.names if name.startswith(prefix)]
    params, variables = engine.params, engine.variables
    return {
        "params": {name[len(prefix) :]: params[name] for name in names if name in params},
        "variables": {name[len(prefix) :]: variables[name] for name in names if name in variables},
        "modes": {
            name[len(prefix) :]: mode for name, mode in engine.binding.modes().items() if name.startswith(prefix)
        },
    }


def _plain(network: Any) -> Any:
    if not isinstance(network, LinenNetwork):
        return network
    module: Any = network._module
    if isinstance(network, ForeignNetwork):  # the object of the other library, where an adapter stands for it
        module = getattr(module, "transformed", getattr(module, "module", module))
    return module


def take_copied_weights(engine: Any) -> None:
    """Gives an engine the weights that its module, or a module on it, carried along when it was copied.

    Args:
        engine: An engine that has just attached.
    """
    params: dict[str, Any] = {}
    variables: dict[str, Any] = {}
    modes: dict[str, bool] = {}
    for prefix, owner in engine.binding.owners.items():
        carried = owner.__dict__.pop(_WEIGHTS, None)
        if carried is None:
            continue
        for section, into in (("params", params), ("variables", variables), ("modes", modes)):
            for name, value in carried[section].items():
                into.setdefault(prefix + name, value)  # the module itself comes first and knows best
    if params or variables:
        engine.load_state_dict({"params": params, "variables": variables}, strict=False, weights_only=True)
    if modes:
        engine.binding.restore_modes(modes)
