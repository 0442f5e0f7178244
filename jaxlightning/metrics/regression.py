"""Mean squared error, mean absolute error and R² score."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlightning.metrics._inputs import check_option, floating, row_mask, same_shape
from jaxlightning.metrics.metric import Metric, State, leaves_out_padding
from jaxlightning.utilities.rank_zero import rank_zero_warn

__all__ = ["MeanAbsoluteError", "MeanSquaredError", "R2Score"]


class _MeanError(Metric):
    """A mean over samples, of each output by itself if there are several.

    Args:
        num_outputs: Number of outputs; with 1 all dimensions are flattened.
        **options: See `Metric`.
    """

    _name = ""

    def __init__(self, num_outputs: int = 1, **options: Any) -> None:
        super().__init__(**options)
        if not isinstance(num_outputs, int) or num_outputs < 1:
            raise ValueError(f"Expected num_outputs to be a positive integer but got {num_outputs}")
        self.num_outputs = num_outputs
        self.add_state(self._name, np.zeros(num_outputs if num_outputs > 1 else (), np.float32))
        self.add_state("total", np.int32(0))

    def _error(self, difference: jax.Array) -> jax.Array:
        raise NotImplementedError

    @leaves_out_padding
    def batch_state(self, preds: Any, target: Any) -> State:
        """Sum the errors of one batch.

        Args:
            preds: Shape [N, ...].
            target: The same shape.
        """
        preds, target = floating(preds), floating(target)
        same_shape(preds, target, type(self).__name__)
        if self.num_outputs == 1:
            preds, target = preds.reshape(-1), target.reshape(-1)
        error, real = self._error(preds - target), row_mask(target.shape)
        total = jnp.asarray(target.shape[0], jnp.int32)
        if real is not None:
            error, total = jnp.where(real, error, 0), jnp.sum(real, dtype=jnp.int32)
        return {self._name: jnp.sum(error, axis=0), "total": total}

    def value_of(self, state: State) -> Any:
        """The mean error."""
        return state[self._name] / state["total"]


class MeanSquaredError(_MeanError):
    """Mean of `(preds - target)²`.

    Args:
        squared: False takes the root of the mean.
        num_outputs: Number of outputs; with 1 all dimensions are flattened.
        **options: See `Metric`.

    Raises:
        ValueError: If `squared` is no boolean.
    """

    _name = "sum_squared_error"

    def __init__(self, squared: bool = True, num_outputs: int = 1, **options: Any) -> None:
        super().__init__(num_outputs, **options)
        if not isinstance(squared, bool):
            raise ValueError(f"Expected argument `squared` to be a boolean but got {squared}")
        self.squared = squared

    def _error(self, difference: jax.Array) -> jax.Array:
        return difference * difference

    def value_of(self, state: State) -> Any:
        """The mean squared error, or its root."""
        mean = super().value_of(state)
        return mean if self.squared else jnp.sqrt(mean)


class MeanAbsoluteError(_MeanError):
    """Mean of `|preds - target|`."""

    _name = "sum_abs_error"

    def _error(self, difference: jax.Array) -> jax.Array:
        return jnp.abs(difference)


class R2Score(Metric):
    """Share of the targets' variance that the predictions explain, `1 - SS_res / SS_tot`.

    Args:
        adjusted: Number of independent regressors for the adjusted score.
        multioutput: How several outputs are reduced: `"uniform_average"`, `"variance_weighted"` or `"raw_values"`.
        num_outputs: Number of outputs, the size of the second dimension. torchmetrics finds it in the data; a state in
            a compiled step has a fixed shape.
        **options: See `Metric`.

    Raises:
        ValueError: If `adjusted` or `multioutput` is out of range.
    """

    def __init__(
        self, adjusted: int = 0, multioutput: str = "uniform_average", num_outputs: int = 1, **options: Any
    ) -> None:
        super().__init__(**options)
        if not isinstance(adjusted, int) or adjusted < 0:
            raise ValueError("`adjusted` parameter should be an integer larger or equal to 0.")
        check_option("multioutput", multioutput, ("raw_values", "uniform_average", "variance_weighted"))
        self.adjusted, self.multioutput, self.num_outputs = adjusted, multioutput, num_outputs
        for name in ("sum_squared_error", "sum_error", "residual"):
            self.add_state(name, np.zeros(num_outputs if num_outputs > 1 else (), np.float32))
        self.add_state("total", np.int32(0))

    @leaves_out_padding
    def batch_state(self, preds: Any, target: Any) -> State:
        """Sum one batch.

        Args:
            preds: Shape [N] or [N, outputs].
            target: The same shape.

        Returns:
            Sums over the rows, float32, shape [outputs] (or () for one), and the number of rows, int32.

        Raises:
            ValueError: If the shapes differ, or are not such.
        """
        preds, target = floating(preds), floating(target)
        same_shape(preds, target, "R2Score")
        if preds.ndim > 2:
            raise ValueError(
                f"Expected both prediction and target to be 1D or 2D tensors, but received tensors with dimension "
                f"{preds.shape}"
            )
        outputs = preds.shape[1] if preds.ndim == 2 else 1
        if outputs != self.num_outputs:
            raise ValueError(
                f"`R2Score` received {outputs} outputs (shape {preds.shape}) but was made for {self.num_outputs}: say "
                f"`R2Score(num_outputs={outputs})`."
            )
        if outputs == 1:
            preds, target = preds.reshape(-1), target.reshape(-1)
        real = row_mask(target.shape)
        total = jnp.asarray(target.shape[0], jnp.int32)
        if real is not None:
            preds, target = jnp.where(real, preds, 0), jnp.where(real, target, 0)
            total = jnp.sum(real, dtype=jnp.int32)
        return {
            "sum_squared_error": jnp.sum(target * target, axis=0),
            "sum_error": jnp.sum(target, axis=0),
            "residual": jnp.sum((target - preds) ** 2, axis=0),
            "total": total,
        }

    def check(self, state: State) -> None:
        """Refuse a score of fewer than two samples."""
        total = int(state["total"])
        if total < 2:
            raise ValueError(f"Needs at least two samples to calculate r2 score. Received {total}.")
        if self.adjusted and self.adjusted >= total - 1:
            rank_zero_warn(
                f"The adjusted r2 score of {total} samples and {self.adjusted} regressors does not exist. Falls back "
                "to standard r2 score."
            )

    def value_of(self, state: State) -> Any:
        """The score."""
        total, residual = state["total"], state["residual"]
        spread = state["sum_squared_error"] - state["sum_error"] * (state["sum_error"] / total)
        # Nearly constant targets and perfect predictions, with torchmetrics' tolerance.
        wrong, varied = jnp.abs(residual) > 1e-4, jnp.abs(spread) > 1e-4
        scores = jnp.where(wrong & varied, 1 - residual / jnp.where(varied, spread, 1), jnp.where(wrong, 0.0, 1.0))
        if self.multioutput == "raw_values":
            score = scores
        elif self.multioutput == "uniform_average":
            score = jnp.mean(scores)
        else:
            score = jnp.sum(spread / jnp.sum(spread) * scores)
        if not self.adjusted:
            return score
        freedom = total - self.adjusted - 1
        return jnp.where(freedom > 0, 1 - (1 - score) * (total - 1) / jnp.maximum(freedom, 1), score)
