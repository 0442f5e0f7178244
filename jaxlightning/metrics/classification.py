"""Accuracy, precision, recall and F1 score, from counts of true and false positives and negatives."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxlightning.metrics._counts import BinaryCounts, MulticlassCounts, MultilabelCounts, safe_divide, task_class
from jaxlightning.metrics.metric import Metric, State

__all__ = [
    "Accuracy",
    "BinaryAccuracy",
    "BinaryF1Score",
    "BinaryPrecision",
    "BinaryRecall",
    "F1Score",
    "MulticlassAccuracy",
    "MulticlassF1Score",
    "MulticlassPrecision",
    "MulticlassRecall",
    "MultilabelAccuracy",
    "MultilabelF1Score",
    "MultilabelPrecision",
    "MultilabelRecall",
    "Precision",
    "Recall",
]


def _averaged(score: jax.Array, state: State, average: str | None, multilabel: bool, top_k: int) -> jax.Array:
    if average in ("none", None):
        return score
    tp, fp, fn = state["tp"], state["fp"], state["fn"]
    if average == "weighted":
        weights = (tp + fn).astype(jnp.float32)
    elif multilabel:
        weights = jnp.ones_like(score)
    else:
        # Classes that occur neither in targets nor in predictions say nothing.
        weights = jnp.where((tp + fp + fn if top_k == 1 else tp + fn) == 0, 0.0, 1.0)
    return jnp.sum(safe_divide(weights * score, jnp.sum(weights)))


class _AccuracyScore:
    zero_division: float

    def _score(self, state: State, average: str | None, multilabel: bool, top_k: int) -> Any:
        if average == "micro":
            state = {name: jnp.sum(value) for name, value in state.items()}
        tp, fp, tn, fn = (state[name] for name in ("tp", "fp", "tn", "fn"))
        if average == "binary" or multilabel:
            score = safe_divide(tp + tn, tp + tn + fp + fn)
        else:
            score = safe_divide(tp, tp + fn)
        return score if average in ("binary", "micro") else _averaged(score, state, average, multilabel, top_k)


class _RatioScore:
    """`tp / (tp + a·fp + b·fn)`: precision, recall and F1 score differ in `a` and `b`."""

    zero_division: float
    _fp: float
    _fn: float
    _honours_top_k = True

    def _score(self, state: State, average: str | None, multilabel: bool, top_k: int) -> Any:
        if average == "micro":
            state = {name: jnp.sum(value) for name, value in state.items()}
        below = state["tp"] + self._fp * state["fp"] + self._fn * state["fn"]
        score = safe_divide(state["tp"], below, self.zero_division)
        if average in ("binary", "micro"):
            return score
        return _averaged(score, state, average, multilabel, top_k if self._honours_top_k else 1)


class _PrecisionScore(_RatioScore):
    _fp, _fn = 1, 0


class _RecallScore(_RatioScore):
    _fp, _fn = 0, 1


class _F1(_RatioScore):
    _fp, _fn = 0.5, 0.5
    _honours_top_k = False


class BinaryAccuracy(_AccuracyScore, BinaryCounts):
    """Share of right predictions, two classes."""


class MulticlassAccuracy(_AccuracyScore, MulticlassCounts):
    """Share of right predictions, several classes."""


class MultilabelAccuracy(_AccuracyScore, MultilabelCounts):
    """Share of right predictions, several labels."""


class BinaryPrecision(_PrecisionScore, BinaryCounts):
    """`tp / (tp + fp)`, two classes."""


class MulticlassPrecision(_PrecisionScore, MulticlassCounts):
    """`tp / (tp + fp)`, several classes."""


class MultilabelPrecision(_PrecisionScore, MultilabelCounts):
    """`tp / (tp + fp)`, several labels."""


class BinaryRecall(_RecallScore, BinaryCounts):
    """`tp / (tp + fn)`, two classes."""


class MulticlassRecall(_RecallScore, MulticlassCounts):
    """`tp / (tp + fn)`, several classes."""


class MultilabelRecall(_RecallScore, MultilabelCounts):
    """`tp / (tp + fn)`, several labels."""


class BinaryF1Score(_F1, BinaryCounts):
    """Harmonic mean of precision and recall, two classes."""


class MulticlassF1Score(_F1, MulticlassCounts):
    """Harmonic mean of precision and recall, several classes."""


class MultilabelF1Score(_F1, MultilabelCounts):
    """Harmonic mean of precision and recall, several labels."""


class _ByTask:
    """A name without a task: makes the metric of the task that is asked for."""

    _tasks: dict[str, type[Metric]]

    def __new__(  # type: ignore[misc]  # as in torchmetrics, the object is one of another class
        cls,
        task: str,
        threshold: float = 0.5,
        num_classes: int | None = None,
        num_labels: int | None = None,
        average: str | None = "micro",
        multidim_average: str = "global",
        top_k: int | None = 1,
        ignore_index: int | None = None,
        validate_args: bool = True,
        **options: Any,
    ) -> Metric:
        """Make the metric.

        Args:
            task: `"binary"`, `"multiclass"` or `"multilabel"`.
            threshold: For binary and multilabel tasks.
            num_classes: For multiclass tasks.
            num_labels: For multilabel tasks.
            average: For multiclass and multilabel tasks.
            multidim_average: Only `"global"`.
            top_k: For multiclass tasks.
            ignore_index: A target that does not count.
            validate_args: Accepted.
            **options: See the class of the task.

        Raises:
            ValueError: For another task, or without the number of classes or labels.
        """
        make = task_class(cls.__name__, cls._tasks, task, num_classes, num_labels)
        common = {"multidim_average": multidim_average, "ignore_index": ignore_index, "validate_args": validate_args}
        if task == "binary":
            return make(threshold=threshold, **common, **options)
        if task == "multilabel":
            return make(num_labels=num_labels, threshold=threshold, average=average, **common, **options)
        return make(num_classes=num_classes, top_k=top_k, average=average, **common, **options)


class Accuracy(_ByTask):
    """`Accuracy(task=...)`: share of right predictions."""

    _tasks = {"binary": BinaryAccuracy, "multiclass": MulticlassAccuracy, "multilabel": MultilabelAccuracy}


class Precision(_ByTask):
    """`Precision(task=...)`: `tp / (tp + fp)`."""

    _tasks = {"binary": BinaryPrecision, "multiclass": MulticlassPrecision, "multilabel": MultilabelPrecision}


class Recall(_ByTask):
    """`Recall(task=...)`: `tp / (tp + fn)`."""

    _tasks = {"binary": BinaryRecall, "multiclass": MulticlassRecall, "multilabel": MultilabelRecall}


class F1Score(_ByTask):
    """`F1Score(task=...)`: harmonic mean of precision and recall."""

    _tasks = {"binary": BinaryF1Score, "multiclass": MulticlassF1Score, "multilabel": MultilabelF1Score}
