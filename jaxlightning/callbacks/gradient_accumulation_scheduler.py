"""Change the number of accumulated batches from epoch to epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxlightning.callbacks.callback import Callback
from jaxlightning.utilities.exceptions import MisconfigurationException
from jaxlightning.utilities.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from jaxlightning.module import JaxLightningModule
    from jaxlightning.trainer import Trainer


class GradientAccumulationScheduler(Callback):
    """Set `trainer.accumulate_grad_batches` at the start of each epoch from a schedule.

    The factor is a number that the compiled step receives, so a change compiles nothing again.

    Args:
        scheduling: From which epoch (counted from 0) how many batches are accumulated, for example `{0: 8, 4: 2}`.
            Before its first epoch the factor is 1.

    Raises:
        TypeError: The schedule is empty.
        MisconfigurationException: An epoch is not an int >= 0, or a factor not an int >= 1.

    Example:
        ```python
        # every batch until epoch 4, every second batch from then on
        Trainer(callbacks=[GradientAccumulationScheduler({4: 2})])
        ```
    """

    def __init__(self, scheduling: dict[int, int]) -> None:
        super().__init__()
        if not scheduling:
            raise TypeError("Empty dict cannot be interpreted correct: expected {epoch: number of batches}, got {}.")
        if any(not isinstance(epoch, int) or epoch < 0 for epoch in scheduling):
            raise MisconfigurationException(
                f"Epoch should be an int greater than or equal to 0. Got {list(scheduling)}."
            )
        if any(not isinstance(factor, int) or factor < 1 for factor in scheduling.values()):
            raise MisconfigurationException(
                f"Accumulation factor should be an int greater than 0. Got {list(scheduling.values())}."
            )
        self.scheduling: dict[int, int] = {0: 1, **scheduling}
        self.epochs = sorted(self.scheduling)

    def going_to_accumulate_grad_batches(self) -> bool:
        """Whether any epoch accumulates more than one batch."""
        return any(factor > 1 for factor in self.scheduling.values())

    def get_accumulate_grad_batches(self, epoch: int) -> int:
        """Return the factor of an epoch, counted from 0."""
        return self.scheduling[max(start for start in self.epochs if start <= epoch)]

    def on_train_start(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        """Check that nothing else accumulates.

        Raises:
            RuntimeError: The module optimizes manually.
            ValueError: `Trainer(accumulate_grad_batches=...)` is set too.
        """
        if not pl_module.automatic_optimization:
            raise RuntimeError(
                "Automatic gradient accumulation and the `GradientAccumulationScheduler` is not supported for manual "
                "optimization. Please remove the callback or switch to automatic optimization."
            )
        overridden = [name for name in ("optimizer_step", "optimizer_zero_grad") if _is_overridden(name, pl_module)]
        if overridden and self.going_to_accumulate_grad_batches():
            rank_zero_warn(
                "When using `Trainer(accumulate_grad_batches != 1)` and overriding "
                "`LightningModule.optimizer_{step,zero_grad}`, the hooks will not be called on every batch "
                "(rather, they are called on every optimization step)."
            )
        if trainer.accumulate_grad_batches != 1:
            raise ValueError(
                "You have set `accumulate_grad_batches` and are using the `GradientAccumulationScheduler` callback. "
                "Either remove `accumulate_grad_batches` from the Trainer or remove the callback."
            )

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        """Set the factor of the epoch that begins."""
        trainer.accumulate_grad_batches = self.get_accumulate_grad_batches(trainer.current_epoch)


def _is_overridden(name: str, module: JaxLightningModule) -> bool:
    """Whether the user's module class, or the module itself, defines a hook of ours anew."""
    if name in vars(module):
        return True
    definer = next((klass for klass in type(module).__mro__ if name in klass.__dict__), None)
    return definer is not None and definer.__module__.partition(".")[0] != "jaxlightning"
