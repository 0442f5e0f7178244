"""Handles for the user's own optax transformations."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxlightning.optim._closures import (
    find_injections,
    find_learning_rate,
    find_name,
    find_needs,
    find_schedules,
    maker_of,
    reachable,
)
from jaxlightning.optim._groups import ParamGroup, as_selection, leaf_paths
from jaxlightning.optim._handle import OptimizerHandle, as_number, settle
from jaxlightning.optim._injection import (
    LEARNING_RATE,
    OptaxGroup,
    injections,
    is_float_scalar,
    map_injections,
    shortest,
)
from jaxlightning.utilities.exceptions import MisconfigurationException


class SlowState(NamedTuple):
    """State of a wrapped `optax.lookahead`, which optax keeps partly in the parameters.

    Attributes:
        inner: Optax's own state.
        slow: The slow parameters.
    """

    inner: Any
    slow: Any


def is_transformation(obj: Any) -> bool:
    """Whether `obj` is an optax transformation or works like one (`optax.MultiSteps`)."""
    return (
        not isinstance(obj, (type, OptimizerHandle))
        and callable(getattr(obj, "init", None))
        and callable(getattr(obj, "update", None))
        and not isinstance(obj, Mapping)
    )


class OptaxOptimizer(OptimizerHandle):
    """An optax transformation with the words of an optimizer.

    `configure_optimizers` may return the transformation itself; this class is for saying more about it: which
    parameters it owns, what it is called in logs, and its learning rate, where optax does not tell.

    Args:
        tx: The transformation, or an `optax.MultiSteps`.
        params: What it owns; None means every parameter.
        name: What LearningRateMonitor calls it; found from `tx` if None.
        lr: Its learning rate, a number or a schedule of the update count, for logging. It does not change `tx`.

    Raises:
        TypeError: If `tx` is no optax transformation.
    """

    def __init__(
        self, tx: Any, params: Any = None, *, name: str | None = None, lr: float | Callable[[Any], Any] | None = None
    ) -> None:
        super().__init__()
        if not is_transformation(tx):
            raise TypeError(
                f"OptaxOptimizer wants an optax transformation (with `init` and `update`), but got {type(tx).__name__}."
            )
        self.tx = tx
        self._tx = optax.with_extra_args_support(
            tx
            if isinstance(tx, optax.GradientTransformation)
            else optax.GradientTransformationExtraArgs(tx.init, tx.update)
        )
        self.name = name or find_name(tx)
        self.owns = None if params is None else as_selection(params)
        self._lookahead = maker_of(getattr(tx, "update", None)) == "lookahead"
        self._averages = self._lookahead or "schedule_free" in set(map(maker_of, reachable(tx)))
        self.lr_source = lr if lr is not None else find_learning_rate(tx)
        self._schedules = find_schedules(tx)
        self._slots: list[tuple[int, str]] = []  # (injection, hyper-parameter) of every entry of the vector
        self._start: dict[tuple[int, str], float] = {}
        self._set: dict[tuple[int, str], float] = {}
        self._injected = False
        self.param_groups = [self._group(0, {})]
        self.defaults = {}
        self._inspect()

    # --- what is in the transformation --------------------------------------------------------------------------

    def _find_injections(self) -> list[tuple[str | None, dict[str, Any], set[str]]]:
        """Label, numbers and scheduled names of every injection, before any parameter exists."""
        found = find_injections(self.tx)
        if not found:
            return []
        try:  # the state for one scalar parameter shows them in the order in which the real one will
            state = self._tx.init({"w": np.zeros((), np.float32)})
        except Exception:  # a mask or label tree that fits only the real parameters
            return [(None, *found[0])] if len(found) == 1 else []
        return [
            (label, dict(node.hyperparams), set(getattr(node, "hyperparams_states", {})))
            for label, node in injections(state)
        ]

    def _inspect(self) -> None:
        found = self._find_injections()
        self._injected = bool(found)
        groups = []
        for index, (label, numbers, scheduled) in enumerate(found):
            fixed = {
                key: shortest(value)
                for key, value in numbers.items()
                if key not in scheduled and is_float_scalar(value)
            }
            for key, number in fixed.items():
                self._slots.append((index, key))
                self._start[index, key] = number
            if LEARNING_RATE in numbers or LEARNING_RATE in scheduled:
                names = {"name": label} if label is not None and len(found) > 1 else {}
                pair = {"betas": None} if {"b1", "b2"} <= fixed.keys() else {}
                groups.append(
                    self._group(index, {**names, **pair, **{k: v for k, v in fixed.items() if k != LEARNING_RATE}})
                )
        if groups:
            self.param_groups[:] = groups
            words = ("betas", "momentum", "weight_decay")
            self.defaults = {key: value for key, value in groups[0].items() if key in words}
        self._changed()

    def _group(self, index: int, values: dict[str, Any]) -> ParamGroup:
        return OptaxGroup({"params": self.owns, **values}, self, index)

    @property
    def optimizer(self) -> Any:
        """The optax transformation."""
        return self.tx

    # --- pure functions -----------------------------------------------------------------------------------------

    def init(self, params: Any) -> Any:
        """Makes the optax state; see `OptimizerHandle.init`."""
        if not jax.tree.leaves(params):
            raise ValueError(
                f"{self.name} got an empty parameter list: none of the module's parameters matches {self.owns!r}."
            )
        if not self._lookahead:
            self.needs_value, self.needs_value_fn = find_needs(self._tx, params)
        if self._lookahead:
            inner = self._tx.init(optax.LookaheadParams.init_synced(params))
            return settle(SlowState(inner=inner, slow=jax.tree.map(jnp.array, params)))
        return settle(self._tx.init(params))

    def update(self, grads: Any, opt_state: Any, params: Any, hyper: Any, **extra: Any) -> tuple[Any, Any]:
        """Turns gradients into updates; see `OptimizerHandle.update`."""
        missing = [
            name
            for name, needed in (("value", self.needs_value), ("value_fn", self.needs_value_fn))
            if needed and name not in extra
        ]
        if missing:
            raise MisconfigurationException(
                f"The optax transformation {self.name} needs {' and '.join(missing)} in its update, which this kind "
                "of step cannot give. Use it with automatic optimization."
            )
        state = self._put_hyper(opt_state, hyper)
        if self._lookahead:
            both = optax.LookaheadParams(fast=params, slow=state.slow)
            updates, inner = self._tx.update(grads, state.inner, both)
            slow = optax.apply_updates(state.slow, updates.slow)
            return updates.fast, settle(SlowState(inner=inner, slow=slow), opt_state)
        updates, new_state = self._tx.update(grads, state, params, **extra)
        return updates, settle(new_state, opt_state)

    def _put_hyper(self, state: Any, hyper: Any) -> Any:
        if not self._slots:
            return state
        entries = {slot: hyper[position] for position, slot in enumerate(self._slots)}

        def put(index: int, node: Any) -> Any:
            values = dict(node.hyperparams)
            for key, old in values.items():
                if (index, key) in entries:
                    new = entries[index, key]
                    # NaN means "not set on the host": the number in the state, the user's own, stays.
                    values[key] = jnp.where(jnp.isnan(new), old, jnp.asarray(new, dtype=jnp.result_type(old)))
            return node._replace(hyperparams=values)

        return map_injections(state, put)

    # --- hyper-parameters ---------------------------------------------------------------------------------------

    @property
    def hyper_names(self) -> list[str]:
        """A name for every entry of the hyper-parameter vector, for example `"0.learning_rate"`."""
        return [f"{index}.{key}" for index, key in self._slots]

    def _collect_hyper(self) -> list[float]:
        return [self._set.get(slot, math.nan) for slot in self._slots]

    def get_number(self, index: int, key: str, opt_state: Any = None) -> float | None:
        """The current value of a hyper-parameter, None if it is unknown.

        Args:
            index: Which `inject_hyperparams` of the transformation, 0 for plain optax.
            key: Optax's name, for example `"learning_rate"`.
            opt_state: The current state; the running trainer's if None.
        """
        if (index, key) in self._set:
            return self._set[index, key]
        if key == LEARNING_RATE and not self._injected:
            return self._plain_lr(opt_state)
        if opt_state is None and self._get_state is not None:
            opt_state = self._get_state()
        if key in self._schedules and index == 0:
            return float(self._schedules[key](self.count(opt_state)))
        nodes = list(injections(opt_state))
        if index < len(nodes) and key in nodes[index][1].hyperparams:
            return shortest(nodes[index][1].hyperparams[key])
        return self._start.get((index, key))

    def _plain_lr(self, opt_state: Any) -> float | None:
        if self.lr_source is None:
            return None
        number = float(self.lr_source(self.count(opt_state))) if callable(self.lr_source) else float(self.lr_source)
        if not math.isfinite(number):
            raise MisconfigurationException(
                f"The learning-rate schedule of {self.name} returned {number} for update {self.count(opt_state)}."
            )
        return number

    def count(self, opt_state: Any = None) -> int:
        """The update count that the transformation's schedules see next."""
        if opt_state is None and self._get_state is not None and isinstance(self.tx, optax.MultiSteps):
            opt_state = self._get_state()
        if isinstance(opt_state, optax.MultiStepsState):
            return int(opt_state.gradient_step)
        # An update that was left out did not move the state, whose count the schedules follow.
        return self.updates - (0 if self._get_skipped is None else self._get_skipped())

    def has_number(self, index: int, key: str) -> bool:
        """Whether a hyper-parameter can be set from the host."""
        return (index, key) in self._slots

    def set_number(self, index: int, key: str, value: Any) -> None:
        """Sets an injected hyper-parameter from the host; the compiled step takes it as an input.

        Args:
            index: Which `inject_hyperparams` of the transformation.
            key: Optax's name.
            value: The number.

        Raises:
            MisconfigurationException: If the transformation has no such injected number.
        """
        if (index, key) not in self._slots:
            if self._injected and (key in self._schedules or key == LEARNING_RATE):
                raise MisconfigurationException(
                    f"{key!r} of {self.name} follows a schedule given to `optax.inject_hyperparams`, so setting it "
                    "would have no effect. Give a number in place of the schedule to set it from outside."
                )
            raise MisconfigurationException(
                f"{key!r} of the optax transformation {self.name} is fixed inside its functions and cannot be set. "
                f"Build it with `optax.inject_hyperparams(optax.{self.name})(...)` (or use an optimizer of "
                "`jaxlightning.optim`), so that schedulers, callbacks and your own code can change it during a run."
            )
        self._set[index, key] = as_number(value, f"{self.name}: {key!r}")
        self._changed()

    def read_lr(self, opt_state: Any = None) -> list[float | None]:
        """The learning rate of every group, see `OptimizerHandle.read_lr`."""
        return [self.get_number(group.index, LEARNING_RATE, opt_state) for group in self.param_groups]

    def state_replaced(self) -> None:
        """Tells the handle that the user put another optimizer state in place: its numbers win over set ones."""
        self._set.clear()
        self._changed()

    def _restore_value(self, group: Any, key: str, value: Any) -> None:
        if key in ("lr", "betas") or (group.index, key) in self._slots:
            if (group.index, LEARNING_RATE if key == "lr" else key) in self._slots and value is not None:
                self.set_number(group.index, LEARNING_RATE if key == "lr" else key, value)
            return
        dict.__setitem__(group, key, value)

    # --- evaluation parameters ----------------------------------------------------------------------------------

    @property
    def has_eval_params(self) -> bool:
        """Whether the transformation averages: `schedule_free` or `lookahead`."""
        return self._averages

    def eval_params(self, opt_state: Any, params: Any) -> Any:
        """The averaged parameters of `schedule_free`, the slow ones of `lookahead`, `params` otherwise.

        Args:
            opt_state: The current state.
            params: The parameters being trained.

        Returns:
            The parameters to evaluate with; pure, may be traced.
        """
        if isinstance(opt_state, SlowState):
            return opt_state.slow
        if not self.has_eval_params:
            return params
        nodes = [node for node in jax.tree.leaves(opt_state, is_leaf=_is_schedule_free) if _is_schedule_free(node)]
        if len(nodes) != 1 or leaf_paths(nodes[0].z) != leaf_paths(params):
            raise MisconfigurationException(
                f"{self.name}: the evaluation parameters of `schedule_free` are known only when one of them owns all "
                "parameters of the optimizer; give each part its own optimizer."
            )
        return optax.contrib.schedule_free_eval_params(nodes[0], params)


def _is_schedule_free(node: Any) -> bool:
    return hasattr(node, "base_optimizer_state") and hasattr(node, "z") and hasattr(node, "b1")


_handles: weakref.WeakValueDictionary[int, OptaxOptimizer] = weakref.WeakValueDictionary()


def handle_for(tx: Any) -> OptaxOptimizer:
    """The handle of an optax transformation; the same one for the same object, until `forget_handles`.

    Schedulers and `configure_optimizers` name the transformation itself, and must end at one handle.

    Args:
        tx: The transformation.

    Returns:
        The handle, which keeps `tx` alive.
    """
    handle = _handles.get(id(tx))
    if handle is None or handle.tx is not tx:
        handle = _handles[id(tx)] = OptaxOptimizer(tx)
    return handle


def forget_handles() -> None:
    """Makes the next run begin with fresh handles for the same transformations."""
    _handles.clear()
