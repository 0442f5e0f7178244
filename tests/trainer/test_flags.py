"""Combinations of flags: counters, limits and the moments of validation, against what Lightning recorded."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from support.tracing import TinyModule, golden, loader

import jaxlightning as pl
from jaxlightning.callbacks import EarlyStopping, GradientAccumulationScheduler, Timer

pytestmark = pytest.mark.usefixtures("compiled_once")

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "logger": False,
    "enable_checkpointing": False,
}


class Unsized:
    """A loader without a length."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Any:
        return iter(loader(self.n))


class Model(TinyModule):
    def __init__(
        self, n_train: int = 20, n_val: int = 8, es: Any = None, iterable: bool = False, **options: Any
    ) -> None:
        super().__init__(n_train=n_train, n_val=n_val)
        self.es, self.iterable = es, iterable
        self.stop_at: Any = options.get("stop_at")
        self.minus_one: Any = options.get("minus_one")
        self.none_at: Any = options.get("none_at", ())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        # A step is compiled, so a stop that Lightning's users ask for inside it is asked for here.
        if self.stop_at is not None and (self.current_epoch, batch_idx) == self.stop_at:
            self.trainer.should_stop = True
        return -1 if self.minus_one is not None and batch_idx == self.minus_one else None

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        self.log("train_loss", 1.0, on_step=True, on_epoch=True)
        if self.none_at and any(batch_idx == index for index in self.none_at):
            return None
        return self._loss(batch)

    def validation_step(self, batch: Any, batch_idx: Any) -> None:
        self._loss(batch)  # so that the sanity check makes the variables
        self.log("val_loss", 1.0 if self.es is None else self.es)

    def train_dataloader(self) -> Any:
        return Unsized(self.n_train) if self.iterable else loader(self.n_train)


class Recorder(pl.Callback):
    def __init__(self) -> None:
        self.train: list[tuple[int, int]] = []
        self.steps: list[int] = []
        self.val: list[dict[str, Any]] = []
        self.ends: list[dict[str, Any]] = []
        self.sanity = 0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.train.append((trainer.current_epoch, batch_idx))
        self.steps.append(trainer.global_step)

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            self.val.append(
                {
                    "epoch": trainer.current_epoch,
                    "batch_idx": trainer.fit_loop.batch_idx,
                    "global_step": trainer.global_step,
                    "batches": None,
                }
            )

    def on_validation_batch_end(self, trainer: Any, module: Any, *args: Any, dataloader_idx: int = 0) -> None:
        if trainer.sanity_checking:
            self.sanity += 1
        else:
            self.val[-1]["batches"] = args[-1] + 1

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.ends.append(
            {"epoch": trainer.current_epoch, "global_step": trainer.global_step, "is_last_batch": trainer.is_last_batch}
        )


def jsonable(value: Any) -> Any:
    if isinstance(value, float) and math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if isinstance(value, (list, tuple)):
        return [jsonable(each) for each in value]
    return value


LIMITS = [
    "max_epochs",
    "min_epochs",
    "max_steps",
    "min_steps",
    "limit_train_batches",
    "limit_val_batches",
    "num_sanity_val_steps",
    "val_check_interval",
    "check_val_every_n_epoch",
    "overfit_batches",
    "fast_dev_run",
    "accumulate_grad_batches",
]


def run(
    root: Path, model: dict[str, Any] | None = None, cbs: Any = tuple, refit: bool = False, **flags: Any
) -> dict[str, Any]:
    recorder = Recorder()
    callbacks = list(cbs())
    found: dict[str, Any] = {}
    try:
        trainer = pl.Trainer(default_root_dir=root, callbacks=[recorder, *callbacks], **QUIET, **flags)
        found["limits_before_fit"] = {name: jsonable(getattr(trainer, name)) for name in LIMITS}
        module = Model(**(model or {}))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(module)
            if refit:
                trainer.fit(module)
        found["warnings"] = sorted({str(each.message)[:140] for each in caught})
        found |= {
            "global_step": trainer.global_step,
            "current_epoch": trainer.current_epoch,
            "num_training_batches": jsonable(trainer.num_training_batches),
            "num_val_batches": jsonable(trainer.num_val_batches),
            "num_sanity_val_batches": jsonable(trainer.num_sanity_val_batches),
            "val_check_batch": jsonable(trainer.val_check_batch),
            "callback_metrics": sorted(trainer.callback_metrics),
            "logged_metrics": sorted(trainer.logged_metrics),
            "should_stop": trainer.should_stop,
            "is_last_batch": trainer.is_last_batch,
            "status": trainer.state.status.value,
            "fn": trainer.state.fn and trainer.state.fn.value,
            "stage": trainer.state.stage and trainer.state.stage.value,
            "max_epochs_after": trainer.max_epochs,
            "max_steps_after": trainer.max_steps,
            "train_batches_per_epoch": [
                sum(1 for epoch, _ in recorder.train if epoch == each)
                for each in sorted({epoch for epoch, _ in recorder.train})
            ],
            "n_train_batches_total": len(recorder.train),
            "sanity_batches": recorder.sanity,
            "validations": recorder.val,
            "epoch_ends": recorder.ends,
            "global_step_after_each_batch_first12": recorder.steps[:12],
        }
        for each in callbacks:
            if isinstance(each, EarlyStopping):
                found["early_stopping"] = {
                    "stopped_epoch": each.stopped_epoch,
                    "wait_count": each.wait_count,
                    "reason": each.stopping_reason.name,
                }
    except Exception as error:
        found["exception"] = {"type": type(error).__name__, "message": str(error)[:300]}
    return found


def stopping(*args: Any, **kwargs: Any) -> Callable[[], list[Any]]:
    return lambda: [EarlyStopping(*args, **kwargs)]


CASES: dict[str, dict[str, Any]] = {
    "epochs2": {"max_epochs": 2},
    "max_steps_25": {"max_steps": 25},
    "max_steps_20_exact_epoch_boundary": {"max_steps": 20},
    "max_steps_25_max_epochs_2": {"max_steps": 25, "max_epochs": 2},
    "max_steps_5_acc_2": {"max_steps": 5, "accumulate_grad_batches": 2},
    "max_steps_7_acc_3": {"max_steps": 7, "accumulate_grad_batches": 3},
    "max_steps_0": {"max_steps": 0},
    "max_epochs_0": {"max_epochs": 0},
    "acc3_remainder": {"max_epochs": 2, "accumulate_grad_batches": 3},
    "acc20_gt_epoch": {"max_epochs": 2, "accumulate_grad_batches": 20},
    "limit_train_0.5": {"max_epochs": 2, "limit_train_batches": 0.5},
    "limit_train_0.25_floor": {"max_epochs": 1, "limit_train_batches": 0.25},
    "limit_train_0.05_too_small": {"max_epochs": 1, "limit_train_batches": 0.05},
    "limit_train_3": {"max_epochs": 2, "limit_train_batches": 3},
    "limit_train_100": {"max_epochs": 1, "limit_train_batches": 100},
    "limit_train_0": {"max_epochs": 1, "limit_train_batches": 0},
    "limit_train_0.0": {"max_epochs": 1, "limit_train_batches": 0.0},
    "limit_train_1": {"max_epochs": 1, "limit_train_batches": 1},
    "limit_train_1.0": {"max_epochs": 1, "limit_train_batches": 1.0},
    "limit_train_1.5_invalid": {"max_epochs": 1, "limit_train_batches": 1.5},
    "limit_val_0.5": {"max_epochs": 1, "limit_val_batches": 0.5},
    "limit_val_0": {"max_epochs": 1, "limit_val_batches": 0},
    "limit_val_1": {"max_epochs": 1, "limit_val_batches": 1},
    "limit_val_0.1_too_small": {"max_epochs": 1, "limit_val_batches": 0.1},
    "val_check_interval_0.5": {"max_epochs": 2, "val_check_interval": 0.5},
    "val_check_interval_0.3": {"max_epochs": 2, "val_check_interval": 0.3},
    "val_check_interval_0.01": {"max_epochs": 1, "val_check_interval": 0.01},
    "val_check_interval_4": {"max_epochs": 2, "val_check_interval": 4},
    "val_check_interval_10": {"max_epochs": 2, "val_check_interval": 10},
    "val_check_interval_11_too_big": {"max_epochs": 2, "val_check_interval": 11},
    "val_check_interval_7_no_epoch": {"max_epochs": 3, "val_check_interval": 7, "check_val_every_n_epoch": None},
    "val_check_interval_25_no_epoch": {"max_epochs": 3, "val_check_interval": 25, "check_val_every_n_epoch": None},
    "val_check_interval_0.5_no_epoch_err": {
        "max_epochs": 3,
        "val_check_interval": 0.5,
        "check_val_every_n_epoch": None,
    },
    "check_val_none_alone": {"max_epochs": 2, "check_val_every_n_epoch": None},
    "val_check_interval_4_acc3": {"max_epochs": 1, "val_check_interval": 4, "accumulate_grad_batches": 3},
    "val_check_interval_1": {"max_epochs": 1, "val_check_interval": 1},
    "check_val_2": {"max_epochs": 5, "check_val_every_n_epoch": 2},
    "check_val_2_interval_0.5": {"max_epochs": 4, "check_val_every_n_epoch": 2, "val_check_interval": 0.5},
    "check_val_1.5_err": {"max_epochs": 2, "check_val_every_n_epoch": 1.5},
    "check_val_10_max5": {"max_epochs": 5, "check_val_every_n_epoch": 10},
    "fast_dev_run_True": {"fast_dev_run": True},
    "fast_dev_run_3": {"fast_dev_run": 3},
    "fast_dev_run_3_acc2": {"fast_dev_run": 3, "accumulate_grad_batches": 2},
    "fast_dev_run_-1": {"fast_dev_run": -1},
    "fast_dev_run_0": {"fast_dev_run": 0, "max_epochs": 1},
    "fast_dev_run_overrides_max": {"fast_dev_run": 2, "max_epochs": 7, "max_steps": 99, "limit_train_batches": 1},
    "overfit_0.2": {"max_epochs": 2, "overfit_batches": 0.2},
    "overfit_3": {"max_epochs": 2, "overfit_batches": 3},
    "overfit_0.5_val": {"max_epochs": 1, "overfit_batches": 0.5},
    "sanity_0": {"max_epochs": 1, "num_sanity_val_steps": 0},
    "sanity_1": {"max_epochs": 1, "num_sanity_val_steps": 1},
    "sanity_-1": {"max_epochs": 1, "num_sanity_val_steps": -1},
    "sanity_100": {"max_epochs": 1, "num_sanity_val_steps": 100},
    "min_epochs_3_early_stop": {"cbs": stopping("val_loss", patience=1), "max_epochs": 8, "min_epochs": 3},
    "early_stop_patience1": {"cbs": stopping("val_loss", patience=1), "max_epochs": 8},
    "early_stop_patience0": {"cbs": stopping("val_loss", patience=0), "max_epochs": 8},
    "min_steps_35_early_stop": {"cbs": stopping("val_loss", patience=1), "max_epochs": 8, "min_steps": 35},
    "min_epochs_3_min_steps_25": {
        "cbs": stopping("val_loss", patience=1),
        "max_epochs": 8,
        "min_epochs": 3,
        "min_steps": 25,
    },
    "early_stop_val_check_0.5": {"cbs": stopping("val_loss", patience=1), "max_epochs": 8, "val_check_interval": 0.5},
    "early_stop_train_metric": {
        "cbs": stopping("train_loss_epoch", patience=2),
        "max_epochs": 8,
        "limit_val_batches": 0,
    },
    "early_stop_check_val_2": {
        "cbs": stopping("val_loss", patience=1),
        "max_epochs": 12,
        "check_val_every_n_epoch": 2,
    },
    "early_stop_nan": {"model": {"es": math.nan}, "cbs": stopping("val_loss", patience=5), "max_epochs": 8},
    "early_stop_threshold": {"cbs": stopping("val_loss", patience=5, stopping_threshold=2.0), "max_epochs": 8},
    "early_stop_missing_strict": {"cbs": stopping("nope"), "max_epochs": 3},
    "early_stop_missing_not_strict": {"cbs": stopping("nope", strict=False), "max_epochs": 2},
    "should_stop_mid_epoch": {"model": {"stop_at": (1, 3)}, "max_epochs": 5},
    "should_stop_mid_epoch_min_epochs": {"model": {"stop_at": (0, 3)}, "max_epochs": 5, "min_epochs": 2},
    "should_stop_mid_epoch_min_steps": {"model": {"stop_at": (0, 3)}, "max_epochs": 5, "min_steps": 7},
    "min_steps_gt_max": {"max_epochs": 1, "min_steps": 50},
    "min_epochs_gt_max": {"max_epochs": 1, "min_epochs": 5},
    "on_train_batch_start_minus1": {"model": {"minus_one": 4}, "max_epochs": 2},
    "on_train_batch_start_minus1_first": {"model": {"minus_one": 0}, "max_epochs": 2},
    "minus1_acc3": {"model": {"minus_one": 4}, "max_epochs": 2, "accumulate_grad_batches": 3},
    # Which batches return None is decided by Python numbers, which a step has when it is not compiled.
    "training_step_returns_none": {"model": {"none_at": (1, 3)}, "max_epochs": 1, "jit": False},
    "training_step_returns_none_acc2": {
        "model": {"none_at": (1, 3)},
        "max_epochs": 1,
        "accumulate_grad_batches": 2,
        "jit": False,
    },
    "iterable_no_len": {"model": {"iterable": True}, "max_epochs": 2},
    "iterable_no_len_acc3": {"model": {"iterable": True}, "max_epochs": 2, "accumulate_grad_batches": 3},
    "iterable_val_interval_0.5_err": {"model": {"iterable": True}, "max_epochs": 1, "val_check_interval": 0.5},
    "iterable_val_interval_4": {"model": {"iterable": True}, "max_epochs": 2, "val_check_interval": 4},
    "iterable_limit_0.5_err": {"model": {"iterable": True}, "max_epochs": 1, "limit_train_batches": 0.5},
    "iterable_limit_4": {"model": {"iterable": True}, "max_epochs": 2, "limit_train_batches": 4},
    "iterable_max_steps_13": {"model": {"iterable": True}, "max_steps": 13},
    "accumulation_scheduler": {"cbs": lambda: [GradientAccumulationScheduler({0: 1, 1: 4, 3: 2})], "max_epochs": 5},
    "refit_same_trainer_max_epochs": {"max_epochs": 2, "refit": True},
    "refit_same_trainer_max_steps": {"max_steps": 13, "refit": True},
    "timer_zero": {"cbs": lambda: [Timer(timedelta(0))], "max_epochs": 3},
    "max_time_large": {"max_time": {"hours": 1}, "max_epochs": 1},
    "max_time_only_sets_max_epochs": {"max_time": "00:00:00:00"},
    "max_epochs_-1_max_steps_12": {"max_epochs": -1, "max_steps": 12},
    "max_epochs_-2_err": {"max_epochs": -2},
    "max_steps_-2_err": {"max_steps": -2},
    "empty_train_loader": {"model": {"n_train": 0}, "max_epochs": 2},
    "empty_val_loader": {"model": {"n_val": 0}, "max_epochs": 1},
    "reload_every_1": {"max_epochs": 2, "reload_dataloaders_every_n_epochs": 1},
}
NOT_COMPARED = {
    # Our warnings name our loader classes; what matters about them has tests of its own.
    "warnings",
}
# The message names the user's loader class, or offers our way out besides Lightning's.
OTHER_WORDS = {"early_stop_missing_strict"}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.catalogue(
    "TF03",
    "TF04",
    "TF05",
    "TF06",
    "TF07",
    "TF08",
    "TF09",
    "TF10",
    "TF11",
    "TF12",
    "TF13",
    "TF14",
    "TF15",
    "TF16",
    "TF17",
    "TF18",
    "TF20",
    "TF22",
    "TF23",
    "TF24",
    "TF27",
    "TF28",
)
@pytest.mark.catalogue(
    "LP05",
    "LP06",
    "LP08",
    "LP11",
    "LP12",
    "LP16",
    "LP17",
    "LP19",
    "LP20",
    "GA03",
    "GA04",
    "GA05",
    "ES01",
    "ES03",
    "ES04",
    "ES05",
    "ES06",
    "ES07",
)
@pytest.mark.catalogue(
    "LP04", adaptation="a step that skips for every batch alike; a choice by Python numbers needs jit=False"
)
@pytest.mark.catalogue("LP07", adaptation="should_stop is set by hooks of the host, a step being compiled")
@pytest.mark.catalogue("LP14", adaptation="gradients of an unfinished window are dropped where the next one starts")
@pytest.mark.catalogue("GA01", adaptation="our own accumulator, with a step that only adds and one that applies")
@pytest.mark.catalogue("GA06", adaptation="the divisor is an argument of the compiled step")
@pytest.mark.catalogue(
    "TM02", adaptation="the timer stops the run where Lightning's does; how it waits has its own test"
)
def test_flags_do_what_they_do_in_lightning(name: str, tmp_path: Path) -> None:
    theirs = golden("flags")[name]
    ours = run(tmp_path, **CASES[name])
    if "exception" in theirs:
        assert ours["exception"]["type"] == theirs["exception"]["type"]
        if name not in OTHER_WORDS:
            assert ours["exception"]["message"] == theirs["exception"]["message"]
        return
    assert "exception" not in ours, ours["exception"]
    if "early_stopping" in theirs:
        theirs["early_stopping"].pop("best")
    for key in theirs.keys() - NOT_COMPARED - {"trainer", "model"}:
        assert ours[key] == theirs[key], key


def test_every_recorded_combination_is_compared() -> None:
    # DIFFERENCES, TF21: an interval of 0 has a clear error.
    assert golden("flags").keys() - CASES.keys() == {"val_check_interval_0"}


@pytest.mark.catalogue("TF21")
def test_a_validation_interval_of_zero_is_refused(tmp_path: Path) -> None:
    with pytest.raises(pl.utilities.exceptions.MisconfigurationException, match="val_check_interval=0"):
        pl.Trainer(val_check_interval=0, **QUIET)
