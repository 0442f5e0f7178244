"""ModelCheckpoint and OnExceptionCheckpoint apart from the recorded files: arguments, state, moments, deleting."""

from __future__ import annotations

import copy
import os
import pickle
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from support.checkpoints import Failing, Scripted, golden, trainer
from support.tracing import RecordingLogger

import jaxlightning as pl
from jaxlightning.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from jaxlightning.checkpoint._stored import StoredCheckpoint
from jaxlightning.utilities.exceptions import MisconfigurationException
from jaxlightning.utilities.warnings import PossibleUserWarning

ERRORS = golden("errors")


@pytest.mark.parametrize(
    ("recorded", "arguments"),
    [
        ("mc_bad_mode", {"mode": "x"}),
        ("mc_topk_-2", {"save_top_k": -2}),
        ("mc_topk_3_no_monitor", {"save_top_k": 3}),
        ("mc_every_n_epochs_-1", {"every_n_epochs": -1}),
        ("mc_every_n_train_steps_-1", {"every_n_train_steps": -1}),
        ("mc_two_triggers", {"every_n_train_steps": 1, "every_n_epochs": 1}),
        ("mc_three_triggers", {"every_n_train_steps": 1, "train_time_interval": timedelta(days=1)}),
    ],
)
def test_contradicting_arguments_are_refused_as_recorded(recorded, arguments):
    with pytest.raises(MisconfigurationException) as error:
        ModelCheckpoint(**arguments)
    assert str(error.value) == ERRORS[recorded]["message"]


def test_a_link_needs_a_local_directory(tmp_path):
    callback = ModelCheckpoint(dirpath="memory://x", save_last="link")
    with pytest.raises(ValueError, match="only supported for local file paths") as error:
        trainer(tmp_path, max_epochs=1, callbacks=[callback]).fit(Scripted())
    assert str(error.value) == ERRORS["mc_link_remote"]["message"]


def test_a_missing_metric_is_an_error_once_validation_has_run(tmp_path):
    t = trainer(tmp_path, max_epochs=1, callbacks=[ModelCheckpoint(tmp_path, monitor="nope")])
    with pytest.raises(MisconfigurationException, match="could not find the monitored key"):
        t.fit(Scripted())


def test_a_metric_of_the_epochs_end_is_waited_for_through_validation_runs(tmp_path):
    class Late(Scripted):
        def on_train_epoch_end(self):
            self.log("late", 1.0 + self.current_epoch)

    callback = ModelCheckpoint(
        tmp_path / "ck", monitor="late", every_n_train_steps=2, save_on_train_epoch_end=True, save_top_k=-1
    )
    trainer(tmp_path, max_epochs=1, val_check_interval=1, callbacks=[callback]).fit(Late())
    assert os.listdir(tmp_path / "ck") == ["epoch=0-step=3.ckpt"]
    assert callback.best_model_score == 1.0


def test_a_missing_metric_is_a_warning_without_validation(tmp_path):
    t = trainer(
        tmp_path, max_epochs=2, limit_val_batches=0, callbacks=[ModelCheckpoint(tmp_path / "ck", monitor="nope")]
    )
    with pytest.warns(UserWarning, match="could not find the monitored key"):
        t.fit(Scripted())
    assert not (tmp_path / "ck").exists()


def test_two_callbacks_that_a_checkpoint_could_not_tell_apart_are_refused(tmp_path):
    with pytest.raises(RuntimeError, match="more than one stateful callback of type `ModelCheckpoint`"):
        trainer(tmp_path, callbacks=[ModelCheckpoint(), ModelCheckpoint(filename="other")])
    trainer(tmp_path, callbacks=[ModelCheckpoint(), ModelCheckpoint(monitor="val_loss")])


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "metrics", "options", "name"),
    [
        (None, {"epoch": 3, "step": 7}, {}, "epoch=3-step=7.ckpt"),
        ("{epoch:03d}", {"epoch": 5}, {}, "epoch=005.ckpt"),
        ("{epoch}-{val_loss:.2f}", {"epoch": 2, "val_loss": np.float32(0.123456)}, {}, "epoch=2-val_loss=0.12.ckpt"),
        ("{epoch}-{epoch_test:.3f}", {"epoch": 3, "epoch_test": 3.0}, {}, "epoch=3-epoch_test=3.000.ckpt"),
        ("{missing:d}", {}, {}, "missing=0.ckpt"),
        ("{missing:.3f}", {}, {}, "missing=0.000.ckpt"),
        ("{val.loss}", {"val.loss": 0.5}, {}, "val.loss=0.5.ckpt"),
        ("a{epoch}b{acc}", {"epoch": 1, "acc": 0.25}, {"auto_insert_metric_name": False}, "a1b0.25.ckpt"),
        ("{loss}", {"loss": np.float32(0.1)}, {}, "loss=0.10000000149011612.ckpt"),
        ("plain", {}, {}, "plain.ckpt"),
    ],
)
def test_names_are_filled_in(template, metrics, options, name):
    assert ModelCheckpoint(filename=template, **options).format_checkpoint_name(metrics) == name


@pytest.mark.lightning
@pytest.mark.parametrize(
    "template",
    [None, "{epoch}-{a/b:.2f}", "x{epoch:02d}_{a/b}", "{missing}{epoch}", "{epoch}-{epoch_a:.1f}", "{step:05d}"],
)
@pytest.mark.parametrize("insert", [True, False])
@pytest.mark.parametrize("extra", [{}, {"ver": 2}, {"prefix": "p"}, {"filename": "{step}"}])
def test_names_are_lightnings(template, insert, extra):
    torch = pytest.importorskip("torch")
    from lightning.pytorch.callbacks import ModelCheckpoint as Theirs

    values = {"epoch": 3, "step": 40, "a/b": 0.123456, "epoch_a": 2.5}
    ours = ModelCheckpoint(filename=template, auto_insert_metric_name=insert)
    theirs = Theirs(filename=template, auto_insert_metric_name=insert)
    got = ours.format_checkpoint_name(
        {k: np.float32(v) if isinstance(v, float) else v for k, v in values.items()}, **extra
    )
    want = theirs.format_checkpoint_name({k: torch.tensor(v) for k, v in values.items()}, **extra)
    assert got == want


def test_a_directory_is_expanded_and_made_absolute(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ModelCheckpoint("~/ck").dirpath == str(tmp_path / "ck")
    assert ModelCheckpoint("rel").dirpath == os.path.join(os.getcwd(), "rel")
    assert ModelCheckpoint(Path(tmp_path)).dirpath == str(tmp_path)


@pytest.mark.lightning
def test_the_state_and_its_key_are_lightnings():
    from lightning.pytorch.callbacks import ModelCheckpoint as Theirs

    for arguments in (
        {},
        {"monitor": "a", "mode": "max"},
        {"every_n_train_steps": 3},
        {"train_time_interval": timedelta(minutes=1)},
    ):
        assert ModelCheckpoint(**arguments).state_key == Theirs(**arguments).state_key
        assert list(ModelCheckpoint(**arguments).state_dict()) == list(Theirs(**arguments).state_dict())


# --- state -----------------------------------------------------------------------------------------------------------


def test_in_another_directory_only_the_best_path_counts(tmp_path):
    first = ModelCheckpoint(tmp_path / "a", monitor="val_loss")
    trainer(tmp_path, max_epochs=2, callbacks=[first]).fit(Scripted())
    same, other = (
        ModelCheckpoint(tmp_path / "a", monitor="val_loss"),
        ModelCheckpoint(tmp_path / "b", monitor="val_loss"),
    )
    same.load_state_dict(first.state_dict())
    assert same.state_dict() == first.state_dict()
    with pytest.warns(UserWarning, match="The dirpath has changed from"):
        other.load_state_dict(first.state_dict())
    assert other.best_model_path == first.best_model_path
    assert other.best_k_models == {}


def test_it_can_be_pickled_and_copied(tmp_path):
    callback = ModelCheckpoint(tmp_path, monitor="val_loss")
    trainer(tmp_path, max_epochs=1, callbacks=[callback]).fit(Scripted())
    for again in (pickle.loads(pickle.dumps(callback)), copy.deepcopy(callback)):
        assert again.state_dict() == callback.state_dict()


def test_to_yaml_writes_the_kept_checkpoints(tmp_path):
    callback = ModelCheckpoint(tmp_path, monitor="val_loss", save_top_k=2)
    with pytest.raises(ValueError, match="not known before a run"):
        ModelCheckpoint().to_yaml()
    trainer(tmp_path, max_epochs=3, callbacks=[callback]).fit(Scripted())
    callback.to_yaml()
    want = {path: float(score) for path, score in callback.best_k_models.items()}
    assert yaml.safe_load((tmp_path / "best_k_models.yaml").read_text()) == want
    callback.to_yaml(tmp_path / "other.yaml")
    assert (tmp_path / "other.yaml").exists()


def test_last_holds_the_same_as_the_other_checkpoint_of_its_step(tmp_path):
    callback = ModelCheckpoint(tmp_path, monitor="val_loss", save_last=True)
    trainer(tmp_path, max_epochs=2, callbacks=[callback]).fit(Scripted())
    best, last = StoredCheckpoint(callback.best_model_path), StoredCheckpoint(tmp_path / "last.ckpt")
    np.testing.assert_array_equal(best.tree("params")["layer"]["kernel"], last.tree("params")["layer"]["kernel"])
    a, b = best.body(), last.body()
    for body in (a, b):
        body.pop("rng")
        state = body["callbacks"].pop(callback.state_key)
        assert state["best_model_path"] == callback.best_model_path
    assert a["loops"] == b["loops"]
    assert a["global_step"] == b["global_step"] == 6


# --- warnings --------------------------------------------------------------------------------------------------------


def test_a_used_directory_is_warned_about(tmp_path):
    (tmp_path / "ck").mkdir()
    (tmp_path / "ck" / "old.txt").write_text("x")
    t = trainer(tmp_path, max_epochs=1, callbacks=[ModelCheckpoint(tmp_path / "ck")])
    with pytest.warns(UserWarning, match="exists and is not empty"):
        t.fit(Scripted())


@pytest.mark.parametrize(("monitor", "warned"), [("val_acc", True), ("val/accuracy", True), ("val_loss", False)])
def test_minimizing_what_looks_like_a_score_is_warned_about(tmp_path, monitor, warned):
    class Module(Scripted):
        def on_validation_epoch_end(self):
            self.log(monitor, 0.5)

    t = trainer(tmp_path, max_epochs=1, callbacks=[ModelCheckpoint(tmp_path, monitor=monitor)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        t.fit(Module())
    about = [w for w in caught if "looks like a score" in str(w.message)]
    assert len(about) == warned
    assert all(issubclass(w.category, PossibleUserWarning) for w in about)


# --- moments ---------------------------------------------------------------------------------------------------------


class LogsStep(Scripted):
    """Logs the step at each validation as `v`."""

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            self.log("v", float(self.trainer.global_step))


def checkpoints(root):
    return sorted(entry for entry in os.listdir(root) if entry.endswith(".ckpt"))


def test_a_step_whose_validation_is_due_is_ranked_on_its_own_metric(tmp_path):
    """pytorch-lightning#20919: with equal intervals the file was ranked and named by the metric before."""
    callback = ModelCheckpoint(
        tmp_path, monitor="v", every_n_train_steps=2, save_top_k=-1, filename="{step}-{v:.0f}", mode="max"
    )
    trainer(tmp_path, max_epochs=1, val_check_interval=2, callbacks=[callback]).fit(LogsStep(n_train=12))
    assert checkpoints(tmp_path) == ["step=2-v=2.ckpt", "step=4-v=4.ckpt", "step=6-v=6.ckpt"]
    assert callback.best_model_path.endswith("step=6-v=6.ckpt")


def test_a_step_without_validation_is_ranked_on_the_last_known_value(tmp_path):
    callback = ModelCheckpoint(
        tmp_path, monitor="v", every_n_train_steps=1, save_top_k=-1, filename="{step}-{v:.0f}", mode="max"
    )
    trainer(tmp_path, max_epochs=2, callbacks=[callback]).fit(LogsStep(n_train=6))
    # Steps 1 and 2 have no value to be ranked by; what was due then is saved with the first one.
    assert checkpoints(tmp_path) == ["step=3-v=3.ckpt", "step=4-v=3.ckpt", "step=5-v=3.ckpt", "step=6-v=6.ckpt"]


def test_a_metric_that_training_logs_once_per_epoch_is_waited_for(tmp_path):
    class Module(Scripted):
        def on_train_epoch_end(self):
            self.log("t", float(self.current_epoch))

    callback = ModelCheckpoint(tmp_path, monitor="t", every_n_train_steps=2, save_top_k=-1, filename="{step}-{t:.0f}")
    trainer(tmp_path, max_epochs=1, limit_val_batches=0, callbacks=[callback]).fit(Module())
    assert checkpoints(tmp_path) == ["step=3-t=0.ckpt"]


def test_accumulation_saves_a_step_once(tmp_path):
    saves = []

    class Counting(ModelCheckpoint):
        def _save_checkpoint(self, trainer, filepath):
            saves.append(trainer.global_step)
            super()._save_checkpoint(trainer, filepath)

    t = trainer(
        tmp_path, max_epochs=1, accumulate_grad_batches=3, callbacks=[Counting(tmp_path, every_n_train_steps=1)]
    )
    t.fit(Scripted(n_train=18))
    assert saves == [1, 2, 3]


def test_a_time_interval_saves_when_it_has_passed(tmp_path, monkeypatch):
    from jaxlightning.callbacks import _checkpoint_moments

    clock = [0.0]
    monkeypatch.setattr(_checkpoint_moments.time, "monotonic", lambda: clock[0])

    class Ticking(pl.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            clock[0] += 10

    callback = ModelCheckpoint(tmp_path, train_time_interval=timedelta(seconds=25), save_top_k=-1)
    trainer(tmp_path, max_epochs=2, callbacks=[Ticking(), callback]).fit(Scripted())
    assert checkpoints(tmp_path) == ["epoch=0-step=3.ckpt", "epoch=1-step=6.ckpt"]


def test_nothing_is_saved_in_the_sanity_check_or_by_other_verbs(tmp_path):
    callback = ModelCheckpoint(tmp_path / "ck", save_on_train_epoch_end=False)

    class Stop(pl.Callback):
        def on_sanity_check_end(self, trainer, module):
            assert not (tmp_path / "ck").exists()

    t = trainer(tmp_path, max_epochs=1, callbacks=[callback, Stop()])
    t.fit(Scripted())
    before = checkpoints(tmp_path / "ck")
    t.validate(Scripted(), verbose=False)
    assert checkpoints(tmp_path / "ck") == before == ["epoch=0-step=3.ckpt"]


def test_loggers_hear_of_each_checkpoint_after_it(tmp_path):
    heard = []

    class Hearing(RecordingLogger):
        def after_save_checkpoint(self, callback):
            heard.append(os.path.basename(callback.best_model_path))

    logger = Hearing([], str(tmp_path))
    callback = ModelCheckpoint(tmp_path / "ck")
    trainer(tmp_path, max_epochs=2, logger=logger, log_every_n_steps=1, callbacks=[callback]).fit(Scripted())
    assert heard == ["epoch=0-step=3.ckpt", "epoch=1-step=6.ckpt"]


# --- exceptions ------------------------------------------------------------------------------------------------------


@pytest.mark.catalogue("MC25", adaptation="the state of the last step that did finish is saved; its arrays are alive")
@pytest.mark.parametrize("where", ["on_train_start", "on_validation_start", "on_train_epoch_end"])
def test_an_exception_anywhere_saves_the_state_of_the_last_step(tmp_path, where):
    class Raising(pl.Callback):
        pass

    def fail(self, trainer, *args):
        if not trainer.sanity_checking and (trainer.global_step or where == "on_train_start"):
            raise RuntimeError("boom")

    setattr(Raising, where, fail)
    callback = ModelCheckpoint(tmp_path / "ck", save_on_exception=True, every_n_epochs=9, filename="exc-{step}")
    t = trainer(tmp_path, max_epochs=2, callbacks=[Raising(), callback])
    with pytest.raises(RuntimeError, match="boom"):
        t.fit(Scripted())
    if where == "on_train_start":
        assert not (tmp_path / "ck").exists()  # no step was taken
    else:
        assert checkpoints(tmp_path / "ck") == ["exc-step=3.ckpt"]
        assert StoredCheckpoint(tmp_path / "ck" / "exc-step=3.ckpt").body()["global_step"] == 3


def test_an_exception_checkpoint_resumes_with_the_batch_that_failed(tmp_path):
    callback = ModelCheckpoint(tmp_path / "ck", save_on_exception=True, every_n_epochs=9, filename="exc")
    with pytest.raises(RuntimeError, match="boom"):
        trainer(tmp_path, max_epochs=3, callbacks=[callback]).fit(Failing())
    whole, resumed = Scripted(), Scripted()
    trainer(tmp_path, max_epochs=3, enable_checkpointing=False).fit(whole)
    t = trainer(tmp_path, max_epochs=3, enable_checkpointing=False)
    with pytest.warns(UserWarning, match="callbacks used to create the checkpoint"):
        t.fit(resumed, ckpt_path=tmp_path / "ck" / "exc.ckpt")
    for key, value in whole.state_dict().items():
        np.testing.assert_array_equal(resumed.state_dict()[key], value)


def test_on_exception_checkpoint_needs_a_name(tmp_path):
    with pytest.raises(ValueError, match="filename cannot be empty"):
        OnExceptionCheckpoint(tmp_path, filename="")
    assert OnExceptionCheckpoint(tmp_path).ckpt_path == str(tmp_path / "on_exception.ckpt")


# --- deleting --------------------------------------------------------------------------------------------------------


def test_what_was_resumed_is_kept(tmp_path):
    trainer(tmp_path, max_epochs=1, callbacks=[ModelCheckpoint(tmp_path)]).fit(Scripted())
    with pytest.warns(UserWarning, match="not empty"):
        trainer(tmp_path, max_epochs=3, callbacks=[ModelCheckpoint(tmp_path)]).fit(
            Scripted(), ckpt_path=tmp_path / "epoch=0-step=3.ckpt"
        )
    assert checkpoints(tmp_path) == ["epoch=0-step=3.ckpt", "epoch=2-step=9.ckpt"]


@pytest.mark.parametrize("path", ["../outside.ckpt", "/etc", "sub/../../outside.ckpt", "link/inner.ckpt"])
def test_nothing_outside_of_the_directory_is_ever_deleted(tmp_path, path: str):
    """What a checkpoint says was saved earlier may be anything."""
    inside, outside = tmp_path / "ck", tmp_path / "outside.ckpt"
    other = tmp_path / "other"
    for folder in (inside, outside, other / "inner.ckpt"):
        folder.mkdir(parents=True)
    for folder in (outside, other / "inner.ckpt"):
        (folder / "_CHECKPOINT_METADATA").write_text("{}")
    (inside / "link").symlink_to(other)
    removed: list[Any] = []

    class Trainer:
        ckpt_path = None

        class _checkpoint_connector:
            auto_resumed = False

            @staticmethod
            def remove_checkpoint(path, **kwargs):
                removed.append(path)

    ModelCheckpoint(inside)._remove_checkpoint(Trainer, os.path.join(inside, path), "new")  # type: ignore[arg-type]
    assert removed == []
    ModelCheckpoint(inside)._remove_checkpoint(Trainer, os.path.join(inside, "a/b.ckpt"), "new")  # type: ignore[arg-type]
    assert len(removed) == 1


def test_old_checkpoints_go_only_after_the_new_commit(tmp_path, monkeypatch):
    from jaxlightning.checkpoint import _layout

    seen = []
    delete = _layout.delete_checkpoint

    def noting(path, **kwargs):
        seen.append((path.name, checkpoints(tmp_path)))
        delete(path, **kwargs)

    monkeypatch.setattr(_layout, "delete_checkpoint", noting)
    trainer(tmp_path, max_epochs=3, callbacks=[ModelCheckpoint(tmp_path)]).fit(Scripted())
    assert seen == [
        ("epoch=0-step=3.ckpt", ["epoch=0-step=3.ckpt", "epoch=1-step=6.ckpt"]),
        ("epoch=1-step=6.ckpt", ["epoch=1-step=6.ckpt", "epoch=2-step=9.ckpt"]),
    ]


def test_a_link_to_last_is_relative_so_that_the_run_can_be_moved(tmp_path):
    callback = ModelCheckpoint(tmp_path / "ck", save_last="link", save_top_k=-1)
    trainer(tmp_path, max_epochs=2, callbacks=[callback]).fit(Scripted())
    assert os.readlink(tmp_path / "ck" / "last.ckpt") == "epoch=1-step=6.ckpt"
    os.rename(tmp_path / "ck", tmp_path / "moved")
    module = Scripted()
    t = trainer(tmp_path, max_epochs=3, enable_checkpointing=False)
    with pytest.warns(UserWarning, match="callbacks used to create the checkpoint"):
        t.fit(module, ckpt_path=tmp_path / "moved" / "last.ckpt")
    assert t.global_step == 9
