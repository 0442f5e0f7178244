"""Several metrics that take the same inputs."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self, TypeAlias

from jaxlightning.metrics.metric import Metric

__all__ = ["MetricCollection"]

OneOrMore: TypeAlias = "Metric | MetricCollection"


class MetricCollection:
    """Several metrics called together.

    Args:
        metrics: A metric, a sequence of metrics (named after their classes), or a dictionary.
        *additional_metrics: More metrics, after a metric or sequence.
        prefix: Put before every name in what the collection returns.
        postfix: Put after every name in what the collection returns.
        compute_groups: Accepted; XLA computes once what several metrics of a compiled step have in common.

    Raises:
        ValueError: If two metrics have one name, or something is no metric.
    """

    def __init__(
        self,
        metrics: OneOrMore | Sequence[OneOrMore] | Mapping[str, OneOrMore],
        *additional_metrics: Metric,
        prefix: str | None = None,
        postfix: str | None = None,
        compute_groups: bool | list[list[str]] = True,
    ) -> None:
        for word, value in (("prefix", prefix), ("postfix", postfix)):
            if value is not None and not isinstance(value, str):
                raise ValueError(f"Expected input `{word}` to be a string, but got {type(value)}")
        self.prefix, self.postfix, self.compute_groups = prefix, postfix, compute_groups
        self._metrics: dict[str, Metric] = {}
        self.add_metrics(metrics, *additional_metrics)

    def add_metrics(self, metrics: Any, *additional_metrics: Metric) -> None:
        """Add metrics.

        Args:
            metrics: A metric, a collection, a sequence of them, or a dictionary that names them.
            *additional_metrics: Further metrics, after one metric or a sequence.

        Raises:
            ValueError: If further metrics follow a dictionary, or a name is taken.
        """
        if isinstance(metrics, Mapping):
            if additional_metrics:
                raise ValueError("Further metrics are taken after a metric or a sequence, not after a dictionary.")
            for name in sorted(metrics):
                self._add(name, metrics[name], nested=f"{name}_")
            return
        given = [metrics] if isinstance(metrics, Metric | MetricCollection) else list(metrics)
        for metric in (*given, *additional_metrics):
            self._add(type(metric).__name__, metric, nested="")

    def _add(self, name: str, metric: Any, nested: str) -> None:
        if isinstance(metric, MetricCollection):
            for inner, each in metric.items():
                self._add(f"{nested}{inner}", each, "")
            return
        if not isinstance(metric, Metric):
            raise ValueError(
                f"The entry {name!r} of a `MetricCollection` is a `{type(metric).__name__}`; expected a "
                "`jaxlightning.metrics.Metric`."
            )
        if name in self._metrics:
            raise ValueError(f"Encountered two metrics both named {name}. Give a dictionary to name them yourself.")
        self._metrics[name] = metric

    def _named(self, name: str) -> str:
        return f"{self.prefix or ''}{name}{self.postfix or ''}"

    def _each(self, call: Callable[[Metric], Any]) -> dict[str, Any]:
        return {self._named(name): call(metric) for name, metric in self._metrics.items()}

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Take a batch into all metrics.

        Returns:
            For every metric the value of this batch alone. Keyword arguments reach the metrics that know them.
        """
        return self._each(lambda metric: metric(*args, **_known(metric, kwargs)))

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Take a batch into all metrics."""
        self._each(lambda metric: metric.update(*args, **_known(metric, kwargs)))

    def compute(self) -> dict[str, Any]:
        """The value of every metric over everything since the last reset."""
        return self._each(lambda metric: metric.compute())

    def reset(self) -> None:
        """Forget all data."""
        for metric in self._metrics.values():
            metric.reset()

    def clone(self, prefix: str | None = None, postfix: str | None = None) -> Self:
        """A copy with states of its own.

        Args:
            prefix: Another prefix; the present one by default.
            postfix: Another postfix; the present one by default.
        """
        new = copy.deepcopy(self)
        new.prefix = self.prefix if prefix is None else prefix
        new.postfix = self.postfix if postfix is None else postfix
        return new

    def items(self, keep_base: bool = False, copy_state: bool = True) -> list[tuple[str, Metric]]:
        """Names and metrics.

        Args:
            keep_base: Whether the names are without prefix and postfix.
            copy_state: Accepted; states are never shared.
        """
        return [(name if keep_base else self._named(name), metric) for name, metric in self._metrics.items()]

    def keys(self, keep_base: bool = False) -> list[str]:
        """The names."""
        return [name for name, _ in self.items(keep_base)]

    def values(self, copy_state: bool = True) -> list[Metric]:
        """The metrics."""
        return list(self._metrics.values())

    def __getitem__(self, name: str) -> Metric:
        if name in self._metrics:
            return self._metrics[name]
        for full, metric in self.items():
            if full == name:
                return metric
        raise KeyError(f"{name!r} is none of the metrics {self.keys()}")

    def __contains__(self, name: object) -> bool:
        return name in self._metrics or name in self.keys()

    def __len__(self) -> int:
        return len(self._metrics)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __repr__(self) -> str:
        return f"MetricCollection({self._metrics}, prefix={self.prefix!r}, postfix={self.postfix!r})"


def _known(metric: Metric, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments that a metric's update takes."""
    if not kwargs:
        return kwargs
    parameters = inspect.signature(metric.batch_state).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return kwargs
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in kwargs.items() if name in names}
