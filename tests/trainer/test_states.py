"""What the Trainer says about itself: states in every hook, attributes, exceptions, estimates, directories."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tracing import CALLBACK_HOOKS, RecordingLogger, TinyModule, golden, loader

import jaxlightning as pl
from jaxlightning.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, Timer, TQDMProgressBar
from jaxlightning.loggers import CSVLogger, TensorBoardLogger
from jaxlightning.utilities.states import TrainerState

pytestmark = pytest.mark.filterwarnings("ignore::jaxlightning.utilities.warnings.PossibleUserWarning")

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def T(root: Path, **flags: Any) -> pl.Trainer:
    return pl.Trainer(
        **{"default_root_dir": root, "logger": False, "enable_checkpointing": False, "max_epochs": 1, **QUIET, **flags}
    )


@pytest.mark.parametrize("verb", ["fit", "validate", "test", "predict"])
@pytest.mark.catalogue("TA01", "TA02")
def test_every_hook_sees_lightnings_state(verb: str, tmp_path: Path) -> None:
    seen: list[list[Any]] = []
    flags = ("training", "validating", "testing", "predicting", "sanity_checking", "evaluating")

    def recording(name: str) -> Any:
        def hook(self: Any, trainer: Any, module: Any, *args: Any, **kwargs: Any) -> None:
            state = trainer.state
            seen.append(
                [
                    name,
                    state.status.value,
                    state.fn.value,
                    state.stage and state.stage.value,
                    [flag for flag in flags if getattr(trainer, flag)],
                    "train_mode" if module.training else "eval_mode",
                ]
            )

        return hook

    left_out = ("state_dict", "load_state_dict", "on_save_checkpoint", "on_load_checkpoint", "on_exception")
    callback = type("C", (pl.Callback,), {n: recording(n) for n in CALLBACK_HOOKS if n not in left_out})()
    limits = {f"limit_{kind}_batches": 1 for kind in ("train", "val", "test", "predict")}
    trainer = T(tmp_path, callbacks=[callback], **limits)
    getattr(trainer, verb)(TinyModule(), **({"verbose": False} if verb in ("validate", "test") else {}))
    state = trainer.state
    seen.append(["AFTER", state.status.value, state.fn and state.fn.value, state.stage])
    # The recorded lists go on with torch's gradient modes.
    assert seen == [each[:6] for each in golden("states")[verb]]


@pytest.mark.catalogue("TF02", "LO01", "PB01")
@pytest.mark.catalogue("TA09", adaptation="one process, so the world has size 1 whatever the devices")
def test_a_new_trainer_has_lightnings_defaults(tmp_path: Path) -> None:
    theirs = golden("trainer_misc")["defaults"]
    trainer = pl.Trainer(default_root_dir=tmp_path, accelerator="cpu")
    assert trainer.state == TrainerState()
    assert [trainer.state.status.value, trainer.state.fn, trainer.state.stage] == theirs["state"]
    # DIFFERENCES, PB01: plain bar and summary unless Rich ones are asked for.
    assert [type(each).__name__ for each in trainer.callbacks] == ["TQDMProgressBar", "ModelSummary", "ModelCheckpoint"]
    assert [type(each).__name__ for each in trainer.loggers] == theirs["loggers"]
    own = {"callbacks", "loggers", "state", "default_root_dir", "log_dir", "order_with_user_callbacks"}
    for name in theirs.keys() - own - {"max_time_adds", "configure_callbacks_override"}:
        value = getattr(trainer, name)
        assert ("inf" if value == math.inf else value) == theirs[name], name
    assert trainer.default_root_dir == str(tmp_path)
    assert os.path.relpath(str(trainer.log_dir), tmp_path) == theirs["log_dir"]


@pytest.mark.catalogue("CB01", "TF32")
def test_callbacks_are_ordered_as_in_lightning(tmp_path: Path) -> None:
    theirs = golden("trainer_misc")["defaults"]
    given = [
        ModelCheckpoint(),
        EarlyStopping("a"),
        LearningRateMonitor(),
        ModelCheckpoint(monitor="x"),
        TQDMProgressBar(),
    ]
    ours = [type(each).__name__ for each in pl.Trainer(default_root_dir=tmp_path, callbacks=given).callbacks]
    expected = [each.removeprefix("Rich") for each in theirs["order_with_user_callbacks"]]
    expected.remove("LearningRateFinder")  # the tuner belongs to later work
    assert ours == expected
    timed = pl.Trainer(default_root_dir=tmp_path, max_time="00:00:01:00", logger=False)
    names = [type(each).__name__ for each in timed.callbacks]
    plain = {"RichProgressBar": "TQDMProgressBar", "RichModelSummary": "ModelSummary"}
    assert names == [plain.get(each, each) for each in theirs["max_time_adds"]]


@pytest.mark.catalogue("CB02")
def test_callbacks_of_the_module_replace_those_of_the_same_kind(tmp_path: Path) -> None:
    class Model(TinyModule):
        def configure_callbacks(self) -> Any:
            return [EarlyStopping("m", mode="max"), ModelCheckpoint(monitor="mm")]

        def validation_step(self, batch: Any, batch_idx: Any) -> None:
            self.log("m", 1.0)
            self.log("mm", 1.0)

    given = [EarlyStopping("u"), ModelCheckpoint(), Timer()]
    trainer = T(tmp_path, fast_dev_run=1, callbacks=given, enable_checkpointing=True)
    trainer.fit(Model())
    ours = [[type(each).__name__, getattr(each, "monitor", None)] for each in trainer.callbacks]
    assert ours == golden("trainer_misc")["defaults"]["configure_callbacks_override"]


@pytest.mark.parametrize(
    ("name", "error"),
    [("ValueError", ValueError("x")), ("KeyboardInterrupt", KeyboardInterrupt()), ("SystemExit", SystemExit(3))],
)
@pytest.mark.catalogue("TA03", "DM08")
@pytest.mark.catalogue(
    "HK31", "ER07", adaptation="raised while the step is traced, so it carries the user's own traceback"
)
def test_an_exception_runs_lightnings_hooks_and_leaves(name: str, error: BaseException, tmp_path: Path) -> None:
    events: list[list[Any]] = []

    class Watch(pl.Callback):
        def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
            state = trainer.state
            events.append(
                [
                    "callback.on_exception",
                    type(exception).__name__,
                    state.status.value,
                    state.stage and state.stage.value,
                ]
            )

        def teardown(self, trainer: Any, module: Any, stage: str) -> None:
            events.append(["callback.teardown", stage])

        def on_train_end(self, trainer: Any, module: Any) -> None:
            events.append(["callback.on_train_end"])

        def on_fit_end(self, trainer: Any, module: Any) -> None:
            events.append(["callback.on_fit_end"])

    class Data(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return loader(4)

        def on_exception(self, exception: BaseException) -> None:
            events.append(["dm.on_exception", type(exception).__name__])

        def teardown(self, stage: str) -> None:
            events.append(["dm.teardown", stage])

    class Model(TinyModule):
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            raise error

        def teardown(self, stage: str) -> None:
            events.append(["module.teardown", stage])

    calls: list[dict[str, Any]] = []
    trainer = T(tmp_path, callbacks=[Watch()], logger=RecordingLogger(calls), limit_val_batches=0, log_every_n_steps=1)
    with pytest.raises(BaseException) as caught:
        trainer.fit(Model(), datamodule=Data())
    theirs = golden("trainer_misc")["exceptions"][name]
    assert f"{type(caught.value).__name__}({caught.value})" == theirs["raised"]
    assert events == theirs["events"]
    assert [f"{each['hook']}:{each['status']}" for each in calls if each["hook"] == "finalize"] == theirs["logger"]
    assert trainer.state.status.value == theirs["status"]
    assert trainer.interrupted == theirs["interrupted"]
    assert (trainer.state.stage and trainer.state.stage.value) == theirs["stage"]


class Enough(Exception):
    pass


class Unsized:
    def __iter__(self) -> Any:
        return iter(loader(10))


@pytest.mark.parametrize(
    ("name", "flags", "unsized"),
    [
        ("epochs3", {"max_epochs": 3}, False),
        ("epochs3_acc2", {"max_epochs": 3, "accumulate_grad_batches": 2}, False),
        ("epochs3_max_steps5", {"max_epochs": 3, "max_steps": 5}, False),
        ("max_steps7", {"max_epochs": None, "max_steps": 7}, False),
        ("inf", {"max_epochs": -1}, False),
        ("iterable_epochs2", {"max_epochs": 2}, True),
        ("iterable_steps9", {"max_epochs": 2, "max_steps": 9}, True),
        ("limit2", {"max_epochs": 2, "limit_train_batches": 2}, False),
    ],
)
@pytest.mark.catalogue("LP30", "LP31")
def test_the_number_of_steps_is_estimated_in_configure_optimizers(
    name: str, flags: dict[str, Any], unsized: bool, tmp_path: Path
) -> None:
    found: list[Any] = []

    class Model(TinyModule):
        def configure_optimizers(self) -> Any:
            found.append(self.trainer.estimated_stepping_batches)
            raise Enough

        def train_dataloader(self) -> Any:
            return Unsized() if unsized else loader(10)

    with pytest.raises(Enough):
        T(tmp_path, **flags).fit(Model())
    expected = golden("trainer_misc")["estimated_stepping_batches"][name]
    assert found == [math.inf if expected == "inf" else expected]


@pytest.mark.catalogue("TF01")
def test_flags_come_from_the_environment_and_an_argument_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = golden("trainer_misc")["env_vars"]
    for name, value in {"MAX_EPOCHS": "7", "LOGGER": "False", "ACCELERATOR": "cpu"}.items():
        monkeypatch.setenv(f"PL_TRAINER_{name}", value)
    trainer, explicit = pl.Trainer(), pl.Trainer(max_epochs=2)
    assert trainer.max_epochs == theirs["max_epochs"]
    assert len(trainer.loggers) == theirs["loggers"]
    assert explicit.max_epochs == theirs["explicit_wins"]


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("tb", lambda d: TensorBoardLogger(d)),
        ("tb_name_empty", lambda d: TensorBoardLogger(d, name="")),
        ("tb_version_str", lambda d: TensorBoardLogger(d, version="zz")),
        ("csv", lambda d: CSVLogger(d)),
        ("csv_version_5", lambda d: CSVLogger(d, version=5)),
        ("none", lambda d: False),
        ("two", lambda d: [CSVLogger(d, name="c1"), TensorBoardLogger(d, name="t1")]),
    ],
)
@pytest.mark.catalogue("LO02")
def test_directories_are_lightnings(name: str, make: Any, tmp_path: Path) -> None:
    theirs = golden("trainer_misc")["log_dirs"][name]
    trainer = pl.Trainer(default_root_dir=tmp_path, logger=make(tmp_path), max_epochs=1, **QUIET)
    trainer.fit(TinyModule())
    assert os.path.relpath(str(trainer.log_dir), tmp_path) == theirs["log_dir"]
    assert os.path.relpath(trainer.checkpoint_callback.dirpath, tmp_path) == theirs["ckpt_dir"]
    # A checkpoint is a directory here, a file there.
    found = {
        re.sub(r"\.ckpt/.*", ".ckpt", str(each.relative_to(tmp_path))) for each in tmp_path.rglob("*") if each.is_file()
    }
    assert sorted({re.sub(r"tfevents\..*", "tfevents.*", each) for each in found}) == theirs["files"]


def test_the_pytrees_of_the_run_can_be_read_and_set_between_steps(tmp_path: Path) -> None:
    trainer = T(tmp_path)
    with pytest.raises(AttributeError, match=r"trainer.state.params.*once a model is attached"):
        _ = trainer.state.params
    module = TinyModule()
    trainer.fit(module)
    params = trainer.state.params
    assert set(params) == {"layer"}
    kernel = params["layer"]["kernel"]
    trainer.state.params = {"layer": {**params["layer"], "kernel": kernel * 0}}
    assert not np.asarray(trainer.state.params["layer"]["kernel"]).any()
    assert np.asarray(kernel).any()
    assert trainer.state.opt_state is not None
    assert trainer.predict(module)[0].shape == (2, 2)


def test_making_a_trainer_starts_no_backend() -> None:
    import subprocess
    import sys

    code = (
        "import jaxlightning as pl; pl.Trainer(); pl.Trainer(devices=2, strategy='ddp', accelerator='cpu')\n"
        "from jax._src import xla_bridge; assert not xla_bridge.backends_are_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
