"""The running reduction of what host code logs under one key."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlightning.metrics._refs import Ref, Snapshot
from jaxlightning.metrics._values import default_dtype, host_number

__all__ = ["HostValue"]


@partial(jax.jit, static_argnames="reduction")
def _fold(total: jax.Array, value: jax.Array, weight: Any, reduction: str) -> jax.Array:
    if reduction in ("mean", "sum"):
        return jnp.add(total, value * weight if reduction == "mean" else value)
    return jnp.minimum(total, value) if reduction == "min" else jnp.maximum(total, value)


class HostValue:
    """Step value and epoch reduction of one key; numbers are reduced on the host, arrays where they live.

    A hook may log an array that the device has not computed yet (`outputs["loss"]` in `on_train_batch_end`): it is
    added up on the device, so that logging never waits.

    Attributes:
        reduction: `"mean"`, `"sum"`, `"min"` or `"max"`.
        step: The last value, None if nothing was logged since the last reset.
        total: The reduction so far (for a mean the weighted sum), a NumPy scalar or a 0-d JAX array.
        weight: Sum of the weights of a mean.
    """

    __slots__ = ("reduction", "step", "total", "weight")

    def __init__(self, reduction: str) -> None:
        self.reduction = reduction
        self.reset()

    @classmethod
    def restored(cls, reduction: str, total: float | None, weight: float, step: float | None) -> HostValue:
        """One that goes on from saved numbers; `total` None if nothing was reduced."""
        value = cls(reduction)
        value.total = None if total is None else host_number(total)
        value.step = None if step is None else host_number(step)
        value.weight = weight
        return value

    def reset(self) -> None:
        """Forget everything that was logged."""
        self.step: Any = None
        self.total: Any = None
        self.weight: Any = 0

    def update(self, value: Any, weight: Any, *, on_epoch: bool) -> None:
        """Log one value.

        Args:
            value: A number, a torch tensor, or a JAX array with one element.
            weight: Its weight in a mean.
            on_epoch: Whether it is also reduced over the epoch.
        """
        if isinstance(value, jax.Array):
            value = value.reshape(())
            if not jnp.issubdtype(value.dtype, jnp.floating) or value.dtype.itemsize < 4:
                value = value.astype(default_dtype())
        else:
            value = host_number(value)
        self.step = value
        if not on_epoch:
            return
        self.weight = self.weight + weight
        if self.total is None:
            # 0 + v * w is v * w, min(inf, v) is v: the first value needs no neutral element.
            self.total = value * weight if self.reduction == "mean" else value
        elif isinstance(value, jax.Array) or isinstance(self.total, jax.Array):
            self.total = _fold(self.total, value, weight, self.reduction)
        elif self.reduction == "mean":
            self.total = self.total + value * weight
        elif self.reduction == "sum":
            self.total = self.total + value
        else:
            # NaN wins, as it does in torch.minimum and on the device.
            self.total = (np.minimum if self.reduction == "min" else np.maximum)(self.total, value)

    def step_value(self) -> Any:
        """The last value as a number or a `Ref`."""
        return _ref(self.step)

    def snapshots(self) -> list[Snapshot]:
        """Moves the total into a snapshot if it is on the device, and returns what has to be fetched."""
        self.total = _ref(self.total)
        return [self.total.snapshot] if type(self.total) is Ref else []

    def row(self) -> tuple[Any, Any]:
        """`(total, weight)` on the host; after `snapshots` were fetched."""
        if type(self.total) is Ref:
            self.total = self.total.value()
        return self.total, self.weight


def _ref(value: Any) -> Any:
    return Ref(Snapshot(value), None) if isinstance(value, jax.Array) else value
