"""Reading what `configure_optimizers` returns: every form that Lightning knows, with its errors and warnings."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from jaxlightning.optim._config import LRSchedulerConfig, OptimizerSetup
from jaxlightning.optim._groups import as_selection
from jaxlightning.optim._handle import OptimizerHandle
from jaxlightning.optim._optax_handle import OptaxOptimizer, forget_handles, handle_for, is_transformation
from jaxlightning.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau, ScheduleLR
from jaxlightning.utilities.exceptions import MisconfigurationException
from jaxlightning.utilities.rank_zero import rank_zero_warn

_OPTIMIZER_KEYS = ("optimizer", "lr_scheduler", "monitor")
# What an optax transformation cannot say about itself.
_OPTAX_KEYS = ("lr", "params", "name")
_SCHEDULER_KEYS = tuple(field.name for field in fields(LRSchedulerConfig))
_IGNORED_IN_MANUAL = ("reduce_on_plateau", "monitor", "strict")

_FORMS = """`configure_optimizers` may return one of:
 * an optimizer (of `jaxlightning.optim`, or an optax transformation)
 * [optimizer, ...]
 * ([optimizer, ...], [scheduler, ...])
 * {"optimizer": optimizer, "lr_scheduler": scheduler or its dictionary, "monitor": metric}
 * [such a dictionary, ...]
 * None"""


def parse_optimizers(module: Any, returned: Any) -> OptimizerSetup:
    """Reads and checks the return value of `configure_optimizers`.

    Args:
        module: The module; asked for `automatic_optimization`, `training_step` and whether `lr_scheduler_step` is
            overridden.
        returned: What its `configure_optimizers` returned.

    Returns:
        The optimizers and the schedulers.

    Raises:
        MisconfigurationException: If the value has an unknown form, or a scheduler's settings do not fit.
        RuntimeError: If there are several optimizers in automatic optimization.
        TypeError: If a scheduler cannot save its state.
    """
    try:
        return _parse(module, returned)
    finally:
        forget_handles()


def _parse(module: Any, returned: Any) -> OptimizerSetup:
    automatic = bool(getattr(module, "automatic_optimization", True))
    if returned is None:
        rank_zero_warn(
            f"`{type(module).__name__}.configure_optimizers` returned `None`, so this fit will run with no optimizer: "
            "steps are counted, parameters stay as they are."
        )
        _check_count(module, automatic, 0)
        return OptimizerSetup()
    optimizers, schedulers, monitor = _read_forms(returned)
    read = _read_automatic if automatic else _read_manual
    configs = [read(_wrap_schedule(item, optimizers), monitor) for item in schedulers]
    _check_count(module, automatic, len(optimizers))
    for config in configs:
        _attach(config.scheduler, optimizers)
    for config in configs:
        _check_scheduler(module, automatic, config.scheduler)
    return OptimizerSetup(optimizers=optimizers, schedulers=configs)


def _is_optimizer(obj: Any) -> bool:
    return isinstance(obj, OptimizerHandle) or is_transformation(obj)


def _as_handle(obj: Any) -> OptimizerHandle:
    return obj if isinstance(obj, OptimizerHandle) else handle_for(obj)


def _read_forms(returned: Any) -> tuple[list[OptimizerHandle], list[Any], str | None]:
    """Takes the return value apart: optimizers, schedulers as given, and the `monitor` of a single dictionary."""
    if _is_optimizer(returned):
        return [_as_handle(returned)], [], None
    if isinstance(returned, Mapping):
        optimizer, schedulers = _read_dictionary(returned)
        return [optimizer], schedulers, returned.get("monitor")
    if isinstance(returned, (list, tuple)):
        pair = len(returned) == 2 and isinstance(returned[0], list) and all(map(_is_optimizer, returned[0]))
        if pair:
            second = returned[1]
            return [_as_handle(o) for o in returned[0]], second if isinstance(second, list) else [second], None
        if returned and all(isinstance(item, Mapping) for item in returned):
            parts = [_read_dictionary(item) for item in returned]
            # Each scheduler of this form brings its own `monitor`; one beside the optimizer is not looked at.
            every = [dict(s) if isinstance(s, Mapping) else {"scheduler": s} for _, found in parts for s in found]
            return [optimizer for optimizer, _ in parts], every, None
        if all(map(_is_optimizer, returned)):
            return [_as_handle(item) for item in returned], [], None
    raise MisconfigurationException(
        f"Unknown configuration for model optimizers: `configure_optimizers` returned {_describe(returned)}.\n{_FORMS}"
        f"{_torch_hint(returned)}"
    )


def _read_dictionary(conf: Mapping[str, Any]) -> tuple[OptimizerHandle, list[Any]]:
    if "optimizer" not in conf:
        raise MisconfigurationException(
            f"The optimizer dictionary must have the key 'optimizer'; it has {sorted(map(str, conf))}.\n{_FORMS}"
        )
    optimizer = conf["optimizer"]
    if not _is_optimizer(optimizer):
        raise MisconfigurationException(
            f"The key 'optimizer' must hold an optimizer, but holds {_describe(optimizer)}.\n{_FORMS}"
            f"{_torch_hint(optimizer)}"
        )
    handle = _as_handle(optimizer)
    about_optax = {key: conf[key] for key in _OPTAX_KEYS if key in conf and isinstance(handle, OptaxOptimizer)}
    extra = {key for key in conf if key not in _OPTIMIZER_KEYS and key not in about_optax}
    if extra:
        rank_zero_warn(f"Found unsupported keys in the optimizer configuration: {extra}", category=RuntimeWarning)
    if isinstance(handle, OptaxOptimizer):
        if about_optax.get("lr") is not None:
            handle.lr_source = about_optax["lr"]
        if about_optax.get("params") is not None:
            handle.owns = as_selection(about_optax["params"])
        if about_optax.get("name") is not None:
            handle.name = str(about_optax["name"])
    return handle, [conf["lr_scheduler"]] if "lr_scheduler" in conf else []


def _wrap_schedule(item: Any, optimizers: Sequence[OptimizerHandle]) -> Any:
    """Makes a scheduler of an optax schedule (a plain function of the step count)."""
    conf = dict(item) if isinstance(item, Mapping) else {"scheduler": item}
    fn = conf.get("scheduler")
    if inspect.isfunction(fn) or isinstance(fn, functools.partial):
        if len(optimizers) != 1:
            raise MisconfigurationException(
                f"A schedule function does not say which of the {len(optimizers)} optimizers it belongs to; use "
                "`jaxlightning.optim.lr_scheduler.ScheduleLR(optimizer, schedule)`."
            )
        conf["scheduler"] = ScheduleLR(optimizers[0], fn)
        return conf if isinstance(item, Mapping) else conf["scheduler"]
    return conf if isinstance(item, Mapping) else item


def _read_automatic(item: Any, monitor: str | None) -> LRSchedulerConfig:
    if not isinstance(item, Mapping):
        if isinstance(item, ReduceLROnPlateau):
            if monitor is None:
                raise MisconfigurationException(_no_monitor('"lr_scheduler": scheduler, "monitor": "val_loss"'))
            return LRSchedulerConfig(item, reduce_on_plateau=True, monitor=monitor)
        return LRSchedulerConfig(item)
    extra = {key for key in item if key not in _SCHEDULER_KEYS}
    if extra:
        rank_zero_warn(
            f"Found unsupported keys in the lr scheduler dict: {extra}. Remove them from what `configure_optimizers` "
            f"returns; the known keys are {list(_SCHEDULER_KEYS)}.",
            category=RuntimeWarning,
        )
    conf = {key: value for key, value in item.items() if key in _SCHEDULER_KEYS}
    if "scheduler" not in conf:
        raise MisconfigurationException(
            f"The lr scheduler dict must have the key 'scheduler' with the scheduler; it has {sorted(map(str, item))}."
        )
    scheduler, interval = conf["scheduler"], conf.setdefault("interval", "epoch")
    if interval not in ("step", "epoch"):
        raise MisconfigurationException(
            f"The 'interval' key in the lr scheduler dict must be 'step' or 'epoch', but is {interval!r}."
        )
    frequency = conf.setdefault("frequency", 1)
    if isinstance(frequency, bool) or not isinstance(frequency, int) or frequency < 1:
        raise MisconfigurationException(
            f"The 'frequency' key in the lr scheduler dict must be a positive integer, but is {frequency!r}."
        )
    conf.setdefault("reduce_on_plateau", isinstance(scheduler, ReduceLROnPlateau))
    if conf["reduce_on_plateau"] and conf.get("monitor") is None:
        raise MisconfigurationException(_no_monitor('"lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}'))
    if isinstance(scheduler, OneCycleLR) and interval == "epoch":
        rank_zero_warn(
            "A `OneCycleLR` scheduler is using 'interval': 'epoch', so it takes one of its steps per epoch. Did you "
            "mean 'interval': 'step'?",
            category=RuntimeWarning,
        )
    return LRSchedulerConfig(**conf)


def _no_monitor(example: str) -> str:
    return (
        "`configure_optimizers` must include a monitor when a `ReduceLROnPlateau` scheduler is used, for example "
        f'{{"optimizer": optimizer, {example}}}.'
    )


def _read_manual(item: Any, monitor: str | None) -> LRSchedulerConfig:
    if not isinstance(item, Mapping):
        return LRSchedulerConfig(item)
    ignored = [key for key in item if key in _IGNORED_IN_MANUAL]
    if ignored:
        rank_zero_warn(
            f"The lr scheduler dict contains the key(s) {ignored}, but the keys will be ignored: in manual "
            "optimization you call `lr_scheduler.step()` yourself.",
            category=RuntimeWarning,
        )
    return LRSchedulerConfig(**{key: value for key, value in item.items() if key not in _IGNORED_IN_MANUAL})


def _check_count(module: Any, automatic: bool, count: int) -> None:
    step = getattr(module, "training_step", None)
    try:
        asks_index = step is not None and "optimizer_idx" in inspect.signature(step).parameters
    except (TypeError, ValueError):
        asks_index = False
    way_out = (
        "set `self.automatic_optimization = False` and take your optimizers in `training_step` with "
        "`opt1, opt2, ... = self.optimizers()`."
    )
    if asks_index:
        raise RuntimeError(
            "Training with multiple optimizers is only supported with manual optimization. Remove the `optimizer_idx` "
            f"argument from `training_step`, {way_out}"
        )
    if automatic and count > 1:
        raise RuntimeError(
            "Training with multiple optimizers is only supported with manual optimization, but "
            f"`configure_optimizers` returned {count}: {way_out}"
        )


def _attach(scheduler: Any, optimizers: Sequence[OptimizerHandle]) -> None:
    """Checks that the scheduler's optimizer was returned."""
    if not hasattr(scheduler, "optimizer"):
        if isinstance(scheduler, (LRScheduler, type)) or not hasattr(scheduler, "step"):
            raise MisconfigurationException(
                f"{_describe(scheduler)} is no lr scheduler: use one of `jaxlightning.optim.lr_scheduler` or an optax "
                f"schedule.{_torch_hint(scheduler)}"
            )
        return
    own = scheduler.optimizer
    if any(own is handle or own is handle.optimizer for handle in optimizers):
        return
    raise MisconfigurationException(
        f"Some schedulers are attached with an optimizer that wasn't returned from `configure_optimizers`: "
        f"{type(scheduler).__name__} belongs to {_describe(own)}.{_torch_hint(scheduler)}"
    )


def _check_scheduler(module: Any, automatic: bool, scheduler: Any) -> None:
    name = type(scheduler).__name__
    if not all(callable(getattr(scheduler, method, None)) for method in ("state_dict", "load_state_dict")):
        raise TypeError(
            f"The provided lr scheduler `{name}` is invalid: it should have `state_dict` and `load_state_dict` "
            "methods, so that it can be saved in checkpoints."
        )
    if automatic and not isinstance(scheduler, LRScheduler) and not _overrides(module, "lr_scheduler_step"):
        raise MisconfigurationException(
            f"The provided lr scheduler `{name}` doesn't follow the LRScheduler API of `jaxlightning.optim`. Override "
            f"the hook `lr_scheduler_step` to say how your scheduler is stepped.{_torch_hint(scheduler)}"
        )


def _overrides(module: Any, name: str) -> bool:
    """Whether a class that is not part of this package defines the method."""
    if name in vars(module):
        return True
    for base in type(module).__mro__:
        if name in vars(base):
            return not base.__module__.startswith("jaxlightning.")
    return False


def _describe(obj: Any) -> str:
    if isinstance(obj, (list, tuple)):
        return f"{type(obj).__name__} of [{', '.join(_describe(item) for item in obj)}]"
    if isinstance(obj, type):
        return f"the class {obj.__name__} itself"
    module = type(obj).__module__
    return type(obj).__name__ if module == "builtins" else f"{module}.{type(obj).__name__}"


def _torch_hint(obj: Any) -> str:
    """A hint if a torch object was given where ours is needed."""
    items = [obj]
    if isinstance(obj, (list, tuple)):
        items.extend(x for item in obj for x in (item if isinstance(item, (list, tuple)) else [item]))
    if any(type(item).__module__.startswith("torch.") for item in items):
        return "\nThis is torch's own; use the class of the same name in `jaxlightning.optim`."
    return ""
