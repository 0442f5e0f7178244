"""Confusion matrix."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlightning.metrics._counts import predicted_class, safe_divide, task_class
from jaxlightning.metrics._inputs import (
    as_labels,
    check_option,
    integer_targets,
    same_shape,
    valid_mask,
)
from jaxlightning.metrics.metric import Metric, State, leaves_out_padding

__all__ = ["BinaryConfusionMatrix", "ConfusionMatrix", "MulticlassConfusionMatrix", "MultilabelConfusionMatrix"]


class _Confusion(Metric):
    """A matrix of counts, rows the targets and columns the predictions."""

    def __init__(
        self,
        shape: tuple[int, ...],
        ignore_index: int | None,
        normalize: str | None,
        validate_args: bool,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        check_option("normalize", normalize, ("true", "pred", "all", "none", None))
        self.ignore_index, self.normalize, self.validate_args = ignore_index, normalize, validate_args
        self.add_state("confmat", np.zeros(shape, np.int32))

    def value_of(self, state: State) -> Any:
        """The counts, or their shares; 0 where there are none."""
        counts = state["confmat"]
        axes = {"true": (-1,), "pred": (-2,), "all": (-2, -1)}.get(self.normalize or "none")
        return counts if axes is None else safe_divide(counts, jnp.sum(counts, axis=axes, keepdims=True))


class BinaryConfusionMatrix(_Confusion):
    """Confusion matrix of two classes, shape [2, 2].

    Args:
        threshold: Above which a probability means 1.
        ignore_index: A target that does not count.
        normalize: `"true"`, `"pred"` or `"all"` for shares; None for counts.
        validate_args: Accepted; shapes are always checked, values never.
        **options: See `Metric`.
    """

    def __init__(
        self,
        threshold: float = 0.5,
        ignore_index: int | None = None,
        normalize: str | None = None,
        validate_args: bool = True,
        **options: Any,
    ) -> None:
        super().__init__((2, 2), ignore_index, normalize, validate_args, **options)
        self.threshold = threshold

    @leaves_out_padding
    def batch_state(self, preds: Any, target: Any) -> State:
        """Count one batch.

        Args:
            preds: Labels, probabilities or logits, shape [N, ...].
            target: 0 and 1, the same shape.
        """
        preds, target = jnp.asarray(preds), integer_targets(target, type(self).__name__)
        same_shape(preds, target, type(self).__name__)
        valid = valid_mask(target, self.ignore_index)
        return {"confmat": _matrix(as_labels(preds, self.threshold, valid), target, valid, 2)}


class MulticlassConfusionMatrix(_Confusion):
    """Confusion matrix of several classes, shape [classes, classes].

    Args:
        num_classes: Number of classes.
        ignore_index: A target that does not count.
        normalize: `"true"`, `"pred"` or `"all"` for shares; None for counts.
        validate_args: Accepted; shapes are always checked, values never.
        **options: See `Metric`.
    """

    def __init__(
        self,
        num_classes: int,
        ignore_index: int | None = None,
        normalize: str | None = None,
        validate_args: bool = True,
        **options: Any,
    ) -> None:
        super().__init__((num_classes, num_classes), ignore_index, normalize, validate_args, **options)
        self.num_classes = num_classes

    @leaves_out_padding
    def batch_state(self, preds: Any, target: Any) -> State:
        """Count one batch.

        Args:
            preds: Probabilities or logits of shape [N, classes, ...], or class numbers of the shape of `target`.
            target: Class numbers, shape [N, ...].
        """
        preds, target = jnp.asarray(preds), integer_targets(target, type(self).__name__)
        chosen = predicted_class(preds, target, self.num_classes, 1, type(self).__name__)
        return {"confmat": _matrix(chosen, target, valid_mask(target, self.ignore_index), self.num_classes)}


class MultilabelConfusionMatrix(_Confusion):
    """Confusion matrices of several labels, shape [labels, 2, 2].

    Args:
        num_labels: Number of labels.
        threshold: Above which a probability means 1.
        ignore_index: A target that does not count.
        normalize: `"true"`, `"pred"` or `"all"` for shares; None for counts.
        validate_args: Accepted; shapes are always checked, values never.
        **options: See `Metric`.
    """

    def __init__(
        self,
        num_labels: int,
        threshold: float = 0.5,
        ignore_index: int | None = None,
        normalize: str | None = None,
        validate_args: bool = True,
        **options: Any,
    ) -> None:
        super().__init__((num_labels, 2, 2), ignore_index, normalize, validate_args, **options)
        self.num_labels, self.threshold = num_labels, threshold

    @leaves_out_padding
    def batch_state(self, preds: Any, target: Any) -> State:
        """Count one batch.

        Args:
            preds: Labels, probabilities or logits, shape [N, labels, ...].
            target: 0 and 1, the same shape.
        """
        preds, target = jnp.asarray(preds), integer_targets(target, type(self).__name__)
        same_shape(preds, target, type(self).__name__)
        labels = jnp.moveaxis(as_labels(preds, self.threshold), 1, 0).reshape(self.num_labels, -1)
        target = jnp.moveaxis(target, 1, 0).reshape(self.num_labels, -1)
        valid = valid_mask(target, self.ignore_index, axis=1)
        return {"confmat": jax.vmap(lambda p, t, v: _matrix(p, t, v, 2))(labels, target, valid)}


def _matrix(preds: jax.Array, target: jax.Array, valid: jax.Array, size: int) -> jax.Array:
    """Counts of (target, prediction), shape [size, size]."""
    preds, target, valid = preds.reshape(-1), target.reshape(-1), valid.reshape(-1)
    rows = jnp.where(valid, target, 0)
    return jnp.zeros((size, size), jnp.int32).at[rows, preds].add(valid.astype(jnp.int32))


class ConfusionMatrix:
    """`ConfusionMatrix(task=...)`: counts of (target, prediction)."""

    _tasks: dict[str, type[Metric]] = {
        "binary": BinaryConfusionMatrix,
        "multiclass": MulticlassConfusionMatrix,
        "multilabel": MultilabelConfusionMatrix,
    }

    def __new__(  # type: ignore[misc]  # as in torchmetrics, the object is one of another class
        cls,
        task: str,
        threshold: float = 0.5,
        num_classes: int | None = None,
        num_labels: int | None = None,
        normalize: str | None = None,
        ignore_index: int | None = None,
        validate_args: bool = True,
        **options: Any,
    ) -> Metric:
        """Make the metric of a task; the arguments are those of its class."""
        make = task_class("ConfusionMatrix", cls._tasks, task, num_classes, num_labels)
        options = {"normalize": normalize, "ignore_index": ignore_index, "validate_args": validate_args, **options}
        if task == "binary":
            return make(threshold=threshold, **options)
        if task == "multilabel":
            return make(num_labels=num_labels, threshold=threshold, **options)
        return make(num_classes=num_classes, **options)
