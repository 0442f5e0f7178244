"""What may be passed to `self.log` as value and as `reduce_fx`, and what becomes of it."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxlightning.utilities.exceptions import MisconfigurationException
from jaxlightning.utilities.warnings import WarningCache

__all__ = ["check_loggable", "default_dtype", "host_number", "is_array", "is_metric", "is_torch", "parse_reduce_fx"]

_REDUCTIONS = {"mean": "mean", "avg": "mean", "sum": "sum", "min": "min", "max": "max", "amin": "min", "amax": "max"}
_FUNCTION_HOMES = ("builtins", "jax", "numpy", "torch")


def parse_reduce_fx(reduce_fx: str | Callable[..., Any]) -> str:
    """Name the reduction that a `reduce_fx` stands for.

    Args:
        reduce_fx: `"mean"` (or `"avg"`), `"sum"`, `"min"`, `"max"` in any case, Python's `min`, `max`, `sum`, or the
            functions of these names in `jax.numpy`, `numpy` and `torch`.

    Returns:
        One of `"mean"`, `"sum"`, `"min"`, `"max"`.

    Raises:
        MisconfigurationException: For anything else.
    """
    if isinstance(reduce_fx, str):
        name = reduce_fx.lower()
        if name in ("mean", "avg", "sum", "min", "max"):
            return _REDUCTIONS[name]
    else:
        # torch's builtins have no `__module__`; their qualified name says where they live.
        qualified = str(getattr(reduce_fx, "__qualname__", ""))
        home = str(getattr(reduce_fx, "__module__", None) or "").partition(".")[0]
        name = str(getattr(reduce_fx, "__name__", ""))
        if name in _REDUCTIONS and (home in _FUNCTION_HOMES or qualified.startswith("_VariableFunctions")):
            return _REDUCTIONS[name]
    raise MisconfigurationException(
        "Only `self.log(..., reduce_fx={min,max,mean,sum})` are supported: these names, Python's own functions, and "
        f"those of jax.numpy, numpy and torch. Received: {reduce_fx!r}. For another reduction log a metric object of "
        "`jaxlightning.metrics`."
    )


def default_dtype() -> type[np.floating[Any]]:
    """The precision in which host numbers are logged: float64 under `jax_enable_x64`, else float32."""
    return np.float64 if jax.config.jax_enable_x64 else np.float32  # type: ignore[attr-defined]


def is_torch(value: Any) -> bool:
    """Whether the value is a torch tensor (found by name, so that torch is not imported)."""
    return any(base.__module__ == "torch" and base.__name__ == "Tensor" for base in type(value).__mro__)


def is_array(value: Any) -> bool:
    """Whether the value is a JAX array, a traced value, or one of the framework's stand-ins for one."""
    return isinstance(value, jax.Array)


def is_metric(value: Any) -> bool:
    """Whether the value is a metric object: one with `compute`, and `merge`, `update` or `reset`."""
    if isinstance(value, type) or is_array(value):
        return False
    return callable(getattr(value, "compute", None)) and any(
        callable(getattr(value, word, None)) for word in ("merge", "update", "reset")
    )


def check_loggable(name: str, value: Any) -> None:
    """Refuse what `self.log` cannot hold.

    Raises:
        ValueError: If the value is neither a number, nor a single-element array, nor a metric object.
        TypeError: If it is a complex number.
    """
    if isinstance(value, Mapping):
        if any(isinstance(inner, Mapping) for inner in value.values()):
            raise ValueError(
                f"`self.log({name}, {value})` was called, but nested dictionaries cannot be logged. "
                "Log every number under a name of its own, for example with `self.log_dict`."
            )
        raise ValueError(
            f"`self.log({name}, {value})` was called, but `{type(value).__name__}` values cannot be logged. "
            "Use `self.log_dict` for a dictionary of numbers."
        )
    if isinstance(value, numbers.Number | np.bool_):
        if isinstance(value, complex | np.complexfloating):
            raise TypeError(
                f"`self.log({name!r}, {value})`: must be real number, not complex. Log its real part or magnitude."
            )
        return
    if is_array(value) or is_torch(value):
        shape = tuple(value.shape)
        if int(np.prod(shape)) != 1:
            raise ValueError(
                f"`self.log({name}, ...)` was called with a value of shape {shape}, but the tensor must have a single "
                f"element. You can try `self.log({name!r}, value.mean())`."
            )
        if "complex" in str(value.dtype):
            raise TypeError(
                f"`self.log({name!r}, ...)`: must be real number, not complex. Log its real part or magnitude."
            )
        return
    if is_metric(value):
        return
    hint = " Pass `float(value)` or a JAX array." if isinstance(value, np.ndarray) and value.size == 1 else ""
    raise ValueError(
        f"`self.log({name}, {value})` was called, but `{type(value).__name__}` values cannot be logged. A value is a "
        f"Python or NumPy number, a single-element JAX array, or a metric object.{hint}"
    )


def warn_if_not_floating(name: str, fx: str, value: Any, cache: WarningCache) -> None:
    """Say once that an integer or boolean array will be turned into floating point."""
    dtype = str(value.dtype).rpartition(".")[2]
    # A weakly typed integer is a Python number that the trace made an array: the user wrote no integer array.
    if "float" in dtype or getattr(value, "weak_type", False):
        return
    cache.warn(
        f"You called `self.log({name!r}, ...)` in your `{fx}` with an array of type {dtype}, but the value needs to be "
        f"floating to be reduced. It is converted to {np.dtype(default_dtype()).name}; convert it yourself to silence "
        f"this, or use `self.logger.log_metrics({{{name!r}: ...}})` for a number that is not to be reduced.",
        key=f"log-not-floating:{fx}:{name}",
    )


def host_number(value: Any) -> np.floating[Any]:
    """A number or torch tensor as a NumPy scalar: in the default precision, but 64-bit tensors keep theirs."""
    dtype: type[np.floating[Any]] = default_dtype()
    if is_torch(value):
        if str(value.dtype) == "torch.float64":
            dtype = np.float64
        value = value.detach().cpu().item()
    with np.errstate(over="ignore"):
        return dtype(value)
