"""The Trainer's list of callbacks: its order, its checks, and where callbacks come from besides the user's argument."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from importlib.metadata import entry_points
from typing import Any

from jaxlightning.callbacks._foreign import check_callbacks, is_foreign_checkpoint
from jaxlightning.callbacks.callback import Callback
from jaxlightning.callbacks.checkpoint import Checkpoint
from jaxlightning.callbacks.early_stopping import EarlyStopping
from jaxlightning.utilities.rank_zero import rank_zero_info

ENTRY_POINT_GROUP = "jaxlightning.callbacks_factory"
"""Installed packages may name a function in this group; it takes no argument and returns callbacks."""


def is_checkpoint_callback(callback: Any) -> bool:
    """Whether a callback writes checkpoints, and so runs after all others."""
    return isinstance(callback, Checkpoint) or is_foreign_checkpoint(callback)


def is_monitoring_callback(callback: Any) -> bool:
    """Whether a callback judges the epoch's metrics, and so runs at the epoch's end after the module's own hook."""
    return isinstance(callback, EarlyStopping) or is_checkpoint_callback(callback)


def reorder_callbacks(callbacks: Iterable[Any]) -> list[Any]:
    """Put the tuner's callbacks first and those that write checkpoints last; otherwise the given order stays.

    Args:
        callbacks: Callbacks in the order in which they were given.

    Returns:
        A new list.
    """
    groups: tuple[list[Any], list[Any], list[Any]] = ([], [], [])
    for callback in callbacks:
        if getattr(callback, "_runs_first", False):
            groups[0].append(callback)
        elif is_checkpoint_callback(callback):
            groups[2].append(callback)
        else:
            groups[1].append(callback)
    return groups[0] + groups[1] + groups[2]


def keeps_state(callback: Any) -> bool:
    """Whether a callback overrides `state_dict`, so that a checkpoint must tell it from its siblings."""
    method = getattr(callback, "state_dict", None)
    if method is None:
        return False
    # From the base upwards: a user's own class may be called `Callback` too.
    bases = [kind for kind in reversed(type(callback).__mro__) if kind.__name__ == "Callback"]
    plain = bases[0].__dict__.get("state_dict") if bases else None
    return getattr(method, "__func__", method) is not plain


def validate_callbacks(callbacks: Sequence[Any]) -> None:
    """Refuse two stateful callbacks whose state a checkpoint could not keep apart.

    Args:
        callbacks: The Trainer's whole list.

    Raises:
        RuntimeError: Two stateful callbacks share a `state_key`.
    """
    seen: set[str] = set()
    for callback in callbacks:
        if not keeps_state(callback):
            continue
        key = callback.state_key
        if key in seen:
            name = type(callback).__name__
            raise RuntimeError(
                f"Found more than one stateful callback of type `{name}` with the state key {key!r}. A checkpoint "
                "keeps the state of each callback under its `state_key`, so the second would overwrite the first. "
                f"Give the `{name}` callbacks different settings, override `state_key`, or remove one of them."
            )
        seen.add(key)


def merge_model_callbacks(trainer_callbacks: Sequence[Any], returned: Any) -> list[Any]:
    """Add what the module's `configure_callbacks` returned to the Trainer's list.

    A returned callback replaces those of the Trainer whose class is its own class or one that it derives from.

    Args:
        trainer_callbacks: The Trainer's list so far.
        returned: One callback, a sequence of callbacks, or nothing.

    Returns:
        The new list, in the order in which it runs.

    Raises:
        TypeError: Something in `returned` is not a callback.
    """
    if not returned:
        return list(trainer_callbacks)
    added = list(returned) if isinstance(returned, Sequence) else [returned]
    check_callbacks(added)
    replaced = {
        type(old)
        for old in trainer_callbacks
        if type(old) is not Callback and any(issubclass(type(new), type(old)) for new in added)
    }
    if replaced:
        rank_zero_info(
            "The following callbacks returned in `LightningModule.configure_callbacks` will override existing callbacks"
            f" passed to Trainer: {', '.join(sorted(t.__name__ for t in replaced))}"
        )
    return reorder_callbacks([c for c in trainer_callbacks if type(c) not in replaced] + added)


def load_external_callbacks(group: str = ENTRY_POINT_GROUP) -> list[Any]:
    """Make the callbacks that installed packages offer.

    Args:
        group: Name of the entry point group.

    Returns:
        The callbacks, in the order in which the packages are found; empty when none offers any.

    Raises:
        TypeError: A factory returned something that is not a callback; the message names the entry point.
    """
    callbacks: list[Any] = []
    for entry in entry_points(group=group):
        made = entry.load()()
        made = list(made) if isinstance(made, (list, tuple)) else [made]
        try:
            check_callbacks(made)
        except TypeError as error:
            error.add_note(f"The entry point `{entry.name}` ({entry.value}) of the group `{group}` returned it.")
            raise
        if made:
            rank_zero_info(
                f"Adding {len(made)} callbacks from entry point '{entry.name}':"
                f" {', '.join(type(c).__name__ for c in made)}"
            )
        callbacks.extend(made)
    return callbacks


def runs_user_code(callback: Any, hook: str) -> bool:
    """Whether a hook of a callback is code of the user's, which may look at the step that has just run.

    Our own callbacks read values at log points and at the ends of epochs only, so they never make the Trainer fetch a
    step's outputs or metrics early.

    Args:
        callback: A callback of the Trainer.
        hook: Name of the hook, for example `"on_train_batch_end"`.

    Returns:
        False for a hook that is not overridden and for one defined in this package.
    """
    if hook in getattr(callback, "__dict__", {}):
        return True
    for klass in type(callback).__mro__:
        if hook in klass.__dict__:
            function = inspect.unwrap(klass.__dict__[hook])
            module = getattr(function, "__module__", klass.__module__) or klass.__module__
            plain_base = klass.__name__ == "Callback" and klass.__module__.endswith(".callbacks.callback")
            return not (module.partition(".")[0] == "jaxlightning" or plain_base)
    return False
