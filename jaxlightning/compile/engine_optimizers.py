"""Optimizer states and gradients that an engine carries between steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxlightning.compile.engine_state import EngineState
from jaxlightning.compile.guarded_update import initial_guards
from jaxlightning.compile.paths import flatten, merge, plain, select
from jaxlightning.compile.persistent_cache import healing
from jaxlightning.compile.trees import by_path, device_copy

__all__ = ["EngineOptimizers"]


class EngineOptimizers(EngineState):
    """Adds the optimizers' part of the carried state."""

    # --- views --------------------------------------------------------------------------------------------------

    @property
    def opt_state(self) -> Any:
        """A copy of the optax state (a tuple of them with several optimizers); assign to change it."""
        states = device_copy(self.tree.opt_state)
        return states[0] if len(states) == 1 else states

    @opt_state.setter
    def opt_state(self, value: Any) -> None:
        states = self.tree.opt_state
        new = (value,) if len(states) == 1 else tuple(value)
        self._set_tree(self.tree.replace(opt_state=self._checked("opt_state", states, new)))
        for handle in self.binding.optimizers:
            _state_replaced(handle)

    @property
    def grads(self) -> Any:
        """A copy of the accumulated gradients of a split step, `{network: nested}`; assign to replace them."""
        return device_copy(self.tree.grads)

    @grads.setter
    def grads(self, value: Any) -> None:
        self._set_tree(self.tree.replace(grads=self._checked("grads", self.tree.grads, plain(value))))
        self.has_gradients = True

    def opt_state_live(self, handle: Any) -> Any:
        """One optimizer's live state, for reading before the next step; an empty dictionary before it exists."""
        index = self.binding.optimizers.index(handle)
        states = self.tree.opt_state
        return states[index] if index < len(states) else {}

    def evaluation_leaves(self) -> tuple[Any, ...]:
        """Leaves of parameters, variables and attributes, those to evaluate with."""
        for handle in self.binding.optimizers:
            if handle.has_eval_params and self._optimizer_paths is not None:
                return self._averaged_leaves()
        return self._leaves[: self._n_eval]

    def _averaged_leaves(self) -> tuple[Any, ...]:
        state = self.tree
        params = state.params
        for handle, opt_state in zip(self.binding.optimizers, state.opt_state, strict=True):
            if handle.has_eval_params:
                own = self.binding.owned_by(handle)
                mine = params if own is None else select(params, own)
                changed = handle.eval_params(opt_state, mine)
                params = merge(params, changed)
        return tuple(jax.tree_util.tree_leaves((params, state.variables, state.attributes)))

    def skipped_updates(self) -> int:
        """How many updates were left out so far because they were not finite; reads the device."""
        state = self.tree
        if state.scaler is not None:
            return int(state.scaler.skipped)
        return int(state.nonfinite.count) if self.binding.skips_updates else 0

    def nonfinite_counts(self) -> Any:
        """A copy of the counts of updates that were not finite, int32 [count, number of the last]; None without."""
        counts = self.tree.nonfinite
        return None if counts is None else jnp.stack([counts.count, counts.last])

    def nonfinite_counts_now(self) -> tuple[int, int]:
        """The same as numbers; reads the device."""
        counts = self.tree.nonfinite
        return (0, -1) if counts is None else (int(counts.count), int(counts.last))

    # --- optimizer states ---------------------------------------------------------------------------------------

    def reset_optimizer_states(self) -> None:
        """Optimizer states are made afresh when the next training step needs them."""
        self._optimizer_paths = None
        self.has_gradients = False
        self._set_tree(self.strategy.put(initial_guards(self.binding, self.tree.replace(opt_state=(), grads=None))))

    def ensure_optimizer_states(self) -> None:
        """Makes optimizer states; when parameters or groups came since, the states grow and keep what they had."""
        paths = set(flatten(self.tree.params))
        made_for = (paths, [handle.structure_version for handle in self.binding.optimizers])
        if self._optimizer_paths == made_for or not self.binding.optimizers or not paths:
            return  # without parameters an optimizer would refuse; a step may still be skipped or raise a better error
        state, states = self.tree, []
        for index, handle in enumerate(self.binding.optimizers):
            own = self.binding.owned_by(handle)
            mine = state.params if own is None else select(state.params, own)
            self._refuse_integers(mine)
            with healing():
                fresh = jax.jit(handle.init)(mine)
            if index < len(state.opt_state):
                old = by_path(state.opt_state[index])
                grown = [old.get(path, leaf) for path, leaf in by_path(fresh).items()]
                fresh = jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(fresh), grown)
            states.append(fresh)
        self._optimizer_paths = made_for
        self._set_tree(state.replace(opt_state=self.strategy.put(device_copy(tuple(states)))))
        if self._pending_optimizers is not None:
            pending, self._pending_optimizers = self._pending_optimizers, None
            self._load_optimizers(pending)

    def _refuse_integers(self, params: Any) -> None:
        for path, leaf in flatten(params).items():
            if not jnp.issubdtype(leaf.dtype, jnp.inexact) and not self.is_frozen(path):
                raise TypeError(
                    f"The parameter `{path}` has dtype {leaf.dtype}: a gradient needs floating-point numbers, and no "
                    "precision changes the dtype of integers. Keep such an array in another collection "
                    "(`self.variable(...)`, an `nnx.Variable`), freeze it, or leave it out of the optimizer."
                )

    def load_optimizer_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restores optimizer states alone; they wait where parameters or optimizers do not exist yet."""
        self._pending_optimizers = [dict(flat) for flat in states]
        if self._optimizer_paths is None:
            self.ensure_optimizer_states()
        else:
            pending, self._pending_optimizers = self._pending_optimizers, None
            self._load_optimizers(pending)

    def _load_optimizers(self, flats: list[dict[str, Any]]) -> None:
        states = self.tree.opt_state
        if len(flats) != len(states):
            raise RuntimeError(
                f"The checkpoint has states of {len(flats)} optimizer(s), `configure_optimizers` made {len(states)}."
            )
        restored = []
        for index, (flat, state) in enumerate(zip(flats, states, strict=True)):
            want = by_path(state)
            problems = [f"missing: {p} {tuple(jnp.shape(want[p]))}" for p in want if p not in flat]
            problems += [f"unexpected: {p} {tuple(np.shape(flat[p]))}" for p in flat if p not in want]
            problems += [
                f"differing: {p} is {tuple(np.shape(flat[p]))} in the checkpoint, {tuple(jnp.shape(want[p]))} here"
                for p in want
                if p in flat and tuple(np.shape(flat[p])) != tuple(jnp.shape(want[p]))
            ]
            if problems:
                raise RuntimeError(
                    f"The checkpoint's state of optimizer {index} does not fit the optimizer that "
                    "`configure_optimizers` "
                    "made (another optimizer, chain or architecture?):\n  " + "\n  ".join(problems[:40])
                )
            leaves = [jnp.array(flat[p], want[p].dtype) for p in want]
            restored.append(jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(state), leaves))
        self._set_tree(self.tree.replace(opt_state=self.strategy.put(tuple(restored))))

    def apply_outside(self, index: int, handle: Any, params: Any, grads: Any, hyper: Any) -> None:
        """Applies one optimizer between two steps.

        Args:
            index: Its number.
            handle: The optimizer.
            params: The parameters that it owns.
            grads: Their gradients.
            hyper: Its hyper-parameters.
        """
        states = list(self.tree.opt_state)

        def update(grads: Any, state: Any, params: Any, hyper: Any) -> Any:
            updates, state = handle.update(grads, state, params, hyper)
            return optax.apply_updates(params, updates), state

        new, states[index] = jax.jit(update)(grads, states[index], params, hyper)
        self._set_tree(self.tree.replace(params=merge(self.tree.params, new), opt_state=tuple(states)))
        self._nnx_stale = True

    # --- gradients ----------------------------------------------------------------------------------------------

    def ensure_gradient_buffer(self) -> None:
        """Gives the state a gradient buffer of zeros for the owned parameters."""
        state, owned = self.tree, self.binding.owned
        if not self.binding.optimizers:
            return
        mine = state.params if owned is None else select(state.params, owned)
        if state.grads is None or set(flatten(state.grads)) != set(flatten(mine)):
            zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), mine)
            if state.grads is not None:
                zeros = merge(zeros, state.grads)
            self._set_tree(state.replace(grads=self.strategy.put(zeros)))

    def replace_gradients(self, gradients: Mapping[str, Any]) -> None:
        """Puts new values over a part of the gradients."""
        self._set_tree(self.tree.replace(grads=merge(self.tree.grads, gradients)))

    def manual_buffers(self, owners: Iterable[int]) -> dict[str, Any]:
        """Zeros for the gradients of some optimizers beside the buffers that are there: `{network: nested}`."""
        state = self.tree
        buffers: dict[str, Any] = dict(state.grads or {})
        for index in owners:
            own = self.binding.owned_by(self.binding.optimizers[index])
            mine = state.params if own is None else select(state.params, own)
            zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), mine)
            buffers = merge(zeros, buffers)
        return buffers

    def ensure_manual_buffers(self, owners: Iterable[int]) -> None:
        """Gives the state gradient buffers of some optimizers; those that are there keep their values."""
        self._set_tree(self.tree.replace(grads=self.strategy.put(self.manual_buffers(owners))))

    def zero_grad(self) -> None:
        """Forgets accumulated gradients."""
        self.has_gradients = False
        if self.tree.grads is not None:
            self._set_tree(self.tree.replace(grads=jax.tree.map(jnp.zeros_like, self.tree.grads)))

    def clip_gradients(self, value: float, algorithm: str = "norm") -> None:
        """Clips the accumulated gradients, by global norm or by value."""
        from jaxlightning.optim import clip_gradients

        if self.tree.grads is not None:
            clipped = jax.jit(clip_gradients, static_argnums=2)(self.tree.grads, value, algorithm)
            self._set_tree(self.tree.replace(grads=clipped))


def _state_replaced(handle: Any) -> None:
    """Tells a handle that its state was replaced: numbers in it then win over those set on the host before."""
    told = getattr(handle, "state_replaced", None)
    if told is not None:
        told()
