"""What every progress bar knows: how much there is to do, and which metrics to show."""

from __future__ import annotations

import builtins
from typing import TYPE_CHECKING, Any

from jaxlightning.callbacks.callback import Callback
from jaxlightning.utilities.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from jaxlightning.module import JaxLightningModule
    from jaxlightning.trainer import Trainer


class ProgressBar(Callback):
    """Base class of progress bars: it keeps the Trainer and knows the totals. Write your own bar as a subclass.

    Example:
        ```python
        class Percent(ProgressBar):
            def __init__(self):
                super().__init__()  # keep this
                self.on = True

            def disable(self):
                self.on = False

            def enable(self):
                self.on = True

            def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
                if self.on:
                    print(f"{100 * (batch_idx + 1) / self.total_train_batches:.0f} %", end="\\r")
        ```
    """

    def __init__(self) -> None:
        super().__init__()
        self._trainer: Trainer | None = None
        self._current_eval_dataloader_idx: int | None = None
        self._cached_values_only = False
        self._shown_values: dict[str, Any] | None = None
        self._warned_names: set[str] = set()

    # what there is to do

    @property
    def trainer(self) -> Trainer:
        """The Trainer that runs this bar.

        Raises:
            TypeError: There is none yet.
        """
        if self._trainer is None:
            raise TypeError(f"The `{type(self).__name__}._trainer` reference has not been set yet.")
        return self._trainer

    @property
    def sanity_check_description(self) -> str:
        """What the bar of the sanity check is called."""
        return "Sanity Checking"

    @property
    def train_description(self) -> str:
        """What the bar of training is called before its first epoch."""
        return "Training"

    @property
    def validation_description(self) -> str:
        """What the bar of validation is called."""
        return "Validation"

    @property
    def test_description(self) -> str:
        """What the bar of testing is called."""
        return "Testing"

    @property
    def predict_description(self) -> str:
        """What the bar of prediction is called."""
        return "Predicting"

    @property
    def total_train_batches(self) -> int | float:
        """Number of training batches in this epoch; `inf` when the loader has no length."""
        trainer = self.trainer
        total: int | float = trainer.num_training_batches
        if trainer.max_epochs == -1 and trainer.max_steps is not None and trainer.max_steps > 0:
            remaining: int = trainer.max_steps - trainer.global_step
            return min(total, remaining)
        return total

    @property
    def total_val_batches_current_dataloader(self) -> int | float:
        """Number of batches of the validation (or sanity check) loader that is running; `inf` without a length."""
        trainer = self.trainer
        return self._of_current_loader(
            trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches
        )

    @property
    def total_test_batches_current_dataloader(self) -> int | float:
        """Number of batches of the test loader that is running; `inf` without a length."""
        return self._of_current_loader(self.trainer.num_test_batches)

    @property
    def total_predict_batches_current_dataloader(self) -> int | float:
        """Number of batches of the prediction loader that is running; `inf` without a length."""
        return self._of_current_loader(self.trainer.num_predict_batches)

    @property
    def total_val_batches(self) -> int | float:
        """Number of batches of all validation loaders; 0 in an epoch without validation."""
        trainer = self.trainer
        every = trainer.check_val_every_n_epoch
        if not trainer.enable_validation or (every is not None and (trainer.current_epoch + 1) % every != 0):
            return 0
        batches = trainer.num_val_batches
        return sum(batches) if isinstance(batches, list) else batches

    def _of_current_loader(self, batches: Any) -> int | float:
        if isinstance(batches, list):
            batches = batches[self._current_eval_dataloader_idx or 0]
        number: int | float = batches
        return number

    def has_dataloader_changed(self, dataloader_idx: int) -> bool:
        """Whether this loader is another one than at the last call; remembers it."""
        changed = self._current_eval_dataloader_idx != dataloader_idx
        self._current_eval_dataloader_idx = dataloader_idx
        return changed

    def reset_dataloader_idx_tracker(self) -> None:
        """Forget which loader was running."""
        self._current_eval_dataloader_idx = None

    # what a subclass offers

    def disable(self) -> None:
        """Stop showing anything. A subclass must provide it."""
        raise NotImplementedError(f"`{type(self).__qualname__}` must override `disable`.")

    def enable(self) -> None:
        """Show progress again. A subclass must provide it."""
        raise NotImplementedError(f"`{type(self).__qualname__}` must override `enable`.")

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print without breaking the bar."""
        builtins.print(*args, **kwargs)

    def setup(self, trainer: Trainer, pl_module: JaxLightningModule, stage: str) -> None:
        """Keep the Trainer, and show nothing on other processes than the first."""
        self._trainer = trainer
        self._shown_values = None
        if not trainer.is_global_zero:
            self.disable()

    # metrics

    def get_metrics(self, trainer: Trainer, pl_module: JaxLightningModule) -> dict[str, Any]:
        """Return what the bar shows; override it to show more, less, or in another format.

        Args:
            trainer: The Trainer.
            pl_module: The module.

        Returns:
            The logger's version as `v_num`, and the metrics logged with `prog_bar=True`. While the bar itself asks in
            the middle of an epoch, these are the values of the last log point: showing them never waits for the device.
        """
        standard = get_standard_metrics(trainer)
        metrics = self._cached(trainer) if self._cached_values_only else trainer.progress_bar_metrics
        for name in standard.keys() & metrics.keys() - self._warned_names:
            self._warned_names.add(name)
            rank_zero_warn(
                f"The progress bar already tracks a metric with the name(s) '{name}' and "
                f"`self.log('{name}', ..., prog_bar=True)` will overwrite this value. If this is undesired, "
                "change the name or override `get_metrics()` in the progress bar callback."
            )
        return {**standard, **metrics}

    @staticmethod
    def _cached(trainer: Trainer) -> dict[str, Any]:
        values: dict[str, Any] = trainer._logger_connector.progress_bar_cached
        return values

    def _changed_metrics(self, trainer: Trainer, pl_module: JaxLightningModule) -> dict[str, Any] | None:
        """Return the metrics to show after a batch, or None when they are the ones shown already."""
        values = self._cached(trainer)
        if values == self._shown_values:
            return None
        self._shown_values = dict(values)
        self._cached_values_only = True
        try:
            return self.get_metrics(trainer, pl_module)
        finally:
            self._cached_values_only = False


def get_standard_metrics(trainer: Trainer) -> dict[str, Any]:
    """Return what a bar shows besides logged metrics.

    Args:
        trainer: The Trainer.

    Returns:
        `{"v_num": version}` of the logger (the versions of several loggers joined by `_`; of a long string the last
        four characters), or nothing without a logger or version.
    """
    loggers = trainer.loggers
    if not loggers:
        return {}
    version = loggers[0].version
    if len(loggers) > 1:
        version = "_".join(dict.fromkeys(str(logger.version) for logger in loggers))
    if version is None or version == "":
        return {}
    return {"v_num": version[-4:] if isinstance(version, str) else version}
