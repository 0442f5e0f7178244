"""The state that an engine carries: flat donated leaves for the hot loop, structured views for everybody else.

A view is a copy, because the leaf behind it is donated to the next step. Setting a view checks its structure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxlightning.compile.freezing import is_frozen, norm_layers
from jaxlightning.compile.paths import flatten, plain
from jaxlightning.compile.state import TrainState
from jaxlightning.compile.trees import by_path, device_copy

if TYPE_CHECKING:
    from jaxlightning.compile.binding import Binding

__all__ = ["EngineState"]


class EngineState:
    """Base class of `Engine`: the carried state as a tree, and views of parameters and variables.

    Args:
        binding: The module's networks and optimizers.
        strategy: Places arrays on devices.
    """

    _seed32: int
    _floats: Any
    evaluation_treedef: Any

    def __init__(self, binding: Binding, strategy: Any) -> None:
        self.binding = binding
        self.strategy = strategy
        self.keep_gradients = False
        self.has_gradients = False
        self._leaves: tuple[Any, ...] = ()
        self.state_treedef: Any = None
        self._pending_optimizers: list[dict[str, Any]] | None = None
        self._optimizer_paths: tuple[set[str], list[int]] | None = None
        self._nnx_stale = False
        self._nnx_exposed = False
        self._exposed: set[str] = set()
        self._unverified: set[str] = set()
        self._strict_load = True
        self._set_tree(TrainState({}, {}))

    # --- the tree and its leaves --------------------------------------------------------------------------------

    @property
    def tree(self) -> TrainState:
        """The live state; its leaves are donated to the next training step, so never keep them."""
        state: TrainState = jax.tree_util.tree_unflatten(self.state_treedef, self._leaves)
        return state

    def _set_tree(self, state: TrainState) -> None:
        leaves, treedef = jax.tree_util.tree_flatten(state)
        self._leaves = tuple(leaves)
        if self.state_treedef is None or treedef != self.state_treedef:
            first = self.state_treedef is None
            self.state_treedef = treedef
            evaluation: Any = jax.tree_util.tree_structure((state.params, state.variables, state.attributes))
            same = not first and evaluation == self.evaluation_treedef
            self.evaluation_treedef = evaluation
            self._n_eval = evaluation.num_leaves
            self._forget(keep_evaluation=same)

    def _restructure(self, treedef: Any) -> None:
        """Takes note of the structure that a step left; compiled steps are kept, because they know theirs."""
        self.state_treedef = treedef
        state = self.tree
        self.evaluation_treedef = jax.tree_util.tree_structure((state.params, state.variables, state.attributes))
        self._n_eval = self.evaluation_treedef.num_leaves

    def _forget(self, keep_evaluation: bool = False) -> None:
        """Drops compiled steps; the engine does."""

    @property
    def leaves(self) -> tuple[Any, ...]:
        """The live leaves of the state."""
        return self._leaves

    @property
    def floats(self) -> Any:
        """The float inputs of the current step."""
        return self._floats

    @property
    def seed32(self) -> int:
        """The seed as a signed 32-bit number."""
        return self._seed32

    @property
    def acc(self) -> Any:
        """The live accumulators of the training epoch."""
        return self.tree.acc

    @acc.setter
    def acc(self, value: Any) -> None:
        self._set_tree(self.tree.replace(acc=value))

    # --- views --------------------------------------------------------------------------------------------------

    @property
    def params_live(self) -> dict[str, Any]:
        """Live parameters, for use before the next step only."""
        return self.tree.params

    @property
    def variables_live(self) -> dict[str, Any]:
        """Live variables, for use before the next step only."""
        return self.tree.variables

    @property
    def params(self) -> dict[str, Any]:
        """A copy of the parameters, `{network: nested}`; assign to change them between steps."""
        params: dict[str, Any] = device_copy(self.tree.params)
        return params

    @params.setter
    def params(self, value: Mapping[str, Any]) -> None:
        self._set_tree(self.tree.replace(params=self._checked("params", self.tree.params, plain(value))))
        self._nnx_stale = True

    @property
    def variables(self) -> dict[str, Any]:
        """A copy of the other variables, `{network: {collection: nested}}`; assign to change them."""
        variables: dict[str, Any] = device_copy(self.tree.variables)
        return variables

    @variables.setter
    def variables(self, value: Mapping[str, Any]) -> None:
        self._set_tree(self.tree.replace(variables=self._checked("variables", self.tree.variables, plain(value))))
        self._nnx_stale = True

    def params_of(self, network: str) -> Any:
        """A copy of one network's parameters, None before they exist."""
        found = self.tree.params.get(network)
        return None if found is None else device_copy(found)

    def is_frozen(self, path: str) -> bool:
        """Whether the parameter at `path` is frozen."""
        decisions = self.binding.freezing_key
        return bool(decisions) and is_frozen(decisions, path, norm_layers(self.tree.variables))

    def flat_params(self) -> dict[str, Any] | None:
        """A copy of all parameters by path, None before any exist."""
        params = self.tree.params
        return flatten(device_copy(params)) if params else None

    def _checked(self, name: str, old: Any, new: Any) -> Any:
        """Places a new value on the devices after comparing its structure with the old one.

        Raises:
            ValueError: If paths, shapes or dtypes differ; the message lists them.
        """
        have, want = by_path(new), by_path(old)
        problems = [f"missing {path}" for path in want if path not in have]
        problems += [f"unexpected {path}" for path in have if path not in want]
        for path in want:
            if path in have:
                a, b = jnp.shape(have[path]), jnp.shape(want[path])
                if a != b:
                    problems.append(f"{path}: shape {a} instead of {b}")
        if problems:
            raise ValueError(f"The new value of `{name}` does not fit the state: " + "; ".join(problems[:20]))
        with self.binding.precision.scope():
            cast = [jnp.array(have[path], want[path].dtype) for path in want]
        return self.strategy.put(jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(old), cast))

    # --- growth ---------------------------------------------------------------------------------------------------

    def take_created(self, params: dict[str, Any], variables: dict[str, Any]) -> None:
        """Takes over freshly created variables."""
        # Copies: equal outputs of a jitted function may share a buffer, and a buffer can be donated only once.
        self._set_tree(
            self.tree.replace(
                params=self.strategy.put(device_copy(self.binding.precision.convert_params(params))),
                variables=self.strategy.put(device_copy(self.binding.precision.convert_variables(variables))),
            )
        )

    def copy_variables(self, source: str, target: str) -> None:
        """Gives the network `target` copies of the variables of `source`, when that has any."""
        state = self.tree
        if source in state.params:
            self.take_created(
                {**state.params, target: device_copy(state.params[source])},
                {**state.variables, target: device_copy(state.variables.get(source, {}))},
            )

    # --- NNX objects ----------------------------------------------------------------------------------------------

    def refresh_nnx(self) -> None:
        """Writes the current values into the user's NNX objects when a step changed them."""
        if self.binding.nnx is not None and self._nnx_stale:
            state = self.tree
            self.binding.nnx.refresh(device_copy(state.params), device_copy(state.variables))
            self._nnx_stale = False

    def nnx_attribute(self, value: Any) -> Any:
        """What reading an attribute with NNX networks gives outside a step: the user's objects, up to date."""
        self.refresh_nnx()
        self._nnx_exposed = True  # the reader may change them; looked at before the next step
        return value

    def _adopt_nnx(self) -> None:
        """Takes over the variables of the user's NNX objects: at the start, and when a hook may have changed them."""
        self._nnx_exposed = False
        nnx = self.binding.nnx
        if nnx is None:
            return
        changed = nnx.split()
        state = self.tree
        policy = self.binding.precision
        params, variables = policy.convert_params(nnx.params()), policy.convert_variables(nnx.variables())
        # Copies: the user's objects keep theirs when these are donated.
        self._set_tree(
            state.replace(
                params=self.strategy.put({**state.params, **device_copy(params)}),
                variables=self.strategy.put({**state.variables, **device_copy(variables)}),
            )
        )
        self._nnx_stale = False
        if changed:
            self._forget()
