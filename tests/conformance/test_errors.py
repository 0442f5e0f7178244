"""ER10: the recorded refusals of callbacks, steps and checkpoints that no other file compares."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import pytest
from support.tracing import TinyModule, golden

import jaxlightning as pl
from jaxlightning.callbacks import (
    BasePredictionWriter,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    Timer,
)

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def T(**flags: Any) -> pl.Trainer:
    return pl.Trainer(**{"logger": False, "enable_checkpointing": False, "max_epochs": 1, **QUIET, **flags})


def make(**methods: Any) -> Any:
    return type("X", (TinyModule,), methods)()


def returning(value: Any) -> Any:
    return make(training_step=lambda self, batch, batch_idx: value(self, batch))


class Bigger(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Dense(2)

    def _loss(self, batch: Any) -> Any:
        return super()._loss(batch) + (self.extra(batch[0]) ** 2).mean()


def saved(root: Path) -> Path:
    trainer = T()
    trainer.fit(TinyModule())
    trainer.save_checkpoint(root / "a.ckpt")
    return root / "a.ckpt"


def plateau(**options: Any) -> Any:
    def configure(module: Any) -> Any:
        optimizer = pl.optim.SGD(module.parameters(), lr=0.1)
        scheduler = pl.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "nope", **options}}

    return configure


class Primitive(pl.LightningModule):
    def __init__(self, x: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters(x)


def monitored(root: Path, val: bool) -> Any:
    callback = ModelCheckpoint(root / "m", monitor="nope")
    flags = {} if val else {"limit_val_batches": 0}
    T(callbacks=[callback], enable_checkpointing=True, **flags).fit(TinyModule())
    return [each.name for each in (root / "m").glob("*")]


RAISES: dict[str, Callable[[Path], Any]] = {
    "step_returns_str": lambda d: T().fit(returning(lambda self, batch: "x")),
    "step_returns_float": lambda d: T().fit(returning(lambda self, batch: 1.0)),
    "step_returns_dict_without_loss": lambda d: T().fit(returning(lambda self, batch: {"a": self._loss(batch)})),
    "es_bad_mode": lambda d: EarlyStopping("a", mode="x"),
    "mc_bad_mode": lambda d: ModelCheckpoint(monitor="a", mode="x"),
    "mc_topk_-2": lambda d: ModelCheckpoint(save_top_k=-2),
    "mc_topk_3_no_monitor": lambda d: ModelCheckpoint(save_top_k=3),
    "mc_every_n_epochs_-1": lambda d: ModelCheckpoint(every_n_epochs=-1),
    "mc_every_n_train_steps_-1": lambda d: ModelCheckpoint(every_n_train_steps=-1),
    "mc_two_triggers": lambda d: ModelCheckpoint(every_n_train_steps=1, every_n_epochs=1),
    "mc_three_triggers": lambda d: ModelCheckpoint(
        every_n_train_steps=1, train_time_interval=__import__("datetime").timedelta(days=1)
    ),
    "mc_monitor_missing_with_val": lambda d: monitored(d, True),
    "mc_link_remote": lambda d: T(
        callbacks=[ModelCheckpoint("memory://x", save_last="link")], enable_checkpointing=True
    ).fit(TinyModule()),
    "lr_monitor_no_logger": lambda d: T(callbacks=[LearningRateMonitor()]).fit(TinyModule()),
    "lr_monitor_bad_interval": lambda d: LearningRateMonitor("x"),
    "timer_bad_duration": lambda d: Timer("1:2"),
    "timer_bad_interval": lambda d: Timer("00:00:00:01", interval="x"),
    "prediction_writer_bad_interval": lambda d: BasePredictionWriter("x"),
    "load_strict_missing_keys": lambda d: Bigger.load_from_checkpoint(saved(d)),
    "plateau_missing_metric_strict": lambda d: T().fit(make(configure_optimizers=plateau())),
    "load_from_instance": lambda d: TinyModule().load_from_checkpoint("x"),
    "save_hparams_primitive": lambda d: Primitive(1),
}
# Where the recorded words name something of torch or of a file, ours name what is meant here.
OUR_WORDS = {
    "es_bad_mode": "`mode` can be",
    "mc_bad_mode": "`mode` can be",
    "mc_monitor_missing_with_val": "`ModelCheckpoint(monitor='nope')` could not find the monitored key",
    "load_strict_missing_keys": "extra",
    "load_from_instance": "load_from_checkpoint` cannot be called on an instance",
    "lr_monitor_bad_interval": "`step` or `epoch` or `None`",
    "step_returns_str": "training_step",
    "step_returns_float": "training_step",
    "step_returns_dict_without_loss": "loss",
    "save_hparams_primitive": "not allowed",
}


@pytest.mark.catalogue("ER10", "LM05", "TM01", "ES08", "HP02", "LM03", "MC11")
@pytest.mark.catalogue("OP06", adaptation="the type of the return value is known when the step is traced")
@pytest.mark.filterwarnings("ignore::jaxlightning.utilities.warnings.PossibleUserWarning")
@pytest.mark.parametrize("name", RAISES)
def test_the_same_is_refused_as_in_lightning(name: str, tmp_path: Path) -> None:
    theirs = golden("errors")[name]
    with pytest.raises(BaseException) as caught:
        RAISES[name](tmp_path)
    error = caught.value
    assert theirs["type"] in [cls.__name__ for cls in type(error).__mro__], repr(error)
    if name in OUR_WORDS:
        assert OUR_WORDS[name] in str(error)
    else:
        assert str(error).startswith(theirs["message"].rstrip(". ")), str(error)


ACCEPTED: dict[str, Callable[[Path], Any]] = {
    "step_returns_nan_loss": lambda d: T().fit(returning(lambda self, batch: self._loss(batch) * float("nan"))),
    "step_extra_dict_keys_passed_to_batch_end": lambda d: T(limit_val_batches=0).fit(
        returning(lambda self, batch: {"loss": self._loss(batch), "extra": self._loss(batch)})
    ),
    "plateau_missing_metric_not_strict": lambda d: T().fit(make(configure_optimizers=plateau(strict=False))),
    "mc_monitor_missing_no_val": lambda d: monitored(d, False),
    "precision_values": lambda d: {
        str(value): T(precision=value).precision
        for value in (None, 32, "32-true", 64, "64-true", "bf16", "bf16-mixed", "bf16-true")
    },
    "barebones_log_warns": lambda d: pl.Trainer(barebones=True, accelerator="cpu", max_epochs=1).fit(
        make(training_step=lambda self, batch, batch_idx: (self.log("a", 1.0), self._loss(batch))[1])
    ),
    "load_strict_False": lambda d: type(Bigger.load_from_checkpoint(saved(d), strict=False)).__name__,
}
OUR_RESULT = {"load_strict_False": "Bigger"}


@pytest.mark.catalogue("ER10", "OP09", "TF35")
@pytest.mark.parametrize("name", ACCEPTED)
def test_the_same_is_accepted_as_in_lightning_with_the_same_kinds_of_warnings(name: str, tmp_path: Path) -> None:
    theirs = golden("errors")[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = ACCEPTED[name](tmp_path)
    assert result == OUR_RESULT.get(name, theirs["result"])
    ours = {each.category.__name__ for each in caught}
    assert {text.partition(":")[0] for text in theirs["warnings"]} <= ours


# What Lightning refuses because torch cannot differentiate it is a gradient of zero here (OP08).
ZERO_GRADIENT = "step_returns_tensor_no_grad"


@pytest.mark.catalogue("OP08", adaptation="a constant loss has zero gradients")
def test_a_loss_without_parameters_has_zero_gradients() -> None:
    assert golden("errors")[ZERO_GRADIENT]["type"] == "RuntimeError"
    module = returning(lambda self, batch: batch[0].mean() + 0 * self._loss(batch))
    T(limit_val_batches=0).fit(module)
