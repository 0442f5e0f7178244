"""The read side of the Trainer: what hooks, callbacks and loggers may ask it."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

from jaxlightning.compile.host_calls import traced_logger, traced_loggers
from jaxlightning.compile.host_trainer import logged_so_far
from jaxlightning.compile.trace import current_trace, note_stage_read
from jaxlightning.loops.call import is_overridden
from jaxlightning.utilities.rank_zero import rank_zero_info
from jaxlightning.utilities.states import RunningStage, TrainerFn, TrainerState, TrainerStatus

if TYPE_CHECKING:
    from jaxlightning.callbacks import Checkpoint, EarlyStopping, ProgressBar
    from jaxlightning.compile.precision import Precision
    from jaxlightning.loops.evaluation_loop import EvaluationLoop
    from jaxlightning.loops.fit_loop import FitLoop
    from jaxlightning.loops.prediction_loop import PredictionLoop
    from jaxlightning.trainer_devices import DeviceFlags


def _stage_flag(stage: RunningStage, text: str) -> property:
    """Return a boolean property that is true in `stage`; setting it enters or leaves the stage."""

    def get(self: TrainerProperties) -> bool:
        note_stage_read()
        return self.state.stage == stage

    def put(self: TrainerProperties, value: bool) -> None:
        if value:
            self.state.stage = stage
        elif self.state.stage == stage:
            self.state.stage = None

    return property(get, put, doc=text)


class TrainerProperties:
    """Properties of the Trainer; `Trainer` itself sets the attributes that they read."""

    state: TrainerState
    callbacks: list[Any]
    fit_loop: FitLoop
    validate_loop: EvaluationLoop
    test_loop: EvaluationLoop
    predict_loop: PredictionLoop
    accumulate_grad_batches: int
    limit_val_batches: int | float
    num_sanity_val_steps: int | float
    datamodule: Any
    precision: str
    precision_plugin: Precision
    on_nonfinite: str | None
    _device_flags: DeviceFlags
    _default_root_dir: str
    _loggers: list[Any]
    _module: Any
    _engine: Any
    _optimizers: list[Any]
    _lr_scheduler_configs: list[Any]
    _logger_connector: Any
    _checkpoint_connector: Any
    _signal_connector: Any

    # --- devices

    @property
    def strategy(self) -> Any:
        """The strategy; asking for it before a run starts a JAX backend."""
        return self._device_flags.resolve()

    @property
    def accelerator(self) -> str:
        """The accelerator flag."""
        return str(self._device_flags.accelerator)

    @property
    def global_rank(self) -> int:
        """Index of this process."""
        return self._device_flags.global_rank

    @property
    def local_rank(self) -> int:
        """Index of this process on its host."""
        return self._device_flags.local_rank

    @property
    def node_rank(self) -> int:
        """Index of this host."""
        return self._device_flags.node_rank

    @property
    def world_size(self) -> int:
        """Number of processes. One process drives all its devices, see `num_devices`."""
        return self._device_flags.world_size

    @property
    def num_nodes(self) -> int:
        """Number of hosts."""
        return self._device_flags.num_nodes

    @property
    def num_devices(self) -> int:
        """Number of devices of this process."""
        return self._device_flags.num_devices

    @property
    def device_ids(self) -> list[int]:
        """Indices of the devices of this process."""
        strategy = self._device_flags.resolved
        return list(range(self.num_devices)) if strategy is None else [int(each.id) for each in strategy.devices]

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the first of all processes."""
        return self.global_rank == 0

    # --- what runs

    @property
    def lightning_module(self) -> Any:
        """The user's module, None before the first run."""
        return self._module

    @property
    def model(self) -> Any:
        """The user's module; nothing is wrapped around it."""
        return self._module

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers of a fit, empty otherwise."""
        return self._optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Any]) -> None:
        self._optimizers = optimizers

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        """The learning-rate schedulers of a fit with when they step."""
        return self._lr_scheduler_configs

    # --- places and loggers

    @property
    def default_root_dir(self) -> str:
        """Where everything goes that has no place of its own."""
        return self._default_root_dir

    @property
    def log_dir(self) -> str | None:
        """Where the first logger writes, or the default directory without loggers."""
        if not self.loggers:
            return self.default_root_dir
        first = self.loggers[0]
        known = any(cls.__name__ in ("TensorBoardLogger", "CSVLogger") for cls in type(first).__mro__)
        directory = first.log_dir if known else first.save_dir
        return None if directory is None else os.fspath(directory)

    @property
    def logger(self) -> Any:
        """The first logger, or None."""
        return traced_logger(self)

    @logger.setter
    def logger(self, logger: Any) -> None:
        self.loggers = [logger] if logger else []

    @property
    def loggers(self) -> list[Any]:
        """All loggers."""
        return traced_loggers(self)

    @loggers.setter
    def loggers(self, loggers: list[Any] | None) -> None:
        self._loggers = loggers or []

    # --- callbacks

    @property
    def early_stopping_callbacks(self) -> list[EarlyStopping]:
        """All EarlyStopping callbacks."""
        from jaxlightning.callbacks import EarlyStopping

        return [each for each in self.callbacks if isinstance(each, EarlyStopping)]

    @property
    def early_stopping_callback(self) -> EarlyStopping | None:
        """The first EarlyStopping callback, or None."""
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def checkpoint_callbacks(self) -> list[Checkpoint]:
        """All callbacks that write checkpoints."""
        from jaxlightning.callbacks import Checkpoint

        return [each for each in self.callbacks if isinstance(each, Checkpoint)]

    @property
    def checkpoint_callback(self) -> Checkpoint | None:
        """The first callback that writes checkpoints, or None."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def progress_bar_callback(self) -> ProgressBar | None:
        """The progress bar, or None."""
        from jaxlightning.callbacks import ProgressBar

        return next((each for each in self.callbacks if isinstance(each, ProgressBar)), None)

    # --- checkpoints

    @property
    def ckpt_path(self) -> Any:
        """The checkpoint that this run loaded; setting it makes it stay for the runs that follow."""
        return self._checkpoint_connector._ckpt_path

    @ckpt_path.setter
    def ckpt_path(self, path: Any) -> None:
        self._checkpoint_connector._ckpt_path = path
        self._checkpoint_connector._user_managed = bool(path)

    # --- state

    training = _stage_flag(RunningStage.TRAINING, "Whether training batches run; False during its validation.")
    testing = _stage_flag(RunningStage.TESTING, "Whether a test runs.")
    predicting = _stage_flag(RunningStage.PREDICTING, "Whether a prediction runs.")
    validating = _stage_flag(RunningStage.VALIDATING, "Whether a validation runs, inside `fit` or by itself.")
    sanity_checking = _stage_flag(RunningStage.SANITY_CHECKING, "Whether the sanity check runs.")

    @property
    def evaluating(self) -> bool:
        """Whether any evaluation runs."""
        return self.state.stage is not None and self.state.stage.evaluating

    @property
    def interrupted(self) -> bool:
        """Whether the last run was ended by an exception."""
        return self.state.status == TrainerStatus.INTERRUPTED

    @property
    def received_sigterm(self) -> bool:
        """Whether the process was asked to terminate."""
        return bool(self._signal_connector.received_sigterm)

    # --- counters and limits

    @property
    def global_step(self) -> Any:
        """Optimizer steps taken over the whole fit; inside a step a 0-d integer that follows it."""
        trace = current_trace()
        if trace is not None:
            return trace.scalars.global_step
        return self.fit_loop.epoch_loop.global_step

    @property
    def current_epoch(self) -> Any:
        """Epochs completed, which is the index of the one that runs; inside a step a 0-d integer that follows it."""
        trace = current_trace()
        if trace is not None:
            return trace.scalars.current_epoch
        return int(self.fit_loop.epoch_progress.current.completed)

    @property
    def max_epochs(self) -> int | None:
        """The most epochs, -1 for no limit, None until `fit` decides."""
        return self.fit_loop.max_epochs

    @property
    def min_epochs(self) -> int | None:
        """The fewest epochs."""
        return self.fit_loop.min_epochs

    @property
    def max_steps(self) -> int:
        """The most optimizer steps, -1 for no limit."""
        return self.fit_loop.max_steps

    @property
    def min_steps(self) -> int | None:
        """The fewest optimizer steps."""
        return self.fit_loop.min_steps

    @property
    def is_last_batch(self) -> bool:
        """Whether the present training batch is the last of its epoch."""
        return bool(self.fit_loop.epoch_loop.batch_progress.is_last_batch)

    # --- data

    @property
    def enable_validation(self) -> bool:
        """Whether a fit validates: there are loaders, a step and a limit above zero."""
        return (
            self.fit_loop.epoch_loop.val_loop.data_source.is_defined()
            and is_overridden("validation_step", self.lightning_module)
            and self.limit_val_batches > 0
        )

    @property
    def train_dataloader(self) -> Any:
        """The training loaders as they were given, None before they are needed."""
        return _loaders(self.fit_loop)

    @property
    def val_dataloaders(self) -> Any:
        """The validation loaders as they were given, None before they are needed."""
        found = _loaders(self.fit_loop.epoch_loop.val_loop)
        return _loaders(self.validate_loop) if found is None else found

    @property
    def test_dataloaders(self) -> Any:
        """The test loaders as they were given, None before they are needed."""
        return _loaders(self.test_loop)

    @property
    def predict_dataloaders(self) -> Any:
        """The prediction loaders as they were given, None before they are needed."""
        return _loaders(self.predict_loop)

    @property
    def num_training_batches(self) -> int | float:
        """Training batches in an epoch, infinity when unknown."""
        return self.fit_loop.max_batches

    @property
    def num_sanity_val_batches(self) -> list[int | float]:
        """Batches per loader in the sanity check."""
        batches = self.fit_loop.epoch_loop.val_loop.max_batches
        return [min(self.num_sanity_val_steps, each) for each in batches]

    @property
    def num_val_batches(self) -> list[int | float]:
        """Validation batches per loader."""
        if self.state.fn == TrainerFn.VALIDATING:
            return self.validate_loop.max_batches
        return self.fit_loop.epoch_loop.val_loop._max_batches

    @property
    def num_test_batches(self) -> list[int | float]:
        """Test batches per loader."""
        return self.test_loop.max_batches

    @property
    def num_predict_batches(self) -> list[int | float]:
        """Prediction batches per loader."""
        return self.predict_loop.max_batches

    @property
    def estimated_stepping_batches(self) -> int | float:
        """How many optimizer steps a fit will take; requests the train loader if need be.

        Infinity without any limit; `max_steps` for a loader without a length.
        """
        if self.max_epochs == -1:
            return math.inf if self.max_steps == -1 else self.max_steps
        if self.train_dataloader is None:
            rank_zero_info("Loading `train_dataloader` to estimate number of stepping batches.")
            self.fit_loop.setup_data()
        batches = self.num_training_batches
        if batches == math.inf:
            return self.max_steps
        steps = math.ceil(batches / self.accumulate_grad_batches) * max(self.max_epochs or 0, 1)
        return steps if self.max_steps == -1 else min(steps, self.max_steps)

    # --- metrics

    @property
    def callback_metrics(self) -> dict[str, Any]:
        """What callbacks may monitor; reading it fetches the values from the device."""
        return self._with_step("callback_metrics")

    @property
    def logged_metrics(self) -> dict[str, Any]:
        """What was sent to the loggers last; reading it fetches the values from the device."""
        return self._with_step("logged_metrics")

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """What the progress bar shows, as Python floats."""
        return self._with_step("progress_bar_metrics")

    def _with_step(self, kind: str) -> dict[str, Any]:
        """Metrics as they are now: in a step that runs eagerly with what it has logged so far."""
        known: dict[str, Any] = getattr(self._logger_connector, kind)
        return known if current_trace() is None else {**known, **logged_so_far(kind)}

    # --- loops

    @property
    def _evaluation_loop(self) -> EvaluationLoop:
        if self.state.fn == TrainerFn.VALIDATING:
            return self.validate_loop
        if self.state.fn == TrainerFn.TESTING:
            return self.test_loop
        return self.fit_loop.epoch_loop.val_loop


def _loaders(loop: Any) -> Any:
    return None if loop.feed is None else loop.feed.combined.iterables
