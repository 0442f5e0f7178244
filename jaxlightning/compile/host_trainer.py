"""What a compiled step may read from the trainer, and the one thing that it may tell it.

Inside a traced step `self.trainer` is a `TrainerView`. A number is read anew before each step; a flag or a text is a
guard; a metric is an input of the step (reading it fetches it from the device, so such a step waits for the one
before); the datamodule's attributes are constants that are watched. Methods of the trainer belong into hooks and raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxlightning.compile.host_proxy import HostNumber
from jaxlightning.compile.log_plan import LogMeta
from jaxlightning.compile.trace import current_trace
from jaxlightning.compile.user_code import user_line

if TYPE_CHECKING:
    from jaxlightning.compile.effects import ReadRecorder
    from jaxlightning.compile.host_attributes import HostAttributes

__all__ = ["MetricsView", "ObjectView", "TrainerView", "logged_so_far"]

_MISSING = object()
_METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
_PLAIN = frozenset(
    {
        "training", "validating", "testing", "predicting", "sanity_checking", "evaluating", "state", "strategy",
        "optimizers", "lr_scheduler_configs", "world_size", "num_devices", "num_nodes", "global_rank", "local_rank",
        "node_rank", "is_global_zero",
    }
)  # fmt: skip
"""What stays the same while a compiled step lives, or is part of what it is compiled for."""


def _now(read: Callable[[], Any]) -> Any:
    """Reads something of the host while a step is traced; what it computes there is no part of the step."""
    with jax.ensure_compile_time_eval():
        return read()


class TrainerView:
    """The trainer as a traced step sees it.

    Args:
        trainer: The trainer.
        module: The module whose step is traced.
        numbers: The numbers of this run of the step.
        recorder: Remembers constants.
    """

    def __init__(self, trainer: Any, module: Any, numbers: HostAttributes, recorder: ReadRecorder) -> None:
        object.__setattr__(self, "_view", (trainer, module, numbers, recorder))

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # so that `isinstance(self.trainer, Trainer)` says yes
        return type(self._view[0])

    def __getattr__(self, name: str) -> Any:
        trainer, module, numbers, recorder = object.__getattribute__(self, "_view")
        if name in ("current_epoch", "global_step", "logger", "loggers"):
            return getattr(module, name)
        if name in ("lightning_module", "model"):
            return module
        if name.startswith("_") or name in _PLAIN:
            return getattr(trainer, name)
        key = f"self.trainer.{name}"
        if name in _METRICS:
            return MetricsView(key, name, lambda: getattr(trainer._logger_connector, name), numbers)
        if name in ("is_last_batch", "should_stop"):
            numbers.inputs.looks_back = True
        value = numbers.written_value(key, _MISSING)
        if value is not _MISSING:
            return value
        value = getattr(trainer, name)
        if name == "datamodule":
            return value if value is None else ObjectView("self.trainer.datamodule", value, numbers, recorder)
        if isinstance(value, bool) and name != "is_last_batch":
            return numbers.flag(key, value, lambda: getattr(trainer, name))
        if isinstance(value, bool | int | float):
            return numbers.source(key, value, lambda: getattr(trainer, name))
        if name == "print":
            return module.print
        if callable(value) and getattr(value, "__self__", None) is trainer:
            return _forbidden(key)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        trainer, _, numbers, _ = object.__getattribute__(self, "_view")
        key = f"self.trainer.{name}"
        if name != "should_stop":
            raise RuntimeError(
                f"The step assigns `{key}` at {user_line()}. The step is compiled: the assignment would happen "
                "once, while it is traced. Do it in a hook such as `on_train_batch_end`."
            )
        if isinstance(value, jax.Array | np.ndarray) and not isinstance(value, HostNumber):
            raise RuntimeError(
                f"The step assigns a traced value to `{key}` at {user_line()}: whether to stop would be known only on "
                "the device. Return the value from the step (or log it) and set `self.trainer.should_stop = True` in "
                "`on_train_batch_end`, or use EarlyStopping. Decisions by batch_idx, self.global_step and other "
                "numbers of the host are possible here."
            )
        numbers.assign(key, value, lambda stop: setattr(trainer, name, bool(stop)))


class NoTrainer:
    """What `self.trainer` is while `module.init(batch)` creates variables before there is a trainer.

    The step is run for the sake of its networks only; what it reads here decides nothing that stays.
    """

    current_epoch = 0
    global_step = 0
    num_training_batches = 1
    is_last_batch = False
    should_stop = False

    def __init__(self, owner: str) -> None:
        self._owner = owner

    @property
    def callback_metrics(self) -> dict[str, Any]:
        """What the step has logged so far."""
        return logged_so_far("callback_metrics")

    @property
    def logged_metrics(self) -> dict[str, Any]:
        """What the step has logged so far."""
        return logged_so_far("logged_metrics")

    @property
    def progress_bar_metrics(self) -> dict[str, Any]:
        """What the step has logged so far."""
        return logged_so_far("progress_bar_metrics")

    def __getattr__(self, name: str) -> Any:
        if name in ("fit", "validate", "test", "predict", "save_checkpoint"):
            return _forbidden(f"self.trainer.{name}")
        raise RuntimeError(
            f"{self._owner} is not attached to a `Trainer`, and its step reads `self.trainer.{name}`: `init(batch)` "
            "cannot run it. `Trainer.fit` creates the variables by itself."
        )


def _forbidden(key: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"The step calls `{key}(...)` at {user_line()}. The step is compiled: the call would happen once, while it "
            "is traced. Call it in a hook such as `on_train_batch_end`."
        )

    return call


class MetricsView(Mapping[str, Any]):
    """A dictionary of metrics as a traced step sees it: its keys are guards, its values inputs.

    What the step itself has logged so far is in it too, with the value of this step.

    Args:
        key: How the user reaches it, for example `"self.trainer.callback_metrics"`.
        kind: Which of the trainer's dictionaries.
        read: Gives the dictionary.
        numbers: The numbers of this run of the step.
    """

    def __init__(self, key: str, kind: str, read: Callable[[], Mapping[str, Any]], numbers: HostAttributes) -> None:
        self._key = key
        self._kind = kind
        self._read = read
        self._numbers = numbers

    def __contains__(self, name: object) -> bool:
        if name in logged_so_far(self._kind):
            return True
        self._numbers.inputs.looks_back = True
        read = self._read
        return bool(self._numbers.flag(f"({name!r} in {self._key})", name in _now(read), lambda: name in read()))

    def __getitem__(self, name: str) -> Any:
        logged = logged_so_far(self._kind)
        if name in logged:
            return logged[name]
        if name not in self:
            raise KeyError(name)
        read, key = self._read, f"{self._key}[{name!r}]"
        value = _now(read)[name]
        number = _number(value)
        if number is None:
            raise TypeError(
                f"`{key}` is no single number ({type(value).__name__}), so a compiled step cannot read it. Read it in "
                "a hook and keep what the step needs as an attribute."
            )
        return self._numbers.source(key, number, lambda: _number(read()[name]))

    def __iter__(self) -> Iterator[str]:
        self._numbers.inputs.looks_back = True
        read = self._read
        key = f"tuple({self._key})"
        known = self._numbers.flag(key, tuple(_now(read)), lambda: tuple(read()))
        return iter(dict.fromkeys([*known, *logged_so_far(self._kind)]))

    def __len__(self) -> int:
        return len(list(iter(self)))


def logged_so_far(kind: str) -> dict[str, Any]:
    """What the running step has logged, by the keys under which a dictionary of the trainer has it.

    Args:
        kind: Which dictionary: `"callback_metrics"`, `"logged_metrics"` or `"progress_bar_metrics"`.
    """
    trace = current_trace()
    if trace is None:
        return {}
    found = dict(trace.unseen_logs)
    for entry in trace.logs:
        meta = entry.meta
        if meta.on_step and meta.reduce_fx != "state" and meta.dataloader_idx is None:
            found.update(dict.fromkeys(_keys(meta, kind), jax.lax.stop_gradient(entry.value)))
    return found


def _keys(meta: LogMeta, kind: str) -> list[str]:
    """Under which keys a dictionary of the trainer has the value of a step."""
    forked = meta.on_step and meta.on_epoch
    step = f"{meta.name}_step" if forked else meta.name
    if kind == "callback_metrics":
        return [meta.name, step]
    return [step] if (meta.logger if kind == "logged_metrics" else meta.prog_bar) else []


def _number(value: Any) -> Any:
    if isinstance(value, bool | int | float | np.generic):
        return value
    if isinstance(value, np.ndarray | jax.Array) and value.ndim == 0:
        return np.asarray(value)[()]
    return None


class ObjectView:
    """An object beside the module (the datamodule) as a traced step sees it: its attributes are watched constants.

    Args:
        key: How the user reaches it.
        target: The object.
        numbers: The numbers of this run of the step.
        recorder: Remembers constants.
    """

    def __init__(self, key: str, target: Any, numbers: HostAttributes, recorder: ReadRecorder) -> None:
        object.__setattr__(self, "_view", (key, target, numbers, recorder))

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._view[1])

    def __getattr__(self, name: str) -> Any:
        key, target, numbers, recorder = object.__getattribute__(self, "_view")
        value = getattr(target, name)
        if name.startswith("__") or (callable(value) and getattr(value, "__self__", None) is target):
            return value
        return numbers.read_beside(f"{key}.{name}", recorder, target, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        key, *_ = object.__getattribute__(self, "_view")
        raise RuntimeError(
            f"The step assigns `{key}.{name}` at {user_line()}. The step is compiled: the assignment would happen "
            "once, while it is traced. Do it in a hook such as `on_train_batch_end`, or keep the number on the module."
        )
