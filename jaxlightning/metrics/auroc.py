"""Area under the ROC curve, binned."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlightning.metrics._counts import predicted_class, safe_divide, task_class
from jaxlightning.metrics._inputs import (
    check_option,
    integer_targets,
    normalized,
    same_shape,
    thresholds_of,
    valid_mask,
)
from jaxlightning.metrics.metric import Metric, State, leaves_out_padding

__all__ = ["AUROC", "BinaryAUROC", "MulticlassAUROC", "MultilabelAUROC"]


class _Curve(Metric):
    """For each threshold how many positives and negatives lie at or above it, and how many there are.

    State: `tp` and `fp` of shape [T, ...], `positives` and `negatives` without the first dimension.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        thresholds: Any,
        ignore_index: int | None,
        validate_args: bool,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.thresholds = thresholds_of(thresholds, type(self).__name__)
        self.ignore_index, self.validate_args = ignore_index, validate_args
        for name in ("tp", "fp"):
            self.add_state(name, np.zeros((len(self.thresholds), *shape), np.int32))
        for name in ("positives", "negatives"):
            self.add_state(name, np.zeros(shape, np.int32))

    def _counted(self, preds: jax.Array, positive: jax.Array, valid: jax.Array) -> State:
        """Counts from probabilities of shape [N, ...]; the first dimension is summed."""

        def above(threshold: Any) -> tuple[jax.Array, jax.Array]:
            hit = (preds >= threshold) & valid
            return jnp.sum(hit & positive, 0, dtype=jnp.int32), jnp.sum(hit & ~positive, 0, dtype=jnp.int32)

        # One threshold after the other: all at once would hold T times the batch.
        tp, fp = jax.lax.map(above, jnp.asarray(self.thresholds))
        return {
            "tp": tp,
            "fp": fp,
            "positives": jnp.sum(positive & valid, 0, dtype=jnp.int32),
            "negatives": jnp.sum(~positive & valid, 0, dtype=jnp.int32),
        }

    def _areas(self, state: State) -> jax.Array:
        # The trapezoids are formed from counts and divided once: the differences of rates round, and a compiler that
        # contracts them leaves a residue at every threshold where nothing changes.
        tp, fp = state["tp"], state["fp"]
        twice = jnp.sum((fp[:-1] - fp[1:]).astype(jnp.float32) * (tp[:-1] + tp[1:]).astype(jnp.float32), axis=0)
        return safe_divide(safe_divide(twice, 2 * state["positives"]), state["negatives"])

    def _averaged(self, state: State, average: str | None) -> Any:
        areas = self._areas(state)
        if average in ("none", None):
            return areas
        known = ~jnp.isnan(areas)
        if average == "macro":
            weights = known.astype(areas.dtype)
        else:
            # What torchmetrics weighs by: everything at or above the first threshold, and the rest of the positives.
            weights = jnp.where(known, state["positives"], 0).astype(areas.dtype)
        return jnp.sum(jnp.where(known, areas, 0) * safe_divide(weights, jnp.sum(weights)))


def _floating_scores(preds: Any, metric: str) -> jax.Array:
    scores: jax.Array = jnp.asarray(preds)
    if not jnp.issubdtype(scores.dtype, jnp.floating):
        raise ValueError(f"Expected `preds` of `{metric}` to be probabilities or logits, but got {scores.dtype}.")
    return scores


def _refuse_max_fpr(max_fpr: float | None, metric: str) -> None:
    if max_fpr not in (None, 1):
        raise NotImplementedError(f"`{metric}(max_fpr={max_fpr})` is not built yet; leave it out for the whole area.")


class BinaryAUROC(_Curve):
    """Binned area under the ROC curve, two classes.

    Args:
        max_fpr: Only None, the whole area.
        thresholds: Number of bins, or the thresholds themselves.
        ignore_index: A target that does not count.
        validate_args: Accepted; shapes are always checked, values never.
        **options: See `Metric`.
    """

    def __init__(
        self,
        max_fpr: float | None = None,
        thresholds: Any = None,
        ignore_index: int | None = None,
        validate_args: bool = True,
        **options: Any,
    ) -> None:
        _refuse_max_fpr(max_fpr, type(self).__name__)
        super().__init__((), thresholds, ignore_index, validate_args, **options)

    @leaves_out_padding
    def batch_state(self, preds: Any, target: Any) -> State:
        """Count one batch.

        Args:
            preds: Probabilities or logits, shape [N, ...].
            target: 0 and 1, the same shape.
        """
        preds, target = _floating_scores(preds, "BinaryAUROC"), integer_targets(target, "BinaryAUROC")
        same_shape(preds, target, "BinaryAUROC")
        preds, target = preds.reshape(-1), target.reshape(-1)
        valid = valid_mask(target, self.ignore_index)
        return self._counted(normalized(preds, "sigmoid", valid), target == 1, valid)

    def value_of(self, state: State) -> Any:
        """The area."""
        return self._areas(state)


class MulticlassAUROC(_Curve):
    """Binned area under the ROC curve, each class against the rest.

    Args:
        num_classes: Number of classes.
        average: `"macro"`, `"weighted"` or `"none"`.
        thresholds: Number of bins, or the thresholds themselves.
        ignore_index: A target that does not count.
        validate_args: Accepted; shapes are always checked, values never.
        **options: See `Metric`.
    """

    def __init__(
        self,
        num_classes: int,
        average: str | None = "macro",
        thresholds: Any = None,
        ignore_index: int | None = None,
        validate_args: bool = True,
        **options: Any,
    ) -> None:
        check_option("average", average, ("macro", "weighted", "none", None))
        super().__init__((num_classes,), thresholds, ignore_index, validate_args, **options)
        self.num_classes, self.average = num_classes, average

    @leaves_out_padding
    def batch_state(self, preds: Any, target: Any) -> State:
        """Count one batch.

        Args:
            preds: Probabilities or logits, shape [N, classes, ...].
            target: Class numbers, shape [N, ...].
        """
        preds, target = _floating_scores(preds, "MulticlassAUROC"), integer_targets(target, "MulticlassAUROC")
        predicted_class(preds, target, self.num_classes, 1, "MulticlassAUROC")  # for its checks of the shapes
        preds = jnp.moveaxis(preds, 1, -1).reshape(-1, self.num_classes)
        target = target.reshape(-1)
        valid = valid_mask(target, self.ignore_index)[:, None]
        positive = target[:, None] == jnp.arange(self.num_classes)
        return self._counted(normalized(preds, "softmax", valid), positive, valid)

    def value_of(self, state: State) -> Any:
        """The area."""
        return self._averaged(state, self.average)


class MultilabelAUROC(_Curve):
    """Binned area under the ROC curve, several labels.

    Args:
        num_labels: Number of labels.
        average: `"micro"`, `"macro"`, `"weighted"` or `"none"`.
        thresholds: Number of bins, or the thresholds themselves.
        ignore_index: A target that does not count.
        validate_args: Accepted; shapes are always checked, values never.
        **options: See `Metric`.
    """

    def __init__(
        self,
        num_labels: int,
        average: str | None = "macro",
        thresholds: Any = None,
        ignore_index: int | None = None,
        validate_args: bool = True,
        **options: Any,
    ) -> None:
        check_option("average", average, ("micro", "macro", "weighted", "none", None))
        super().__init__((num_labels,), thresholds, ignore_index, validate_args, **options)
        self.num_labels, self.average = num_labels, average

    @leaves_out_padding
    def batch_state(self, preds: Any, target: Any) -> State:
        """Count one batch.

        Args:
            preds: Probabilities or logits, shape [N, labels, ...].
            target: 0 and 1, the same shape.
        """
        preds, target = _floating_scores(preds, "MultilabelAUROC"), integer_targets(target, "MultilabelAUROC")
        same_shape(preds, target, "MultilabelAUROC")
        preds, target = (jnp.moveaxis(each, 1, -1).reshape(-1, self.num_labels) for each in (preds, target))
        return self._counted(normalized(preds, "sigmoid"), target == 1, valid_mask(target, self.ignore_index))

    def value_of(self, state: State) -> Any:
        """The area."""
        if self.average == "micro":
            return self._areas({name: jnp.sum(value, axis=-1) for name, value in state.items()})
        return self._averaged(state, self.average)


class AUROC:
    """`AUROC(task=..., thresholds=...)`: binned area under the ROC curve."""

    _tasks: dict[str, type[Metric]] = {
        "binary": BinaryAUROC,
        "multiclass": MulticlassAUROC,
        "multilabel": MultilabelAUROC,
    }

    def __new__(  # type: ignore[misc]  # as in torchmetrics, the object is one of another class
        cls,
        task: str,
        thresholds: Any = None,
        num_classes: int | None = None,
        num_labels: int | None = None,
        average: str | None = "macro",
        max_fpr: float | None = None,
        ignore_index: int | None = None,
        validate_args: bool = True,
        **options: Any,
    ) -> Metric:
        """Make the metric of a task; the arguments are those of its class."""
        make = task_class("AUROC", cls._tasks, task, num_classes, num_labels)
        options = {"thresholds": thresholds, "ignore_index": ignore_index, "validate_args": validate_args, **options}
        if task == "binary":
            return make(max_fpr=max_fpr, **options)
        if task == "multilabel":
            return make(num_labels=num_labels, average=average, **options)
        return make(num_classes=num_classes, average=average, **options)
