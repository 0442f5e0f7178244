"""`Trainer(auto_resume=True)`: a restarted program goes on by itself, from a whole checkpoint or from the beginning."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import Scripted, trainer

import jaxlightning as pl
from jaxlightning.callbacks import EarlyStopping, ModelCheckpoint
from jaxlightning.loggers import CSVLogger


class Run(Scripted):
    """The script of its metrics goes on after a resume."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["runs"] = self.runs

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.runs = checkpoint["runs"]


def fit(root: Path, *, stop: int | None = None, module: Any = None, **flags: Any) -> tuple[Any, Any]:
    """One process: trains 3 epochs of 3 batches; `stop` is the batch before which it ends by an error."""

    class Stop(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if stop == trainer.fit_loop.total_batch_idx:
                raise OSError("the machine goes away")

    callbacks = flags.pop("callbacks", None) or [ModelCheckpoint(every_n_train_steps=2, save_last=True)]
    t = trainer(
        root,
        **{
            "max_epochs": 3,
            "auto_resume": True,
            "logger": CSVLogger(root),
            "log_every_n_steps": 1,
            "callbacks": [*callbacks, Stop()],
            **flags,
        },
    )
    module = module or Run()
    if stop is None:
        t.fit(module)
    else:
        with pytest.raises(OSError, match="goes away"):
            t.fit(module)
    return t, module


def weights(module: Any) -> Any:
    return {name: np.asarray(value) for name, value in module.state_dict().items()}


def same(a: Any, b: Any) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def checkpoints(root: Path) -> Path:
    return root / "lightning_logs" / "version_0" / "checkpoints"


def test_a_run_that_is_interrupted_again_and_again_ends_like_one_that_was_not(tmp_path: Path) -> None:
    _, undisturbed = fit(tmp_path / "a")
    for stop in (3, 3, 5, 8):
        fit(tmp_path / "b", stop=stop)
    t, module = fit(tmp_path / "b")
    assert t.global_step == 9
    assert same(weights(module), weights(undisturbed))
    logs = Path("lightning_logs", "version_0", "metrics.csv")
    assert (tmp_path / "b" / logs).read_bytes() == (tmp_path / "a" / logs).read_bytes()
    kept = [sorted(path.name for path in checkpoints(tmp_path / root).iterdir()) for root in "ab"]
    assert kept[0] == kept[1]  # in one directory, and none of the interrupted runs is left over
    assert [path.name for path in (tmp_path / "b" / "lightning_logs").iterdir()] == ["version_0"]


def test_damaged_checkpoints_are_named_and_passed_over(tmp_path: Path) -> None:
    fit(tmp_path, stop=8, callbacks=[ModelCheckpoint(every_n_train_steps=2, save_top_k=-1)])
    steps = [checkpoints(tmp_path) / f"epoch={(step - 1) // 3}-step={step}.ckpt" for step in (2, 4, 6, 8)]
    data = max((steps[3] / "params").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 255
    data.write_bytes(raw)  # an array with another content: only its check sum tells
    (steps[2] / "_CHECKPOINT_METADATA").unlink()  # never committed
    left = checkpoints(tmp_path) / "epoch=2-step=9.ckpt.saving-01234567.orbax-checkpoint-tmp"
    left.mkdir()
    (checkpoints(tmp_path) / "empty.ckpt").mkdir()
    with pytest.warns(UserWarning, match="cannot be used and is passed over") as caught:
        t, module = fit(tmp_path, callbacks=[ModelCheckpoint(every_n_train_steps=2, save_top_k=-1)])
    named = " ".join(str(each.message) for each in caught)
    assert all(str(path) in named for path in (*steps[2:], checkpoints(tmp_path) / "empty.ckpt"))
    assert t.ckpt_path == str(steps[1])
    assert not left.exists()
    _, undisturbed = fit(tmp_path / "other")
    assert same(weights(module), weights(undisturbed))


def test_nothing_to_resume_is_a_fresh_start(tmp_path: Path) -> None:
    t, _ = fit(tmp_path / "new")
    assert t.ckpt_path is None
    assert t.global_step == 9
    weights_only = [ModelCheckpoint(save_weights_only=True)]
    fit(tmp_path / "weights", callbacks=weights_only)
    t, _ = fit(tmp_path / "weights", callbacks=[ModelCheckpoint(save_weights_only=True)])
    assert t.ckpt_path is None  # weights alone are no state of a run


def test_a_finished_run_does_nothing_more(tmp_path: Path) -> None:
    _, first = fit(tmp_path)
    rows = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_bytes()
    t, again = fit(tmp_path)
    assert t.global_step == 9
    assert same(weights(again), weights(first))
    assert (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_bytes() == rows


def test_a_run_that_had_been_stopped_early_stays_stopped(tmp_path: Path) -> None:
    def callbacks() -> list[Any]:
        return [EarlyStopping("train_loss", patience=1), ModelCheckpoint(save_last=True)]

    t, first = fit(tmp_path, callbacks=callbacks())
    assert t.global_step == 6  # train_loss grows
    t, again = fit(tmp_path, callbacks=callbacks())
    assert t.global_step == 6
    assert same(weights(again), weights(first))


@pytest.mark.filterwarnings("ignore:Checkpoint directory:UserWarning")
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")
def test_an_explicit_path_and_a_second_fit_go_before(tmp_path: Path) -> None:
    t, module = fit(tmp_path, max_epochs=1)
    other = tmp_path / "lightning_logs" / "elsewhere.ckpt"
    t.save_checkpoint(other)
    t.fit_loop.max_epochs = 2
    t.fit(module)
    assert t.ckpt_path is None  # it went on from memory
    fresh = trainer(tmp_path, auto_resume=True, max_epochs=3, callbacks=[ModelCheckpoint(tmp_path / "x")])
    fresh.fit(Run(), ckpt_path=other)
    assert fresh.ckpt_path == other


def test_without_the_flag_a_run_begins_anew(tmp_path: Path) -> None:
    fit(tmp_path, stop=5)
    t, _ = fit(tmp_path, auto_resume=False)
    assert t.ckpt_path is None
    assert {path.name for path in (tmp_path / "lightning_logs").iterdir()} == {"version_0", "version_1"}


@pytest.mark.filterwarnings("ignore:The dirpath has changed:UserWarning")
def test_a_version_in_a_checkpoint_is_no_way_out_of_the_directory(tmp_path: Path) -> None:
    fit(tmp_path, stop=5)
    for metadata in checkpoints(tmp_path).glob("*/metadata/metadata.json"):
        data = json.loads(metadata.read_text())
        text = json.dumps(data).replace('"version": 0', '"version": "../../outside"')
        assert text != json.dumps(data)
        metadata.write_text(text)
    fit(tmp_path)
    assert not (tmp_path.parent / "outside").exists()
    assert not (tmp_path / "outside").exists()


def test_a_replaced_checkpoint_whose_successor_never_came_is_put_back(tmp_path: Path) -> None:
    fit(tmp_path, stop=8)
    last = checkpoints(tmp_path) / "last.ckpt"
    shutil.rmtree(checkpoints(tmp_path) / "epoch=2-step=8.ckpt")
    last.rename(last.with_name("last.ckpt.replaced-0a1b2c3d"))
    t, _ = fit(tmp_path)
    assert t.ckpt_path == str(last)
