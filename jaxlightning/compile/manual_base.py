"""What runs of a step with manual optimization have in common, whether the step is traced, eager or replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax

from jaxlightning.compile.freezing import frozen_of, keep_frozen, keep_statistics
from jaxlightning.compile.guarded_update import guarded_update
from jaxlightning.compile.manual_events import ManualOptions, ManualPlan
from jaxlightning.compile.paths import flatten, merge, select
from jaxlightning.compile.run_step import is_array
from jaxlightning.compile.state import TrainState
from jaxlightning.optim import Optimizer
from jaxlightning.utilities.exceptions import MisconfigurationException

if TYPE_CHECKING:
    from jaxlightning.compile.binding import Binding
    from jaxlightning.compile.manual_replay import ClosureValue
    from jaxlightning.compile.manual_schedulers import Rates
    from jaxlightning.compile.trace import Trace

__all__ = ["ManualBase", "OptimizerUpdate", "check_loss", "leaf_paths"]


def leaf_paths(tree: Any) -> list[str]:
    """The path of every leaf of nested dictionaries, in flattening order."""
    return [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]
    ]


def check_loss(loss: Any, has_gradient: bool, where: str) -> Any:
    """What `manual_backward` may be given.

    Args:
        loss: What it was given.
        has_gradient: Whether the cotangent was given too, so that the loss need not be a scalar.
        where: The user's step, for messages.

    Returns:
        The loss, a scalar of shape [] unless `has_gradient`.

    Raises:
        TypeError: If it is no array of JAX.
        RuntimeError: If it is no real floating-point scalar.
    """
    if not is_array(loss):
        hint = ""
        if any(c.__module__.split(".")[0] == "torch" for c in type(loss).__mro__):
            hint = " Compute the loss with jax.numpy / optax from the arrays of the batch."
        raise TypeError(
            f"`manual_backward` in `{where}` wants the loss, a scalar array of JAX, but got {type(loss).__name__} "
            f"{loss!r:.80}.{hint}"
        )
    if not jnp.issubdtype(loss.dtype, jnp.floating):
        raise RuntimeError(
            f"`manual_backward` in `{where}` got a loss of dtype {loss.dtype}; a gradient needs a real floating-point "
            "scalar."
        )
    if has_gradient:
        return loss
    if loss.size != 1:
        raise RuntimeError(
            f"`manual_backward` in `{where}` got a loss of shape {tuple(loss.shape)}; a gradient needs a scalar. Reduce"
            " it: `loss.mean()`, or pass `gradient=`."
        )
    return loss.reshape(())


def independent_loss(number: int, where: str) -> RuntimeError:
    """The error for a loss without a path to a parameter; `number` counts backward calls from 1."""
    return RuntimeError(
        f"The loss of `manual_backward` number {number} in `{where}` does not depend on any parameter that an optimizer"
        " owns and that takes part (element 0 of tensors does not require grad). Was it computed under"
        " `jax.lax.stop_gradient`, from constants, or while another optimizer was toggled?"
    )


class OptimizerUpdate:
    """One call of `opt.step()` as a function of arrays.

    Args:
        run: The run in which it happens.
        index: Number of the optimizer.
        handle: The optimizer.
        value: The loss as a function of the parameters, for an optimizer that evaluates it several times.
    """

    def __init__(self, run: ManualBase, index: int, handle: Any, value: ClosureValue | None = None) -> None:
        own, nested = run.binding.owned_by(handle), run.nested(run.raw)
        self._binding = run.binding
        self._handle = handle
        self._value = value
        self._frozen = run.frozen
        mine = nested if own is None else select(nested, own)
        self._shape = jax.tree_util.tree_structure(mine)
        self._count = len(jax.tree_util.tree_leaves(mine))
        self._rest = jax.tree_util.tree_structure((run.opt_states[index], run.guards))

    def kept(self, run: ManualBase, index: int) -> list[Any]:
        """What the update replaces: leaves of the parameters, of the optimizer's state and of what guards updates."""
        mine = [run.raw[leaf] for leaf in run.leaves_of(index)]
        return [*mine, *jax.tree_util.tree_leaves((run.opt_states[index], run.guards))]

    def put(self, run: ManualBase, index: int, results: Sequence[Any]) -> None:
        """Gives a run what came out."""
        for leaf, value in zip(run.leaves_of(index), results[: self._count], strict=True):
            run.raw[leaf] = value
        run.opt_states[index], run.guards = jax.tree_util.tree_unflatten(self._rest, list(results[self._count :]))

    def __call__(self, gradients: Sequence[Any], kept: Sequence[Any], further: Sequence[Any]) -> list[Any]:
        """Applies the optimizer.

        Args:
            gradients: Leaves of the gradients, without loss scale.
            kept: As `kept` gives them.
            further: Its hyper-parameters, then the loss of the last backward call if there was one, then constants of
                the loss as a function.

        Returns:
            New leaves in the order of `kept`.
        """
        hyper, loss = further[0], further[1] if len(further) > 1 else None
        mine = jax.tree_util.tree_unflatten(self._shape, list(kept[: self._count]))
        grads = jax.tree_util.tree_unflatten(self._shape, list(gradients))
        opt_state, (scaler, nonfinite) = jax.tree_util.tree_unflatten(self._rest, list(kept[self._count :]))
        before = TrainState(mine, {}, opt_state=opt_state, scaler=scaler, nonfinite=nonfinite)
        extra = {} if loss is None else {"value": loss, "grad": grads}
        if self._value is not None:
            extra["value_fn"] = self._value.with_consts(further[2:])
        updates, new_state = self._handle.update(grads, opt_state, mine, hyper, **extra)
        updated = optax.apply_updates(mine, updates)
        if self._frozen is not None:
            updated = merge(updated, select(mine, self._frozen.params.__contains__))
            grouped = isinstance(self._handle, Optimizer)
            new_state = keep_frozen(self._frozen, mine, new_state, opt_state, grouped=grouped)
        after = before.replace(params=updated, opt_state=new_state)
        after = guarded_update(self._binding, before, after, grads, loss)
        return jax.tree_util.tree_leaves((after.params, (after.opt_state, (after.scaler, after.nonfinite))))


class ManualBase:
    """Parameters, their owners and what networks see of them during one run of a step.

    Args:
        binding: The module, its networks and optimizers.
        state: The training state at the start of the step.
        options: Static choices of the variant.
        check: Whether losses and gradients are checked for being finite.
        where: The user's step, for messages.

    Attributes:
        raw: The parameters as they are now, in flattening order.
        views: What networks read.
        plan: What the step does to optimizers and schedulers.
        history: The parameters after everything that changed them, in order.
        entered: How often `opt.step` was called.
        rates: What the step does to learning rates, None where that happens at once.
    """

    def __init__(self, binding: Binding, state: TrainState, options: ManualOptions, check: bool, where: str) -> None:
        self.binding = binding
        self.options = options
        self.check = check
        self.where = where
        self.plan = ManualPlan()
        self.flags: list[Any] = []
        self.flag_names: list[str] = []
        self.raw, self.treedef = jax.tree_util.tree_flatten(state.params)
        self.views: list[Any] = list(self.raw)
        self.paths = leaf_paths(state.params)
        self.owners = [self._owner(path) for path in self.paths]
        self.owned = [leaf for leaf, owner in enumerate(self.owners) if owner is not None]
        self.opt_states = list(state.opt_state)
        self.guards = (state.scaler, state.nonfinite)
        self.frozen = frozen_of(binding, state.params, state.variables)
        self.state = state
        self.buffers = {} if state.grads is None else flatten(state.grads)
        self.toggled: int | None = None
        self.loss: Any = None
        self.history: list[list[Any]] = []
        self.entered = 0
        self.rates: Rates | None = None
        self.trace: Trace

    def start(self, trace: Trace) -> None:
        """Gives the trace the parameters to read."""
        self.trace = trace
        trace.params.update(self.nested(self.views))

    def _owner(self, path: str) -> int | None:
        for index, handle in enumerate(self.binding.optimizers):
            owns = self.binding.owned_by(handle)
            if owns is None or owns(path):
                return index
        return None

    def nested(self, leaves: Sequence[Any]) -> dict[str, Any]:
        """Parameters as networks have them, from their leaves."""
        tree: dict[str, Any] = jax.tree_util.tree_unflatten(self.treedef, list(leaves))
        return tree

    def leaves_of(self, index: int) -> list[int]:
        """Numbers of the parameters that an optimizer owns."""
        return [leaf for leaf in self.owned if self.owners[leaf] == index]

    def _takes_part(self, leaf: int) -> bool:
        held = self.frozen is not None and self.paths[leaf] in self.frozen.params
        return not held and self.toggled in (None, self.owners[leaf])

    def _tracked(self, leaves: Sequence[int]) -> list[int]:
        """Those of some parameters that gradients are taken of."""
        return [
            leaf
            for leaf in leaves
            if self.owners[leaf] is not None
            and self._takes_part(leaf)
            and jnp.issubdtype(self.raw[leaf].dtype, jnp.inexact)
        ]

    def _show(self, leaves: Sequence[int]) -> None:
        """Makes new views of parameters: what networks read from now on."""
        raise NotImplementedError

    def _publish(self) -> None:
        self.trace.params.update(self.nested(self.views))
        if self.binding.raw:
            self.binding.place_raw(self.trace)
        if self.binding.nnx is not None:
            self.binding.nnx.put_params(self.trace)

    def absorb(self) -> None:
        """Takes over parameters that the step assigned itself."""
        current = jax.tree_util.tree_leaves({name: self.trace.params[name] for name in self.nested(self.raw)})
        changed = [leaf for leaf, value in enumerate(current) if value is not self.views[leaf]]
        if changed:
            self._assigned(changed, current)
            self._show(changed)
            self._publish()

    def _assigned(self, changed: list[int], current: list[Any]) -> None:
        for leaf in changed:
            self.raw[leaf] = jax.lax.stop_gradient(current[leaf])

    def _index(self, handle: Any) -> int:
        for index, known in enumerate(self.binding.optimizers):
            if handle is known or handle is known.optimizer:
                return index
        raise MisconfigurationException(
            f"{type(handle).__name__} is none of the optimizers that `configure_optimizers` returned."
        )

    def _enter(self, what: str) -> None:
        self.trace.require_own_level(what, "call it in the step itself")
        self.binding.take_raw(self.trace)
        self.absorb()

    def _stepped(self, index: int) -> None:
        self.plan.steps.append(index)
        scalars = self.trace.scalars
        scalars.global_step = scalars.global_step + 1

    def _name_flags(self) -> None:
        number = len(self.flags)
        self.flag_names.append(f"the loss of `manual_backward` number {number}")
        self.flag_names += [
            f"the gradient of {self.paths[leaf]} in `manual_backward` number {number}" for leaf in self.owned
        ]

    def toggle(self, handle: Any, on: bool) -> None:
        """`toggle_optimizer` and `untoggle_optimizer`: which optimizer's parameters have gradients."""
        self._enter("`toggle_optimizer`")
        self.toggled = self._index(handle) if on else None
        self._show(self.owned)
        self._publish()

    def _left(self, grads: Any) -> TrainState:
        """The training state at the end, with these gradient buffers."""
        variables = keep_statistics(self.frozen, self.trace.variables, self.state.variables)
        if self.binding.precision.casts:  # what the step carries keeps its dtype
            variables = jax.tree.map(lambda new, like: new.astype(like.dtype), variables, self.state.variables)
        return self.state.replace(
            params=self.nested(self.raw), variables=variables, opt_state=tuple(self.opt_states), grads=grads,
            scaler=self.guards[0], nonfinite=self.guards[1],
        )  # fmt: skip

    def _with_gradients(self, buffers: Callable[[str], Any]) -> Any:
        """The state's gradient buffers with new values by path."""
        grads = self.state.grads
        if grads is None:
            return None
        return jax.tree_util.tree_unflatten(
            jax.tree_util.tree_structure(grads), [buffers(path) for path in leaf_paths(grads)]
        )
