"""Preparing predictions and targets of classification metrics, as torchmetrics does."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlightning.compile.trace import current_trace

__all__ = [
    "as_labels",
    "check_option",
    "floating",
    "integer_targets",
    "normalized",
    "row_mask",
    "same_shape",
    "thresholds_of",
    "valid_mask",
]


def check_option(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Refuse a value that is not on the list.

    Raises:
        ValueError: If it is not.
    """
    if value not in allowed:
        raise ValueError(f"Expected argument `{name}` to be one of {allowed}, but got {value!r}.")


def integer_targets(target: Any, metric: str) -> jax.Array:
    """Targets as integers.

    Raises:
        ValueError: If they are floating point.
    """
    target = jnp.asarray(target)
    if jnp.issubdtype(target.dtype, jnp.floating):
        raise ValueError(f"Expected `target` of `{metric}` to be integers or booleans, but got {target.dtype}.")
    labels: jax.Array = target.astype(jnp.int32)
    return labels


def floating(value: Any) -> jax.Array:
    """An array in single precision at least."""
    array = jnp.asarray(value)
    if not jnp.issubdtype(array.dtype, jnp.floating) or array.dtype.itemsize < 4:
        array = array.astype(jnp.float32)
    return array


def same_shape(preds: Any, target: Any, metric: str) -> None:
    """Refuse predictions and targets of different shapes.

    Raises:
        ValueError: If they differ.
    """
    if preds.shape != target.shape:
        raise ValueError(
            f"Expected `preds` and `target` of `{metric}` to have the same shape, but got {preds.shape} and "
            f"{target.shape}."
        )


def row_mask(shape: tuple[int, ...], axis: int = 0) -> jax.Array | None:
    """Which entries of an array belong to real rows of a batch that `Trainer(pad_batches=...)` padded.

    Args:
        shape: Its shape; along `axis` it has one entry, or a run of several, for each row of the batch, in order.
        axis: The axis of the batch.

    Returns:
        A bool array that broadcasts to `shape`; None outside of a step on a padded batch, and for other lengths.
    """
    trace = current_trace()
    mask = None if trace is None else trace.mask
    if mask is None or not shape or shape[axis] % mask.shape[0]:
        return None
    entries = jnp.repeat(mask, shape[axis] // mask.shape[0], total_repeat_length=shape[axis])
    return entries.reshape([shape[axis] if i == axis else 1 for i in range(len(shape))])


def valid_mask(target: jax.Array, ignore_index: int | None, axis: int = 0) -> jax.Array:
    """Which targets count, of the shape of `target`: those that are not ignored and not padding."""
    valid = jnp.ones(target.shape, bool) if ignore_index is None else target != ignore_index
    real = row_mask(target.shape, axis)
    return valid if real is None else valid & real


def normalized(preds: jax.Array, how: str, valid: jax.Array | None = None, axis: int = -1) -> jax.Array:
    """Probabilities: if any prediction is outside [0, 1], all are taken for logits.

    Args:
        preds: Floating point.
        how: `"sigmoid"` or `"softmax"`.
        valid: Which predictions are asked; all by default.
        axis: Where the classes are, for the softmax.

    Returns:
        An array of the same shape.
    """
    if valid is None:
        valid = row_mask(preds.shape)
    outside = (preds < 0) | (preds > 1) | jnp.isnan(preds)
    if valid is not None:
        outside = outside & valid
    logits = jax.nn.sigmoid(preds) if how == "sigmoid" else jax.nn.softmax(preds, axis=axis)
    return jnp.where(jnp.any(outside), logits, preds)


def as_labels(preds: jax.Array, threshold: float, valid: jax.Array | None = None) -> jax.Array:
    """Zeros and ones from probabilities or logits; integer predictions stay as they are."""
    if jnp.issubdtype(preds.dtype, jnp.floating):
        preds = normalized(preds, "sigmoid", valid) > threshold
    return preds.astype(jnp.int32)


def thresholds_of(thresholds: int | list[float] | Any, metric: str) -> np.ndarray[Any, Any]:
    """The thresholds of a binned curve, float32 of shape [T].

    Raises:
        NotImplementedError: For None, the exact curve.
        ValueError: If they are fewer than two or outside [0, 1].
    """
    if thresholds is None:
        raise NotImplementedError(
            f"`{metric}(thresholds=None)` would keep every prediction, and a state that grows with the data cannot "
            "live in a compiled step. Give the number of bins, for example `thresholds=200`."
        )
    if isinstance(thresholds, int):
        if thresholds < 2:
            raise ValueError(f"Expected argument `thresholds` to be at least 2, but got {thresholds}.")
        # Symmetric, as torch.linspace computes it: equal comparisons need equal bits.
        step = np.float32(1) / np.float32(thresholds - 1)
        up = np.arange(thresholds, dtype=np.float32) * step
        down = np.float32(1) - step * np.arange(thresholds - 1, -1, -1, dtype=np.float32)
        return np.where(np.arange(thresholds) < thresholds // 2, up, down).astype(np.float32)
    values = np.asarray(thresholds, np.float32)
    if values.ndim != 1 or not np.all((values >= 0) & (values <= 1)):
        raise ValueError(f"Expected argument `thresholds` to be numbers in [0, 1], but got {thresholds!r}.")
    return values
