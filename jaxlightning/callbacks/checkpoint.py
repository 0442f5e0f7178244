"""The marker by which the Trainer knows the callbacks that write checkpoints."""

from __future__ import annotations

from jaxlightning.callbacks.callback import Callback


class Checkpoint(Callback):
    """Base class of every callback that writes checkpoints.

    The Trainer runs these after all other callbacks, adds its default `ModelCheckpoint` only when there is none,
    and offers them as `trainer.checkpoint_callbacks`.
    """
