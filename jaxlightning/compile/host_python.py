"""Functions of Python that a traced step calls on numbers of the host, or that would run once and never again.

While a step is traced the functions of `math` accept numbers of the host, so that `math.exp(-self.global_step / 1000)`
compiles once. `print` of a traced value and a look at the clock get a hint, once. Outside a trace, and for everybody
else's numbers, all of them are what they always are.
"""

from __future__ import annotations

import builtins
import functools
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import jax

from jaxlightning.compile.host_proxy import HostNumber
from jaxlightning.compile.host_values import constant_text
from jaxlightning.compile.user_code import is_user_frame, user_line
from jaxlightning.utilities.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from jaxlightning.compile.trace import Trace

__all__ = ["python_in_a_trace"]

_MATH = (
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "cbrt", "pow", "sin", "cos", "tan", "asin", "acos",
    "atan", "atan2", "sinh", "cosh", "tanh", "degrees", "radians", "fabs", "floor", "ceil", "trunc", "fmod", "copysign",
    "gcd", "factorial", "comb", "isclose", "isfinite", "isnan", "isinf", "hypot", "erf",
)  # fmt: skip
_CLOCKS = ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time")

_lock = threading.Lock()
_users = 0
_originals: list[tuple[Any, str, Any]] = []
_running = threading.local()


@contextmanager
def python_in_a_trace(trace: Trace, hints: set[str], *, mute: bool) -> Iterator[None]:
    """Lets the functions know that a step is traced in this thread.

    Args:
        trace: The run of the step.
        hints: What was said before; grows.
        mute: Whether `print` is silent: the step was traced before, or is run for something else than its effects.
    """
    before = getattr(_running, "state", None)
    _install()
    _running.state = (trace, hints, mute)
    try:
        yield
    finally:
        _running.state = before
        _uninstall()


def _install() -> None:
    global _users
    with _lock:
        _users += 1
        if _users > 1:
            return
        for name in _MATH:
            if hasattr(math, name):
                _replace(math, name, _of_numbers)
        for name in _CLOCKS:
            _replace(time, name, _clock)
        _replace(builtins, "print", _print)


def _uninstall() -> None:
    global _users
    with _lock:
        _users -= 1
        if _users == 0:
            while _originals:
                owner, name, original = _originals.pop()
                setattr(owner, name, original)


def _replace(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = getattr(owner, name)
    _originals.append((owner, name, original))
    setattr(owner, name, functools.wraps(original)(make(original)))


def _of_numbers(original: Callable[..., Any]) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        number = next((a for a in args if isinstance(a, HostNumber)), None)
        if number is None or kwargs or any(isinstance(a, jax.Array) and not isinstance(a, HostNumber) for a in args):
            return original(*args, **kwargs)
        shown = ", ".join(a._expression.text if isinstance(a, HostNumber) else constant_text(a) for a in args)
        return number._inputs.compute(f"math.{original.__name__}({shown})", original, *args)

    return function


def _clock(original: Callable[..., Any]) -> Callable[..., Any]:
    def function(*args: Any) -> Any:
        state = getattr(_running, "state", None)
        if state is not None and is_user_frame(sys._getframe(1)):
            _hint(
                state,
                f"`time.{original.__name__}()` is called in a compiled step at {user_line()}: the time is read once, "
                "while the step is traced. Measure in hooks (`on_train_batch_start`, `on_train_batch_end`) or with "
                "`Trainer(profiler=...)`.",
                original.__name__,
            )
        return original(*args)

    return function


def _print(original: Callable[..., Any]) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> None:
        state = getattr(_running, "state", None)
        if state is None or not is_user_frame(sys._getframe(1)):
            original(*args, **kwargs)
            return
        if any((isinstance(a, jax.core.Tracer) and not isinstance(a, HostNumber)) or _shows_tracer(a) for a in args):
            _hint(
                state,
                f"`print` shows a traced value at {user_line()}: the step is compiled, so it prints once and shows no "
                "numbers. `self.print(...)` prints at every step with the values; `jax.debug.print` and "
                "`Trainer(jit=False)` do so too.",
                "print",
            )
        if not state[2]:
            original(*args, **kwargs)

    return function


def _shows_tracer(value: Any) -> bool:
    return isinstance(value, str) and ("JitTracer" in value or "Traced<" in value or "JVPTracer" in value)


def _hint(state: tuple[Trace, set[str], bool], text: str, key: str) -> None:
    trace, hints, _ = state
    if not trace.silent and key not in hints:
        hints.add(key)
        rank_zero_warn(text)
