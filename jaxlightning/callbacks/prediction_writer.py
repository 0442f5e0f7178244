"""The base class of callbacks that write predictions to files or databases."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

from jaxlightning.callbacks.callback import Callback
from jaxlightning.utilities.exceptions import MisconfigurationException

if TYPE_CHECKING:
    from jaxlightning.module import JaxLightningModule
    from jaxlightning.trainer import Trainer


class WriteInterval(StrEnum):
    """When predictions are written.

    Attributes:
        BATCH: After each batch.
        EPOCH: Once, after the last batch.
        BATCH_AND_EPOCH: Both.
    """

    BATCH = "batch"
    EPOCH = "epoch"
    BATCH_AND_EPOCH = "batch_and_epoch"

    @property
    def on_batch(self) -> bool:
        """Whether each batch is written."""
        return self in (WriteInterval.BATCH, WriteInterval.BATCH_AND_EPOCH)

    @property
    def on_epoch(self) -> bool:
        """Whether all predictions are written at the end."""
        return self in (WriteInterval.EPOCH, WriteInterval.BATCH_AND_EPOCH)


class BasePredictionWriter(Callback):
    """Base class for writing what `Trainer.predict` computes.

    Override `write_on_batch_end`, `write_on_epoch_end`, or both, as `write_interval` asks for. Each process writes its
    own part: put `trainer.global_rank` into the file's name.

    Args:
        write_interval: `"batch"`, `"epoch"` or `"batch_and_epoch"`.

    Raises:
        MisconfigurationException: Another interval.

    Example:
        ```python
        class ToNumpy(BasePredictionWriter):
            def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
                np.savez(f"predictions_{trainer.global_rank}.npz", *predictions)

        Trainer(callbacks=[ToNumpy("epoch")]).predict(model, loader, return_predictions=False)
        ```
    """

    def __init__(self, write_interval: Literal["batch", "epoch", "batch_and_epoch"] = "batch") -> None:
        super().__init__()
        if write_interval not in list(WriteInterval):
            raise MisconfigurationException(
                f"`write_interval` should be one of {[interval.value for interval in WriteInterval]}. "
                f"Received: {write_interval!r}"
            )
        self.interval = WriteInterval(write_interval)

    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: JaxLightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Write the prediction of one batch.

        Args:
            trainer: The Trainer.
            pl_module: The module.
            prediction: What `predict_step` returned.
            batch_indices: Indices into the dataset of the batch's samples; empty where the loader does not tell.
            batch: The batch.
            batch_idx: Its index.
            dataloader_idx: The index of its loader.
        """
        raise NotImplementedError(
            f"`{type(self).__qualname__}(write_interval={self.interval.value!r})` must override `write_on_batch_end`."
        )

    def write_on_epoch_end(
        self,
        trainer: Trainer,
        pl_module: JaxLightningModule,
        predictions: Sequence[Any],
        batch_indices: Sequence[Any],
    ) -> None:
        """Write all predictions.

        Args:
            trainer: The Trainer.
            pl_module: The module.
            predictions: What `predict_step` returned for each batch; with several loaders a list of such lists.
            batch_indices: Indices into the dataset as `[loader][batch][sample]`.
        """
        raise NotImplementedError(
            f"`{type(self).__qualname__}(write_interval={self.interval.value!r})` must override `write_on_epoch_end`."
        )

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: JaxLightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Hand one batch to `write_on_batch_end`."""
        if not self.interval.on_batch:
            return
        indices = trainer.predict_loop.current_batch_indices
        self.write_on_batch_end(trainer, pl_module, outputs, indices, batch, batch_idx, dataloader_idx)

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        """Hand all batches to `write_on_epoch_end`."""
        if not self.interval.on_epoch:
            return
        loop = trainer.predict_loop
        self.write_on_epoch_end(trainer, pl_module, loop.predictions, loop.epoch_batch_indices)
