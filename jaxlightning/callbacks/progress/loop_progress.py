"""What the bars on tqdm and on rich share: the switch, and the count of the loaders of evaluation and prediction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxlightning.callbacks.progress.progress_bar import ProgressBar

if TYPE_CHECKING:
    from jaxlightning.module import JaxLightningModule
    from jaxlightning.trainer import Trainer

__all__ = ["LoopProgressBar"]


class LoopProgressBar(ProgressBar):
    """Base of `TQDMProgressBar` and `RichProgressBar`.

    A subclass says how a count begins and goes on (`_begin_count`, `_count_batches`).

    Args:
        refresh_rate: How often the screen follows, in the subclass's unit; 0 shows nothing.
        leave: Whether the bar of each training epoch stays on the screen.
    """

    def __init__(self, refresh_rate: int, leave: bool) -> None:
        super().__init__()
        self._refresh_rate = refresh_rate
        self._leave = leave
        self._enabled = True

    @property
    def refresh_rate(self) -> int:
        """How often the screen follows: for tqdm every so many batches, for rich so many times per second."""
        return self._refresh_rate

    @property
    def is_enabled(self) -> bool:
        """Whether anything is shown."""
        return self._enabled and self._refresh_rate > 0

    @property
    def is_disabled(self) -> bool:
        """Whether nothing is shown."""
        return not self.is_enabled

    def disable(self) -> None:
        """Show nothing from now on."""
        self._enabled = False

    def enable(self) -> None:
        """Show progress again."""
        self._enabled = True

    # evaluation and prediction

    def _begin_count(self, trainer: Trainer, stage: str, description: str, total: float) -> None:
        """Begin to count the batches of a loader.

        Args:
            trainer: The Trainer.
            stage: `"val"`, `"test"` or `"predict"`.
            description: What to call it.
            total: Number of its batches, `inf` when it has no length.
        """
        raise NotImplementedError

    def _count_batches(self, stage: str, n: int) -> None:
        """Count on to `n` batches of the loader that is running."""
        raise NotImplementedError

    def _enter_loader(self, trainer: Trainer, stage: str, name: str, dataloader_idx: int) -> None:
        if self.has_dataloader_changed(dataloader_idx):
            total: int | float = getattr(self, f"total_{stage}_batches_current_dataloader")
            self._begin_count(trainer, stage, f"{name} DataLoader {dataloader_idx}", total)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: JaxLightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Begin the count of a loader."""
        name = self.sanity_check_description if trainer.sanity_checking else self.validation_description
        self._enter_loader(trainer, "val", name, dataloader_idx)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: JaxLightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Count a batch."""
        self._count_batches("val", batch_idx + 1)

    def on_test_batch_start(
        self, trainer: Trainer, pl_module: JaxLightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Begin the count of a loader."""
        self._enter_loader(trainer, "test", self.test_description, dataloader_idx)

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: JaxLightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Count a batch."""
        self._count_batches("test", batch_idx + 1)

    def on_predict_batch_start(
        self, trainer: Trainer, pl_module: JaxLightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Begin the count of a loader."""
        self._enter_loader(trainer, "predict", self.predict_description, dataloader_idx)

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: JaxLightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Count a batch."""
        self._count_batches("predict", batch_idx + 1)
