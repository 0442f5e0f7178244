"""Calling the users' hooks: who overrides which, in which order, and under which name `self.log` sees them.

For every event the callbacks come first, in the order of the list, then the module. Which objects override a hook is
found once per run, so an event that nobody listens to costs a dictionary lookup outside the batch loop and nothing
inside it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from jaxlightning.callbacks._registry import is_monitoring_callback, runs_user_code

if TYPE_CHECKING:
    from jaxlightning.trainer import Trainer

Hook = Callable[..., Any]

_BASE_NAMES = {
    "Callback",
    "LightningModule",
    "JaxLightningModule",
    "LightningDataModule",
    "DataHooks",
    "CheckpointHooks",
    "ModelHooks",
}
_BASE_PACKAGES = ("jaxlightning.", "lightning.", "pytorch_lightning.")


def base_classes(instance: object) -> list[type]:
    """Return the classes of ours and of Lightning's in the ancestry of `instance` that only declare hooks."""
    return [
        cls
        for cls in type(instance).__mro__
        if cls.__name__ in _BASE_NAMES and (cls.__module__ + ".").startswith(_BASE_PACKAGES)
    ]


def _plain(function: Any) -> Any:
    """Return the function behind bound methods, wrappers and partial objects, to compare identities."""
    while True:
        if isinstance(function, partial):
            function = function.func
        elif inspect.ismethod(function):
            function = function.__func__
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        else:
            return function


def is_overridden(name: str, instance: object | None, base: type | None = None) -> bool:
    """Tell whether `instance` brings its own `name`.

    Args:
        name: The hook.
        instance: A module, datamodule or callback; None overrides nothing.
        base: The class that declares the hook; found in the ancestry of `instance` by default, so that Lightning's
            own callbacks and datamodules are judged against Lightning's classes without importing them.

    Returns:
        False for a hook that is missing, set to None, or still the one of the base class.
    """
    if instance is None:
        return False
    own = getattr(instance, name, None)
    if not callable(own):
        return False
    bases = [base] if base is not None else base_classes(instance)
    declared = [_plain(vars(cls)[name]) for root in bases for cls in root.__mro__ if name in vars(cls)]
    return not any(_plain(own) is function for function in declared)


def parameters_of(function: Hook) -> dict[str, inspect.Parameter]:
    """Return the parameters of a bound hook by name; empty when Python cannot tell."""
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return {}


def accepts(function: Hook, name: str) -> bool:
    """Tell whether `function` can take an argument called `name`, by name or through `*args` or `**kwargs`."""
    params = parameters_of(function)
    kinds = {param.kind for param in params.values()}
    return name in params or inspect.Parameter.VAR_POSITIONAL in kinds or inspect.Parameter.VAR_KEYWORD in kinds


class HookTable:
    """Who overrides what, for one run.

    Args:
        trainer: The trainer whose module and callbacks are asked.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._token: tuple[int, int, int] | None = None
        self._callbacks: dict[tuple[str, bool | None], list[Hook]] = {}
        self._module: dict[str, Hook | None] = {}

    def reset(self) -> None:
        """Forget everything; the next question looks again."""
        self._token = None

    def _refresh(self) -> None:
        callbacks = self.trainer.callbacks
        token = (id(callbacks), len(callbacks), id(self.trainer.lightning_module))
        if token != self._token:
            self._token = token
            self._callbacks.clear()
            self._module.clear()

    def callbacks(self, name: str, monitoring: bool | None = None) -> list[Hook]:
        """Return the bound `name` hooks of the callbacks that override it.

        Args:
            name: The hook.
            monitoring: True for early stopping and checkpoint callbacks only, False for the others only.
        """
        self._refresh()
        key = (name, monitoring)
        found = self._callbacks.get(key)
        if found is None:
            found = []
            profiler = self.trainer._active_profiler
            for callback in self.trainer.callbacks:
                if monitoring is not None and is_monitoring_callback(callback) is not monitoring:
                    continue
                hook = getattr(callback, name, None)
                if callable(hook) and (profiler is not None or is_overridden(name, callback)):
                    if profiler is not None:
                        hook = _profiled(profiler, f"[Callback]{callback.state_key}.{name}", hook)
                    found.append(hook)
            self._callbacks[key] = found
        return found

    def module(self, name: str) -> Hook | None:
        """Return the module's own `name`, or None when it does not override it."""
        self._refresh()
        if name not in self._module:
            module = self.trainer.lightning_module
            hook: Hook | None = getattr(module, name) if is_overridden(name, module) else None
            profiler = self.trainer._active_profiler
            if hook is not None and profiler is not None:
                hook = _profiled(profiler, f"[LightningModule]{type(module).__name__}.{name}", hook)
            self._module[name] = hook
        return self._module[name]

    def any(self, *names: str) -> bool:
        """Tell whether the module or a callback overrides one of `names`."""
        module, callbacks = self.trainer.lightning_module, self.trainer.callbacks
        return any(is_overridden(name, each) for name in names for each in (module, *callbacks))

    def wants_outputs(self, name: str) -> bool:
        """Tell whether somebody other than our own callbacks receives the outputs that hook `name` is given."""
        if is_overridden(name, self.trainer.lightning_module):
            return True
        return any(runs_user_code(callback, name) for callback in self.trainer.callbacks)


def _profiled(profiler: Any, action: str, hook: Hook) -> Hook:
    def run(*args: Any, **kwargs: Any) -> Any:
        with profiler.profile(action):
            return hook(*args, **kwargs)

    return run


def call_callback_hooks(
    trainer: Trainer, name: str, *args: Any, monitoring_callbacks: bool | None = None, **kwargs: Any
) -> None:
    """Call hook `name` of every callback that overrides it, as `hook(trainer, module, *args, **kwargs)`.

    Args:
        trainer: The trainer.
        name: The hook.
        *args: Handed on.
        monitoring_callbacks: True or False to call only those that do or do not monitor a metric.
        **kwargs: Handed on.
    """
    hooks = trainer._hooks.callbacks(name, monitoring_callbacks)
    if not hooks:
        return
    module = trainer.lightning_module
    previous = _enter(module, name)
    for hook in hooks:
        hook(trainer, module, *args, **kwargs)
    _leave(module, previous)
    if trainer._engine is not None:
        trainer._engine.host_code_ran()


def call_lightning_module_hook(trainer: Trainer, name: str, *args: Any, **kwargs: Any) -> Any:
    """Call the module's hook `name`, overridden or not, and return what it returns (None for a hook set to None)."""
    module = trainer.lightning_module
    if module is None:
        raise TypeError(f"There is no module to call `{name}` on: no model is attached to the Trainer.")
    hook = getattr(module, name, None)
    if not callable(hook):
        return None
    profiler = trainer._active_profiler
    previous = _enter(module, name)
    if profiler is None:
        output = hook(*args, **kwargs)
    else:
        with profiler.profile(f"[LightningModule]{type(module).__name__}.{name}"):
            output = hook(*args, **kwargs)
    _leave(module, previous)
    if trainer._engine is not None:
        trainer._engine.host_code_ran()
    return output


def call_lightning_datamodule_hook(trainer: Trainer, name: str, *args: Any, **kwargs: Any) -> Any:
    """Call the datamodule's hook `name` and return what it returns."""
    datamodule = trainer.datamodule
    if datamodule is None:
        raise TypeError(f"There is no datamodule to call `{name}` on.")
    hook = getattr(datamodule, name, None)
    if not callable(hook):
        return None
    profiler = trainer._active_profiler
    if profiler is None:
        return hook(*args, **kwargs)
    with profiler.profile(f"[LightningDataModule]{type(datamodule).__name__}.{name}"):
        return hook(*args, **kwargs)


def _enter(module: Any, name: str) -> str | None:
    """Tell `self.log` which hook runs; written past `__setattr__`, which watches for changes by the user."""
    if module is None:
        return None
    space = vars(module)
    previous: str | None = space.get("_current_fx_name")
    space["_current_fx_name"] = name
    return previous


def _leave(module: Any, previous: str | None) -> None:
    # Not in a `finally`: after an exception the name tells the connector and the reader where it happened.
    if module is not None:
        vars(module)["_current_fx_name"] = previous
