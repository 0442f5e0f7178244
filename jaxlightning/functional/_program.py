"""From a hand-written step to the one call per batch that the loops make.

A jitted step is called as it is. Any other is compiled together with the splitting of the key, and its state is
donated. The program of a loss function is ours: gradient, update and state in one compiled call.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxlightning.compile.checks import checked, raising
from jaxlightning.compile.repeated_step import StateCarrier
from jaxlightning.functional._forms import (
    Form,
    LossForm,
    StepOutputs,
    entries_of,
    is_jitted,
    plain_logs,
    split_outputs,
)
from jaxlightning.functional._held import Held, NnxHeld
from jaxlightning.functional._values import Rate
from jaxlightning.utilities.exceptions import MisconfigurationException

__all__ = ["RepeatedProgram", "TrainProgram", "caller", "loss_step", "split_key"]


@jax.jit
def split_key(key: Any) -> Any:
    """`key, subkey = jax.random.split(key)`, as hand-written loops do at every step."""
    keys = jax.random.split(key)
    return keys[0], keys[1]


@jax.jit
def _copied(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), tree)


_PLACES = {"batch": 1, "opt": 2, "key": 3}


def caller(function: Callable[..., Any], form: Form, places: Mapping[str, int] = _PLACES) -> Callable[..., Any]:
    """A function that puts its arguments into the order, or under the names, that a step wants.

    Args:
        function: The step.
        form: Its form.
        places: Where each role stands among the arguments; what is not in it is the first.

    Returns:
        By default `(carry, batch, opt, key) -> the step's result`.
    """
    order = [places.get(role, 0) for role in form.roles]
    if not form.keywords:
        get = operator.itemgetter(*order)
        return lambda *values: function(*get(values))
    split = len(order) - len(form.keywords)
    named = dict(zip(form.keywords, order[split:], strict=True))
    return lambda *values: function(
        *[values[i] for i in order[:split]], **{name: values[i] for name, i in named.items()}
    )


class TrainProgram:
    """Runs one training batch: `(carry, opt, key, batch) -> (carry, opt, key, losses, rate)`.

    Args:
        function: The user's step.
        form: Its form.
        held: What it carries.
        rate: Where the learning rate is.
        jit: Whether a step that is not jitted is jitted.
        donate: Whether the state may be donated to such a step.
        checks: Kinds of run-time checks that are put around the step, jitted or not.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        form: Form,
        held: Held,
        rate: Rate,
        *,
        jit: bool,
        donate: bool,
        checks: tuple[str, ...] = (),
    ) -> None:
        self.function = function
        self.form = form
        self.held = held
        self.rate = rate
        self.outputs: StepOutputs | None = None
        self.as_it_is = is_jitted(function)
        self._step = caller(function, form)
        self._donates = False
        self._checked = False
        if checks:
            if isinstance(held, NnxHeld) and held.live:
                raise MisconfigurationException(
                    f"`Trainer(checkify=...)`: {form.where} is jitted by `nnx.jit`, into which no checks can be put. "
                    "Pass the plain function."
                )
            self.call: Callable[..., Any] = raising(jax.jit(checked(self._traced, checks)), form.where)
        elif self.as_it_is:
            self.call = self._call_as_it_is
        elif jit:
            self.call = jax.jit(self._traced, donate_argnums=(0, 1, 2) if donate else ())
        else:
            self.call = self._traced

    def _call_as_it_is(self, carry: Any, opt: Any, key: Any, batch: Any) -> Any:
        subkey = None
        if key is not None:
            key, subkey = split_key(key)
        held = self.held
        if isinstance(held, NnxHeld):
            model, optimizer = held.objects
            out = self._step(model, batch, optimizer, subkey)
            return carry, opt, key, self._losses(out, model, optimizer), None
        before = carry if held.static is None else held.rebuild(carry)
        out = self._step(before, batch, opt, subkey)
        places = self.outputs
        if places is None:
            places = self._first_look(out, before, opt)
        new_opt = opt if places.opt is None else out[places.opt]
        losses: Any = out[places.logs[0]] if len(places.logs) == 1 else tuple(out[i] for i in places.logs)
        rate = None if self.rate.get is None else self.rate.get(out[0] if new_opt is None else new_opt)
        if self._donates:
            # The step donates its state: what is read later must not be a part of it.
            losses, rate = _copied((losses, rate))
        return out[0] if held.static is None else held.strip(out[0]), new_opt, key, losses, rate

    def _first_look(self, out: Any, carry: Any, opt: Any) -> StepOutputs:
        """Learns from the first return value where its parts are, and whether the step donates its arguments."""
        self._donates = any(
            leaf.is_deleted() for leaf in jax.tree_util.tree_leaves((carry, opt)) if isinstance(leaf, jax.Array)
        )
        self.outputs = self._require(split_outputs(self.form, out, carry, opt))
        self.held.require_same_static(out[0], self.form.where)
        return self.outputs

    def _require(self, places: StepOutputs | None) -> StepOutputs:
        if places is None:
            raise TypeError(
                f"{self.form.where} returned a loss and no state: it is a loss function. Pass it as "
                "`fit(..., loss_fn=...)`, without `jax.jit`, and the step around it is written for you."
            )
        return places

    def _losses(self, out: Any, carry: Any, opt: Any) -> Any:
        return () if out is None else out

    def _traced(self, carry: Any, opt: Any, key: Any, batch: Any) -> Any:
        subkey = None
        if key is not None:
            keys = jax.random.split(key)
            key, subkey = keys[0], keys[1]
        held = self.held
        before = held.rebuild(carry)
        if isinstance(held, NnxHeld):
            model, optimizer = before
            losses = plain_logs(self._losses(self._step(model, batch, optimizer, subkey), model, optimizer))
            new, new_opt, source = held.strip((model, optimizer)), opt, None
            source = new
        else:
            out = self._step(before, batch, opt, subkey)
            places = self.outputs = self._require(split_outputs(self.form, out, before, opt))
            held.require_same_static(out[0], self.form.where)
            new_opt = opt if places.opt is None else out[places.opt]
            losses = tuple(plain_logs(out[i]) for i in places.logs)
            new = held.strip(out[0])
            source = out[0] if new_opt is None else new_opt
        rate = None if self.rate.get is None else self.rate.get(source)
        return _distinct((new, new_opt, key, losses, rate))


class RepeatedProgram:
    """The same program on batch after batch, as `compile.repeated_step.RepeatedStep` is for a module.

    Args:
        held: What is carried.
        program: The program.
        finish: Makes the result of the last batch.
    """

    # A hand-written step reads nothing that could change between two batches.
    still_valid, uses_host_numbers = True, False
    _dirty = False
    _leaves: tuple[Any, ...] = ()

    def __init__(self, held: Held, program: TrainProgram, finish: Callable[..., Any]) -> None:
        self._held = held
        self._call = program.call
        self._finish = finish
        self._last: tuple[Any, Any, int] = (None, None, 0)

    @property
    def bare(self) -> tuple[StateCarrier, Any, Any, type | None]:
        """Itself and no kind of batch: a hand-written step is called as a whole."""
        return self, None, None, None

    def integers(self, batch_idx: int, current_epoch: int, global_step: int, micro_step: int, count: int) -> range:
        """The numbers of `count` batches over the run."""
        return range(micro_step, micro_step + count)

    def __call__(self, batch: Any, number: int) -> bool:
        """Runs a batch."""
        held = self._held
        held.carry, held.opt, held.key, parts, rate = self._call(held.carry, held.opt, held.key, batch)
        self._last = (parts, rate, number)
        return True

    def finish(self, count: int) -> Any:
        """Books `count` batches and gives the result of the last."""
        result = self._finish(count, *self._last)
        self._last = (None, None, 0)
        return result


def _distinct(tree: Any) -> Any:
    """Copies every leaf that occurs a second time: each will be donated, and a buffer can be donated only once."""
    seen: set[int] = set()

    def own(leaf: Any) -> Any:
        if not hasattr(leaf, "dtype"):
            return leaf
        if id(leaf) in seen:
            return jnp.array(leaf, copy=True)
        seen.add(id(leaf))
        return leaf

    return jax.tree.map(own, tree)


def loss_step(function: Callable[..., Any], form: LossForm, tx: Any) -> tuple[Callable[..., Any], Form]:
    """Writes the step around a loss function.

    Args:
        function: `(params, batch, ...) -> loss` or `(loss, aux)`.
        form: Its form.
        tx: The optax transformation, None when the state brings its own.

    Returns:
        The step, in the form `(state, batch[, key])` with a TrainState, else `(params, opt_state, batch[, key])`.
    """
    with_state = tx is None
    call = caller(function, form, {"batch": 1, "batch_stats": 2, "state": 3, "key": 4})

    def gradients(params: Any, batch: Any, batch_stats: Any, state: Any, key: Any) -> Any:
        trainable, rest = _partition(params)

        def loss_fn(trainable: Any) -> tuple[Any, Any]:
            out = call(_combined(trainable, rest), batch, batch_stats, state, key)
            loss, aux = (out[0], out[1:]) if isinstance(out, tuple) else (out, ())
            if jnp.shape(loss) != ():
                raise TypeError(
                    f"{form.where} must return a scalar loss, alone or first; it returned shape {jnp.shape(loss)}."
                )
            return loss, aux

        (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(trainable)
        losses, updates = _read_aux(loss, aux, batch_stats)
        return grads, losses, updates, trainable, rest

    if with_state:

        def state_step(state: Any, batch: Any, key: Any = None) -> Any:
            stats = getattr(state, "batch_stats", None)
            grads, losses, updates, _, _ = gradients(state.params, batch, stats, state, key)
            fields = {} if updates is None else {"batch_stats": updates}
            return state.apply_gradients(grads=grads, **fields), losses

        roles: tuple[str, ...] = ("state", "batch")
        step: Callable[..., Any] = state_step
    else:

        def params_step(params: Any, opt_state: Any, batch: Any, key: Any = None) -> Any:
            grads, losses, _, trainable, rest = gradients(params, batch, None, None, key)
            updates, opt_state = tx.update(grads, opt_state, trainable)
            return _combined(optax.apply_updates(trainable, updates), rest), opt_state, losses

        roles = ("params", "opt", "batch")
        step = params_step
    return step, Form((*roles, *(("key",) if "key" in form.roles else ())), form.where)


def _read_aux(loss: Any, aux: tuple[Any, ...], batch_stats: Any) -> tuple[Any, Any]:
    """Losses to log, and new batch statistics when they are among the auxiliary values."""
    updates: Any = None
    losses: list[Any] = []
    for part in _spread(aux):
        entries = entries_of(part)
        if entries is None:
            losses.append(part)
            continue
        if "batch_stats" in entries and not hasattr(entries["batch_stats"], "dtype"):
            updates = entries.pop("batch_stats")
        if entries:
            losses.append(entries)
    named = [part for part in losses if isinstance(part, dict) and "loss" in part]
    return (tuple(losses) if named else (loss, *losses)), updates


def _spread(value: Any) -> list[Any]:
    if isinstance(value, list | tuple) and entries_of(value) is None:
        return [part for item in value for part in _spread(item)]
    return [] if value is None else [value]


def _partition(params: Any) -> tuple[Any, Any]:
    """Floating-point leaves, which are trained, and the rest; None stands for a leaf of the other half."""

    def trained(leaf: Any) -> bool:
        return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact)

    leaves, treedef = jax.tree_util.tree_flatten(params)
    if all(map(trained, leaves)):
        return params, None
    pick = jax.tree_util.tree_unflatten
    return (
        pick(treedef, [leaf if trained(leaf) else None for leaf in leaves]),
        pick(treedef, [None if trained(leaf) else leaf for leaf in leaves]),
    )


def _combined(trainable: Any, rest: Any) -> Any:
    if rest is None:
        return trainable
    return jax.tree.map(lambda a, b: b if a is None else a, trainable, rest, is_leaf=lambda leaf: leaf is None)


def trainable_of(params: Any) -> Any:
    """The part of parameters that a loss function's optimizer is made for."""
    return _partition(params)[0]
