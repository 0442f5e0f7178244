"""The state that an engine carries: flat donated leaves for the hot loop, structured views for everybody else.

A view is a copy, because the leaf behind it is donated to the next step. Setting a view checks its structure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxlightning.compile.freezing import is_frozen, norm_layers
from jaxlightning.compile.guarded_update import initial_guards
from jaxlightning.compile.paths import flatten, merge, plain, select
from jaxlightning.compile.persistent_cache import healing
from jaxlightning.compile.precision import ScalerState
from jaxlightning.compile.state import TrainState

if TYPE_CHECKING:
    from jaxlightning.compile.binding import Binding

__all__ = ["EngineState"]


class EngineState:
    """Base class of `Engine`: parameters, variables, optimizer states, gradients, accumulators.

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

    def evaluation_accumulators(self, stage: str) -> Any:
        """The live accumulators of an evaluation stage."""
        return self._eval_acc[stage]  # type: ignore[attr-defined]

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
        params: dict[str, Any] = _copy(self.tree.params)
        return params

    @params.setter
    def params(self, value: Mapping[str, Any]) -> None:
        self._set_tree(self.tree.replace(params=self._checked("params", self.tree.params, plain(value))))
        self._nnx_stale = True

    @property
    def variables(self) -> dict[str, Any]:
        """A copy of the other variables, `{network: {collection: nested}}`; assign to change them."""
        variables: dict[str, Any] = _copy(self.tree.variables)
        return variables

    @variables.setter
    def variables(self, value: Mapping[str, Any]) -> None:
        self._set_tree(self.tree.replace(variables=self._checked("variables", self.tree.variables, plain(value))))
        self._nnx_stale = True

    @property
    def opt_state(self) -> Any:
        """A copy of the optax state (a tuple of them with several optimizers); assign to change it."""
        states = _copy(self.tree.opt_state)
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
        return _copy(self.tree.grads)

    @grads.setter
    def grads(self, value: Any) -> None:
        self._set_tree(self.tree.replace(grads=self._checked("grads", self.tree.grads, plain(value))))
        self.has_gradients = True

    def opt_state_live(self, handle: Any) -> Any:
        """One optimizer's live state, for reading before the next step; an empty dictionary before it exists."""
        index = self.binding.optimizers.index(handle)
        states = self.tree.opt_state
        return states[index] if index < len(states) else {}

    def params_of(self, network: str) -> Any:
        """A copy of one network's parameters, None before they exist."""
        found = self.tree.params.get(network)
        return None if found is None else _copy(found)

    def is_frozen(self, path: str) -> bool:
        """Whether the parameter at `path` is frozen."""
        decisions = self.binding.freezing_key
        return bool(decisions) and is_frozen(decisions, path, norm_layers(self.tree.variables))

    def flat_params(self) -> dict[str, Any] | None:
        """A copy of all parameters by path, None before any exist."""
        params = self.tree.params
        return flatten(_copy(params)) if params else None

    def _checked(self, name: str, old: Any, new: Any) -> Any:
        """Places a new value on the devices after comparing its structure with the old one.

        Raises:
            ValueError: If paths, shapes or dtypes differ; the message lists them.
        """
        have, want = _by_path(new), _by_path(old)
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
                params=self.strategy.put(_copy(self.binding.precision.convert_params(params))),
                variables=self.strategy.put(_copy(self.binding.precision.convert_variables(variables))),
            )
        )

    def copy_variables(self, source: str, target: str) -> None:
        """Gives the network `target` copies of the variables of `source`, when that has any."""
        state = self.tree
        if source in state.params:
            self.take_created(
                {**state.params, target: _copy(state.params[source])},
                {**state.variables, target: _copy(state.variables.get(source, {}))},
            )

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
                old = _by_path(state.opt_state[index])
                grown = [old.get(path, leaf) for path, leaf in _by_path(fresh).items()]
                fresh = jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(fresh), grown)
            states.append(fresh)
        self._optimizer_paths = made_for
        self._set_tree(state.replace(opt_state=self.strategy.put(_copy(tuple(states)))))
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

    # --- NNX objects ----------------------------------------------------------------------------------------------

    def refresh_nnx(self) -> None:
        """Writes the current values into the user's NNX objects when a step changed them."""
        if self.binding.nnx is not None and self._nnx_stale:
            state = self.tree
            self.binding.nnx.refresh(_copy(state.params), _copy(state.variables))
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
                params=self.strategy.put({**state.params, **_copy(params)}),
                variables=self.strategy.put({**state.variables, **_copy(variables)}),
            )
        )
        self._nnx_stale = False
        if changed:
            self._forget()

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything a checkpoint needs, as numpy arrays that nobody else holds.

        Returns:
            `params`, `variables` (nested), `optimizer_states` (one flat `{path: array}` each), `gradients` (nested or
            None) and `accumulators` (`{stage: [2, capacity] array}`).
        """
        state = self.tree
        return {
            "params": _to_host(state.params),
            "variables": _to_host({**state.variables, **self._buffer_sections()}),
            "optimizer_states": [_to_host(_by_path(s)) for s in state.opt_state]
            if self._pending_optimizers is None
            else list(self._pending_optimizers),
            "gradients": None if state.grads is None else _to_host(state.grads),
            "scaler": None if state.scaler is None else _to_host(state.scaler._asdict()),
            "nonfinite": None if state.nonfinite is None else _to_host(state.nonfinite._asdict()),
            "accumulators": {} if state.acc is None else {"train": _to_host(state.acc)},
        }

    def load_state_dict(self, sections: Mapping[str, Any], *, strict: bool = True, weights_only: bool = False) -> None:
        """Restores what `state_dict` gave, before or after variables exist.

        Args:
            sections: As returned by `state_dict`.
            strict: Whether missing and unexpected paths are errors; differing shapes always are.
            weights_only: Whether only parameters and variables are restored.

        Raises:
            RuntimeError: If the paths or shapes do not fit; the message lists them.
        """
        params, variables = plain(sections["params"]), plain(sections.get("variables") or {})
        self._load_buffers(variables, strict)
        self._check_weights(params, variables, strict)
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
        return {path: {"nnx": value} for path, value in self.buffer_values().items()}  # type: ignore[attr-defined]

    def _load_buffers(self, variables: dict[str, Any], strict: bool) -> None:
        """Takes the buffers out of `variables` and sets them."""
        here = self.buffer_values()  # type: ignore[attr-defined]
        saved = {path: variables.pop(path)["nnx"] for path in list(variables) if path in here}
        missing = [path for path in here if path not in saved]
        if strict and missing:
            raise RuntimeError(
                f"The checkpoint does not fit {type(self.binding.module).__name__}:\n  "
                + "\n  ".join(f"missing: buffer {path} {np.shape(here[path])}" for path in missing)
                + "\nPass `strict=False` (or set `self.strict_loading = False`) to load what fits."
            )
        self.set_buffers(saved)  # type: ignore[attr-defined]

    def load_optimizer_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restores optimizer states alone; they wait where parameters or optimizers do not exist yet."""
        self._pending_optimizers = [dict(flat) for flat in states]
        if self._optimizer_paths is None:
            self.ensure_optimizer_states()
        else:
            pending, self._pending_optimizers = self._pending_optimizers, None
            self._load_optimizers(pending)

    def load_scaler(self, saved: Mapping[str, Any]) -> None:
        """Restores the loss scale, where the precision has one."""
        state = self.tree
        if state.scaler is not None:
            fresh = {name: jnp.asarray(saved[name], old.dtype) for name, old in state.scaler._asdict().items()}
            self._set_tree(state.replace(scaler=self.strategy.put(ScalerState(**fresh))))

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

    def _placed(self, tree: Any) -> Any:
        # Copies: numpy memory handed to a CPU device may be shared with the host array.
        with self.binding.precision.scope():
            return self.strategy.put(jax.tree.map(jnp.array, tree))

    def _check_weights(self, params: Mapping[str, Any], variables: Mapping[str, Any], strict: bool) -> None:
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
        for path in have:
            network = path.split("/")[1]
            exists = network in state.params or network in state.variables
            if network not in names or (exists and path not in want):
                problems.append(f"unexpected: {path} {tuple(np.shape(have[path]))}")
        for name in names:
            if name not in params and name not in state.params and have:
                problems.append(f"missing: everything of network `{name}`")
        if fatal or (problems and strict):
            lines = fatal + (problems if strict else [])
            raise RuntimeError(
                f"The checkpoint does not fit {type(self.binding.module).__name__}:\n  "
                + "\n  ".join(lines[:40])
                + ("" if fatal else "\nPass `strict=False` (or set `self.strict_loading = False`) to load what fits.")
            )

    def _load_optimizers(self, flats: list[dict[str, Any]]) -> None:
        states = self.tree.opt_state
        if len(flats) != len(states):
            raise RuntimeError(
                f"The checkpoint has states of {len(flats)} optimizer(s), `configure_optimizers` made {len(states)}."
            )
        restored = []
        for index, (flat, state) in enumerate(zip(flats, states, strict=True)):
            want = _by_path(state)
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


def _state_replaced(handle: Any) -> None:
    """Tells a handle that its state was replaced: numbers in it then win over those set on the host before."""
    told = getattr(handle, "state_replaced", None)
    if told is not None:
        told()


def _by_path(tree: Any) -> dict[str, Any]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def _copy(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), tree)


def _to_host(tree: Any) -> Any:
    # One fetch for all; a copy, because on a CPU the fetched array shares the device buffer, which is donated later.
    return jax.tree.map(lambda leaf: np.array(leaf, copy=True), jax.device_get(tree))
