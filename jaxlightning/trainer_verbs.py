"""The four verbs of the Trainer: what they take, what they refuse, and how a run begins."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, cast

from jaxlightning.loops.checks import check_model
from jaxlightning.loops.data_connector import DataConnector, is_datamodule
from jaxlightning.loops.interrupts import call_and_handle_interrupt
from jaxlightning.trainer_run import run
from jaxlightning.utilities.exceptions import MisconfigurationException
from jaxlightning.utilities.states import RunningStage, TrainerFn, TrainerState, TrainerStatus

if TYPE_CHECKING:
    from jaxlightning.loops.evaluation_loop import EvaluationLoop
    from jaxlightning.loops.fit_loop import FitLoop
    from jaxlightning.loops.prediction_loop import PredictionLoop
    from jaxlightning.trainer import Trainer


class TrainerVerbs:
    """`fit`, `validate`, `test` and `predict`; `Trainer` sets the attributes that they use."""

    state: TrainerState
    should_stop: bool
    fit_loop: FitLoop
    validate_loop: EvaluationLoop
    test_loop: EvaluationLoop
    predict_loop: PredictionLoop
    _module: Any
    _data_connector: DataConnector
    _checkpoint_connector: Any

    def fit(
        self,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Train a module.

        Args:
            model: The module.
            train_dataloaders: A loader or a collection of loaders, or a datamodule.
            val_dataloaders: A loader or a collection of loaders.
            datamodule: A datamodule, in place of loaders.
            ckpt_path: A checkpoint to continue from: a path, "last", "best" or "hpc".
            weights_only: Accepted for Lightning's sake; nothing is ever unpickled.

        Raises:
            TypeError: When `model` is not a module of ours.
            MisconfigurationException: When something that a fit needs is missing.
        """
        check_model(model, TrainerFn.FITTING)
        if is_datamodule(train_dataloaders):
            train_dataloaders, datamodule = None, train_dataloaders
        if (train_dataloaders is not None or val_dataloaders is not None) and datamodule is not None:
            raise MisconfigurationException(
                "You cannot pass `train_dataloader` or `val_dataloaders` to `trainer.fit(datamodule=...)`"
            )
        self.should_stop = False
        data = {"train": train_dataloaders, "val": val_dataloaders}
        self._start(TrainerFn.FITTING, RunningStage.TRAINING, model, data, datamodule, ckpt_path, weights_only)

    def validate(
        self,
        model: Any = None,
        dataloaders: Any = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        verbose: bool = True,
        datamodule: Any = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Evaluate a module on validation data.

        Args:
            model: The module; that of the last run by default.
            dataloaders: A loader or a collection of loaders, or a datamodule.
            ckpt_path: A checkpoint to load first: a path, "best" or "last". Without a model the best one is loaded.
            verbose: Whether to print the results.
            datamodule: A datamodule, in place of loaders.
            weights_only: Accepted for Lightning's sake.

        Returns:
            One dictionary of metrics per loader.
        """
        self.validate_loop.verbose = verbose
        result: list[dict[str, float]] = self._evaluate(
            TrainerFn.VALIDATING,
            RunningStage.VALIDATING,
            "val",
            model,
            dataloaders,
            ckpt_path,
            datamodule,
            weights_only,
        )
        return result

    def test(
        self,
        model: Any = None,
        dataloaders: Any = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        verbose: bool = True,
        datamodule: Any = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Evaluate a module on test data.

        Args:
            model: The module; that of the last run by default.
            dataloaders: A loader or a collection of loaders, or a datamodule.
            ckpt_path: A checkpoint to load first: a path, "best" or "last". Without a model the best one is loaded.
            verbose: Whether to print the results.
            datamodule: A datamodule, in place of loaders.
            weights_only: Accepted for Lightning's sake.

        Returns:
            One dictionary of metrics per loader.
        """
        self.test_loop.verbose = verbose
        result: list[dict[str, float]] = self._evaluate(
            TrainerFn.TESTING, RunningStage.TESTING, "test", model, dataloaders, ckpt_path, datamodule, weights_only
        )
        return result

    def predict(
        self,
        model: Any = None,
        dataloaders: Any = None,
        datamodule: Any = None,
        return_predictions: bool | None = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        weights_only: bool | None = None,
    ) -> list[Any] | None:
        """Run a module's `predict_step` on data.

        Args:
            model: The module; that of the last run by default.
            dataloaders: A loader or a collection of loaders, or a datamodule.
            datamodule: A datamodule, in place of loaders.
            return_predictions: Whether to keep and return the predictions; True by default.
            ckpt_path: A checkpoint to load first: a path, "best" or "last". Without a model the best one is loaded.
            weights_only: Accepted for Lightning's sake.

        Returns:
            The predictions per batch, on the host; per loader and batch with several loaders; None when not wanted.
        """
        self.predict_loop.return_predictions = True if return_predictions is None else return_predictions
        result: list[Any] | None = self._evaluate(
            TrainerFn.PREDICTING,
            RunningStage.PREDICTING,
            "predict",
            model,
            dataloaders,
            ckpt_path,
            datamodule,
            weights_only,
        )
        return result

    def _evaluate(
        self,
        fn: TrainerFn,
        stage: RunningStage,
        kind: str,
        model: Any,
        dataloaders: Any,
        ckpt_path: Any,
        datamodule: Any,
        weights_only: bool | None,
    ) -> Any:
        if model is not None:
            check_model(model, fn)
        elif self._module is None:
            raise TypeError(
                f"`Trainer.{fn.value}()` requires a `LightningModule` when it hasn't been passed in a previous run"
            )
        if is_datamodule(dataloaders):
            dataloaders, datamodule = None, dataloaders
        if dataloaders is not None and datamodule is not None:
            raise MisconfigurationException(
                f"You cannot pass both `trainer.{fn.value}(dataloaders=..., datamodule=...)`"
            )
        return self._start(fn, stage, model, {kind: dataloaders}, datamodule, ckpt_path, weights_only)

    def _refuse_inside_training(self, fn: TrainerFn, model: Any) -> None:
        other = getattr(self._module if model is None else model, "_trainer", None)
        for trainer in (self, other):
            if trainer is not None and trainer.fit_loop.in_epochs:
                raise MisconfigurationException(
                    f"`Trainer.{fn.value}` was called inside of a running `fit`"
                    f"{'' if trainer is self else ' of another Trainer'} with the same module: the two runs would "
                    "overwrite each other's state. Call it in `on_train_end`, in `on_fit_end` or after `fit`, or give "
                    "another Trainer a copy: `copy.deepcopy(module)` has the present weights."
                )

    def _start(
        self,
        fn: TrainerFn,
        stage: RunningStage,
        model: Any,
        data: dict[str, Any],
        datamodule: Any,
        ckpt_path: Any,
        weights_only: bool | None,
    ) -> Any:
        """Enter a verb: set the state, link model and data, find the checkpoint, run."""
        self._refuse_inside_training(fn, model)
        connected = self._module is not None
        self._module = self._module if model is None else model
        self.state.fn, self.state.status, self.state.stage = fn, TrainerStatus.RUNNING, stage

        def implementation() -> Any:
            self._data_connector.attach_data(self._module, **data, datamodule=datamodule)
            path = self._checkpoint_connector.resolve_ckpt_path(
                fn, ckpt_path, model_provided=model is not None, model_connected=connected
            )
            return run(cast("Trainer", self), self._module, path, weights_only)

        return call_and_handle_interrupt(cast("Trainer", self), implementation)
