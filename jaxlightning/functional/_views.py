"""What a hand-written step carries, as callbacks and checkpoints see it: the views of an engine on a `Held`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxlightning.compile.engine import Engine
from jaxlightning.compile.networks import NetworkInfo
from jaxlightning.compile.trees import device_copy
from jaxlightning.functional._held import Held, like, nested, to_host
from jaxlightning.utilities.exceptions import MisconfigurationException
from jaxlightning.utilities.host_memory import HostCopies

__all__ = ["HeldViews"]

NETWORK = "model"
"""The one network that views and checkpoints show."""


class HeldViews(Engine):
    """Base of `FunctionalEngine`: reads and replaces parts of the carry in the words of `compile.Engine`.

    Attributes:
        held: The carry, on the devices of the run.
    """

    held: Held

    # --- views --------------------------------------------------------------------------------------------------

    def _sections(self, convert: Callable[[Any], Any]) -> dict[str, dict[tuple[str, ...], Any]]:
        sections: dict[str, dict[tuple[str, ...], Any]] = {"params": {}, "variables": {}, "optimizer": {}}
        leaves = jax.tree_util.tree_leaves(self.held.dynamic())
        for (section, path), leaf in zip(self.held.places(), leaves, strict=True):
            sections[section][path] = convert(leaf)
        return sections

    @property
    def params(self) -> dict[str, Any]:
        """A copy of the parameters, `{"model": nested}`."""
        return {NETWORK: nested(self._sections(device_copy)["params"])}

    @params.setter
    def params(self, value: Mapping[str, Any]) -> None:
        self._replace("params", value)

    @property
    def variables(self) -> dict[str, Any]:
        """A copy of everything else that is no optimizer state, `{"model": {collection: nested}}`."""
        return {NETWORK: nested(self._sections(device_copy)["variables"])}

    @variables.setter
    def variables(self, value: Mapping[str, Any]) -> None:
        self._replace("variables", value)

    @property
    def params_live(self) -> dict[str, Any]:
        """The same copy: only the step itself sees live parameters."""
        return self.params

    @property
    def variables_live(self) -> dict[str, Any]:
        """The same copy."""
        return self.variables

    @property
    def opt_state(self) -> Any:
        """A copy of the optimizer state: the one beside the state, or the one in it."""
        source = self.held.opt if self.held.opt is not None else getattr(self.held.carry, "opt_state", ())
        return device_copy(source)

    @opt_state.setter
    def opt_state(self, value: Any) -> None:
        if self.held.opt is None:
            raise MisconfigurationException("Replace the whole state of a hand-written step, not its `opt_state`.")
        self.held.opt = self.strategy.put(device_copy(value))

    def is_frozen(self, path: str) -> bool:
        """Which parameters are trained is up to the step."""
        return False

    def flat_params(self) -> dict[str, Any]:
        """A copy of all parameters by path."""
        return {"/".join((NETWORK, *path)): leaf for path, leaf in self._sections(device_copy)["params"].items()}

    def params_of(self, network: str) -> Any:
        """A copy of the parameters."""
        return self.params.get(network)

    def opt_state_live(self, handle: Any) -> Any:
        """The live optimizer state."""
        return self.held.opt

    def networks(self) -> list[NetworkInfo]:
        """The one network, for summaries."""
        return [
            NetworkInfo(
                name=NETWORK,
                type_name=self.module.steps.type_name,
                params=self.params[NETWORK],
                variables={
                    name: tree if isinstance(tree, dict) else {name: tree}
                    for name, tree in self.variables[NETWORK].items()
                    if name != "state"
                },
                mode="train",
            )
        ]

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def state_dict(self, copies: HostCopies | None = None) -> dict[str, Any]:
        """Everything that a checkpoint needs, in the sections of `compile.Engine.state_dict`."""
        sections = self._sections(lambda leaf: to_host(leaf, copies))
        return {
            "params": {NETWORK: nested(sections["params"])},
            "variables": {NETWORK: nested(sections["variables"])},
            "optimizer_states": [{"/".join(path): leaf for path, leaf in sections["optimizer"].items()}],
            "gradients": None,
            "accumulators": {},
        }

    def has_copies(self, copies: HostCopies) -> bool:
        """Say whether parameters and optimizer states are those that were copied last."""
        sections = self._sections(lambda leaf: leaf)
        return copies.know([leaf for name in ("params", "optimizer") for leaf in sections[name].values()])

    def bare_networks(self) -> dict[str, bool]:
        """None: the step's own state is all there is."""
        return {}

    def load_state_dict(
        self,
        sections: Mapping[str, Any],
        *,
        strict: bool = True,
        weights_only: bool = False,
        bare: Mapping[str, bool] | None = None,
    ) -> None:
        """Restores what `state_dict` gave.

        Raises:
            RuntimeError: If the paths or shapes do not fit; the message lists them.
        """
        for section in ("params", "variables"):
            self._replace(section, sections.get(section) or {}, strict=strict)
        if not weights_only:
            self.load_optimizer_states(sections.get("optimizer_states") or [])

    def load_optimizer_states(self, states: Sequence[Mapping[str, Any]], *, strict: bool = True) -> None:
        """Restores the optimizer state."""
        if states:
            self._replace("optimizer", dict(states[0]), strict=strict, flat=True)

    def load_gradients(self, gradients: Any) -> None:
        """A hand-written step keeps no gradients.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError("The checkpoint holds accumulated gradients, so a LightningModule wrote it, not `fit`.")

    def _replace(self, section: str, values: Mapping[str, Any], *, strict: bool = True, flat: bool = False) -> None:
        leaves, treedef = jax.tree_util.tree_flatten(self.held.dynamic())
        places = self.held.places()
        have: dict[tuple[str, ...], Any] = {}
        if flat:
            known = {"/".join(path): path for kind, path in places if kind == section}
            have = {known.get(name, (name,)): leaf for name, leaf in values.items()}
        else:
            _collect(values.get(NETWORK, {}), (), have)
        problems = []
        wanted = [path for kind, path in places if kind == section]
        missing = [path for path in wanted if path not in have]
        problems += [f"missing: {'/'.join(path)}" for path in missing if strict]
        problems += [f"unexpected: {'/'.join(path)}" for path in have if path not in set(wanted) and strict]
        for index, (kind, path) in enumerate(places):
            if kind != section or path not in have:
                continue
            new = like(have[path], leaves[index])
            if jnp.shape(new) != jnp.shape(leaves[index]):
                problems.append(
                    f"differing: {'/'.join(path)} is {jnp.shape(new)} in the checkpoint, "
                    f"{jnp.shape(leaves[index])} here"
                )
            leaves[index] = new
        if problems:
            raise RuntimeError(
                f"The {section} in the checkpoint do not fit the state that `fit` was given:\n  "
                + "\n  ".join(problems[:40])
            )
        self.held.set_dynamic(self.strategy.put(jax.tree_util.tree_unflatten(treedef, leaves)))


def _collect(tree: Any, path: tuple[str, ...], into: dict[tuple[str, ...], Any]) -> None:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            _collect(value, (*path, str(key)), into)
    else:
        into[path] = tree
