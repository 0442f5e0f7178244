"""Tell Lightning's own callbacks apart by name, without importing Lightning.

A plain subclass of `lightning.pytorch.Callback` runs here unchanged: hooks are looked up by name. Lightning's own
callbacks that reach into its Trainer, or into torch, do not; they are refused with the name of ours.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jaxlightning.callbacks.callback import Callback
from jaxlightning.callbacks.prediction_writer import BasePredictionWriter

_ROOTS = ("lightning.pytorch", "pytorch_lightning")

# Lightning's classes that need nothing but public attributes and hook names
_WORK_AS_THEY_ARE = frozenset({"Callback", "LambdaCallback", "BasePredictionWriter", "Checkpoint"})

_OURS = {
    "EarlyStopping": "EarlyStopping",
    "GradientAccumulationScheduler": "GradientAccumulationScheduler",
    "LearningRateMonitor": "LearningRateMonitor",
    "ModelCheckpoint": "ModelCheckpoint",
    "ModelSummary": "ModelSummary",
    "OnExceptionCheckpoint": "OnExceptionCheckpoint",
    "ProgressBar": "ProgressBar",
    "RichModelSummary": "RichModelSummary",
    "RichProgressBar": "RichProgressBar",
    "TQDMProgressBar": "TQDMProgressBar",
    "Timer": "Timer",
}


def foreign_bases(obj: object) -> list[str]:
    """Return the names of Lightning's own callback classes that an object is an instance of.

    Args:
        obj: A callback, or anything else.

    Returns:
        Class names in method resolution order, the base `Callback` included; empty when Lightning plays no part.
    """
    return [
        klass.__name__
        for klass in type(obj).__mro__
        if klass.__module__.startswith(_ROOTS) and f"{klass.__module__}.".split(".callbacks.")[0] in _ROOTS
    ]


def is_foreign_checkpoint(obj: object) -> bool:
    """Whether an object carries Lightning's marker class for callbacks that write checkpoints."""
    return "Checkpoint" in foreign_bases(obj)


def is_prediction_writer(obj: object) -> bool:
    """Whether an object is a `BasePredictionWriter`, ours or Lightning's."""
    return isinstance(obj, BasePredictionWriter) or "BasePredictionWriter" in foreign_bases(obj)


def check_callbacks(callbacks: Iterable[Any]) -> None:
    """Refuse what cannot be a callback of our Trainer.

    Args:
        callbacks: What the user passed as `Trainer(callbacks=...)` or returned from `configure_callbacks`.

    Raises:
        TypeError: For a class in place of an instance, for an object that is no callback, and for one of Lightning's
            own callbacks (or a subclass) that works with Lightning's Trainer only.
    """
    for callback in callbacks:
        if isinstance(callback, type):
            raise TypeError(
                f"A callback must be an instance, but the class `{callback.__qualname__}` was given. "
                f"Write `{callback.__qualname__}(...)`."
            )
        bases = foreign_bases(callback)
        if not bases:
            if not isinstance(callback, Callback):
                raise TypeError(
                    f"Expected callbacks, got {callback!r} of type `{type(callback).__qualname__}`. A callback "
                    "subclasses `jaxlightning.Callback` (or `lightning.pytorch.Callback`)."
                )
            continue
        refused = next((name for name in bases if name not in _WORK_AS_THEY_ARE), None)
        if refused is None:
            continue
        name = type(callback).__qualname__
        what = f"Lightning's `{refused}`" if name == refused else f"`{name}`, a subclass of Lightning's `{refused}`,"
        if refused in _OURS:
            raise TypeError(
                f"{what} works with Lightning's own Trainer only. "
                f"Use `jaxlightning.callbacks.{_OURS[refused]}`, which takes the same arguments."
            )
        raise TypeError(
            f"{what} works with Lightning's own Trainer only, and jaxlightning has no callback of that name. "
            "Remove it, or write the behaviour as a subclass of `jaxlightning.Callback`."
        )
