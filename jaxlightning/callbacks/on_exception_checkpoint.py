"""Save a checkpoint when a run fails."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from jaxlightning.callbacks.checkpoint import Checkpoint

if TYPE_CHECKING:
    from jaxlightning.module import JaxLightningModule
    from jaxlightning.trainer import Trainer


class OnExceptionCheckpoint(Checkpoint):
    """Save when an exception ends the run; the next `fit` without `ckpt_path` continues there, and success deletes it.

    Args:
        dirpath: Where the checkpoint goes.
        filename: Its name, without the ending.

    Raises:
        ValueError: The name is empty.
    """

    FILE_EXTENSION = ".ckpt"

    def __init__(self, dirpath: str | os.PathLike[str], filename: str = "on_exception") -> None:
        super().__init__()
        if not filename:
            raise ValueError("The filename cannot be empty")
        self.dirpath = dirpath
        self.filename = filename

    @property
    def ckpt_path(self) -> str:
        """The path of the checkpoint."""
        return os.path.join(self.dirpath, self.filename + self.FILE_EXTENSION)

    def on_exception(self, trainer: Trainer, pl_module: JaxLightningModule, exception: BaseException) -> None:
        """Save, replacing an older one."""
        trainer.save_checkpoint(self.ckpt_path)

    def teardown(self, trainer: Trainer, pl_module: JaxLightningModule, stage: str) -> None:
        """Delete the checkpoint: the run got to its end."""
        connector: Any = trainer._checkpoint_connector
        connector.remove_checkpoint(self.ckpt_path)
