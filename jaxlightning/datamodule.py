"""`LightningDataModule`: the data of an experiment in one place."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxlightning.utilities.combined_loader import flatten, sized_len
from jaxlightning.utilities.hparams import HyperparametersMixin
from jaxlightning.utilities.model_helpers import restricted_classmethod

if TYPE_CHECKING:
    from typing import Self

    from jaxlightning.trainer import Trainer

_KINDS = ("train", "val", "test", "predict")
_NAMES = ("Train", "Validation", "Test", "Predict")


class LightningDataModule(HyperparametersMixin):
    """Knows how to prepare, split and load the data.

    Override what is needed: `prepare_data` (download, once), `setup` (split, at every run), the `*_dataloader` hooks
    and `teardown`.

    Attributes:
        trainer: The trainer that runs it, None before.
        prepare_data_per_node: Whether every host calls `prepare_data`, or only the first.
        allow_zero_length_dataloader_with_multiple_devices: Accepted for Lightning's sake.

    Example:
        ```python
        class Digits(LightningDataModule):
            def setup(self, stage):
                self.x, self.y = load_digits(return_X_y=True)

            def train_dataloader(self):
                return ArrayLoader(self.x, self.y, batch_size=32, shuffle=True)
        ```
    """

    name: str | None = None
    CHECKPOINT_HYPER_PARAMS_KEY = "datamodule_hyper_parameters"
    CHECKPOINT_HYPER_PARAMS_NAME = "datamodule_hparams_name"

    def __init__(self) -> None:
        super().__init__()
        self.trainer: Trainer | None = None
        self.prepare_data_per_node = True
        self.allow_zero_length_dataloader_with_multiple_devices = False

    # --- hooks

    def prepare_data(self) -> None:
        """Download and prepare data; called on one process, so set no state."""

    def setup(self, stage: str) -> None:
        """Get ready for a run, on every process.

        Args:
            stage: "fit", "validate", "test" or "predict".
        """

    def teardown(self, stage: str) -> None:
        """Clean up after a run.

        Args:
            stage: "fit", "validate", "test" or "predict".
        """

    def train_dataloader(self) -> Any:
        """Return the training loader or loaders."""

    def val_dataloader(self) -> Any:
        """Return the validation loader or loaders."""

    def test_dataloader(self) -> Any:
        """Return the test loader or loaders."""

    def predict_dataloader(self) -> Any:
        """Return the prediction loader or loaders."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch before it goes to the device."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        """Move a batch; by default the compiled step does."""
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch after `transfer_batch_to_device`."""
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint should keep."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""

    def on_exception(self, exception: BaseException) -> None:
        """Called when a run fails."""

    # --- construction

    @classmethod
    def from_datasets(
        cls,
        train_dataset: Any = None,
        val_dataset: Any = None,
        test_dataset: Any = None,
        predict_dataset: Any = None,
        batch_size: int = 1,
        num_workers: int = 0,
        **datamodule_kwargs: Any,
    ) -> Self:
        """Make a datamodule from datasets; hooks exist only for those that were given.

        A torch dataset gets a torch DataLoader. Anything else with a length and indexing (numpy arrays, tuples of
        arrays, lists of samples) gets a loader of ours with the same meaning.

        Args:
            train_dataset: Shuffled unless it is only iterable; a dataset, or a list or dict of datasets.
            val_dataset: Not shuffled.
            test_dataset: Not shuffled.
            predict_dataset: Not shuffled.
            batch_size: Samples per batch.
            num_workers: Worker processes of torch DataLoaders.
            **datamodule_kwargs: Handed to `__init__`.

        Returns:
            The datamodule.
        """
        names = inspect.signature(cls.__init__).parameters
        given = {"batch_size": batch_size, "num_workers": num_workers}
        takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in names.values())
        extra = {name: value for name, value in given.items() if name in names or takes_any}
        datamodule = cls(**{**extra, **datamodule_kwargs})
        datasets = (train_dataset, val_dataset, test_dataset, predict_dataset)
        for kind, dataset in zip(_KINDS, datasets, strict=True):
            if dataset is not None:
                hook = _loader_hook(dataset, batch_size, num_workers, shuffle=kind == "train")
                setattr(datamodule, f"{kind}_dataloader", hook)
        return datamodule

    @restricted_classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | os.PathLike[str],
        map_location: Any = None,
        hparams_file: str | os.PathLike[str] | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Rebuild a datamodule from the hyper-parameters in a checkpoint.

        Args:
            checkpoint_path: The checkpoint.
            map_location: Accepted for Lightning's sake.
            hparams_file: A file with hyper-parameters, in place of those in the checkpoint.
            weights_only: Accepted for Lightning's sake.
            **kwargs: Override hyper-parameters.

        Returns:
            The datamodule, with its state.
        """
        from jaxlightning.checkpoint import load_datamodule_from_checkpoint

        loaded: Self = load_datamodule_from_checkpoint(cls, checkpoint_path, hparams_file=hparams_file, **kwargs)
        return loaded

    def __str__(self) -> str:
        """One line for each kind of loader, with the sizes of the datasets that its hook gives at this moment."""
        lines = []
        for kind, name in zip(_KINDS, _NAMES, strict=True):
            try:
                text = _describe(getattr(self, f"{kind}_dataloader")())
            except Exception:  # not overridden, or it does not work before `setup`
                text = "None"
            lines.append(f"{{{name} dataloader: {text}}}")
        return os.linesep.join(lines)


def _describe(loaders: Any) -> str:
    if loaders is None:
        return "None"
    leaves, _ = flatten(loaders)
    sizes = [sized_len(getattr(loader, "dataset", loader)) for loader in leaves]
    texts = [f"size={'NA' if size is None else size}" for size in sizes]
    several = isinstance(loaders, (list, tuple, Mapping))
    return " ; ".join(f"{i}. {text}" for i, text in enumerate(texts, start=1)) if several else texts[0]


def _loader_hook(dataset: Any, batch_size: int, num_workers: int, *, shuffle: bool) -> Any:
    def hook() -> Any:
        if isinstance(dataset, Mapping):
            return {name: _loader(each, batch_size, num_workers, shuffle) for name, each in dataset.items()}
        if isinstance(dataset, Sequence) and dataset and all(_is_dataset(each) for each in dataset):
            return [_loader(each, batch_size, num_workers, shuffle) for each in dataset]
        return _loader(dataset, batch_size, num_workers, shuffle)

    return hook


def _is_torch(value: object, name: str) -> bool:
    return any(cls.__name__ == name and cls.__module__.startswith("torch.") for cls in type(value).__mro__)


def _is_dataset(value: object) -> bool:
    return _is_torch(value, "Dataset")


def _loader(dataset: Any, batch_size: int, num_workers: int, shuffle: bool) -> Any:
    if _is_dataset(dataset):
        from torch.utils.data import DataLoader

        shuffle = shuffle and not _is_torch(dataset, "IterableDataset")
        return DataLoader(dataset, batch_size=batch_size, shuffle=shuffle, num_workers=num_workers, pin_memory=False)
    from jaxlightning.adapters import ArrayLoader

    if isinstance(dataset, tuple):
        return ArrayLoader(*dataset, batch_size=batch_size, shuffle=shuffle)
    return ArrayLoader(dataset, batch_size=batch_size, shuffle=shuffle)
