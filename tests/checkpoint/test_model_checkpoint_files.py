"""ModelCheckpoint against the recorded runs of Lightning: files, the order of saving and deleting, its attributes."""

from __future__ import annotations

import math
import os
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import Failing, Scripted, golden, trainer

from jaxlightning.callbacks import EarlyStopping, ModelCheckpoint, OnExceptionCheckpoint
from jaxlightning.checkpoint._stored import StoredCheckpoint
from jaxlightning.loggers import CSVLogger, TensorBoardLogger

pytestmark = pytest.mark.usefixtures("compiled_once")

GOLDEN = golden("checkpoint_files")


class NaN(Scripted):
    losses = [math.nan, 5.0, 7.0, 4.0]


class Ext(ModelCheckpoint):
    FILE_EXTENSION = ".tpkc"


def last_name(callback):
    callback.CHECKPOINT_NAME_LAST = "{epoch}-last"


def chars(callback):
    callback.CHECKPOINT_JOIN_CHAR = "_"
    callback.CHECKPOINT_EQUALS_CHAR = ":"


VL: dict[str, Any] = {"monitor": "val_loss"}
ALL: dict[str, Any] = {"save_top_k": -1}
# name -> (arguments of ModelCheckpoint, options of the run)
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "default": ({}, {}),
    "default_nodir_nologger": ({}, {"dirpath": False}),
    "default_nodir_tb": ({}, {"dirpath": False, "logger": "tb"}),
    "default_nodir_csv_named": ({}, {"dirpath": False, "logger": "csv"}),
    "topk_all": (ALL, {}),
    "topk_0_save_last": ({"save_top_k": 0, "save_last": True}, {}),
    "topk_0": ({"save_top_k": 0}, {}),
    "save_last": ({"save_last": True}, {}),
    "save_last_link": ({"save_last": "link", **ALL}, {}),
    "monitor_top1": (VL, {"max_epochs": 5}),
    "monitor_top2_min": ({**VL, "save_top_k": 2}, {"max_epochs": 5}),
    "monitor_top2_max": ({**VL, "save_top_k": 2, "mode": "max"}, {"max_epochs": 5}),
    "monitor_top3_last": ({**VL, "save_top_k": 3, "save_last": True}, {"max_epochs": 5}),
    "monitor_topall": ({**VL, **ALL}, {"max_epochs": 5}),
    "monitor_filename_fmt": ({**VL, "save_top_k": 2, "filename": "m-{epoch:02d}-{val_loss:.2f}"}, {"max_epochs": 5}),
    "filename_no_auto_insert": (
        {**VL, **ALL, "filename": "ep{epoch}_acc{val/acc:.2f}", "auto_insert_metric_name": False},
        {},
    ),
    "filename_slash_auto_insert": ({**VL, **ALL, "filename": "{epoch}-{val/acc:.2f}"}, {}),
    "filename_missing_metric": ({**ALL, "filename": "{epoch}-{nope:.3f}"}, {}),
    "filename_static_topall": ({**VL, **ALL, "filename": "model"}, {}),
    "filename_static_top1": ({**VL, "filename": "model"}, {"max_epochs": 5}),
    "filename_static_no_version": ({**VL, **ALL, "filename": "model", "enable_version_counter": False}, {}),
    "filename_static_monitor_none": ({"filename": "model"}, {}),
    "every_n_epochs_2": ({"every_n_epochs": 2, **ALL}, {"max_epochs": 5}),
    "every_n_epochs_2_top1": ({"every_n_epochs": 2}, {"max_epochs": 5}),
    "every_n_epochs_0": ({"every_n_epochs": 0}, {}),
    "every_n_epochs_2_save_last": ({"every_n_epochs": 2, "save_last": True}, {"max_epochs": 5}),
    "every_n_train_steps_2": ({"every_n_train_steps": 2, **ALL}, {}),
    "every_n_train_steps_2_top1": ({"every_n_train_steps": 2}, {}),
    "every_n_train_steps_2_accumulate2": ({"every_n_train_steps": 2, **ALL}, {"accumulate_grad_batches": 2}),
    "every_n_train_steps_monitor_val": ({**VL, "every_n_train_steps": 2, **ALL}, {}),
    "every_n_train_steps_monitor_train": ({"monitor": "train_loss", "every_n_train_steps": 2, **ALL}, {}),
    "every_n_train_steps_save_last": ({"every_n_train_steps": 2, "save_last": True}, {}),
    "train_time_interval_0": ({"train_time_interval": timedelta(0), **ALL}, {"max_epochs": 1}),
    "save_on_train_epoch_end_False": ({**VL, **ALL, "save_on_train_epoch_end": False}, {}),
    "save_on_train_epoch_end_True": ({**VL, **ALL, "save_on_train_epoch_end": True}, {}),
    "val_check_interval_0.5_monitor": ({**VL, **ALL}, {"n_train": 8, "val_check_interval": 0.5}),
    "val_check_interval_int1_monitor": ({**VL, **ALL}, {"val_check_interval": 1}),
    "val_check_interval_int2_monitor": ({**VL, **ALL}, {"n_train": 8, "val_check_interval": 2}),
    "val_check_interval_0.5_nomonitor": (ALL, {"n_train": 8, "val_check_interval": 0.5}),
    "check_val_every_2_monitor": ({**VL, **ALL}, {"max_epochs": 5, "check_val_every_n_epoch": 2}),
    "check_val_every_2_nomonitor": (ALL, {"max_epochs": 5, "check_val_every_n_epoch": 2}),
    "no_val_monitor_train_epoch": (
        {"monitor": "train_loss_epoch", **ALL, "filename": "{epoch}-{train_loss_epoch:.1f}"},
        {"limit_val_batches": 0},
    ),
    "max_steps_4": (ALL, {"max_epochs": -1, "max_steps": 4}),
    "nan_first_min": ({**VL, "save_top_k": 1}, {"mod": NaN, "max_epochs": 4}),
    "nan_first_max": ({**VL, "save_top_k": 1, "mode": "max"}, {"mod": NaN, "max_epochs": 4}),
    "save_weights_only": ({"save_weights_only": True}, {}),
    "rerun_new_trainer": ({**VL, **ALL, "filename": "{epoch}"}, {"max_epochs": 2, "twice": True}),
    "rerun_new_trainer_save_last": ({"save_last": True}, {"max_epochs": 2, "twice": True}),
    "rerun_new_trainer_monitor_none": ({}, {"max_epochs": 2, "twice": True}),
    "refit_same_trainer": ({**VL, **ALL, "filename": "t"}, {"max_epochs": 2, "same_trainer": True}),
    "two_callbacks": (
        [
            {**VL, "filename": "best"},
            {"every_n_train_steps": 3, **ALL, "filename": "s{step}", "auto_insert_metric_name": False},
        ],
        {},
    ),
    "file_extension": ({"save_last": True}, {"cls": Ext}),
    "name_last_epoch": ({"save_last": True, **ALL}, {"mutate": last_name}),
    "join_equals_chars": ({**VL, **ALL, "filename": None, "save_last": False}, {"mutate": chars}),
    "preexisting_file_same_name": (ALL, {"pre": ["epoch=0-step=3.ckpt"]}),
    "fast_dev_run": ({"save_last": True}, {"fast_dev_run": 2}),
    "exception_no_flag": ({}, {"mod": Failing}),
    "exception_save_on_exception": (
        {"save_on_exception": True, "filename": "exc", "every_n_epochs": 7},
        {"mod": Failing},
    ),
    "exception_save_on_exception_default_name": (
        {"save_on_exception": True, "every_n_epochs": 7, "save_last": True},
        {"mod": Failing},
    ),
    "early_stop": ({**VL, **ALL}, {"stop": True, "max_epochs": 8}),
    "max_epochs_0": ({"save_last": True}, {"max_epochs": 0}),
}


def listing(root: str) -> tuple[list[str], list[str]]:
    """The checkpoints (directories or links) and other files below a directory, and which of them are links."""
    found: list[str] = []
    for folder, folders, files in os.walk(root):
        for name in list(folders):
            if name.endswith((".ckpt", ".tpkc")):
                folders.remove(name)
                files.append(name)
        found += [os.path.relpath(os.path.join(folder, name), root) for name in files if "tfevents" not in name]
    return sorted(found), sorted(f for f in found if os.path.islink(os.path.join(root, f)))


def number(value: Any) -> Any:
    if value is None:
        return None
    value = round(float(value), 6)
    # The recording writes Python floats as text and tensors as JSON's Infinity.
    return value


def run(
    root: str,
    arguments: Any,
    *,
    mod: Any = Scripted,
    n_train: int = 6,
    twice: bool = False,
    same_trainer: bool = False,
    stop: bool = False,
    dirpath: bool = True,
    pre: Any = (),
    logger: str = "",
    cls: Any = ModelCheckpoint,
    mutate: Any = None,
    **flags: Any,
) -> list[dict[str, Any]]:
    flags = {"max_epochs": 3, **flags}
    out = []
    for _ in range(2 if twice else 1):
        all_arguments = arguments if isinstance(arguments, list) else [arguments]
        callbacks = [cls(**({"dirpath": root} if dirpath else {}), **each) for each in all_arguments]
        for callback in callbacks if mutate else []:
            mutate(callback)
        for name in pre:
            Path(root, name).write_text("")
        loggers = {
            "tb": lambda: TensorBoardLogger(root),
            "csv": lambda: CSVLogger(root, name="n", version="vv"),
            "": lambda: False,
        }
        stopping = [EarlyStopping("val_loss", patience=1)] if stop else []
        t = trainer(root, logger=loggers[logger](), callbacks=[*callbacks, *stopping], **flags)
        events: list[Any] = []
        save, remove = t.save_checkpoint, t._checkpoint_connector.remove_checkpoint

        def recorded_save(path, *args, t=t, events=events, save=save, **kwargs):
            stage = t.state.stage.value if t.state.stage else None
            at = {"epoch": t.current_epoch, "global_step": t.global_step, "stage": stage}
            events.append(["save", os.path.relpath(path, root), at])
            return save(path, *args, **kwargs)

        def recorded_remove(path, *args, events=events, remove=remove, **kwargs):
            events.append(["remove", os.path.relpath(path, root)])
            return remove(path, *args, **kwargs)

        t.save_checkpoint, t._checkpoint_connector.remove_checkpoint = recorded_save, recorded_remove
        error = None
        try:
            t.fit(mod(n_train))
            if same_trainer:
                t.fit_loop.max_epochs = flags["max_epochs"] * 2
                t.fit(mod(n_train))
        except RuntimeError as exception:
            error = f"{type(exception).__name__}: {exception}"
        files, links = listing(root)

        def relative(path: str) -> str:
            return os.path.relpath(path, root) if path else path

        out.append(
            {
                "files": files,
                "symlinks": links,
                "events": events,
                "error": error,
                "global_step": t.global_step,
                "current_epoch": t.current_epoch,
                "callbacks": [
                    {
                        "state_key": c.state_key,
                        "best_model_path": relative(c.best_model_path),
                        "best_model_score": number(c.best_model_score),
                        "last_model_path": relative(c.last_model_path),
                        "kth_best_model_path": relative(c.kth_best_model_path),
                        "kth_value": number(c.kth_value),
                        "current_score": number(c.current_score),
                        "best_k_models": {relative(k): number(v) for k, v in c.best_k_models.items()},
                        "dirpath": relative(str(c.dirpath)),
                    }
                    for c in callbacks
                ],
            }
        )
    return out


def save(name: str, epoch: int, step: int, stage: str = "train") -> list[Any]:
    return ["save", name, {"epoch": epoch, "global_step": step, "stage": stage}]


# What we do differently on purpose (DIFFERENCES.md): rule -> case -> what the recording would have to say.
DIFFERENCES: dict[str, dict[str, dict[str, Any]]] = {
    "MC15: a save whose metric is still to come waits for it, and none is lost": {
        "every_n_train_steps_monitor_val": {
            "files": ["epoch=0-step=3.ckpt", "epoch=1-step=4.ckpt", "epoch=1-step=6.ckpt", "epoch=2-step=8.ckpt"],
            "events": [
                save("epoch=0-step=3.ckpt", 0, 3, "validate"),  # due at step 2, where val_loss is not known yet
                save("epoch=1-step=4.ckpt", 1, 4),
                save("epoch=1-step=6.ckpt", 1, 6, "validate"),  # its own validation is due
                save("epoch=2-step=8.ckpt", 2, 8),
            ],
            "best_k_models": {
                "epoch=0-step=3.ckpt": 10.0,
                "epoch=1-step=4.ckpt": 10.0,
                "epoch=1-step=6.ckpt": 9.0,
                "epoch=2-step=8.ckpt": 9.0,
            },
            "best_model_path": "epoch=1-step=6.ckpt",
            "best_model_score": 9.0,
            "kth_best_model_path": "epoch=0-step=3.ckpt",
            "kth_value": 10.0,
            "current_score": 9.0,
        }
    },
    "MC20: fast_dev_run writes no checkpoint at all": {
        "fast_dev_run": {"files": [], "events": [], "last_model_path": ""},
    },
}


def expected(name: str) -> list[dict[str, Any]]:
    runs = GOLDEN[name]["runs"]
    for cases in DIFFERENCES.values():
        for key, value in cases.get(name, {}).items():
            target = runs[0] if key in runs[0] else runs[0]["callbacks"][0]
            target[key] = value
    return runs


@pytest.mark.parametrize("name", CASES)
@pytest.mark.catalogue(
    "MC01",
    "MC02",
    "MC03",
    "MC04",
    "MC05",
    "MC07",
    "MC08",
    "MC09",
    "MC13",
    "MC17",
    "MC18",
    "MC21",
    "MC22",
    "MC23",
    "MC32",
)
@pytest.mark.catalogue("MC14", "MC16", adaptation="a snapshot is taken before the next step may overwrite it")
@pytest.mark.catalogue("MC25", adaptation="what is saved is the state of the last step that finished")
@pytest.mark.catalogue("MC15", "MC20")
def test_files_events_and_attributes_are_those_of_the_recording(name, tmp_path):
    arguments, options = CASES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = run(str(tmp_path), arguments, **options)
    for ours, theirs in zip(got, expected(name), strict=True):
        for key in theirs:
            if key == "callbacks":
                for a, b in zip(ours[key], theirs[key], strict=True):
                    assert a == {k: float(v) if v in ("inf", "-inf") else v for k, v in b.items()}
            else:
                assert ours[key] == theirs[key], key


def test_every_recorded_configuration_is_compared():
    assert set(CASES) | {"on_exception_checkpoint"} == set(GOLDEN)


@pytest.mark.catalogue("MC26")
def test_on_exception_checkpoint_is_written_used_and_deleted_as_recorded(tmp_path):
    want = GOLDEN["on_exception_checkpoint"]
    first = trainer(tmp_path, callbacks=[OnExceptionCheckpoint(tmp_path)], max_epochs=3)
    expected = pytest.warns(UserWarning, match="there is no last checkpoint available|ckpt_path=None")
    with expected, pytest.raises(RuntimeError, match="boom"):
        first.fit(Failing())
    assert sorted(os.listdir(tmp_path)) == want["files"]
    assert (first.interrupted, first.state.status.value) == (want["interrupted"], want["status"])
    stored = StoredCheckpoint(tmp_path / "on_exception.ckpt")
    assert stored.body()["global_step"] == want["ckpt_global_step"]
    second = trainer(tmp_path, callbacks=[OnExceptionCheckpoint(tmp_path)], max_epochs=3)
    with pytest.warns(UserWarning, match=r"fit\(ckpt_path=None\)"):
        second.fit(Scripted())
    assert os.path.basename(second.ckpt_path) == want["refit_ckpt_path"]
    assert sorted(os.listdir(tmp_path)) == want["after_successful_refit"]
    assert {"global_step": second.global_step, "current_epoch": second.current_epoch} == want["refit_final"]
