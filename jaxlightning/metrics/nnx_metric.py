"""Metrics of `flax.nnx` as metric objects: their Variables become a state that a compiled step can return."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jaxlightning.metrics.collection import MetricCollection
from jaxlightning.metrics.metric import Metric

__all__ = ["NnxMetric", "adopt_nnx_metrics", "is_nnx_metric"]

State = dict[str, Any]


def is_nnx_metric(value: Any) -> bool:
    """Whether the object is a metric of nnx; by name, because importing nnx takes time."""
    return any(c.__name__ == "Metric" and c.__module__.startswith("flax.nnx") for c in type(value).__mro__)


class NnxMetric(Metric):
    """An `nnx.metrics` object with the words of both: nnx's `update(values=...)`, and `self.log("key", self.metric)`.

    Args:
        metric: An `nnx.metrics.Average`, `Accuracy` or `Welford`, or a subclass that keeps their way of counting.

    Raises:
        NotImplementedError: For other metrics, whose states nobody knows how to merge.
    """

    def __init__(self, metric: Any) -> None:
        super().__init__()
        from flax import nnx

        if not isinstance(metric, nnx.metrics.Average | nnx.metrics.Welford):
            raise NotImplementedError(
                f"The nnx metric `{type(metric).__name__}` keeps a state whose merging is not known. Averages, "
                "accuracies "
                "and Welford statistics can be used; or write it as a `jaxlightning.metrics.Metric`."
            )
        self._metric = metric
        metric.reset()
        for name, value in self._values(metric).items():
            self.add_state(name, value, "sum")

    @staticmethod
    def _values(metric: Any) -> State:
        from flax import nnx

        state = nnx.split(metric)[1]
        return {"/".join(map(str, path)): variable.get_value() for path, variable in nnx.to_flat_state(state)}

    def _with(self, values: State) -> Any:
        """A fresh nnx object that holds the given values."""
        from flax import nnx

        graphdef, state = nnx.split(self._metric)
        flat = {path: variable.replace(values["/".join(map(str, path))]) for path, variable in nnx.to_flat_state(state)}
        return nnx.merge(graphdef, nnx.from_flat_state(flat), copy=True)

    def batch_state(self, *args: Any, **kwargs: Any) -> State:
        """The state of one batch: what nnx's `update` makes of a reset metric."""
        fresh = self._with({name: jnp.asarray(value) for name, value in self._defaults.items()})
        fresh.update(*args, **kwargs)
        return self._values(fresh)

    def value_of(self, state: State) -> Any:
        """What nnx computes from a state."""
        return self._with(state).compute()

    def merge(self, left: State, right: State) -> State:
        """Sums for averages; for Welford the parallel form of Chan, Golub and LeVeque (1979)."""
        if "m2" not in left:
            return super().merge(left, right)
        count = left["count"] + right["count"]
        share = right["count"] / jnp.maximum(count, 1)
        delta = right["mean"] - left["mean"]
        return {
            "count": count,
            "mean": left["mean"] + delta * share,
            "m2": left["m2"] + right["m2"] + delta**2 * left["count"] * share,
        }

    def __repr__(self) -> str:
        return f"NnxMetric({type(self._metric).__name__})"


def adopt_nnx_metrics(module: Any) -> None:
    """Puts metric objects in the place of the nnx metrics among a module's attributes (also in lists and dicts)."""
    for name, value in list(vars(module).items()):
        if not name.startswith("_"):
            adopted = _adopted(value)
            if adopted is not value:
                vars(module)[name] = adopted


def _adopted(value: Any) -> Any:
    if is_nnx_metric(value):
        names = getattr(value, "_metric_names", None)
        if names is not None:  # a MultiMetric
            return MetricCollection({each: NnxMetric(getattr(value, each)) for each in names})
        return NnxMetric(value)
    if type(value) is dict and any(is_nnx_metric(item) for item in value.values()):
        return {key: _adopted(item) for key, item in value.items()}
    if type(value) is list and any(is_nnx_metric(item) for item in value):
        return [_adopted(item) for item in value]
    return value
