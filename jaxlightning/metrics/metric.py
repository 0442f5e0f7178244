"""Metric objects: torchmetrics' words over a state that is a dictionary of arrays.

A metric is a set of pure functions (`functional()`: init, update, merge, compute) with a stateful face. On the host the
face keeps the state in the object. In a compiled step it gives the state of the batch to the step, which returns it;
the log connector merges it into the object's state on the device, without waiting.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, NamedTuple, Self, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxlightning.compile.log_plan import LogMeta
from jaxlightning.compile.trace import Trace, current_trace
from jaxlightning.utilities.rank_zero import rank_zero_warn

__all__ = ["Metric", "MetricFunctions", "leaves_out_padding", "live_metric", "merge_states", "traced_values"]

State: TypeAlias = dict[str, Any]
_Function = TypeVar("_Function", bound=Callable[..., Any])

_tokens = itertools.count()
_live: weakref.WeakValueDictionary[int, Metric] = weakref.WeakValueDictionary()
_MERGES: dict[str, Callable[[Any, Any], Any]] = {"sum": jnp.add, "max": jnp.maximum, "min": jnp.minimum}
_ONLY_DEFAULTS = {
    "compute_on_cpu": False,
    "dist_sync_on_step": False,
    "process_group": None,
    "dist_sync_fn": None,
    "distributed_available_fn": None,
    "sync_on_compute": True,
    "compute_with_cache": True,
}


class MetricFunctions(NamedTuple):
    """A metric as pure functions, for loops of one's own.

    Attributes:
        init: `() -> state`, a dictionary of arrays.
        update: `(state, *inputs) -> state`.
        merge: `(state, state) -> state`.
        compute: `(state) -> value`.
    """

    init: Callable[[], State]
    update: Callable[..., State]
    merge: Callable[[State, State], State]
    compute: Callable[[State], Any]


class Metric:
    """Base class of all metrics.

    A metric of one's own calls `add_state` in `__init__` and then either defines `update` and `compute` as for
    torchmetrics, on attributes named like the states (`self.correct += ...`), or two pure functions: `batch_state`, the
    state of one batch alone, and `value_of`, the value of a state. `update` runs on fresh states, one batch at a time;
    what it leaves is merged into the whole as `add_state` says.

    Args:
        **options: The options that all metrics of torchmetrics have; only their defaults are built.

    Raises:
        NotImplementedError: For other values of these options.
        ValueError: For unknown options.
    """

    _own_update: ClassVar[Any] = None
    _own_compute: ClassVar[Any] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # The user's words describe one batch; under their names stand the ones that keep the state.
        for name, place in (("update", "_own_update"), ("compute", "_own_compute")):
            if name in cls.__dict__:
                setattr(cls, place, cls.__dict__[name])
                delattr(cls, name)

    def __init__(self, **options: Any) -> None:
        for name, value in options.items():
            if name not in _ONLY_DEFAULTS:
                raise ValueError(f"`{type(self).__name__}` got an unexpected argument {name!r}.")
            if value is not _ONLY_DEFAULTS[name]:
                raise NotImplementedError(
                    f"`{type(self).__name__}({name}={value!r})` is not built yet; {_ONLY_DEFAULTS[name]!r} is what it "
                    "does. A state is reduced over all devices already."
                )
        self._defaults: dict[str, np.ndarray[Any, Any]] = {}
        self._reductions: dict[str, str] = {}
        self._start()

    def _start(self) -> None:
        self._state: State | None = None
        self._computed: Any = None
        self._token = next(_tokens)
        _live[self._token] = self

    # --- What a metric defines ---

    def add_state(self, name: str, default: Any, dist_reduce_fx: str = "sum") -> None:
        """Declare a part of the state.

        Args:
            name: Its name.
            default: Its value before any update, neutral under the reduction.
            dist_reduce_fx: How two states are merged: `"sum"`, `"max"` or `"min"`.

        Raises:
            ValueError: For another reduction.
        """
        if dist_reduce_fx not in _MERGES:
            raise ValueError(
                f"`dist_reduce_fx={dist_reduce_fx!r}`: a state is merged by one of {sorted(_MERGES)}. States that grow "
                "with the data cannot live in a compiled step."
            )
        self._defaults[name] = np.asarray(default)
        self._reductions[name] = dist_reduce_fx

    def batch_state(self, *args: Any, **kwargs: Any) -> State:
        """The state of one batch alone.

        Args:
            *args: What `update` and a call take.
            **kwargs: The same by name.

        Returns:
            An array for every name that `add_state` declared, and no other.

        Raises:
            NotImplementedError: If the class defines neither this nor `update`.
        """
        if self._own_update is None:
            raise NotImplementedError(f"`{type(self).__name__}` defines neither `update` nor `batch_state`.")
        with self._exposed({name: jnp.asarray(default) for name, default in self._defaults.items()}):
            self._own_update(*args, **kwargs)
            return {name: self.__dict__[name] for name in self._defaults}

    def value_of(self, state: State) -> Any:
        """The value of a state; traceable.

        Raises:
            NotImplementedError: If the class defines neither this nor `compute`.
        """
        if self._own_compute is None:
            raise NotImplementedError(f"`{type(self).__name__}` defines neither `compute` nor `value_of`.")
        with self._exposed(state):
            return self._own_compute()

    @contextmanager
    def _exposed(self, state: State) -> Iterator[None]:
        """The states as attributes, while a method of the user's runs."""
        self.__dict__.update(state)
        try:
            yield
        finally:
            for name in self._defaults:
                self.__dict__.pop(name, None)

    def __getattr__(self, name: str) -> Any:
        # Only reached for what is no attribute: the parts of the state, as in torchmetrics.
        if name in self.__dict__.get("_defaults", ()):
            return self.state[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def check(self, state: State) -> None:
        """Complain about a state whose value means nothing; called on the host, by `compute`."""
        return None

    # --- Pure functions ---

    def functional(self) -> MetricFunctions:
        """The metric as pure functions, usable under `jit`, `vmap` and `scan`."""

        def init() -> State:
            return {name: jnp.asarray(default) for name, default in self._defaults.items()}

        def update(state: State, *args: Any, **kwargs: Any) -> State:
            return self.merge(state, self._batch(args, kwargs))

        return MetricFunctions(init, update, self.merge, self.value_of)

    def merge(self, left: State, right: State) -> State:
        """The state of everything that two states saw.

        Args:
            left: A state, as `batch_state` or `merge` gives it.
            right: Another.

        Returns:
            Their merged state, by the `dist_reduce_fx` of each name.
        """
        return {name: _MERGES[fx](left[name], right[name]) for name, fx in self._reductions.items()}

    def _batch(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> State:
        trace = current_trace()
        if trace is None or trace.mask is None:
            state = self.batch_state(*args, **kwargs)
        else:
            state = self._real_rows(trace, args, kwargs)
        if state.keys() != self._defaults.keys():
            raise RuntimeError(
                f"`{type(self).__name__}.batch_state` returned {sorted(state)}, but `add_state` declared "
                f"{sorted(self._defaults)}."
            )
        return state

    def _real_rows(self, trace: Trace, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> State:
        """The state of the real rows of a padded batch."""
        mask = trace.mask
        leaves, structure = jax.tree_util.tree_flatten((args, dict(kwargs)))
        by_row = [getattr(leaf, "ndim", 0) > 0 and leaf.shape[0] == mask.shape[0] for leaf in leaves]
        if not any(by_row):  # no rows of the batch: whoever computed this has to have left out the padding
            trace.unmasked.append(type(self).__name__)
            trace.mask = None
            try:
                return self.batch_state(*args, **kwargs)
            finally:
                trace.mask = mask
        if getattr(type(self).batch_state, "leaves_out_padding", False):
            return self.batch_state(*args, **kwargs)

        # Row after row, each merged into those before: exact for every metric whose states can be merged.
        def take(state: State, row: Any) -> tuple[State, None]:
            real, *parts = row
            given = iter(parts)
            filled = [next(given)[None] if each else leaf for leaf, each in zip(leaves, by_row, strict=True)]
            row_args, row_kwargs = jax.tree_util.tree_unflatten(structure, filled)
            merged = self.merge(state, self.batch_state(*row_args, **row_kwargs))
            return {name: jnp.where(real, merged[name], old).astype(old.dtype) for name, old in state.items()}, None

        empty = {name: jnp.asarray(default) for name, default in self._defaults.items()}
        rows = [jnp.asarray(leaf) for leaf, each in zip(leaves, by_row, strict=True) if each]
        return jax.lax.scan(take, empty, (mask, *rows))[0]

    # --- The stateful face ---

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Take a batch into the state.

        Returns:
            The value of this batch alone.
        """
        batch = self._batch(args, kwargs)
        value = self.value_of(batch)
        if not self._give_to_step(batch, value):
            self.absorb(batch)
        return value

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Take a batch into the state; cheaper than a call where the batch's own value is not needed.

        Args:
            *args: What `batch_state` takes.
            **kwargs: The same by name.
        """
        batch = self._batch(args, kwargs)
        if not self._give_to_step(batch, None):
            self.absorb(batch)

    def _give_to_step(self, batch: State, value: Any) -> bool:
        trace = current_trace()
        if trace is None:
            return False
        if trace.kind == "predict":
            raise NotImplementedError(
                f"`{type(self).__name__}` was called in `predict_step`, which keeps no metrics. Call it in "
                "`test_step`, or on the predictions in `on_predict_batch_end`."
            )
        if value is not None:
            traced_values(trace)[self._token] = value
        trace.add_log(LogMeta(fx="", name=str(self._token), on_step=False, on_epoch=True, reduce_fx="state"), batch)
        return True

    def absorb(self, batch: State) -> None:
        """Merge the state of a batch into that of the metric."""
        self._state = batch if self._state is None else self.merge(self._state, batch)
        self._computed = None

    def compute(self) -> Any:
        """The value over everything since the last reset.

        Raises:
            RuntimeError: In a compiled step, which does not hold the state of earlier batches.
        """
        if current_trace() is not None:
            raise RuntimeError(
                f"`{type(self).__name__}.compute()` was called in a step. A compiled step holds the batch only; the "
                "state of earlier batches is merged after it. Log the metric (`self.log(name, metric)`), or call "
                "`compute()` in a hook at the end of the epoch."
            )
        if self._computed is None:
            if self._state is None:
                rank_zero_warn(
                    f"The `compute` method of `{type(self).__name__}` was called before `update`: there is no data, "
                    "and the value may mean nothing."
                )
            state = self.state
            self.check(state)
            self._computed = self.value_of(state)
        return self._computed

    def reset(self) -> None:
        """Forget all data.

        Raises:
            RuntimeError: In a compiled step.
        """
        if current_trace() is not None:
            raise RuntimeError(
                f"`{type(self).__name__}.reset()` was called in a step, where it would happen once and never again. "
                "Logged metrics are reset at the end of the epoch; reset others in a hook."
            )
        self._state = self._computed = None

    @property
    def state(self) -> State:
        """The state as a dictionary of arrays; the defaults before any update."""
        if self._state is None:
            return {name: jnp.asarray(default) for name, default in self._defaults.items()}
        return dict(self._state)

    @state.setter
    def state(self, state: Mapping[str, Any] | None) -> None:
        self._state = (
            None
            if state is None
            else {name: jnp.asarray(state[name], default.dtype) for name, default in self._defaults.items()}
        )
        self._computed = None

    @property
    def update_called(self) -> bool:
        """Whether there is any data."""
        return self._state is not None

    @property
    def reductions(self) -> tuple[tuple[str, str], ...]:
        """How each part of the state is merged."""
        return tuple(self._reductions.items())

    def clone(self) -> Self:
        """A copy with a state of its own."""
        return copy.deepcopy(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new = object.__new__(type(self))
        memo[id(self)] = new
        new.__setstate__({name: copy.deepcopy(value, memo) for name, value in self.__getstate__().items()})
        return new

    def __getstate__(self) -> dict[str, Any]:
        state = {
            name: value for name, value in self.__dict__.items() if name not in ("_token", "_computed", "_forward")
        }
        if self._state is not None:
            state["_state"] = {name: np.asarray(value) for name, value in jax.device_get(self._state).items()}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._start()
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def live_metric(token: str) -> Metric | None:
    """The metric that a state in a step's output belongs to; None if it is gone."""
    return _live.get(int(token))


def traced_values(trace: Trace) -> dict[int, Any]:
    """The batch values of the metrics that were called in a step, by token."""
    values: dict[int, Any] = trace.__dict__.setdefault("metric_values", {})
    return values


def leaves_out_padding(batch_state: _Function) -> _Function:
    """Mark a `batch_state` that asks `row_mask` and so leaves out the padding of `Trainer(pad_batches=...)`."""
    batch_state.leaves_out_padding = True  # type: ignore[attr-defined]
    return batch_state


@partial(jax.jit, static_argnames="reductions")
def _merge_all(old: Sequence[State], new: Sequence[State], reductions: tuple[tuple[tuple[str, str], ...], ...]) -> Any:
    return [
        {name: _MERGES[fx](left[name], right[name]) for name, fx in each}
        for left, right, each in zip(old, new, reductions, strict=True)
    ]


def merge_states(metrics: Sequence[Metric], states: Sequence[State]) -> None:
    """Merge the states of one step into those of their metrics: one device call, which nobody waits for.

    Args:
        metrics: Different metrics.
        states: A state for each.
    """
    going = [(metric, state) for metric, state in zip(metrics, states, strict=True) if metric._state is not None]
    for metric, state in zip(metrics, states, strict=True):
        metric._computed = None
        if metric._state is None:
            metric._state = dict(state)
    if going:
        merged = _merge_all(
            [metric._state for metric, _ in going],
            [dict(state) for _, state in going],
            tuple(metric.reductions for metric, _ in going),
        )
        for (metric, _), state in zip(going, merged, strict=True):
            metric._state = state
