"""A callback made of functions, without a class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxlightning.callbacks.callback import Callback

_NOT_HOOKS = frozenset({"state_dict", "load_state_dict"})
_HOOKS = tuple(
    name
    for name, member in vars(Callback).items()
    if callable(member) and not name.startswith("_") and name not in _NOT_HOOKS
)


class LambdaCallback(Callback):
    """A callback whose hooks are given as keyword arguments.

    Args:
        **hooks: For each hook its function, which gets `(trainer, pl_module, ...)` as the hook of a class would.

    Raises:
        TypeError: A name is not one of `Callback`'s hooks.

    Example:
        ```python
        Trainer(callbacks=[LambdaCallback(on_train_start=lambda trainer, module: print("training begins"))])
        ```
    """

    def __init__(self, **hooks: Callable[..., Any] | None) -> None:
        super().__init__()
        unknown = [name for name in hooks if name not in _HOOKS]
        if unknown:
            raise TypeError(
                f"LambdaCallback got unexpected hook names: {', '.join(map(repr, unknown))}. "
                f"The hooks are: {', '.join(_HOOKS)}."
            )
        for name, function in hooks.items():
            if function is not None:
                setattr(self, name, function)
