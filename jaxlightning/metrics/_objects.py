"""Metric objects in `self.log`: whose they are, where they live on the module, and how their states are merged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from jaxlightning.compile.log_plan import LogMeta
from jaxlightning.metrics.collection import MetricCollection
from jaxlightning.metrics.metric import Metric, live_metric, merge_states
from jaxlightning.utilities.exceptions import MisconfigurationException

__all__ = [
    "PASSED",
    "absorb_states",
    "attribute_of",
    "find_metric",
    "merge_passed",
    "refuse_foreign_metric",
    "refuse_torchmetrics",
]

PASSED = "<passed to self.log>"
"""Stands where the attribute's path would, for metric values that are merged under the key they were logged with."""

_MAX_DEPTH = 4
_OURS = (
    *("Accuracy", "Precision", "Recall", "F1Score", "AUROC", "ConfusionMatrix"),
    *("BinaryAccuracy", "MulticlassAccuracy", "MultilabelAccuracy"),
    *("MeanSquaredError", "MeanAbsoluteError", "R2Score"),
    *("MeanMetric", "SumMetric", "MaxMetric", "MinMetric", "MetricCollection"),
)


def refuse_foreign_metric(name: str, value: Any) -> None:
    """Refuse metric objects that cannot live in a compiled step, and name those that can.

    Raises:
        MisconfigurationException: For torchmetrics.
        NotImplementedError: For metrics of nnx that are no attributes of the module.
        ValueError: For anything else without `merge`.
    """
    homes = {base.__module__.partition(".")[0] for base in type(value).__mro__}
    kind = type(value).__name__
    if "torchmetrics" in homes:
        raise MisconfigurationException(
            f"`self.log({name!r}, ...)` received the torchmetrics object `{kind}`, which works on torch tensors. "
            "`jaxlightning.metrics` has metrics of the same names and arguments."
        )
    if any(base.__module__.startswith("flax.nnx") for base in type(value).__mro__):
        raise NotImplementedError(
            f"`self.log({name!r}, ...)` received the nnx metric `{kind}`, which is no attribute of the module. Put "
            "it on "
            "`self` in `__init__`: the trainer then makes its state part of the compiled step."
        )
    if not callable(getattr(value, "merge", None)):
        raise ValueError(
            f"`self.log({name!r}, ...)` received a `{kind}` with `compute` but without `merge`, so that values of "
            "several batches cannot be joined. Use a metric of `jaxlightning.metrics`, or one like clu's."
        )


def refuse_torchmetrics(module: Any) -> None:
    """Refuse a module that holds objects of torchmetrics.

    Raises:
        MisconfigurationException: If it holds one; the attribute is named.
    """
    for name, value in vars(module).items():
        items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else (value,)
        for item in items:
            if any(base.__module__.partition(".")[0] == "torchmetrics" for base in type(item).__mro__):
                kind = type(item).__name__
                raise MisconfigurationException(
                    f"`{type(module).__name__}.{name}` holds the torchmetrics object `{kind}`, which works on torch "
                    "tensors and cannot be part of a step compiled by JAX. `jaxlightning.metrics` has metrics of the "
                    f"same names and arguments: {'use' if kind in _OURS else 'among them'} "
                    f"{f'`jaxlightning.metrics.{kind}`' if kind in _OURS else ', '.join(_OURS)}."
                )


def metrics_of(owner: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Metric]]:
    """All metrics on a module with their paths, also in collections, lists, dictionaries and child modules."""
    for name, value in vars(owner).items():
        if name not in ("_trainer", "_engine"):
            yield from _walk(f"{prefix}{name}", value, depth)


def _walk(path: str, value: Any, depth: int) -> Iterator[tuple[str, Metric]]:
    if isinstance(value, Metric):
        yield path, value
    elif depth > _MAX_DEPTH:
        return
    elif isinstance(value, MetricCollection):
        for name, metric in value.items(keep_base=True):
            yield f"{path}.{name}", metric
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _walk(f"{path}.{name}", item, depth + 1)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _walk(f"{path}.{index}", item, depth + 1)
    elif any(base.__name__ == "JaxLightningModule" for base in type(value).__mro__):
        yield from metrics_of(value, f"{path}.", depth + 1)


def attribute_of(module: Any, name: str, metric: Metric, given: str | None) -> str:
    """Where on the module a logged metric lives.

    Args:
        module: The module.
        name: The key under which it is logged, for the error.
        metric: The metric.
        given: `metric_attribute` of the call.

    Returns:
        The path, for example `"val_metrics.MulticlassAccuracy"`.

    Raises:
        MisconfigurationException: If it is not there.
    """
    known = list(metrics_of(module))
    for path, found in known:
        if found is metric and given in (None, path):
            return path
    paths = [path for path, _ in known]
    if given is not None:
        raise MisconfigurationException(
            f"`self.log({name!r}, ..., metric_attribute={given!r})`: this attribute is not the metric that was logged. "
            f"The metrics on `{type(module).__name__}` are {paths}."
        )
    raise MisconfigurationException(
        f"Could not find the `LightningModule` attribute for the `{type(metric).__name__}` logged as {name!r}: its "
        f"state has to outlive the step, so it must be made in `__init__` and kept on `self`. The metrics on "
        f"`{type(module).__name__}` are {paths}."
    )


def find_metric(module: Any, path: str) -> Metric:
    """The metric at a path that `attribute_of` gave.

    Raises:
        MisconfigurationException: If there is none any more.
    """
    for known, metric in metrics_of(module):
        if known == path:
            return metric
    raise MisconfigurationException(
        f"The metric `self.{path}` of `{type(module).__name__}` was logged and is gone. Reset a metric instead of "
        "replacing or deleting it."
    )


def absorb_states(metas: Sequence[LogMeta], states: Sequence[Any]) -> list[tuple[LogMeta, Any]]:
    """Give the states that a step returned to their metrics; one device call for all of them.

    Args:
        metas: What the states are: those of metrics on the module have no hook name.
        states: The states.

    Returns:
        The other states, which belong to the keys they were logged with.
    """
    passed: list[tuple[LogMeta, Any]] = []
    waiting = []
    for meta, state in zip(metas, states, strict=True):
        if meta.fx:
            passed.append((meta, state))
        else:
            metric = live_metric(meta.name)
            if metric is not None:
                waiting.append((metric, state))
    while waiting:
        # A metric that was called twice in the step takes its states one after the other.
        first: dict[int, tuple[Metric, Any]] = {}
        later = []
        for metric, state in waiting:
            if id(metric) in first:
                later.append((metric, state))
            else:
                first[id(metric)] = (metric, state)
        merge_states([metric for metric, _ in first.values()], [state for _, state in first.values()])
        waiting = later
    return passed


@jax.jit
def merge_passed(left: Any, right: Any) -> Any:
    """Merge two metric values with a `merge` method, such as clu's."""
    return left.merge(right)
