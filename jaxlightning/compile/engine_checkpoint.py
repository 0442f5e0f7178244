"""What a checkpoint holds of an engine's state, and how it is put back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlightning.compile.engine_attributes import EngineAttributes
from jaxlightning.compile.paths import flatten, merge, plain, select
from jaxlightning.compile.precision import ScalerState
from jaxlightning.compile.trees import by_path, host_copy
from jaxlightning.utilities.host_memory import HostCopies

__all__ = ["EngineCheckpoint"]


class EngineCheckpoint(EngineAttributes):
    """Adds saving and restoring of the carried state."""

    def state_dict(self, copies: HostCopies | None = None) -> dict[str, Any]:
        """Everything a checkpoint needs, as numpy arrays that nobody else holds.

        Args:
            copies: Gives copies that live already once more; then the arrays must not be changed.

        Returns:
            `params`, `variables` (nested), `optimizer_states` (one flat `{path: array}` each), `gradients` (nested or
            None) and `accumulators` (`{stage: [2, capacity] array}`).
        """
        state = self.tree
        return {
            "params": host_copy(state.params, copies),
            "variables": host_copy({**state.variables, **self._buffer_sections()}, copies),
            "optimizer_states": [host_copy(by_path(s), copies) for s in state.opt_state]
            if self._pending_optimizers is None
            else list(self._pending_optimizers),
            "gradients": None if state.grads is None else host_copy(state.grads, copies),
            "scaler": None if state.scaler is None else host_copy(state.scaler._asdict(), copies),
            "nonfinite": None if state.nonfinite is None else host_copy(state.nonfinite._asdict(), copies),
            "accumulators": {} if state.acc is None else {"train": host_copy(state.acc, copies)},
        }

    def has_copies(self, copies: HostCopies) -> bool:
        """Say whether the parameters and optimizer states are those that were copied last."""
        return copies.know(jax.tree.leaves((self.tree.params, self.tree.opt_state)))

    def bare_networks(self) -> dict[str, bool]:
        """The networks without variables, and whether they were called: a Dropout has none even then."""
        state = self.tree
        return {
            name: name in state.params
            for name in self.binding.names
            if not jax.tree.leaves((state.params.get(name), state.variables.get(name)))
        }

    def load_state_dict(
        self,
        sections: Mapping[str, Any],
        *,
        strict: bool = True,
        weights_only: bool = False,
        bare: Mapping[str, bool] | None = None,
    ) -> None:
        """Restores what `state_dict` gave, before or after variables exist.

        Args:
            sections: As returned by `state_dict`.
            strict: Whether missing and unexpected paths are errors; differing shapes always are.
            weights_only: Whether only parameters and variables are restored.
            bare: The `bare_networks` of that moment, for which nothing is missing.

        Raises:
            RuntimeError: If the paths or shapes do not fit; the message lists them.
        """
        params, variables = plain(sections["params"]), plain(sections.get("variables") or {})
        self._load_buffers(variables, strict)
        bare = {} if bare is None else bare
        # The state has a place for a network that was called, also an empty one.
        params = {**{name: {} for name, called in bare.items() if called}, **params}
        self._check_weights(params, variables, strict, bare)
        state = self.tree
        known = set(self.binding.names)
        keep = {name: tree for name, tree in params.items() if name in known}
        keep_variables = {name: tree for name, tree in variables.items() if name in known}
        # Linen networks that were not called yet: their shapes are compared when a step calls them.
        self._unverified |= {name for name in keep if name in self.binding.linen and name not in state.params}
        self._strict_load = strict
        policy = self.binding.precision
        new_params = policy.convert_params(merge(state.params, keep))
        new_variables = policy.convert_variables(merge(state.variables, keep_variables))
        self._set_tree(state.replace(params=self._placed(new_params), variables=self._placed(new_variables)))
        self._nnx_stale = True
        if weights_only:
            return
        self.load_optimizer_states(sections.get("optimizer_states") or [])

    def _buffer_sections(self) -> dict[str, Any]:
        """Buffers as variables of a network of their own name, so that they have their plain name in `state_dict`."""
        return {path: {"nnx": value} for path, value in self.buffer_values().items()}

    def _load_buffers(self, variables: dict[str, Any], strict: bool) -> None:
        """Takes the buffers out of `variables` and sets them."""
        here = self.buffer_values()
        saved = {path: variables.pop(path)["nnx"] for path in list(variables) if path in here}
        missing = [path for path in here if path not in saved]
        if strict and missing:
            raise RuntimeError(
                f"The checkpoint does not fit {type(self.binding.module).__name__}:\n  "
                + "\n  ".join(f"missing: buffer {path} {np.shape(here[path])}" for path in missing)
                + "\nPass `strict=False` (or set `self.strict_loading = False`) to load what fits."
            )
        self.set_buffers(saved)

    def _check_weights(
        self, params: Mapping[str, Any], variables: Mapping[str, Any], strict: bool, bare: Mapping[str, bool]
    ) -> None:
        have = flatten({"params": params, "variables": variables})
        state = self.tree
        want = flatten({"params": state.params, "variables": state.variables})
        names = set(self.binding.names)
        problems, fatal = [], []
        for path in want:
            if path not in have:
                problems.append(f"missing: {path} {tuple(want[path].shape)}")
            elif tuple(np.shape(have[path])) != tuple(want[path].shape):
                fatal.append(
                    f"differing: {path} is {tuple(np.shape(have[path]))} in the checkpoint, "
                    f"{tuple(want[path].shape)} here"
                )
        # Names of networks may contain a slash, so they are not cut out of the path.
        owners = {
            path: network
            for section, networks in (("params", params), ("variables", variables))
            for network, tree in networks.items()
            for path in flatten({section: {network: tree}})
        }
        for path, network in owners.items():
            exists = network in state.params or network in state.variables
            if network not in names or (exists and path not in want):
                problems.append(f"unexpected: {path} {tuple(np.shape(have[path]))}")
        known = {*params, *variables, *state.params, *state.variables, *bare}
        if have:
            problems += [f"missing: everything of network `{name}`" for name in self.binding.names if name not in known]
        if fatal or (problems and strict):
            lines = fatal + (problems if strict else [])
            raise RuntimeError(
                f"The checkpoint does not fit {type(self.binding.module).__name__}:\n  "
                + "\n  ".join(lines[:40])
                + ("" if fatal else "\nPass `strict=False` (or set `self.strict_loading = False`) to load what fits.")
            )

    def _placed(self, tree: Any) -> Any:
        # Copies: numpy memory handed to a CPU device may be shared with the host array.
        with self.binding.precision.scope():
            return self.strategy.put(jax.tree.map(jnp.array, tree))

    def number_values(self) -> dict[str, Any]:
        """The numbers on the module that steps change, for a checkpoint: `{"self.count": 7}`."""
        values = {}
        for key, why in self.effect_facts.host.numbers.items():
            if why in ("written", "made"):
                owner, name = self._number(key)
                value = None if owner is None else owner.__dict__.get(name)
                if isinstance(value, bool | int | float | np.generic):
                    values[key] = value.item() if isinstance(value, np.generic) else value
        return values

    def load_numbers(self, values: dict[str, Any]) -> None:
        """Restores what `number_values` gave, before or after steps were traced.

        Args:
            values: By name; those of modules that are not here are left out.
        """
        for key, value in values.items():
            owner, name = self._number(key)
            if owner is not None:
                owner.__dict__[name] = value
        self._dirty = True

    def _number(self, key: str) -> tuple[Any, str]:
        prefix, _, name = key.removeprefix("self.").rpartition(".")
        return self.binding.owners.get(f"{prefix}." if prefix else ""), name

    def load_scaler(self, saved: Mapping[str, Any]) -> None:
        """Restores the loss scale, where the precision has one."""
        state = self.tree
        if state.scaler is not None:
            fresh = {name: jnp.asarray(saved[name], old.dtype) for name, old in state.scaler._asdict().items()}
            self._set_tree(state.replace(scaler=self.strategy.put(ScalerState(**fresh))))

    def load_nonfinite(self, saved: Mapping[str, Any]) -> None:
        """Restores the counts of updates that were not finite, where they are counted."""
        state = self.tree
        if state.nonfinite is not None:
            fresh = {name: jnp.asarray(saved[name], jnp.int32) for name in state.nonfinite._fields}
            self._set_tree(state.replace(nonfinite=self.strategy.put(type(state.nonfinite)(**fresh))))

    def load_gradients(self, gradients: Mapping[str, Any]) -> None:
        """Restores the gradients of an accumulation window that is under way.

        Raises:
            RuntimeError: If they do not fit the parameters that the optimizers own.
        """
        owned, params = self.binding.owned, self.tree.params
        want = flatten(params if owned is None else select(params, owned))
        have = flatten(plain(gradients))
        wrong = sorted(set(want) ^ set(have)) + [p for p in want if p in have and np.shape(have[p]) != want[p].shape]
        if wrong:
            raise RuntimeError(
                f"The accumulated gradients in the checkpoint do not fit the parameters of the optimizers: {wrong[:20]}"
            )
        self._set_tree(self.tree.replace(grads=self._placed(plain(gradients))))
        self.has_gradients = True
