"""The Trainer's callbacks: defaults, order, and those that a module brings along."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from jaxlightning.callbacks import ModelSummary, ProgressBar, Timer, TQDMProgressBar
from jaxlightning.callbacks._foreign import check_callbacks
from jaxlightning.callbacks._registry import (
    is_checkpoint_callback,
    load_external_callbacks,
    merge_model_callbacks,
    reorder_callbacks,
    validate_callbacks,
)
from jaxlightning.loops.call import call_lightning_module_hook
from jaxlightning.utilities.exceptions import MisconfigurationException
from jaxlightning.utilities.rank_zero import rank_zero_info

if TYPE_CHECKING:
    from jaxlightning.trainer import Trainer


def make_callbacks(
    given: Any,
    *,
    enable_checkpointing: bool,
    enable_progress_bar: bool,
    enable_model_summary: bool,
    max_time: str | timedelta | dict[str, int] | None,
) -> list[Any]:
    """Complete the list of callbacks with the defaults, and order it.

    Args:
        given: A callback, a list of callbacks, or None.
        enable_checkpointing: Whether to add a ModelCheckpoint when there is no checkpoint callback.
        enable_progress_bar: Whether to add a progress bar when there is none.
        enable_model_summary: Whether to add a summary when there is none.
        max_time: Add a Timer with this duration when there is none.

    Returns:
        A new list.

    Raises:
        MisconfigurationException: When a switched-off kind of callback was passed, or two progress bars.
        RuntimeError: When two callbacks that keep state cannot be told apart.
        TypeError: For something that is no callback of ours.
    """
    callbacks = [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]
    check_callbacks(callbacks)
    if any(map(is_checkpoint_callback, callbacks)):
        if not enable_checkpointing:
            raise MisconfigurationException(
                "Trainer was configured with `enable_checkpointing=False` but found `ModelCheckpoint` in callbacks"
                " list."
            )
    elif enable_checkpointing:
        from jaxlightning.callbacks import ModelCheckpoint

        callbacks.append(ModelCheckpoint())
    if max_time is not None:
        if any(isinstance(each, Timer) for each in callbacks):
            rank_zero_info("Ignoring `Trainer(max_time=...)`, callbacks list already contains a Timer.")
        else:
            callbacks.append(Timer(duration=max_time, interval="step"))
    _add_progress_bar(callbacks, enable_progress_bar)
    if enable_model_summary:
        found = [type(each) for each in callbacks if isinstance(each, ModelSummary)]
        if found:
            rank_zero_info(
                f"Trainer already configured with model summary callbacks: {found}. Skipping setting a default"
                " `ModelSummary` callback."
            )
        else:
            callbacks.append(ModelSummary())
    callbacks.extend(load_external_callbacks())
    validate_callbacks(callbacks)
    return reorder_callbacks(callbacks)


def _add_progress_bar(callbacks: list[Any], enabled: bool) -> None:
    bars = [each for each in callbacks if isinstance(each, ProgressBar)]
    if len(bars) > 1:
        raise MisconfigurationException(
            "You added multiple progress bar callbacks to the Trainer, but currently only one progress bar is"
            " supported."
        )
    if bars and not enabled:
        raise MisconfigurationException(
            f"Trainer was configured with `enable_progress_bar=False` but found `{type(bars[0]).__name__}` in callbacks"
            " list."
        )
    if enabled and not bars:
        callbacks.append(TQDMProgressBar())


def attach_model_callbacks(trainer: Trainer) -> None:
    """Merge what the module's `configure_callbacks` returns into the list, and give every callback `log`.

    Args:
        trainer: The trainer, with its module attached.
    """
    returned = call_lightning_module_hook(trainer, "configure_callbacks")
    if returned:
        trainer.callbacks = merge_model_callbacks(trainer.callbacks, returned)
    module = trainer.lightning_module
    for callback in trainer.callbacks:
        callback.log = module.log
        callback.log_dict = module.log_dict


def default_root(path: str | os.PathLike[str] | None) -> str:
    """Return the directory for everything that has no place of its own; `~` is expanded, URLs are kept."""
    text = os.fspath(path) if path else os.getcwd()
    text = text.removeprefix("file://")
    return text if "://" in text else os.path.normpath(os.path.expanduser(text))
