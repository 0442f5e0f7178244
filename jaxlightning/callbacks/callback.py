"""The base class of callbacks: every hook that Lightning calls, as a no-op, with Lightning's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxlightning.module import JaxLightningModule
    from jaxlightning.trainer import Trainer


class Callback:
    """Base class of everything that hooks into a run without being part of the model.

    Override the hooks you need. The Trainer finds out once per run which hooks a callback overrides, so the ones
    that stay as they are here cost nothing.

    Example:
        ```python
        class Hello(Callback):
            def on_train_start(self, trainer, pl_module):
                print("training begins")

        Trainer(callbacks=[Hello()])
        ```
    """

    @property
    def state_key(self) -> str:
        """The name under which a checkpoint keeps this callback's state; the class's qualified name by default."""
        return self.__class__.__qualname__

    def _generate_state_key(self, **kwargs: Any) -> str:
        """Build a state key from the class name and the settings that tell two instances apart.

        Args:
            **kwargs: The settings, in the order in which they are to appear.

        Returns:
            For example `"EarlyStopping{'monitor': 'val_loss', 'mode': 'min'}"`.
        """
        return f"{self.__class__.__qualname__}{kwargs!r}"

    # state

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint should keep of this callback; it must be writable as JSON."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` returned when the checkpoint was written."""

    def on_save_checkpoint(self, trainer: Trainer, pl_module: JaxLightningModule, checkpoint: dict[str, Any]) -> None:
        """Called when a checkpoint is put together; `checkpoint` may be added to."""

    def on_load_checkpoint(self, trainer: Trainer, pl_module: JaxLightningModule, checkpoint: dict[str, Any]) -> None:
        """Called when a checkpoint is read, before `load_state_dict`."""

    # every verb

    def setup(self, trainer: Trainer, pl_module: JaxLightningModule, stage: str) -> None:
        """Called when fit, validate, test or predict begins; `stage` is the verb's name."""

    def teardown(self, trainer: Trainer, pl_module: JaxLightningModule, stage: str) -> None:
        """Called when fit, validate, test or predict ends; `stage` is the verb's name."""

    def on_exception(self, trainer: Trainer, pl_module: JaxLightningModule, exception: BaseException) -> None:
        """Called when a run is ended by an exception."""

    # fit

    def on_fit_start(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        """Called when fit begins, after the optimizers were configured."""

    def on_fit_end(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        """Called when fit ends."""

    def on_sanity_check_start(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        """Called before the sanity check's validation."""

    def on_sanity_check_end(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        """Called after the sanity check's validation."""

    def on_train_start(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        """Called when training begins, after the sanity check."""

    def on_train_end(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        """Called when training ends."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        """Called when a training epoch begins."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        """Called when a training epoch ends, after its validation."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: JaxLightningModule, batch: Any, batch_idx: int) -> None:
        """Called before a training batch."""

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: JaxLightningModule,
        outputs: Mapping[str, Any] | Any | None,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Called after a training batch; `outputs["loss"]` is the loss divided by the accumulation factor."""

    # between gradient and update; overriding one of these splits the compiled step in two

    def on_before_zero_grad(self, trainer: Trainer, pl_module: JaxLightningModule, optimizer: Any) -> None:
        """Called before the gradients are reset."""

    def on_before_backward(self, trainer: Trainer, pl_module: JaxLightningModule, loss: Any) -> None:
        """Called with the loss before its gradients are used."""

    def on_after_backward(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        """Called when the gradients of a batch are there, before clipping and update."""

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: JaxLightningModule, optimizer: Any) -> None:
        """Called before the optimizer updates the parameters."""

    # validation

    def on_validation_start(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        """Called when a validation run begins."""

    def on_validation_end(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        """Called when a validation run ends."""

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        """Called before the first validation batch."""

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        """Called after the last validation batch."""

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: JaxLightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before a validation batch."""

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: JaxLightningModule,
        outputs: Mapping[str, Any] | Any | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Called after a validation batch."""

    # test

    def on_test_start(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        """Called when a test run begins."""

    def on_test_end(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        """Called when a test run ends."""

    def on_test_epoch_start(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        """Called before the first test batch."""

    def on_test_epoch_end(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        """Called after the last test batch."""

    def on_test_batch_start(
        self, trainer: Trainer, pl_module: JaxLightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before a test batch."""

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: JaxLightningModule,
        outputs: Mapping[str, Any] | Any | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Called after a test batch."""

    # predict

    def on_predict_start(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        """Called when a prediction run begins."""

    def on_predict_end(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        """Called when a prediction run ends."""

    def on_predict_epoch_start(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        """Called before the first prediction batch."""

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        """Called after the last prediction batch."""

    def on_predict_batch_start(
        self, trainer: Trainer, pl_module: JaxLightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before a prediction batch."""

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: JaxLightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Called after a prediction batch; `outputs` is what `predict_step` returned."""
