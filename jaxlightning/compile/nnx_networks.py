"""NNX networks on a module: split once, all together, and merged again inside each trace.

The graph definition is static; parameters and other variables travel as nested dictionaries with text keys, like those
of linen networks. Random state is not carried: in a trace each key becomes a function of the step's key and of the key
that the user gave, and counts start at zero.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxlightning.compile.paths import Nested, flatten, merge
from jaxlightning.compile.precision import Precision
from jaxlightning.compile.precision_layers import plain_class, prepare_nnx
from jaxlightning.compile.trace import Trace, path_hash

__all__ = ["NnxGroup"]

_SEED_MASK = 0x7FFFFFFF


def _value_of(leaf: Any) -> Any:
    """The value of a Variable; a bare array on an NNX module is a leaf of its state without one."""
    get_value = getattr(leaf, "get_value", None)
    return leaf if get_value is None else get_value()


class NnxGroup:
    """All NNX modules of one Lightning module, split jointly so that sharing survives.

    Args:
        modules: `{path: module}`; the same object may stand under several paths.
    """

    def __init__(self, modules: dict[str, Any]) -> None:
        from flax import nnx

        self._nnx = nnx
        self.modules = modules
        self._merged: dict[str, Any] | None = None
        self.split()

    def split(self) -> bool:
        """Reads the graph definition of the modules anew.

        Returns:
            Whether it changed since the last time (a mode was set, a layer replaced).
        """
        nnx = self._nnx
        graphdef, params, rngs, rest = nnx.split(self.modules, nnx.Param, nnx.RngState, ...)
        changed = bool(getattr(self, "graphdef", None) != graphdef)
        self.graphdef = graphdef
        self._templates = {"params": params, "rngs": rngs, "rest": rest}
        self._paths = {name: [path for path, _ in nnx.to_flat_state(state)] for name, state in self._templates.items()}
        # Concrete here, where no trace runs: the user's own seeds become constants that each step's key is mixed with.
        self._salts = {
            path: int(jax.random.bits(variable.get_value())) & _SEED_MASK
            for path, variable in nnx.to_flat_state(rngs)
            if jnp.issubdtype(variable.get_value().dtype, jax.dtypes.prng_key)
        }
        return changed

    def _pure(self, state: Any) -> dict[tuple[Any, ...], Any]:
        return {path: _value_of(leaf) for path, leaf in self._nnx.to_flat_state(state)}

    def params(self) -> Nested:
        """The parameters of the live modules: `{network: nested}`."""
        return self._nest(self._pure(self._templates["params"]))

    def variables(self) -> Nested:
        """Every other variable but random state, as `{network: {"nnx": nested}}`."""
        return {name: {"nnx": tree} for name, tree in self._nest(self._pure(self._templates["rest"])).items()}

    @staticmethod
    def _nest(flat: dict[tuple[Any, ...], Any]) -> Nested:
        out: Nested = {}
        for path, value in flat.items():
            node = out
            for key in path[:-1]:
                node = node.setdefault(str(key), {})
            node[str(path[-1])] = value
        return out

    def _state(self, name: str, values: dict[str, Any]) -> Any:
        nnx = self._nnx
        template = dict(nnx.to_flat_state(self._templates[name]))
        flat = {}
        for path in self._paths[name]:
            leaf, value = template[path], values["/".join(map(str, path))]
            flat[path] = leaf.replace(value) if hasattr(leaf, "get_value") else value
        return nnx.from_flat_state(flat)

    def bind(self, trace: Trace, eval_networks: frozenset[str], precision: Precision) -> dict[str, Any]:
        """Fresh modules that hold the variables of a trace.

        Args:
            trace: Its `params` and `variables` have an entry for each network.
            eval_networks: Networks whose layers are to be in evaluation mode.
            precision: In which dtypes they compute.

        Returns:
            `{path: module}`.
        """
        nnx = self._nnx
        params = flatten({name: trace.params.get(name, {}) for name in self.modules})
        rest = flatten({name: trace.variables.get(name, {}).get("nnx", {}) for name in self.modules})
        rngs: dict[str, Any] = {}
        for path, variable in nnx.to_flat_state(self._templates["rngs"]):
            name = "/".join(map(str, path))
            salt = self._salts.get(path)
            if salt is not None:
                rngs[name] = jax.random.fold_in(jax.random.fold_in(trace.key, path_hash(name)), salt)
            else:
                rngs[name] = jnp.zeros_like(variable.get_value())
        merged: dict[str, Any] = nnx.merge(
            self.graphdef,
            self._state("params", params),
            self._state("rngs", rngs),
            self._state("rest", rest),
            copy=True,
        )
        networks = {name: network for name, network in merged.items() if not isinstance(network, nnx.Variable)}
        for name in eval_networks:
            if name in networks:
                networks[name].eval()
        cast = not trace.creating and prepare_nnx(precision, networks)
        if eval_networks or cast:
            for network in networks.values():
                plain_class(network)
            self._bound_graphdef = nnx.split(merged)[0]
            if cast:
                prepare_nnx(precision, networks)
        else:
            self._bound_graphdef = self.graphdef
        self._merged = merged
        self._bound_params = self._pure(nnx.split(merged, nnx.Param, ...)[1])
        return merged

    def put_params(self, trace: Trace) -> None:
        """Gives the bound modules the trace's parameters anew, after an optimizer stepped inside the step."""
        flat = flatten({name: trace.params.get(name, {}) for name in self.modules})
        self._nnx.update(self._merged, self._state("params", flat))
        self._bound_params = self._pure(self._nnx.split(self._merged, self._nnx.Param, ...)[1])

    def collect(self, trace: Trace) -> None:
        """Writes the variables of the bound modules back into the trace.

        Raises:
            RuntimeError: If the step added, removed or replaced something on a module.
        """
        nnx = self._nnx
        for network in (self._merged or {}).values():
            plain_class(network)
        graphdef, params, _, rest = nnx.split(self._merged, nnx.Param, nnx.RngState, ...)
        if graphdef != self._bound_graphdef:
            raise RuntimeError(
                "The step changed the structure of an NNX network (an attribute or Variable was added, removed or "
                "replaced, or its mode was set). Do that in `__init__` or in a hook; a compiled step may only change "
                "the values of existing Variables."
            )
        for name, tree in self._nest(self._pure(rest)).items():
            trace.variables[name] = {"nnx": tree}
        now = self._pure(params)
        changed = self._nest({path: value for path, value in now.items() if value is not self._bound_params[path]})
        for name, tree in changed.items():
            known = trace.params[name]  # in the dtypes of the state; the bound modules may compute in others
            trace.write_params(name, merge(known, tree) if isinstance(tree, dict) else tree)
        self._merged = None

    def refresh(self, params: Nested, variables: Nested) -> None:
        """Writes the engine's variables into the user's own module objects."""
        nnx = self._nnx
        flat_params = flatten({name: params.get(name, {}) for name in self.modules})
        flat_rest = flatten({name: variables.get(name, {}).get("nnx", {}) for name in self.modules})
        nnx.update(self.modules, self._state("params", flat_params), self._state("rest", flat_rest))
