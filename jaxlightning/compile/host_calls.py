"""Loggers and printing inside a step: calls are recorded and made on the host after every step, with concrete values.

`self.logger.experiment.add_scalar("gap", gap, self.global_step)` cannot happen while the step is traced: `gap` has no
value yet. In a traced step `self.logger` is a `HostObject`: it remembers calls, with the arrays among their arguments
as outputs of the step. A call whose result the step uses cannot wait; using it raises.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import numpy as np

from jaxlightning.compile.containers import map_items
from jaxlightning.compile.replay import Replay
from jaxlightning.compile.trace import current_trace
from jaxlightning.compile.user_code import user_line

if TYPE_CHECKING:
    from jaxlightning.compile.trace import Trace

__all__ = ["HostObject", "recorded_print", "traced_logger", "traced_loggers"]

_PLAIN = (str, bytes, int, float, bool, type(None), os.PathLike)
_LAZY = frozenset({"experiment"})
"""Attributes that open files or connections when they are read: looked up when a call is made."""


def traced_logger(trainer: Any) -> Any:
    """What a step gets for `self.logger`."""
    trace = _recording()
    if trace is None:
        return trainer._loggers[0] if trainer._loggers else None
    if trace.ask("self.logger is None", lambda: not trainer._loggers):
        return None
    return HostObject(trace, "self.logger", lambda: trainer._loggers[0])


def traced_loggers(trainer: Any) -> list[Any]:
    """What a step gets for `self.loggers`."""
    trace = _recording()
    if trace is None:
        loggers: list[Any] = trainer._loggers
        return loggers
    count = trace.ask("len(self.loggers)", lambda: len(trainer._loggers))
    return [HostObject(trace, f"self.loggers[{i}]", lambda i=i: trainer._loggers[i]) for i in range(count)]  # type: ignore[misc]


def recorded_print(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Records `self.print(...)`; False where the step runs eagerly and it is to print at once."""
    trace = _recording()
    if trace is None:
        return False
    _record(trace, "self.print", (args, kwargs), lambda call: module.print(*call[0], **call[1]))
    return True


def _recording() -> Trace | None:
    """The running trace, where calls on the host are recorded or dropped."""
    trace = current_trace()
    return trace if trace is not None and (trace.silent or trace.attributes is not None) else None


def _record(trace: Trace, text: str, value: Any, apply: Callable[[Any], Any]) -> None:
    trace.require_own_level(f"`{text}(...)`", "return the values from the function and use them outside")
    if not trace.silent:
        trace.replays.append(Replay(f"`{text}(...)` ({user_line()})", value, apply))


class HostObject:
    """Stands in a step for an object whose methods are called on the host after the step.

    Args:
        trace: Gets the calls.
        text: The object as source.
        find: Gives the object, when a call is made.
    """

    __slots__ = ("_find", "_text", "_trace")

    def __init__(self, trace: Trace, text: str, find: Callable[[], Any]) -> None:
        object.__setattr__(self, "_trace", trace)
        object.__setattr__(self, "_text", text)
        object.__setattr__(self, "_find", find)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        text, find = f"{self._text}.{name}", self._find
        if name not in _LAZY and not any(f".{lazy}" in self._text for lazy in _LAZY):
            value = getattr(find(), name)
            if isinstance(value, _PLAIN):
                return self._trace.ask(text, lambda: getattr(find(), name))
        return HostObject(self._trace, text, lambda: getattr(find(), name))

    def __call__(self, *args: Any, **kwargs: Any) -> _NoResult:
        """Records a call."""
        find = self._find

        def apply(call: Any) -> None:
            positional, named = map_items(call, _concrete)
            find()(*positional, **named)

        _record(self._trace, self._text, (args, kwargs), apply)
        return _NoResult(f"{self._text}(...)")

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise RuntimeError(
            f"A compiled step cannot set `{self._text}.{name}`: it would happen once, while the step is traced. Set it "
            "in a hook such as `on_train_start`."
        )

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class of the real object, so that `isinstance` answers as outside a step."""
        return HostObject if any(f".{lazy}" in self._text for lazy in _LAZY) else type(self._find())

    def __repr__(self) -> str:
        return f"<`{self._text}` in a step; its calls are made after the step>"


def _concrete(leaf: Any) -> Any:
    """An argument as loggers of every kind take it."""
    return (
        np.asarray(leaf)[()]
        if isinstance(leaf, jax.Array) and leaf.ndim == 0
        else (np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf)
    )


class _NoResult:
    """What a recorded call gives; any use of it raises."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        object.__setattr__(self, "_text", text)

    def _refuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise RuntimeError(
            f"The step uses what `{object.__getattribute__(self, '_text')}` returns. In a compiled step this call is "
            "made on the host after the step, with concrete values, so there is no result yet. Make the call in a hook "
            "such as `on_train_batch_end`, with values that the step returns, or run with `Trainer(jit=False)`."
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse()

    __call__ = __getitem__ = __iter__ = __len__ = __bool__ = __int__ = __float__ = __contains__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __enter__ = __exit__ = __setattr__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __array__ = __jax_array__ = _refuse
    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<result of `{object.__getattribute__(self, '_text')}`, which does not exist in a compiled step>"
