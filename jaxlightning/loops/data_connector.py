"""Links data to a run: which loaders and datamodule belong to it, and who transfers the batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jaxlightning.loops.call import (
    call_lightning_datamodule_hook,
    call_lightning_module_hook,
    is_overridden,
)
from jaxlightning.loops.data import LoaderSource

if TYPE_CHECKING:
    from jaxlightning.trainer import Trainer

Transfer = Callable[[Any, int], Any]
_TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def is_datamodule(value: object) -> bool:
    """Tell whether `value` is a LightningDataModule, ours or Lightning's."""
    return any(
        cls.__name__ == "LightningDataModule"
        and cls.__module__.startswith(("jaxlightning.", "lightning.", "pytorch_lightning."))
        for cls in type(value).__mro__
    )


class DataConnector:
    """Holds the data side of a trainer.

    Args:
        trainer: The trainer.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def attach_data(
        self,
        model: Any,
        *,
        train: Any = None,
        val: Any = None,
        test: Any = None,
        predict: Any = None,
        datamodule: Any = None,
    ) -> None:
        """Decide who gives the loaders of this run: those passed, else the datamodule, else the module.

        Args:
            model: The module.
            train: Loaders passed for training.
            val: Loaders passed for validation.
            test: Loaders passed for testing.
            predict: Loaders passed for prediction.
            datamodule: The datamodule of the run, or None.
        """
        trainer = self.trainer
        owner, from_datamodule = (model, False) if datamodule is None else (datamodule, True)
        for loop, name, loaders in (
            (trainer.fit_loop, "train_dataloader", train),
            (trainer.fit_loop.epoch_loop.val_loop, "val_dataloader", val),
            (trainer.validate_loop, "val_dataloader", val),
            (trainer.test_loop, "test_dataloader", test),
            (trainer.predict_loop, "predict_dataloader", predict),
        ):
            loop.release_data()
            loop.data_source = LoaderSource(name, loaders, owner, from_datamodule)
        trainer.datamodule = datamodule
        if datamodule is not None:
            datamodule.trainer = trainer
        model.trainer = trainer

    def prepare_data(self) -> None:
        """Call `prepare_data` of datamodule and module, where overridden, on the processes that should."""
        trainer = self.trainer
        for owner, call in (
            (trainer.datamodule, call_lightning_datamodule_hook),
            (trainer.lightning_module, call_lightning_module_hook),
        ):
            if owner is None or not is_overridden("prepare_data", owner):
                continue
            everywhere = getattr(owner, "prepare_data_per_node", True)
            if trainer.local_rank == 0 and (everywhere or trainer.node_rank == 0):
                call(trainer, "prepare_data")

    def transfer(self) -> Transfer | None:
        """Return the users' batch transfer hooks as one function, or None when nobody overrides one.

        The transfer itself is the compiled call's; the hooks see and may replace the batch before it.
        """
        before, move, after = (self._transfer_hook(name) for name in _TRANSFER_HOOKS)
        if before is None and move is None and after is None:
            return None
        device = getattr(self.trainer.strategy, "root_device", None)

        def run(batch: Any, dataloader_idx: int) -> Any:
            if before is not None:
                batch = before(batch, dataloader_idx)
            if move is not None:
                batch = move(batch, device, dataloader_idx)
            return batch if after is None else after(batch, dataloader_idx)

        return run

    def _transfer_hook(self, name: str) -> Callable[..., Any] | None:
        trainer, module, datamodule = self.trainer, self.trainer.lightning_module, self.trainer.datamodule
        in_module = is_overridden(name, module)
        if datamodule is not None:
            if is_overridden(name, datamodule):
                if in_module:
                    trainer._warnings.warn(
                        f"You have overridden `{name}` in both `LightningModule` and `LightningDataModule`."
                        " It will use the implementation from `LightningDataModule` instance."
                    )
                return lambda *args: call_lightning_datamodule_hook(trainer, name, *args)
            if in_module:
                trainer._warnings.warn(
                    f"You have overridden `{name}` in `LightningModule` but have passed in a"
                    " `LightningDataModule`. It will use the implementation from `LightningModule` instance."
                )
        return (lambda *args: call_lightning_module_hook(trainer, name, *args)) if in_module else None
