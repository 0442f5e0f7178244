"""From a call of `self.log` to a validated `LogCall`: where it was made, what it means, how much it weighs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from jaxlightning.compile.log_plan import LogMeta
from jaxlightning.compile.trace import Trace, current_trace
from jaxlightning.metrics._batch_size import extract_batch_size
from jaxlightning.metrics._fx_rules import resolve_levels
from jaxlightning.metrics._objects import PASSED, attribute_of, refuse_foreign_metric
from jaxlightning.metrics._values import (
    check_loggable,
    default_dtype,
    is_array,
    is_metric,
    is_torch,
    parse_reduce_fx,
    warn_if_not_floating,
)
from jaxlightning.metrics.metric import Metric, traced_values
from jaxlightning.utilities.exceptions import MisconfigurationException
from jaxlightning.utilities.rank_zero import rank_zero_warn
from jaxlightning.utilities.warnings import WarningCache

if TYPE_CHECKING:
    from jaxlightning.metrics._results import ResultCollection

__all__ = ["LogCall", "log_in_trace", "log_value", "resolve_call", "step_value", "warn_barebones"]

_STEP_HOOKS = {
    "train": "training_step",
    "validate": "validation_step",
    "sanity_check": "validation_step",
    "test": "test_step",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LogCall:
    """One accepted call of `self.log`.

    Attributes:
        meta: Its options, with all defaults filled in.
        value: A number, a torch tensor (host only) or an array with one element; in a trace a 0-d array or number.
        weight: Weight in an epoch mean; None means one.
        trace: The step in which it was made, None on the host.
    """

    meta: LogMeta
    value: Any
    weight: Any
    trace: Trace | None


def resolve_call(
    name: str,
    value: Any,
    options: Mapping[str, Any],
    *,
    fx: str | None,
    results: ResultCollection | None,
    has_logger: bool,
    warnings: WarningCache,
    module: Any = None,
) -> LogCall:
    """Validate a call of `self.log` and fill in what it left out.

    Args:
        name: The key.
        value: The value, already found loggable.
        options: The keyword options of `self.log`.
        fx: The hook that is running, None outside of the trainer's control flow.
        results: The collection of the stage, for the loader index and the batch; None without a trainer.
        has_logger: Whether some logger will receive it.
        warnings: Where warnings are remembered.
        module: The module, for the attributes that hold metric objects.

    Returns:
        The call.

    Raises:
        MisconfigurationException: If the hook, a level, the name or an option does not allow it.
    """
    if fx is None:
        raise MisconfigurationException(
            f"You are trying to `self.log({name!r}, ...)` but it is not managed by the `Trainer` control flow: no hook "
            "of this module or of a callback is running."
        )
    on_step, on_epoch = resolve_levels(fx, options.get("on_step"), options.get("on_epoch"))
    add_dataloader_idx = bool(options.get("add_dataloader_idx", True))
    if add_dataloader_idx and "/dataloader_idx_" in name:
        raise MisconfigurationException(
            f"You called `self.log` with the key `{name}` but it should not contain information about `dataloader_idx` "
            "when `add_dataloader_idx=True`: the index is added for you."
        )
    _refuse_unbuilt(name, options)
    trace = current_trace()
    metric = _metric_path(module, name, value, options.get("metric_attribute"))
    logger = options.get("logger")
    if logger and not has_logger:
        warnings.warn(
            f"You called `self.log({name!r}, ..., logger=True)` but have no logger configured. "
            "Give the trainer one: `Trainer(logger=...)`.",
            key=f"log-no-logger:{name}",
        )
    meta = LogMeta(
        fx=fx,
        name=name,
        on_step=on_step,
        on_epoch=on_epoch,
        reduce_fx=parse_reduce_fx(options.get("reduce_fx", "mean")),
        prog_bar=bool(options.get("prog_bar", False)),
        # Without a logger the value is still what `validate` and `test` return.
        logger=True if logger is None else bool(logger),
        add_dataloader_idx=add_dataloader_idx,
        dataloader_idx=None if results is None else results.dataloader_idx,
        rank_zero_only=bool(options.get("rank_zero_only", False)),
        sync_dist=bool(options.get("sync_dist", False)) and jax.process_count() > 1,
        metric=metric,
    )
    if metric is not None:
        return LogCall(meta=meta, value=value, weight=None, trace=trace)
    value = _prepare(name, value, fx, trace, warnings)
    weight = _weight(meta, options.get("batch_size"), results, trace, warnings)
    return LogCall(meta=meta, value=value, weight=weight, trace=trace)


def _metric_path(module: Any, name: str, value: Any, given: str | None) -> str | None:
    """Where the logged metric object lives, None for other values."""
    if isinstance(value, Metric):
        if module is None:
            raise NotImplementedError(
                f"`self.log({name!r}, metric)` needs the trainer's loop, which keeps the metric's state. In a loop of "
                "your own use `metric.functional()`."
            )
        return attribute_of(module, name, value, given)
    if is_metric(value):
        refuse_foreign_metric(name, value)
        return PASSED
    if given is not None:
        raise MisconfigurationException(
            f"`self.log({name!r}, ..., metric_attribute={given!r})` received no metric object but a "
            f"`{type(value).__name__}`."
        )
    return None


def step_value(call: LogCall) -> Any:
    """The value of the batch alone of a metric object that was logged in a step.

    Raises:
        MisconfigurationException: If it is wanted and the metric has none, because only `update` was called.
    """
    if not call.meta.on_step or call.trace is None:
        return 0.0
    if call.meta.metric == PASSED:
        return jax.numpy.asarray(call.value.compute(), default_dtype()).reshape(())
    found = traced_values(call.trace).get(call.value._token)
    if found is None:
        raise MisconfigurationException(
            f"`self.log({call.meta.name!r}, metric, on_step=True)` in `{call.meta.fx}`: the metric has no value of "
            "this batch, because it was not called. Call it (`self.metric(preds, target)`) before logging it, or log "
            "it with `on_step=False, on_epoch=True`."
        )
    return _scalar(call.meta.name, found)


def _scalar(name: str, value: Any) -> Any:
    if value.size != 1:
        raise ValueError(
            f"The metric logged as {name!r} has a value of shape {value.shape}, but a logged value must have a single "
            "element. Log `compute()` of it piece by piece in a hook at the end of the epoch."
        )
    return value.reshape(()).astype(default_dtype())


def _refuse_unbuilt(name: str, options: Mapping[str, Any]) -> None:
    if options.get("sync_dist_group") is not None:
        raise NotImplementedError(
            f"`self.log({name!r}, ..., sync_dist_group=...)`: JAX has no process groups. Leave it out; "
            "`sync_dist=True` reduces over all processes."
        )
    across = options.get("sync_dist") and not options.get("rank_zero_only") and jax.process_count() > 1
    if across and current_trace() is None:
        raise NotImplementedError(
            f"`self.log({name!r}, ..., sync_dist=True)` from a host hook with {jax.process_count()} processes is not "
            "built yet. Log it in the step, where values are reduced over all devices already."
        )


def _prepare(name: str, value: Any, fx: str, trace: Trace | None, warnings: WarningCache) -> Any:
    if is_torch(value):
        if trace is not None:
            raise TypeError(
                f"`self.log({name!r}, ...)` in `{fx}` received a torch tensor. A step is compiled by JAX, and a torch "
                "tensor in it would be a constant. Compute the value with `jax.numpy`."
            )
        warn_if_not_floating(name, fx, value, warnings)
        return value
    if not is_array(value):
        # JAX refuses Python integers beyond 32 bits, and fractions and decimals altogether.
        return value if trace is None or isinstance(value, float) else float(value)
    warn_if_not_floating(name, fx, value, warnings)
    if trace is None:
        if isinstance(value, jax.core.Tracer):
            raise RuntimeError(
                f"`self.log({name!r}, ...)` in `{fx}` received a value that is being traced by a `jax.jit` or another "
                "transform of your own. Return it from the transformed function and log it outside."
            )
        return value
    value = value.reshape(())
    # Sums in half precision lose counts; integers have no mean.
    if not jax.numpy.issubdtype(value.dtype, jax.numpy.floating) or value.dtype.itemsize < 4:
        value = value.astype(default_dtype())
    return value


def _weight(
    meta: LogMeta, batch_size: Any, results: ResultCollection | None, trace: Trace | None, warnings: WarningCache
) -> Any:
    if not meta.on_epoch or meta.reduce_fx != "mean":
        return None
    mask = None if trace is None else trace.mask
    if mask is not None and (batch_size is None or (isinstance(batch_size, int) and batch_size == mask.shape[0])):
        return mask.sum()  # the padded size, said or not, stands for the real rows
    if batch_size is not None:
        return batch_size
    if results is None:
        batch = getattr(trace, "batch", None)
        return None if batch is None else extract_batch_size(batch, warnings)
    if results.batch_size is None:
        if results.batch is None:
            return None
        results.batch_size = extract_batch_size(results.batch, warnings)
    return results.batch_size


def log_in_trace(
    trace: Trace | None, name: str, value: Any, options: Mapping[str, Any], warnings: WarningCache
) -> bool:
    """Record a call of `self.log` in a train or evaluation step that no trainer's loop runs.

    Args:
        trace: The step that is running, or None.
        name: The key.
        value: The value.
        options: The keyword options of `self.log`.
        warnings: Where warnings are remembered.

    Returns:
        Whether there was such a step.
    """
    fx = None if trace is None else _STEP_HOOKS.get(trace.kind)
    if trace is None or fx is None:
        return False
    check_loggable(name, value)
    call = resolve_call(name, value, options, fx=fx, results=None, has_logger=True, warnings=warnings)
    trace.add_log(call.meta, call.value, call.weight)
    return True


def warn_barebones(name: str) -> None:
    """Say that nothing is logged under `Trainer(barebones=True)`."""
    rank_zero_warn(
        f"You are trying to `self.log({name!r}, ...)` but `Trainer(barebones=True)` is configured: logging is off, so "
        "that the raw speed can be measured."
    )


_process_warnings = WarningCache()


def log_value(module: Any, name: str, value: Any, **options: Any) -> None:
    """What `LightningModule.log` does: hand a value to the trainer, or say why that is not possible.

    In a step that runs without a trainer (see `jaxlightning.functionalize`) the value goes to the step itself.

    Args:
        module: The module on which `log` was called.
        name: The key.
        value: A number, a single-element array or a metric object.
        **options: The options of `LightningModule.log`.

    Raises:
        MisconfigurationException: If nothing may be logged here, or not like this.
        ValueError: If the value cannot be logged.
    """
    if options.get("enable_graph"):
        _process_warnings.warn(
            "`self.log(..., enable_graph=True)` changes nothing here: a JAX value carries no graph.", key="enable-graph"
        )
    trainer = getattr(module, "_trainer", None)
    if trainer is None:
        if log_in_trace(current_trace(), name, value, options, _process_warnings):
            return
        check_loggable(name, value)
        rank_zero_warn(
            f"You are trying to `self.log({name!r}, ...)` but the `self.trainer` reference is not registered on the "
            "model yet: the value goes nowhere. Pass the module to a `Trainer` first."
        )
        return
    log: Callable[..., None] = trainer._logger_connector.log
    log(module, name, value, **options)
