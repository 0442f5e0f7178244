"""Running mean, sum, maximum and minimum of whatever is given."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlightning.metrics._inputs import floating, row_mask
from jaxlightning.metrics.metric import Metric, State, leaves_out_padding
from jaxlightning.utilities.rank_zero import rank_zero_warn

__all__ = ["MaxMetric", "MeanMetric", "MinMetric", "SumMetric"]

_STRATEGIES = ("error", "warn", "ignore", "disable")


class _Aggregator(Metric):
    """What the four have in common: the treatment of NaN.

    Args:
        nan_strategy: `"error"`, `"warn"` or `"ignore"` leave NaN out, and the first two say so when the value is
            computed (a compiled step cannot); `"disable"` takes it in; a float takes its place.
        **options: See `Metric`.
    """

    _name = "value"
    _default: float = 0.0
    _reduction = "sum"

    def __init__(self, nan_strategy: str | float = "warn", **options: Any) -> None:
        super().__init__(**options)
        if nan_strategy not in _STRATEGIES and not isinstance(nan_strategy, float):
            raise ValueError(
                f"Arg `nan_strategy` should either be a float or one of {_STRATEGIES} but got {nan_strategy}."
            )
        self.nan_strategy = nan_strategy
        self.add_state(self._name, np.float32(self._default), self._reduction)
        self.add_state("nans", np.int32(0))

    def _prepared(self, value: Any, weight: Any = None) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Values, weights, which of them count, and the number of NaNs."""
        value = floating(value)
        weight = jnp.broadcast_to(jnp.ones((), value.dtype) if weight is None else floating(weight), value.shape)
        real = row_mask(value.shape) if value.ndim else None
        counts = jnp.ones(value.shape, bool) if real is None else jnp.broadcast_to(real, value.shape)
        if self.nan_strategy == "disable":
            return value, jnp.ones_like(value), counts, jnp.zeros((), jnp.int32)
        nans = (jnp.isnan(value) | jnp.isnan(weight)) & counts
        if isinstance(self.nan_strategy, float):
            value = jnp.where(nans, jnp.asarray(self.nan_strategy, value.dtype), value)
            weight = jnp.where(nans, jnp.ones((), weight.dtype), weight)
            return value, weight, counts, jnp.zeros((), jnp.int32)
        return value, weight, counts & ~nans, jnp.sum(nans, dtype=jnp.int32)

    def check(self, state: State) -> None:
        """Speak about NaN, if that is wanted."""
        if self.nan_strategy in ("error", "warn") and int(state["nans"]):
            if self.nan_strategy == "error":
                raise RuntimeError(
                    f"Encountered `nan` values in tensor: {int(state['nans'])} in what `{type(self).__name__}` got."
                )
            rank_zero_warn(
                f"Encountered `nan` values in tensor. Will be removed: {int(state['nans'])} of what "
                f"`{type(self).__name__}` was given."
            )

    @leaves_out_padding
    def batch_state(self, value: Any) -> State:
        """Reduce one batch.

        Args:
            value: Numbers of any shape.
        """
        value, _, counts, nans = self._prepared(value)
        neutral = jnp.asarray(self._default, value.dtype)
        reductions: dict[str, Any] = {"sum": jnp.sum, "max": jnp.max, "min": jnp.min}
        return {
            self._name: reductions[self._reduction](jnp.where(counts, value, neutral), initial=neutral),
            "nans": nans,
        }

    def value_of(self, state: State) -> Any:
        """The reduction."""
        return state[self._name]


class SumMetric(_Aggregator):
    """Sum of all values.

    Args:
        nan_strategy: What becomes of NaN, see `MeanMetric`.
        **options: See `Metric`.
    """

    _name = "sum_value"


class MaxMetric(_Aggregator):
    """Largest value.

    Args:
        nan_strategy: What becomes of NaN, see `MeanMetric`.
        **options: See `Metric`.
    """

    _name = "max_value"
    _default = -np.inf
    _reduction = "max"


class MinMetric(_Aggregator):
    """Smallest value.

    Args:
        nan_strategy: What becomes of NaN, see `MeanMetric`.
        **options: See `Metric`.
    """

    _name = "min_value"
    _default = np.inf
    _reduction = "min"


class MeanMetric(_Aggregator):
    """Weighted mean of all values, `sum(weight * value) / sum(weight)`.

    Args:
        nan_strategy: `"error"`, `"warn"` or `"ignore"` leave NaN out, and the first two say so when the value is
            computed (a compiled step cannot); `"disable"` takes it in; a float takes its place.
        **options: See `Metric`.

    Raises:
        ValueError: For another `nan_strategy`.
    """

    _name = "mean_value"

    def __init__(self, nan_strategy: str | float = "warn", **options: Any) -> None:
        super().__init__(nan_strategy, **options)
        self.add_state("weight", np.float32(0))

    @leaves_out_padding
    def batch_state(self, value: Any, weight: Any = None) -> State:
        """Reduce one batch.

        Args:
            value: Numbers of any shape.
            weight: Their weights, broadcast to the shape of `value`; ones by default.
        """
        value, weight, counts, nans = self._prepared(value, weight)
        weight = jnp.where(counts, weight, 0)
        total = jnp.sum(jnp.where(counts, value * weight, 0))
        return {"mean_value": total, "weight": jnp.sum(weight), "nans": nans}

    def value_of(self, state: State) -> Any:
        """The mean; NaN without data."""
        return state["mean_value"] / state["weight"]
