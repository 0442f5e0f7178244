"""`Trainer`: its flags and its parts.

Who owns what: `trainer_verbs` has fit, validate, test and predict, `trainer_flags` knows what a flag may be,
`trainer_devices` resolves devices when something runs, `trainer_callbacks` completes the list of callbacks,
`trainer_run` is the order of a run, `trainer_properties` answers questions, and `loops/` does the work.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from jaxlightning.checkpoint import CheckpointConnector
from jaxlightning.compile.checks import eager_refused, parse_checks
from jaxlightning.compile.fused_step import check_steps_per_dispatch
from jaxlightning.compile.persistent_cache import check_compilation_cache
from jaxlightning.compile.precision import Precision
from jaxlightning.loggers import DummyLogger, configure_loggers
from jaxlightning.loops.call import HookTable
from jaxlightning.loops.data_connector import DataConnector
from jaxlightning.loops.evaluation_loop import EvaluationLoop
from jaxlightning.loops.fit_loop import FitLoop
from jaxlightning.loops.interrupts import SignalConnector
from jaxlightning.loops.nonfinite import NonfiniteWatch
from jaxlightning.loops.prediction_loop import PredictionLoop
from jaxlightning.loops.resident import check_data_on_device
from jaxlightning.metrics import LoggerConnector
from jaxlightning.optim._nonfinite import check_mode
from jaxlightning.profilers import PassThroughProfiler
from jaxlightning.profilers._select import select_profiler
from jaxlightning.trainer_callbacks import default_root, make_callbacks
from jaxlightning.trainer_devices import DeviceFlags
from jaxlightning.trainer_flags import (
    batch_limit,
    check_barebones,
    check_clipping,
    check_pad_batches,
    check_prefetch_batches,
    check_unbuilt,
    check_vectorize,
    defaults_from_env,
    select_precision,
    set_normal_defaults,
    time_interval_seconds,
)
from jaxlightning.trainer_properties import TrainerProperties
from jaxlightning.trainer_run import seed_from
from jaxlightning.trainer_verbs import TrainerVerbs
from jaxlightning.utilities.exceptions import MisconfigurationException
from jaxlightning.utilities.rank_zero import rank_zero_info
from jaxlightning.utilities.states import RunningStage, TrainerFn, TrainerState
from jaxlightning.utilities.warnings import WarningCache


class Trainer(TrainerVerbs, TrainerProperties):
    """Runs a module: `fit`, `validate`, `test` and `predict`.

    Every flag may also come from the environment as `PL_TRAINER_<FLAG>`; an explicit argument wins. Making a Trainer
    starts no JAX backend. A value of a flag that is not built yet raises.

    Args:
        accelerator: "auto", "cpu", "gpu", "cuda" or "tpu".
        strategy: "auto", "ddp", or a `jaxlightning.parallel.Strategy`.
        devices: A number, a list of indices, or "auto": one on a CPU, all local ones on an accelerator.
        num_nodes: Number of hosts.
        precision: "32-true", "64-true", "16-true", "bf16-true", "16-mixed" or "bf16-mixed", or 64, 32, 16, "bf16".
        logger: True for TensorBoard, False for none, a logger or several.
        callbacks: A callback or a list of them.
        fast_dev_run: Run n batches of everything (True is 1), without loggers and checkpoints.
        max_epochs: The most epochs; -1 for no limit. Without any limit 1000.
        min_epochs: The fewest epochs before an early stop.
        max_steps: The most optimizer steps; -1 for no limit.
        min_steps: The fewest optimizer steps before an early stop.
        max_time: The most time, as "DD:HH:MM:SS", a timedelta or its arguments.
        limit_train_batches: Batches per epoch (int) or their fraction (float).
        limit_val_batches: The same for each validation loader.
        limit_test_batches: The same for each test loader.
        limit_predict_batches: The same for each prediction loader.
        overfit_batches: Train and validate on the same few batches, without shuffling.
        val_check_interval: Validate after this many batches (int), at this fraction of the epoch (float), or after this
            much time.
        check_val_every_n_epoch: Validate only in every n-th epoch; None to count batches over epochs.
        num_sanity_val_steps: Validation batches before training; -1 for all.
        log_every_n_steps: Send step metrics to the loggers after every n-th optimizer step.
        enable_checkpointing: Whether to save a checkpoint per epoch by default.
        enable_progress_bar: Whether to show a progress bar by default.
        enable_model_summary: Whether to print a summary by default.
        accumulate_grad_batches: Batches per optimizer step.
        gradient_clip_val: Clip gradients at this norm or value.
        gradient_clip_algorithm: "norm" or "value".
        deterministic: Accepted with a note.
        benchmark: Accepted with a note.
        inference_mode: Accepted with a note.
        use_distributed_sampler: Accepted with a note.
        profiler: "simple", "advanced", "jax", or a profiler.
        detect_anomaly: Raise at the first loss or gradient that is not finite; one device read per step.
        on_nonfinite: What becomes of an update whose loss or gradients are not finite: None (it is applied, as in
            Lightning), "skip", "warn", or "raise" at the next log point or end of an epoch. They are counted on the
            device and logged as `nonfinite_updates`.
        barebones: Switch off everything that costs time besides training.
        plugins: A precision policy of `jaxlightning.plugins`, in place of `precision`.
        sync_batchnorm: Accepted with a note.
        reload_dataloaders_every_n_epochs: Request the loaders anew every n epochs.
        default_root_dir: Where everything goes that has no place of its own; the working directory by default.
        enable_autolog_hparams: Whether to log hyper-parameters when a run starts.
        model_registry: Not built yet.
        jit: Compile the steps; False runs them eagerly, so that a breakpoint shows numbers.
        channels_last: Turn NCHW image leaves of batches into NHWC.
        vectorize: How torch DataLoaders over data in memory are read: "auto" indexes the arrays in one go where that
            gives the same bits, True raises where it cannot, False never does, "distribution" also replaces random
            crops and flips by versions that draw other numbers.
        pad_batches: Fill short batches up to one shape, so that the last batch compiles nothing new: True for the
            loader's batch size, a number for that many rows. Steps get a mask, `self.batch_mask`.
        steps_per_dispatch: How many training batches go to the device in one compiled call: 1, a number, or "auto"
            (up to 50, fewer for large batches, where that is at least 10 % faster on the first batches). Calls never
            cross a log point, validation, checkpoint, the end of an epoch or a Python decision that changes, and
            batches run one by one where a hook of yours runs per batch.
        data_on_device: Keep training data that is in arrays (`ArrayLoader`, what the fast path reads) on the device, so
            that steps get row numbers and gather the rows: "auto" on accelerators where it fits into a quarter of the
            memory, a float up to 1.0 where it fits into that part of any device's, True raises where it cannot, False
            never does. Batches are the same bits.
        prefetch_batches: Read this many batches ahead in a background thread and send them to the accelerator; for
            loaders that wait for files or decode images. Never beyond a `limit_*_batches`.
        checkify: JAX's run-time checks in every step, raised on the host: "nan", "div", "oob", "user", several of them
            with commas between, or True for all; one device read per step.
        compilation_cache: Keep compiled steps for the next start of the script: True in your cache directory (as the
            platform has it), a path in that folder, False not at all. JAX's own options and environment variables for
            its cache win, and are as before after each run.
        log_compiles: Report every compilation at INFO: why, how long it took, its memory and operations.
        seed: Seed of parameters and random keys; that of `seed_everything` by default, else 0.
        auto_resume: Let the first `fit` without `ckpt_path` continue the newest checkpoint below `default_root_dir`
            that is complete, in the loggers' directories of that run. Give every run a root directory of its own.

    Attributes:
        state: Status, verb and stage of the run; also `params`, `opt_state`, `variables` and `step`.
        should_stop: Set it to end training after the current batch.
        callbacks: The callbacks in the order in which they run.

    Raises:
        MisconfigurationException: For a value that makes no sense.
        NotImplementedError: For a value that is not built yet.
        ValueError: For an unknown name.
        TypeError: For an unknown flag.
    """

    @defaults_from_env
    def __init__(
        self,
        *,
        accelerator: str = "auto",
        strategy: Any = "auto",
        devices: list[int] | str | int = "auto",
        num_nodes: int = 1,
        precision: str | int | Precision | None = None,
        logger: Any | Iterable[Any] | bool | None = None,
        callbacks: list[Any] | Any | None = None,
        fast_dev_run: int | bool = False,
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int = -1,
        min_steps: int | None = None,
        max_time: str | timedelta | dict[str, int] | None = None,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        overfit_batches: int | float = 0.0,
        val_check_interval: int | float | str | timedelta | dict[str, int] | None = None,
        check_val_every_n_epoch: int | None = 1,
        num_sanity_val_steps: int | None = None,
        log_every_n_steps: int | None = None,
        enable_checkpointing: bool | None = None,
        enable_progress_bar: bool | None = None,
        enable_model_summary: bool | None = None,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
        deterministic: bool | str | None = None,
        benchmark: bool | None = None,
        inference_mode: bool = True,
        use_distributed_sampler: bool = True,
        profiler: Any | str | None = None,
        detect_anomaly: bool = False,
        on_nonfinite: str | None = None,
        barebones: bool = False,
        plugins: Any = None,
        sync_batchnorm: bool = False,
        reload_dataloaders_every_n_epochs: int = 0,
        default_root_dir: str | os.PathLike[str] | None = None,
        enable_autolog_hparams: bool = True,
        model_registry: str | None = None,
        jit: bool = True,
        channels_last: bool = False,
        vectorize: bool | str = "auto",
        pad_batches: bool | int = False,
        steps_per_dispatch: int | str = 1,
        data_on_device: bool | float | str = "auto",
        prefetch_batches: int = 0,
        compilation_cache: bool | str | os.PathLike[str] = True,
        log_compiles: bool = False,
        checkify: str | bool | None = None,
        seed: int | None = None,
        auto_resume: bool = False,
    ) -> None:
        flags = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        self.barebones = barebones
        if barebones:
            check_barebones(flags)
        else:
            set_normal_defaults(flags)
        check_unbuilt(flags)
        self._device_flags = DeviceFlags(accelerator, strategy, devices, num_nodes)
        self.precision_plugin = select_precision(precision, plugins)
        self.precision = self.precision_plugin.precision
        self.on_nonfinite = check_mode(on_nonfinite)
        self._default_root_dir = default_root(default_root_dir)
        self._jit, self.channels_last, self._log_compiles = jit, channels_last, log_compiles
        self._checkify = parse_checks(checkify)
        eager_refused(jit, self._checkify)
        self._seed_flag = seed
        self._compilation_cache = check_compilation_cache(compilation_cache)
        self._steps_per_dispatch = check_steps_per_dispatch(steps_per_dispatch)
        self._vectorize, self._pad_batches = check_vectorize(vectorize), check_pad_batches(pad_batches)
        self.auto_resume = bool(auto_resume)
        self._data_on_device = check_data_on_device(data_on_device)
        self._prefetch_batches = check_prefetch_batches(prefetch_batches)
        self._module: Any = None
        self._engine: Any = None
        self._optimizers: list[Any] = []
        self._lr_scheduler_configs: list[Any] = []
        self._plateau_seen: dict[int, Any] = {}
        self._nonfinite_watch: NonfiniteWatch | None = None
        self._warnings = WarningCache()
        self.datamodule: Any = None
        self.should_stop = False
        self.state = TrainerState()

        self._hooks = HookTable(self)
        self._data_connector = DataConnector(self)
        self._logger_connector = LoggerConnector(self)
        self._checkpoint_connector = CheckpointConnector(self)
        self._signal_connector = SignalConnector(self)

        self.fit_loop = FitLoop(self, min_epochs, max_epochs, min_steps, max_steps)
        self.validate_loop = EvaluationLoop(self, TrainerFn.VALIDATING, RunningStage.VALIDATING)
        self.test_loop = EvaluationLoop(self, TrainerFn.TESTING, RunningStage.TESTING)
        self.predict_loop = PredictionLoop(self)
        self.accumulate_grad_batches = accumulate_grad_batches

        self.callbacks: list[Any] = make_callbacks(
            callbacks,
            enable_checkpointing=flags["enable_checkpointing"],
            enable_progress_bar=flags["enable_progress_bar"],
            enable_model_summary=flags["enable_model_summary"],
            max_time=max_time,
        )
        self._check_data_flags(val_check_interval, check_val_every_n_epoch, reload_dataloaders_every_n_epochs)
        self.gradient_clip_algorithm = check_clipping(gradient_clip_val, gradient_clip_algorithm)
        self.gradient_clip_val = gradient_clip_val
        if flags["detect_anomaly"]:
            rank_zero_info(
                "You have turned on `Trainer(detect_anomaly=True)`. This will significantly slow down compute speed and"
                " is recommended only for model debugging."
            )
        self._detect_anomaly = bool(flags["detect_anomaly"])
        self.profiler = select_profiler(flags["profiler"])
        self._loggers = configure_loggers(flags["logger"], self.default_root_dir)
        self.log_every_n_steps = int(flags["log_every_n_steps"])
        self.enable_autolog_hparams = enable_autolog_hparams
        self._set_debugging_flags(flags)

    def _check_data_flags(self, val_check_interval: Any, check_val_every_n_epoch: Any, reload_every: Any) -> None:
        if check_val_every_n_epoch is not None and not isinstance(check_val_every_n_epoch, int):
            raise MisconfigurationException(
                f"`check_val_every_n_epoch` should be an integer, found {check_val_every_n_epoch!r}."
            )
        if check_val_every_n_epoch is None and isinstance(val_check_interval, float):
            raise MisconfigurationException(
                "`val_check_interval` should be an integer or a time-based duration (str 'DD:HH:MM:SS',"
                " datetime.timedelta, or dict kwargs for timedelta) when `check_val_every_n_epoch=None`."
            )
        if not isinstance(reload_every, int) or isinstance(reload_every, bool) or reload_every < 0:
            raise MisconfigurationException(
                f"`reload_dataloaders_every_n_epochs` should be an int >= 0, got {reload_every}."
            )
        self.check_val_every_n_epoch = check_val_every_n_epoch
        self.reload_dataloaders_every_n_epochs = reload_every

    def _set_debugging_flags(self, flags: dict[str, Any]) -> None:
        """Set limits and intervals; `fast_dev_run` and `overfit_batches` override them."""
        fast = flags["fast_dev_run"]
        if isinstance(fast, int) and fast < 0:
            raise MisconfigurationException(f"fast_dev_run={fast!r} is not a valid configuration. It should be >= 0.")
        self.fast_dev_run: int | bool = True if fast == 1 else fast
        self.overfit_batches = batch_limit(flags["overfit_batches"], "overfit_batches")
        self.val_check_batch: int | float | None = None
        self._val_check_time_interval: float | None = None
        self._last_val_time = 0.0
        self.val_check_interval: int | float = 1.0
        kinds = ("train", "val", "test", "predict")
        if fast:
            limits: dict[str, int | float] = dict.fromkeys(kinds, int(fast))
            self.fit_loop.epoch_loop.max_steps = int(fast)
            self.fit_loop.max_epochs = 1
            self.num_sanity_val_steps: int | float = 0
            self.check_val_every_n_epoch = 1
            self._loggers = [DummyLogger()] if self._loggers else []
            rank_zero_info(
                f"Running in `fast_dev_run` mode: will run the requested loop using {int(fast)} batch(es)."
                " Logging and checkpointing is suppressed."
            )
        else:
            limits = {kind: batch_limit(flags[f"limit_{kind}_batches"], f"limit_{kind}_batches") for kind in kinds}
            sanity = flags["num_sanity_val_steps"]
            self.num_sanity_val_steps = float("inf") if sanity == -1 else sanity
            interval = flags["val_check_interval"]
            if isinstance(interval, (str, dict, timedelta)):
                self._val_check_time_interval = time_interval_seconds(interval)
            else:
                self.val_check_interval = batch_limit(interval, "val_check_interval")
                if self.val_check_interval == 0:
                    raise MisconfigurationException(
                        f"`Trainer(val_check_interval={interval!r})` would validate after every 0 batches. Use"
                        " `limit_val_batches=0` to switch validation off, or an interval of at least 1 batch."
                    )
        if self.overfit_batches > 0:
            limits["train"] = limits["val"] = self.overfit_batches
        self.limit_train_batches, self.limit_val_batches = limits["train"], limits["val"]
        self.limit_test_batches, self.limit_predict_batches = limits["test"], limits["predict"]

    # --- for the parts

    def _begin_run(self, model: Any) -> None:
        """Forget what belongs to the run before."""
        self._module = model
        self._warnings.clear()
        self._optimizers, self._lr_scheduler_configs = [], []
        self._hooks.reset()

    @property
    def _active_profiler(self) -> Any:
        """The profiler, None when it records nothing."""
        return None if isinstance(self.profiler, PassThroughProfiler) else self.profiler

    def _seed(self) -> int:
        return seed_from(self._seed_flag)

    def _teardown(self) -> None:
        """Close what the run opened; the users' `teardown` hooks come later and only after a success."""
        try:
            # Not only the loop that runs now: a failing validation leaves the iterator of training open.
            loops = {
                TrainerFn.FITTING: self.fit_loop,
                TrainerFn.VALIDATING: self.validate_loop,
                TrainerFn.TESTING: self.test_loop,
                TrainerFn.PREDICTING: self.predict_loop,
            }
            if self.state.fn is not None:
                loops[self.state.fn].teardown()
            self._logger_connector.teardown()
            self._checkpoint_connector.wait()
            if self._engine is not None:
                self._engine.detach()
        finally:
            self._signal_connector.teardown()

    # --- for users

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the first process of every host."""
        if self.local_rank == 0:
            print(*args, **kwargs)

    def save_checkpoint(
        self, filepath: str | os.PathLike[str], weights_only: bool | None = None, storage_options: Any = None
    ) -> None:
        """Save a checkpoint now.

        Args:
            filepath: Where to, usually ending in `.ckpt`.
            weights_only: Leave out optimizers, schedulers and callbacks.
            storage_options: For the file system of a path with a scheme, such as `s3://`, as fsspec takes them.

        Raises:
            AttributeError: Before a model was attached.
            TypeError: For storage options of a local path.
        """
        if self._module is None:
            raise AttributeError(
                "Saving a checkpoint is only possible if a model is attached to the Trainer. Did you call"
                " `Trainer.save_checkpoint()` before calling `Trainer.{fit,validate,test,predict}`?"
            )
        self._logger_connector.flush()
        profiler = self._active_profiler
        if profiler is None:
            self._checkpoint_connector.save_checkpoint(filepath, weights_only, storage_options)
        else:
            with profiler.profile("save_checkpoint"):
                self._checkpoint_connector.save_checkpoint(filepath, weights_only, storage_options)
