"""What can be wrong with a checkpoint."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint is damaged, incomplete, not a checkpoint, or does not fit."""


class NotACheckpointError(CheckpointError):
    """The path holds something else."""


class IncompleteCheckpointError(CheckpointError):
    """The directory has no complete commit: saving was interrupted, or files are missing."""
