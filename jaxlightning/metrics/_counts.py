"""Counting true and false positives and negatives, for binary, multiclass and multilabel tasks."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlightning.metrics._inputs import as_labels, check_option, integer_targets, same_shape, valid_mask
from jaxlightning.metrics.metric import Metric, State, leaves_out_padding

__all__ = ["BinaryCounts", "MulticlassCounts", "MultilabelCounts", "predicted_class", "safe_divide", "task_class"]

_AVERAGES = ("micro", "macro", "weighted", "none", None)


class Counts(Metric):
    """Counts `tp`, `fp`, `tn`, `fn`: one number each, or one per class or label."""

    def __init__(
        self, size: int | None, multidim_average: str, ignore_index: int | None, validate_args: bool, **options: Any
    ) -> None:
        super().__init__(**options)
        check_option("multidim_average", multidim_average, ("global", "samplewise"))
        if multidim_average == "samplewise":
            raise NotImplementedError(
                f"`{type(self).__name__}(multidim_average='samplewise')` keeps a value per sample, and a state that "
                "grows with the data cannot live in a compiled step. Use 'global'."
            )
        self.ignore_index = ignore_index
        self.validate_args = validate_args
        for name in ("tp", "fp", "tn", "fn"):
            self.add_state(name, np.zeros(() if size is None else size, np.int32))

    @abstractmethod
    def _score(self, state: State, average: str | None, multilabel: bool, top_k: int) -> Any:
        """The score of counts."""


class BinaryCounts(Counts):
    """Two classes.

    Args:
        threshold: Above which a probability means 1.
        multidim_average: Only `"global"`: further dimensions are flattened into the batch.
        ignore_index: A target that does not count.
        validate_args: Accepted; shapes are always checked, values never.
        **options: See `Metric`, and `zero_division` for precision, recall and F1 score.
    """

    _average = "binary"

    def __init__(
        self,
        threshold: float = 0.5,
        multidim_average: str = "global",
        ignore_index: int | None = None,
        validate_args: bool = True,
        zero_division: float = 0,
        **options: Any,
    ) -> None:
        super().__init__(None, multidim_average, ignore_index, validate_args, **options)
        self.threshold, self.zero_division = threshold, zero_division

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
        return _count(as_labels(preds, self.threshold), target, valid, axis=None)

    def value_of(self, state: State) -> Any:
        """The score."""
        return self._score(state, "binary", False, 1)


class MultilabelCounts(Counts):
    """Several labels, each 0 or 1.

    Args:
        num_labels: Number of labels.
        threshold: Above which a probability means 1.
        average: `"micro"`, `"macro"`, `"weighted"` or `"none"`.
        multidim_average: Only `"global"`.
        ignore_index: A target that does not count.
        validate_args: Accepted; shapes are always checked, values never.
        **options: See `Metric`, and `zero_division` for precision, recall and F1 score.
    """

    def __init__(
        self,
        num_labels: int,
        threshold: float = 0.5,
        average: str | None = "macro",
        multidim_average: str = "global",
        ignore_index: int | None = None,
        validate_args: bool = True,
        zero_division: float = 0,
        **options: Any,
    ) -> None:
        super().__init__(num_labels, multidim_average, ignore_index, validate_args, **options)
        check_option("average", average, _AVERAGES)
        self.num_labels, self.threshold, self.average = num_labels, threshold, average
        self.zero_division = zero_division

    @leaves_out_padding
    def batch_state(self, preds: Any, target: Any) -> State:
        """Count one batch.

        Args:
            preds: Labels, probabilities or logits, shape [N, labels, ...].
            target: 0 and 1, the same shape.
        """
        preds, target = jnp.asarray(preds), integer_targets(target, type(self).__name__)
        same_shape(preds, target, type(self).__name__)
        if preds.ndim < 2 or preds.shape[1] != self.num_labels:
            raise ValueError(
                f"Expected both `target.shape[1]` and `preds.shape[1]` to be equal to `num_labels={self.num_labels}`, "
                f"but got shape {preds.shape}."
            )
        valid = valid_mask(target, self.ignore_index)
        axes = (0, *range(2, preds.ndim))
        return _count(as_labels(preds, self.threshold), target, valid, axis=axes)

    def value_of(self, state: State) -> Any:
        """The score."""
        return self._score(state, self.average, True, 1)


class MulticlassCounts(Counts):
    """Several classes, one of which is right.

    Args:
        num_classes: Number of classes.
        top_k: How many of the most probable classes may hold the target.
        average: `"micro"`, `"macro"`, `"weighted"` or `"none"`.
        multidim_average: Only `"global"`.
        ignore_index: A target that does not count.
        validate_args: Accepted; shapes are always checked, values never.
        **options: See `Metric`, and `zero_division` for precision, recall and F1 score.
    """

    def __init__(
        self,
        num_classes: int,
        top_k: int = 1,
        average: str | None = "macro",
        multidim_average: str = "global",
        ignore_index: int | None = None,
        validate_args: bool = True,
        zero_division: float = 0,
        **options: Any,
    ) -> None:
        super().__init__(num_classes, multidim_average, ignore_index, validate_args, **options)
        check_option("average", average, _AVERAGES)
        if not 1 <= top_k <= num_classes:
            raise ValueError(f"Expected argument `top_k` to be from 1 to `num_classes={num_classes}`, but got {top_k}.")
        self.num_classes, self.top_k, self.average, self.zero_division = num_classes, top_k, average, zero_division

    @leaves_out_padding
    def batch_state(self, preds: Any, target: Any) -> State:
        """Count one batch.

        Args:
            preds: Probabilities or logits of shape [N, classes, ...], or class numbers of the shape of `target`.
            target: Class numbers, shape [N, ...].
        """
        preds, target = jnp.asarray(preds), integer_targets(target, type(self).__name__)
        chosen = predicted_class(preds, target, self.num_classes, self.top_k, type(self).__name__).reshape(-1)
        target = target.reshape(-1)
        valid = valid_mask(target, self.ignore_index).astype(jnp.int32)
        none = jnp.zeros(self.num_classes, jnp.int32)
        # A target that does not count may be any number: give it a place and add nothing there.
        place = jnp.where(valid == 1, target, 0)
        tp = none.at[place].add(valid * (chosen == target))
        support = none.at[place].add(valid)
        predicted = none.at[chosen].add(valid)
        return {
            "tp": tp,
            "fp": predicted - tp,
            "fn": support - tp,
            "tn": jnp.sum(valid) - predicted - support + tp,
        }

    def value_of(self, state: State) -> Any:
        """The score."""
        return self._score(state, self.average, False, self.top_k)


def predicted_class(preds: jax.Array, target: jax.Array, num_classes: int, top_k: int, metric: str) -> jax.Array:
    """The class that counts as predicted: the target if it is among the first `top_k`, else the most probable.

    Args:
        preds: Shape [N, classes, ...], or that of `target`.
        target: Shape [N, ...].
        num_classes: Number of classes.
        top_k: How many classes are asked.
        metric: Name for the errors.

    Returns:
        Class numbers of the shape of `target`.

    Raises:
        ValueError: If the shapes do not fit.
    """
    if preds.ndim == target.ndim + 1:
        if preds.shape[1] != num_classes or (preds.shape[0], *preds.shape[2:]) != target.shape:
            raise ValueError(
                f"`{metric}` expects `preds` of shape [N, {num_classes}, ...] for `target` of shape {target.shape}, "
                f"but got {preds.shape}."
            )
        best = jnp.argmax(preds, axis=1).astype(jnp.int32)
        if top_k == 1:
            return best
        classes = jnp.moveaxis(jax.lax.top_k(jnp.moveaxis(preds, 1, -1), top_k)[1], -1, 0)
        return jnp.where(jnp.any(classes == target, axis=0), target, best)
    same_shape(preds, target, metric)
    if jnp.issubdtype(preds.dtype, jnp.floating):
        raise ValueError(
            f"`{metric}` received `preds` of the shape of `target` but of type {preds.dtype}, no class numbers."
        )
    if top_k > 1:
        raise ValueError(f"`{metric}(top_k={top_k})` needs the scores of all classes, but got class numbers.")
    return preds.astype(jnp.int32)


def _count(preds: jax.Array, target: jax.Array, valid: jax.Array, axis: tuple[int, ...] | None) -> State:
    def total(mask: jax.Array) -> jax.Array:
        return jnp.sum(mask & valid, axis=axis, dtype=jnp.int32)

    hit, positive = preds == target, target == 1
    return {
        "tp": total(hit & positive),
        "fp": total(~hit & (target == 0)),
        "tn": total(hit & (target == 0)),
        "fn": total(~hit & positive),
    }


def task_class(
    name: str, tasks: dict[str, type[Metric]], task: str, num_classes: int | None, num_labels: int | None
) -> type[Metric]:
    """The class for a task.

    Raises:
        ValueError: For another task, or without the number of classes or labels.
    """
    if task not in tasks:
        raise ValueError(f"`{name}(task={task!r})`: the tasks are {list(tasks)}.")
    for wanted, argument, value in (
        ("multiclass", "num_classes", num_classes),
        ("multilabel", "num_labels", num_labels),
    ):
        if task == wanted and not isinstance(value, int):
            raise ValueError(f"`{name}(task={task!r})` needs `{argument}` as an integer, but got {value!r}.")
    return tasks[task]


def safe_divide(numerator: Any, denominator: Any, zero_division: float = 0) -> jax.Array:
    """The quotient, or `zero_division` where the denominator is zero."""
    numerator, denominator = jnp.asarray(numerator, jnp.float32), jnp.asarray(denominator, jnp.float32)
    zero = denominator == 0
    return jnp.where(zero, zero_division, numerator / jnp.where(zero, 1, denominator))
