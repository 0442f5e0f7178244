"""What is refused, with which exception and which words, against what Lightning recorded."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import numpy as np
import pytest
from support.tracing import TinyModule, golden, loader

import jaxlightning as pl
from jaxlightning.callbacks import EarlyStopping, GradientAccumulationScheduler, ModelCheckpoint, TQDMProgressBar
from jaxlightning.utilities.combined_loader import CombinedLoader
from jaxlightning.utilities.exceptions import MisconfigurationException

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def T(**flags: Any) -> pl.Trainer:
    return pl.Trainer(**{"logger": False, "enable_checkpointing": False, "max_epochs": 1, **QUIET, **flags})


def without(*names: str) -> Any:
    """A module built from scratch that lacks some methods."""
    space = {k: v for k, v in vars(TinyModule).items() if k not in names and not k.startswith("__")}

    def init(self: Any) -> None:
        pl.LightningModule.__init__(self)
        self.layer, self.lr_value = nn.Dense(2), 0.1
        self.n_train = self.n_val = self.n_test = self.n_pred = 4

    return type("Partial", (pl.LightningModule,), {**space, "__init__": init})()


def make(**methods: Any) -> Any:
    return type("X", (TinyModule,), methods)()


def optimizer(returned: Callable[[Any], Any]) -> Any:
    return make(configure_optimizers=returned)


def sgd(module: Any) -> Any:
    return pl.optim.SGD(module.parameters(), lr=0.1)


class Manual(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def fit_then(trainer: pl.Trainer, **kwargs: Any) -> Any:
    trainer.fit(TinyModule())
    return trainer.test(**kwargs)


def interrupt(*args: Any) -> Any:
    raise KeyboardInterrupt


def resume_lower(root: Path) -> None:
    trainer = T(max_epochs=3)
    trainer.fit(TinyModule())
    trainer.save_checkpoint("a.ckpt")
    T(max_epochs=1).fit(TinyModule(), ckpt_path="a.ckpt")


def resume_weights_only(root: Path) -> None:
    trainer = T()
    trainer.fit(TinyModule())
    trainer.save_checkpoint("a.ckpt", weights_only=True)
    T(max_epochs=2).fit(TinyModule(), ckpt_path="a.ckpt")


def clips_otherwise(
    self: Any, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
) -> None:
    self.clip_gradients(optimizer, gradient_clip_val=0.3)


def needs_index(self: Any, batch: Any, batch_idx: Any, dataloader_idx: Any) -> None:
    return None


def takes_index(self: Any, batch: Any, batch_idx: Any, dataloader_idx: Any = 0) -> None:
    return None


def step_with_optimizer_idx(self: Any, batch: Any, batch_idx: Any, optimizer_idx: Any) -> Any:
    return self._loss(batch)


RAISES: dict[str, Callable[[Path], Any]] = {
    "fit_no_training_step": lambda d: T().fit(without("training_step")),
    "fit_no_configure_optimizers": lambda d: T().fit(without("configure_optimizers")),
    "fit_no_train_dataloader": lambda d: T().fit(without("train_dataloader")),
    "validate_no_step": lambda d: T().validate(without("validation_step")),
    "validate_no_loader": lambda d: T().validate(without("val_dataloader")),
    "test_no_step": lambda d: T().test(without("test_step")),
    "predict_no_forward_no_step": lambda d: T().predict(without("predict_step", "forward")),
    "predict_no_loader": lambda d: T().predict(without("predict_dataloader")),
    "fit_not_a_module": lambda d: T().fit(nn.Dense(2)),
    "validate_without_model": lambda d: T().validate(),
    "test_without_model": lambda d: T().test(),
    "predict_without_model": lambda d: T().predict(),
    "fit_loader_and_datamodule": lambda d: T().fit(TinyModule(), loader(4), datamodule=pl.LightningDataModule()),
    "validate_loader_and_datamodule": lambda d: T().validate(
        TinyModule(), loader(4), datamodule=pl.LightningDataModule()
    ),
    "fit_non_iterable": lambda d: T().fit(TinyModule(), 5),
    "fit_loader_returns_None": lambda d: T().fit(make(train_dataloader=lambda self: None)),
    "legacy_training_epoch_end": lambda d: T().fit(make(training_epoch_end=lambda self, outputs: None)),
    "legacy_validation_epoch_end": lambda d: T().validate(make(validation_epoch_end=lambda self, outputs: None)),
    "two_optimizers_automatic": lambda d: T().fit(optimizer(lambda m: [sgd(m), sgd(m)])),
    "optimizer_idx_arg": lambda d: T().fit(make(training_step=step_with_optimizer_idx)),
    "manual_gradient_clip": lambda d: T(gradient_clip_val=1.0).fit(Manual()),
    "manual_accumulate": lambda d: T(accumulate_grad_batches=2).fit(Manual()),
    "clip_val_str": lambda d: T(gradient_clip_val="1"),
    "clip_algo_bad": lambda d: T(gradient_clip_val=1.0, gradient_clip_algorithm="norm2"),
    "clip_conflict": lambda d: T(gradient_clip_val=1.0).fit(make(configure_gradient_clipping=clips_otherwise)),
    "optimizer_step_without_closure": lambda d: T().fit(make(optimizer_step=lambda self, e, i, o, c: None)),
    "two_progress_bars": lambda d: pl.Trainer(callbacks=[TQDMProgressBar(), TQDMProgressBar()], logger=False),
    "progress_bar_disabled_but_passed": lambda d: pl.Trainer(
        callbacks=[TQDMProgressBar()], enable_progress_bar=False, logger=False
    ),
    "checkpoint_disabled_but_passed": lambda d: T(callbacks=[ModelCheckpoint()], enable_checkpointing=False),
    "duplicate_stateful_callbacks": lambda d: T(callbacks=[EarlyStopping("a"), EarlyStopping("a")]),
    "two_identical_model_checkpoints": lambda d: T(
        callbacks=[ModelCheckpoint(filename="a"), ModelCheckpoint(filename="b")], enable_checkpointing=True
    ),
    "gas_with_trainer_acc": lambda d: T(
        accumulate_grad_batches=2, callbacks=[GradientAccumulationScheduler({0: 2})]
    ).fit(TinyModule()),
    "overfit_invalid": lambda d: T(overfit_batches=1.5),
    "limit_neg": lambda d: T(limit_val_batches=-1),
    "val_check_interval_1.5": lambda d: T(val_check_interval=1.5),
    "reload_neg": lambda d: T(reload_dataloaders_every_n_epochs=-1),
    "reload_float": lambda d: T(reload_dataloaders_every_n_epochs=1.0),
    "profiler_bad": lambda d: T(profiler="bad"),
    "unknown_arg": lambda d: T(foo=1),
    "accelerator_bad": lambda d: pl.Trainer(accelerator="nope"),
    "devices_0": lambda d: pl.Trainer(accelerator="cpu", devices=0),
    "precision_bad": lambda d: pl.Trainer(accelerator="cpu", precision="7"),
    "val_time_bad": lambda d: T(val_check_interval="1:2:3"),
    "val_time_nonint": lambda d: T(val_check_interval="a:b:c:d"),
    "barebones_logger": lambda d: pl.Trainer(barebones=True, logger=True),
    "barebones_ckpt": lambda d: pl.Trainer(barebones=True, enable_checkpointing=True),
    "barebones_fdr": lambda d: pl.Trainer(barebones=True, fast_dev_run=True),
    "save_checkpoint_before_fit": lambda d: T().save_checkpoint("x.ckpt"),
    "ckpt_missing_file": lambda d: T().fit(TinyModule(), ckpt_path="nope.ckpt"),
    "test_best_no_checkpoint_cb": lambda d: fit_then(T(), ckpt_path="best"),
    "test_best_topk0": lambda d: fit_then(
        T(enable_checkpointing=True, callbacks=[ModelCheckpoint(d, save_top_k=0)]), ckpt_path="best"
    ),
    "test_best_fast_dev_run": lambda d: fit_then(
        pl.Trainer(
            accelerator="cpu", fast_dev_run=True, logger=False, enable_progress_bar=False, enable_model_summary=False
        ),
        ckpt_path="best",
    ),
    "resume_max_epochs_lower": resume_lower,
    "resume_weights_only_ckpt": resume_weights_only,
    "module_trainer_unattached": lambda d: TinyModule().trainer,
    "dl_idx_arg_single_loader": lambda d: T().validate(make(validation_step=needs_index)),
    "no_dl_idx_arg_two_loaders": lambda d: T().validate(TinyModule(), [loader(2), loader(2)]),
    "no_dl_idx_in_batch_end_two_loaders": lambda d: T().validate(
        make(validation_step=takes_index, on_validation_batch_end=lambda self, outputs, batch, batch_idx: None),
        [loader(2), loader(2)],
    ),
    "train_sequential_combined": lambda d: T().fit(TinyModule(), CombinedLoader([loader(2)], "sequential")),
    "predict_non_sequential_combined": lambda d: T().predict(TinyModule(), CombinedLoader([loader(2)], "max_size")),
    "combined_bad_mode": lambda d: CombinedLoader([loader(2)], "x"),
    "combined_len_before_iter": lambda d: len(CombinedLoader([loader(2)])),
    "keyboard_interrupt": lambda d: T().fit(make(training_step=interrupt)),
    "user_exception_propagates": lambda d: T().fit(make(training_step=lambda self, batch, batch_idx: 1 / 0)),
}
# Where the recorded words name something of torch or of Lightning's file format, ours name what is meant here.
OUR_WORDS = {
    "accelerator_bad": "Available names are: auto, cpu",
    "fit_not_a_module": "`model` must be a `LightningModule`, got `Dense`",
    "module_trainer_unattached": "is not attached to a `Trainer`",
    "profiler_bad": "it can only be one of ['simple', 'advanced'",
    "two_identical_model_checkpoints": "Found more than one stateful callback of type `ModelCheckpoint`",
    "duplicate_stateful_callbacks": "Found more than one stateful callback of type `EarlyStopping`",
    "legacy_training_epoch_end": "Support for `training_epoch_end` has been removed",
    "legacy_validation_epoch_end": "Support for `validation_epoch_end` has been removed",
    "ckpt_missing_file": "Checkpoint file not found",
    "resume_weights_only_ckpt": "checkpoint contains only the model",
    "no_dl_idx_arg_two_loaders": "no `dataloader_idx` argument in `TinyModule.validation_step()`",
    "no_dl_idx_in_batch_end_two_loaders": "no `dataloader_idx` argument in `X.on_validation_batch_end()`",
    "two_optimizers_automatic": "Training with multiple optimizers is only supported with manual optimization",
    "precision_bad": "Precision '7' is invalid. Allowed precision values:",
}


@pytest.mark.filterwarnings("ignore::jaxlightning.utilities.warnings.PossibleUserWarning")
@pytest.mark.filterwarnings("ignore:.*test.ckpt_path.*:UserWarning")
@pytest.mark.parametrize("name", RAISES)
@pytest.mark.catalogue(
    "MC35",
    "RS18",
    "TF33",
    "TF35",
    "DL02",
    "DL07",
    "DL11",
    "DL13",
    "DL18",
    "PR07",
    "ER01",
    "ER02",
    "ER04",
    "ER05",
    "ER06",
    "ER08",
    "ES10",
    "TA04",
)
@pytest.mark.catalogue("TF39", adaptation="names and errors are Lightning's; a strategy chooses a mesh")
@pytest.mark.catalogue("HK35", adaptation="the closure is the compiled gradient computation")
def test_the_same_is_refused_as_in_lightning(name: str, tmp_path: Path) -> None:
    theirs = golden("errors")[name]
    with pytest.raises(BaseException) as caught:
        RAISES[name](tmp_path)
    error = caught.value
    assert theirs["type"] in [cls.__name__ for cls in type(error).__mro__], repr(error)
    message = str(error)
    if name in OUR_WORDS:
        assert OUR_WORDS[name] in message
    else:
        # Ours may go on after Lightning's words and say what to do.
        assert message.startswith(theirs["message"].rstrip(". ")), message


ACCEPTED: dict[str, Callable[[Path], Any]] = {
    "fit_val_loader_no_val_step": lambda d: T().fit(without("validation_step")),
    "fit_val_step_no_val_loader": lambda d: T().fit(without("val_dataloader")),
    "opt_None": lambda d: T().fit(optimizer(lambda m: None)),
    "clip_algo_upper_ok": lambda d: T(gradient_clip_val=1.0, gradient_clip_algorithm="NORM").gradient_clip_algorithm,
    "two_early_stopping_different_monitor_ok": lambda d: len(
        T(callbacks=[EarlyStopping("a"), EarlyStopping("b")]).early_stopping_callbacks
    ),
    "val_check_interval_2.0_ok": lambda d: T(val_check_interval=2.0).val_check_interval,
    "positional_arg": lambda d: "<Trainer>" if isinstance(pl.Trainer("cpu"), pl.Trainer) else None,
    "barebones_flags": lambda d: (
        lambda t: {
            "log_every_n_steps": t.log_every_n_steps,
            "callbacks": len(t.callbacks),
            "loggers": len(t.loggers),
            "num_sanity_val_steps": t.num_sanity_val_steps,
        }
    )(pl.Trainer(barebones=True, accelerator="cpu")),
    "fit_last_none_available": lambda d: T(enable_checkpointing=True, default_root_dir=d).fit(
        TinyModule(), ckpt_path="last"
    ),
    "module_props_unattached": lambda d: {
        name: str(getattr(TinyModule(), name))
        for name in ("current_epoch", "global_step", "global_rank", "local_rank", "logger", "loggers")
    },
    "val_shuffle_warns": lambda d: T().validate(
        TinyModule(), pl.ArrayLoader((np.zeros((4, 4), np.float32),), batch_size=2, shuffle=True), verbose=False
    ),
}


OUR_WARNINGS = {"opt_None": "this fit will run with no optimizer"}


@pytest.mark.parametrize("name", ACCEPTED)
@pytest.mark.catalogue("ER03", "TF31")
@pytest.mark.catalogue("TA05", adaptation="unattached values are Python's; in a step they are arguments")
def test_the_same_is_accepted_as_in_lightning_with_the_same_warnings(name: str, tmp_path: Path) -> None:
    theirs = golden("errors")[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = ACCEPTED[name](tmp_path)
    assert result == theirs["result"]
    ours = [f"{each.category.__name__}: {each.message}" for each in caught]
    expected = [OUR_WARNINGS.get(name) or text.split(" HINT")[0][:100] for text in theirs["warnings"]]
    assert [text for text in expected if not any(text in each for each in ours)] == []


@pytest.mark.filterwarnings("ignore:.*test.ckpt_path.*:UserWarning")
def test_a_test_without_a_model_after_a_fit_takes_the_best_checkpoint(tmp_path: Path) -> None:
    trainer = T(enable_checkpointing=True, default_root_dir=tmp_path)
    trainer.fit(TinyModule())
    trainer.test(verbose=False)
    assert os.path.basename(trainer.ckpt_path) == golden("errors")["test_none_after_fit_warns_best"]["result"]


# --- Bad input that only we can meet


def test_a_forgotten_super_init_is_named() -> None:
    class Forgetful(pl.LightningModule):
        def __init__(self) -> None:
            pass

        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            return batch

        def configure_optimizers(self) -> Any:
            return None

    with pytest.raises(RuntimeError, match=r"Forgetful.__init__` does not call `super\(\).__init__\(\)`"):
        T().fit(Forgetful(), loader(2))


@pytest.mark.torch
@pytest.mark.lightning
@pytest.mark.catalogue("ER09", adaptation="a module of torch is refused and told our class")
def test_a_module_of_lightning_is_told_which_class_to_use() -> None:
    import lightning.pytorch as theirs

    class Torch(theirs.LightningModule):
        pass

    with pytest.raises(TypeError, match=r"`Torch` is a PyTorch LightningModule.*jaxlightning.LightningModule"):
        T().fit(Torch())


def test_a_loader_that_fails_keeps_its_traceback_and_the_run_is_torn_down() -> None:
    class Broken:
        closed = False

        def __len__(self) -> int:
            return 10

        def __iter__(self) -> Any:
            try:
                for index in range(10):
                    if index == 7:
                        raise OSError("disk on fire")
                    yield (np.zeros((2, 4), np.float32),)
            finally:
                Broken.closed = True

    trainer = T(limit_val_batches=0)
    with pytest.raises(OSError, match="disk on fire") as caught:
        trainer.fit(TinyModule(), Broken())
    assert any(entry.name == "__iter__" for entry in caught.traceback)
    assert Broken.closed
    assert trainer.global_step == 7
    assert trainer.interrupted


@pytest.mark.parametrize(
    ("verb", "step"), [("fit", "training_step"), ("test", "test_step"), ("predict", "predict_step")]
)
def test_a_stray_stop_iteration_is_named(verb: str, step: str) -> None:
    """DIFFERENCES, LP04: not a silent end of the epoch."""

    def stop(self: Any, batch: Any, batch_idx: Any) -> Any:
        raise StopIteration

    with pytest.raises(RuntimeError, match=f"A StopIteration came out of `X.{step}`"):
        getattr(T(limit_val_batches=0), verb)(make(**{step: stop}))


def test_a_class_in_place_of_a_module_is_refused() -> None:
    with pytest.raises(TypeError, match="got the class `TinyModule` itself"):
        T().fit(TinyModule)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"num_nodes": 2}, "num_nodes=2"),
        ({"plugins": ["x"]}, "plugins"),
        ({"model_registry": "x"}, "model_registry"),
        ({"strategy": "fsdp"}, "strategy='fsdp'"),
    ],
)
def test_a_flag_that_is_not_built_yet_says_so(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(NotImplementedError, match=f"{words}.*not built yet"):
        T(**flags)


def test_flags_at_lightnings_defaults_are_accepted() -> None:
    trainer = T(
        num_nodes=1, plugins=None, model_registry=None, precision="32-true", strategy="auto", devices="auto",
        sync_batchnorm=False, inference_mode=True, use_distributed_sampler=True, benchmark=None, deterministic=None,
        profiler=None, detect_anomaly=False, barebones=False, gradient_clip_algorithm=None,
    )  # fmt: skip
    assert trainer.precision == T().precision == "32-true"


@pytest.mark.parametrize(
    "flag", [{"sync_batchnorm": True}, {"benchmark": True}, {"inference_mode": False}, {"deterministic": "warn"}]
)
def test_torch_only_flags_are_accepted_with_one_note(flag: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="jaxlightning"):
        T(**flag)
    notes = [each for each in caplog.messages if "changes nothing here" in each]
    assert len(notes) == 1
    assert next(iter(flag)) in notes[0]


@pytest.mark.parametrize("flags", [{"max_epochs": 1.5}, {"max_epochs": "2"}, {"gradient_clip_val": float("nan")}])
def test_limits_that_are_no_numbers_are_refused(flags: dict[str, Any]) -> None:
    with pytest.raises(MisconfigurationException, match=next(iter(flags))):
        T(**flags)


def test_a_run_with_jit_switched_off_in_jax_is_eager() -> None:
    import jax

    flags = {"max_epochs": 1, "limit_train_batches": 1, "limit_val_batches": 0, "logger": False}
    with jax.disable_jit():
        trainer = T(enable_checkpointing=False, **flags)
        trainer.fit(TinyModule())
    assert trainer.global_step == 1
