"""The hooks of a module with their defaults, in Lightning's names and signatures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["ModuleHooks"]


class ModuleHooks:
    """Everything that a module may override; the trainer calls a hook only where it is overridden."""

    training: bool
    _modes: dict[str, Any] | None
    _engine: Any

    prepare_data_per_node = True
    """Whether every host calls `prepare_data`, or only the first."""
    allow_zero_length_dataloader_with_multiple_devices = False
    """Accepted for Lightning's sake."""

    # --- steps --------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the loss of a batch; compiled.

        Args:
            *args: The batch as its loader gave it, a pytree of arrays, and `batch_idx`, its index in the epoch from 0
                (where the override takes it; with several loaders a batch is a collection of theirs).
            **kwargs: The same by name.

        Returns:
            In automatic optimization the loss, a floating-point array with one element, a dict with it under
            `"loss"`, or None to skip the update. In manual optimization anything.
        """

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates a validation batch; compiled.

        Args:
            *args: The batch, `batch_idx` from 0, and with several loaders `dataloader_idx` from 0.
            **kwargs: The same by name.

        Returns:
            Anything; `on_validation_batch_end` gets it.
        """

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates a test batch; compiled. Arguments and result are as in `validation_step`."""

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Predicts a batch; compiled. By default `self(batch)`.

        Args:
            *args: The batch, `batch_idx` from 0, and with several loaders `dataloader_idx` from 0.
            **kwargs: The same by name.

        Returns:
            The predictions, a pytree; `Trainer.predict` collects one per batch.
        """
        return self(args[0] if args else kwargs.get("batch"))  # type: ignore[operator]

    # --- set-up ---------------------------------------------------------------------------------------------------

    def configure_callbacks(self) -> Any:
        """Gives callbacks of the model, which replace those of the same type in the trainer.

        Returns:
            A callback or a sequence of them.
        """
        return []

    def configure_model(self) -> None:
        """Creates networks that are too large for `__init__`; called once before variables are restored."""

    def configure_optimizers(self) -> Any:
        """Gives the optimizers and schedulers.

        Returns:
            Any of Lightning's forms, with optimizers of `jaxlightning.optim` or optax transformations: one optimizer,
            a list of them, two lists (optimizers, schedulers), a dict with `"optimizer"` and `"lr_scheduler"` (itself a
            scheduler or a dict with `"scheduler"`, `"interval"`, `"frequency"`, `"monitor"`, ...), a tuple of such
            dicts, or None for a run without updates.
        """

    def prepare_data(self) -> None:
        """Downloads and prepares data on one process; assigns no state."""

    def setup(self, stage: str) -> None:
        """Called at the start of fit, validate, test and predict."""

    def teardown(self, stage: str) -> None:
        """Called at the end of fit, validate, test and predict."""

    def train_dataloader(self) -> Any:
        """The training loader, or a collection of them."""

    def val_dataloader(self) -> Any:
        """The validation loader(s)."""

    def test_dataloader(self) -> Any:
        """The test loader(s)."""

    def predict_dataloader(self) -> Any:
        """The prediction loader(s)."""

    # --- batches to the device ------------------------------------------------------------------------------------

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Changes a batch on the host, before it goes to the device.

        Args:
            batch: A pytree of numpy arrays; other leaves stay on the host.
            dataloader_idx: Index of its loader, from 0.

        Returns:
            The batch to go on with.
        """
        return batch

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        """Moves a batch; by default it stays numpy, because a compiled call takes it fastest that way.

        Args:
            batch: What `on_before_batch_transfer` gave.
            device: The first JAX device of the run.
            dataloader_idx: Index of its loader, from 0.

        Returns:
            The batch to go on with.
        """
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Changes a batch after its transfer; arguments and result are as in `on_before_batch_transfer`."""
        return batch

    # --- optimization -----------------------------------------------------------------------------------------------

    def on_before_zero_grad(self, optimizer: Any) -> None:
        """Called before the gradients of `optimizer` are cleared."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        """Clears the gradients.

        Args:
            epoch: Index of the epoch, from 0.
            batch_idx: Index of the batch in the epoch, from 0.
            optimizer: One of `self.optimizers()`.
        """
        optimizer.zero_grad()

    def on_before_backward(self, loss: Any) -> None:
        """Called before gradients are computed."""

    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        """Marks the moment at which gradients are computed; the compiled half of the step has them already.

        Args:
            loss: The loss, divided by `accumulate_grad_batches`, an array with one element.
            *args: Nothing; the place that Lightning keeps for further arguments.
            **kwargs: Nothing.
        """

    def on_after_backward(self) -> None:
        """Called when gradients are there; `self.trainer._engine.grads` reads and replaces them."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Called with final, unclipped gradients before the update."""

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clips the gradients; override to clip in another way.

        Args:
            optimizer: The optimizer that is to step.
            gradient_clip_val: The largest norm or absolute value, as given to the trainer; None for no clipping.
            gradient_clip_algorithm: `"norm"` or `"value"`, as given to the trainer.
        """
        self.clip_gradients(  # type: ignore[attr-defined]
            optimizer, gradient_clip_val=gradient_clip_val, gradient_clip_algorithm=gradient_clip_algorithm
        )

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """Applies an update; an override must call the closure, or `optimizer.step(closure=optimizer_closure)`.

        Args:
            epoch: Index of the epoch, from 0.
            batch_idx: Index of the batch in the epoch, from 0.
            optimizer: The optimizer.
            optimizer_closure: Computes loss and gradients and gives the loss.
        """
        optimizer.step(closure=optimizer_closure)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Steps a scheduler.

        Args:
            scheduler: The scheduler of `configure_optimizers`.
            metric: The monitored value of a plateau scheduler, else None.
        """
        if metric is None:
            scheduler.step()
        else:
            scheduler.step(metric)

    # --- fit --------------------------------------------------------------------------------------------------------

    def on_fit_start(self) -> None:
        """Called at the very beginning of fit."""

    def on_fit_end(self) -> None:
        """Called at the very end of fit."""

    def on_train_start(self) -> None:
        """Called before the first epoch, after the sanity check."""

    def on_train_end(self) -> None:
        """Called after the last epoch."""

    def on_train_epoch_start(self) -> None:
        """Called before each training epoch."""

    def on_train_epoch_end(self) -> None:
        """Called after each training epoch and its validation."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        """Called before each batch; returning -1 skips the rest of the epoch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Called after each batch; `outputs` is `{"loss": loss / accumulate_grad_batches, ...}`."""

    # --- evaluation -------------------------------------------------------------------------------------------------

    def on_validation_model_zero_grad(self) -> None:
        """Called before validation inside fit, outside accumulation windows; gradients of the last step are dropped."""
        if self._engine is not None:
            self._engine.zero_grad()

    def _enter_evaluation(self) -> None:
        engine = self._engine
        self._modes = {"module": self.training, "networks": engine.binding.modes() if engine is not None else {}}
        self.eval()  # type: ignore[attr-defined]

    def _leave_evaluation(self) -> None:
        modes, self._modes = self._modes, None
        if modes is None:
            self.train()  # type: ignore[attr-defined]
            return
        self.training = modes["module"]
        if self._engine is not None:
            self._engine.binding.restore_modes(modes["networks"])
            self._engine.modes_changed()

    def on_validation_model_eval(self) -> None:
        """Puts the module in evaluation mode."""
        self._enter_evaluation()

    def on_validation_model_train(self) -> None:
        """Restores the modes that the module and its networks had before validation."""
        self._leave_evaluation()

    def on_test_model_eval(self) -> None:
        """Puts the module in evaluation mode."""
        self._enter_evaluation()

    def on_test_model_train(self) -> None:
        """Restores the modes that the module and its networks had before testing."""
        self._leave_evaluation()

    def on_predict_model_eval(self) -> None:
        """Puts the module in evaluation mode."""
        self._enter_evaluation()

    def on_predict_model_train(self) -> None:
        """Restores the modes that the module and its networks had before predicting."""
        self._leave_evaluation()

    def on_validation_start(self) -> None:
        """Called before each validation run."""

    def on_validation_end(self) -> None:
        """Called after each validation run."""

    def on_validation_epoch_start(self) -> None:
        """Called before the first validation batch."""

    def on_validation_epoch_end(self) -> None:
        """Called after the last validation batch."""

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before each validation batch."""

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called after each validation batch with what `validation_step` returned."""

    def on_test_start(self) -> None:
        """Called before testing."""

    def on_test_end(self) -> None:
        """Called after testing."""

    def on_test_epoch_start(self) -> None:
        """Called before the first test batch."""

    def on_test_epoch_end(self) -> None:
        """Called after the last test batch."""

    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before each test batch."""

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called after each test batch with what `test_step` returned."""

    def on_predict_start(self) -> None:
        """Called before predicting."""

    def on_predict_end(self) -> None:
        """Called after predicting."""

    def on_predict_epoch_start(self) -> None:
        """Called before the first prediction batch."""

    def on_predict_epoch_end(self) -> None:
        """Called after the last prediction batch."""

    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before each prediction batch."""

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called after each prediction batch with what `predict_step` returned."""

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Called with the checkpoint dictionary before it is written; may change it."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Called with the checkpoint dictionary before it is applied."""
