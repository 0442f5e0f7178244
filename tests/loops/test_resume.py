"""Where a resumed run continues: batches, counters, hooks and the loggers' axis, against what Lightning recorded.

DIFFERENCES RS10, RS11, RS12 and RS15 are applied to the recorded lists here, each where it is named.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tracing import RecordingLogger, TinyModule, golden

import jaxlightning as pl
from jaxlightning.callbacks import ModelCheckpoint

pytestmark = [
    pytest.mark.filterwarnings("ignore::jaxlightning.utilities.warnings.PossibleUserWarning"),
    # As in the recorded runs the second trainer has no checkpoint callback.
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning"),
]

THEIRS = golden("resume")


class Data:
    """Batches of one number each, 0 to n - 1."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Any:
        return (np.array([float(i)], np.float32) for i in range(self.n))


class Model(TinyModule):
    def __init__(self, n: int = 4, boom: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.n, self.boom = n, boom
        self.seen: list[Any] = []
        self.hooks: list[Any] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.boom == (self.current_epoch, batch_idx):
            raise RuntimeError("boom")
        self.seen.append([self.current_epoch, batch_idx, batch.item(), self.global_step])

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        self.log("x", 1.0)
        return (self.layer(np.ones((1, 4), np.float32)) ** 2).mean()

    def on_validation_batch_start(self, batch: Any, batch_idx: int) -> None:
        kind = "sanity" if self.trainer.sanity_checking else "val"
        self.seen.append([kind, self.current_epoch, batch_idx])

    def validation_step(self, batch: Any, batch_idx: Any) -> None:
        self.log("vl", 1.0)

    def train_dataloader(self) -> Any:
        return Data(self.n)

    def val_dataloader(self) -> Any:
        return Data(2)

    def on_train_start(self) -> None:
        self.hooks.append(["on_train_start", self.current_epoch, self.global_step])

    def on_train_epoch_start(self) -> None:
        self.hooks.append(["on_train_epoch_start", self.current_epoch, self.global_step])

    def on_train_epoch_end(self) -> None:
        self.hooks.append(["on_train_epoch_end", self.current_epoch, self.global_step])


def T(root: Path, **flags: Any) -> pl.Trainer:
    quiet = {"accelerator": "cpu", "devices": 1, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(**{"default_root_dir": root, "logger": False, "enable_checkpointing": False, **quiet, **flags})


SCENARIOS: dict[str, dict[str, Any]] = {
    "epoch_end_ckpt": {"first": {"max_epochs": 2}, "second": {"max_epochs": 3}},
    "last_epoch_end_ckpt": {"first": {"max_epochs": 2}, "second": {"max_epochs": 3}},
    "epoch_end_no_val": {"first": {"max_epochs": 2}, "second": {"max_epochs": 3}, "val": False},
    "mid_epoch_step2": {
        "first": {"max_epochs": 1},
        "second": {"max_epochs": 2},
        "saving": {"every_n_train_steps": 2},
    },
    "step_ckpt_at_epoch_boundary": {
        "first": {"max_epochs": 1},
        "second": {"max_epochs": 2},
        "saving": {"every_n_train_steps": 2},
    },
    "mid_epoch_acc2": {
        "first": {"max_epochs": 1, "accumulate_grad_batches": 2},
        "second": {"max_epochs": 2, "accumulate_grad_batches": 2},
        "saving": {"every_n_train_steps": 1},
    },
    "after_val_mid_epoch": {
        "first": {"max_epochs": 1, "val_check_interval": 0.5},
        "second": {"max_epochs": 2, "val_check_interval": 0.5},
    },
    "save_on_val_end": {
        "first": {"max_epochs": 1},
        "second": {"max_epochs": 2},
        "saving": {"save_on_train_epoch_end": False},
    },
    "max_steps_resume": {"first": {"max_steps": 6}, "second": {"max_steps": 10}},
    "exception_ckpt": {
        "first": {"max_epochs": 3},
        "second": {"max_epochs": 3},
        "saving": {"save_on_exception": True, "every_n_epochs": 9},
        "boom": (1, 2),
    },
    "resume_already_done": {"first": {"max_epochs": 2}, "second": {"max_epochs": 2}},
}


def run(
    root: Path, picked: str, first: Any, second: Any, saving: Any = None, boom: Any = None, val: bool = True
) -> tuple[list[str], Model, list[dict[str, Any]], pl.Trainer]:
    flags: dict[str, Any] = {} if val else {"limit_val_batches": 0}
    folder = root / "checkpoints"
    checkpoint = ModelCheckpoint(folder, save_top_k=-1, **(saving or {}))
    trainer = T(root, enable_checkpointing=True, callbacks=[checkpoint], **first, **flags)
    if boom is None:
        trainer.fit(Model())
    else:
        with pytest.raises(RuntimeError, match="boom"):
            trainer.fit(Model(boom=boom))
    files = sorted(each.name for each in folder.iterdir() if each.name.endswith(".ckpt"))
    calls: list[dict[str, Any]] = []
    module = Model()
    resumed = T(root, logger=RecordingLogger(calls), log_every_n_steps=1, **second, **flags)
    resumed.fit(module, ckpt_path=str(folder / picked))
    return files, module, calls, resumed


def continuing(seen: list[Any]) -> list[Any]:
    """RS10: the data continue where they stopped, so batch k holds the number k."""
    return [[e[0], e[1], float(e[1]), e[3]] if len(e) == 4 else e for e in seen]


def expected(name: str) -> tuple[list[Any], list[Any], list[Any]]:
    theirs = THEIRS[name]
    seen, hooks = continuing(theirs["resumed_seen"]), theirs["resumed_hooks"]
    steps = [[step, sorted(keys)] for step, keys in theirs["log_steps"]]
    if name == "step_ckpt_at_epoch_boundary":
        # RS12: saved after the last batch; its validation and epoch end still come, and so does the next epoch's start.
        seen = [["val", 0, 0], ["val", 0, 1], *seen]
        hooks = [
            ["on_train_start", 0, 4],
            ["on_train_epoch_end", 0, 4],
            ["on_train_epoch_start", 1, 4],
            ["on_train_epoch_end", 1, 8],
        ]
        steps = [[3, ["epoch", "vl"]], *steps]
    if name == "exception_ckpt":
        # RS15: no +1 on the loggers' axis.
        steps = [[step - 1, keys] for step, keys in steps]
    return seen, hooks, steps


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_resumed_run_continues_where_it_should(name: str, tmp_path: Path) -> None:
    theirs = THEIRS[name]
    files, module, calls, trainer = run(tmp_path, theirs["picked"], **SCENARIOS[name])
    assert files == theirs["files"]
    seen, hooks, steps = expected(name)
    assert module.seen == seen
    assert module.hooks == hooks
    assert [[each["step"], sorted(each["metrics"])] for each in calls if each["hook"] == "log_metrics"] == steps
    assert {"global_step": trainer.global_step, "current_epoch": trainer.current_epoch} == theirs["final"]


def test_a_checkpoint_saved_after_fit_continues_with_the_next_epoch(tmp_path: Path) -> None:
    theirs = THEIRS["saved_after_fit_returned"]
    trainer = T(tmp_path, max_epochs=2)
    trainer.fit(Model())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    module = Model()
    resumed = T(tmp_path, max_epochs=3)
    resumed.fit(module, ckpt_path=tmp_path / "a.ckpt")
    assert module.seen == theirs["resumed_seen"]
    assert [resumed.global_step, resumed.current_epoch] == theirs["final"]


def test_the_progress_in_a_checkpoint_is_lightnings(tmp_path: Path) -> None:
    """LP25, at the end of an epoch."""
    saved: list[dict[str, Any]] = []

    class Keep(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            saved.append(trainer.fit_loop.state_dict())

    T(tmp_path, max_epochs=2, callbacks=[Keep()]).fit(Model())
    for state, name in zip(saved, ("epoch_end_ckpt", "last_epoch_end_ckpt"), strict=True):
        theirs = THEIRS[name]["saved"]["progress"]
        assert {key: state[key] for key in theirs} == theirs


def test_fitting_twice_goes_on_counting(tmp_path: Path) -> None:
    theirs = THEIRS["fit_twice_same_trainer"]
    module = Model()
    trainer = T(tmp_path, max_epochs=1)
    trainer.fit(module)
    assert [trainer.global_step, trainer.current_epoch] == theirs["after_first"]
    trainer.fit_loop.max_epochs = 2
    before = len(module.seen)
    trainer.fit(module)
    assert [trainer.global_step, trainer.current_epoch] == theirs["after_second"]
    assert module.seen[before:] == theirs["second_seen"]


def test_validating_leaves_the_counters_alone(tmp_path: Path) -> None:
    module = Model()
    trainer = T(tmp_path, max_epochs=1)
    trainer.fit(module)
    trainer.validate(module, verbose=False)
    assert [trainer.global_step, trainer.current_epoch] == THEIRS["validate_after_fit_counters"]
