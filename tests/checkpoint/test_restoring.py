"""Which checkpoint a run loads, what it takes up from it and in which order, and what it cannot go on from."""

from __future__ import annotations

import logging
import os
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.checkpoints import DM, Scripted, WithHparams, loader, quiet_fit, trainer

import jaxlightning as pl
from jaxlightning.callbacks import EarlyStopping, ModelCheckpoint
from jaxlightning.optim import Adam
from jaxlightning.utilities.exceptions import MisconfigurationException

pytestmark = pytest.mark.usefixtures("compiled_once")


def test_resuming_needs_the_training_state(fitted):
    t, root = fitted
    t.save_checkpoint(root / "w.ckpt", weights_only=True)
    with pytest.raises(KeyError, match="checkpoint contains only the model"):
        quiet_fit(trainer(root, max_epochs=3, enable_checkpointing=False), WithHparams(), ckpt_path=root / "w.ckpt")


def test_a_missing_checkpoint_is_a_file_not_found_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"Checkpoint file not found: nope.ckpt"):
        trainer(tmp_path, max_epochs=1).fit(Scripted(), ckpt_path="nope.ckpt")


def test_fewer_epochs_than_the_checkpoint_has_is_an_error(tmp_path):
    t = trainer(tmp_path, max_epochs=3, enable_checkpointing=False)
    t.fit(Scripted())
    t.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(MisconfigurationException, match=r"current_epoch=3, but you have set Trainer\(max_epochs=1\)"):
        trainer(tmp_path, max_epochs=1, enable_checkpointing=False).fit(Scripted(), ckpt_path=tmp_path / "a.ckpt")


def test_another_optimizer_is_an_error_that_lists_the_paths(tmp_path):
    t = trainer(tmp_path, max_epochs=1, enable_checkpointing=False)
    t.fit(Scripted())
    t.save_checkpoint(tmp_path / "a.ckpt")

    class WithAdam(Scripted):
        def configure_optimizers(self):
            return Adam(self.parameters(), lr=0.1)

    class WithNone(Scripted):
        def configure_optimizers(self):
            return None

    with pytest.raises((RuntimeError, ValueError), match="optimizer"):
        quiet_fit(trainer(tmp_path, max_epochs=2), WithAdam(), ckpt_path=tmp_path / "a.ckpt")
    with pytest.raises(RuntimeError, match="the states of 1 optimizers, but `configure_optimizers` returned 0"):
        quiet_fit(trainer(tmp_path, max_epochs=2), WithNone(), ckpt_path=tmp_path / "a.ckpt")


def test_loading_runs_the_hooks_in_lightnings_order(fitted):
    root, calls = fitted[1], []

    class Noting(pl.Callback):
        state_key = EarlyStopping("val_loss").state_key

        def on_load_checkpoint(self, trainer, module, checkpoint):
            calls.append("callback.on_load_checkpoint")

        def load_state_dict(self, state_dict):
            calls.append("callback.load_state_dict")

    class Module(WithHparams):
        def on_load_checkpoint(self, checkpoint):
            calls.append("module.on_load_checkpoint")

        def configure_optimizers(self):
            calls.append("configure_optimizers")
            return super().configure_optimizers()

        def on_fit_start(self):
            calls.append("on_fit_start")
            assert self.trainer.global_step == 0

        def on_train_start(self):
            calls.append("on_train_start")
            assert self.trainer.global_step == 3

    class Data(DM):
        __qualname__ = "DM"

        def load_state_dict(self, state_dict):
            calls.append("datamodule.load_state_dict")

    t = trainer(root, max_epochs=2, callbacks=[Noting()], enable_checkpointing=False)
    quiet_fit(t, Module(), datamodule=Data(), ckpt_path=root / "last.ckpt")
    assert calls == [
        "module.on_load_checkpoint",
        "datamodule.load_state_dict",
        "callback.on_load_checkpoint",
        "callback.load_state_dict",
        "configure_optimizers",
        "on_fit_start",
        "on_train_start",
    ]
    assert t._checkpoint_connector._loaded == {}  # RS27: nothing is kept


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_the_other_verbs_load_weights_and_callbacks_but_no_counters(fitted, verb, caplog):
    t, root = fitted

    class Module(WithHparams):
        def test_step(self, batch, batch_idx):
            self.loss(batch)

        def predict_step(self, batch, batch_idx):
            return self.layer(batch[0])

        test_dataloader = predict_dataloader = Scripted.val_dataloader

    fresh, stopping = Module(), EarlyStopping("val_loss")
    caplog.set_level(logging.INFO, logger="jaxlightning")
    second = trainer(root, callbacks=[stopping], enable_checkpointing=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        getattr(second, verb)(fresh, ckpt_path=root / "last.ckpt")
    for key, value in t.lightning_module.state_dict().items():
        np.testing.assert_array_equal(fresh.state_dict()[key], value)
    assert float(stopping.best_score) == 10.0
    assert second.global_step == 0
    assert any(record.message.startswith("Loaded model weights from the checkpoint") for record in caplog.records)


def test_best_needs_a_best_checkpoint(tmp_path):
    class Module(Scripted):
        def test_step(self, batch, batch_idx):
            self.loss(batch)

        test_dataloader = Scripted.val_dataloader

    t = quiet_fit(trainer(tmp_path, max_epochs=1, enable_checkpointing=False), Module())
    with pytest.raises(ValueError, match=r"`ModelCheckpoint` is not configured."):
        t.test(ckpt_path="best")
    t = quiet_fit(trainer(tmp_path, max_epochs=1, callbacks=[ModelCheckpoint(tmp_path, save_top_k=0)]), Module())
    with pytest.raises(ValueError, match="not configured to save the best model"):
        t.test(ckpt_path="best")
    t = quiet_fit(trainer(tmp_path, fast_dev_run=True), Module())
    with pytest.raises(ValueError, match=r"cannot execute .* with `fast_dev_run=True`"):
        t.test(ckpt_path="best")
    with pytest.raises(ValueError, match="no HPC checkpoint was found"):
        t.test(ckpt_path="hpc")


def test_several_checkpoint_callbacks_are_warned_about(tmp_path):
    class Module(Scripted):
        def test_step(self, batch, batch_idx):
            self.loss(batch)

        test_dataloader = Scripted.val_dataloader

    callbacks = [ModelCheckpoint(tmp_path / "a"), ModelCheckpoint(tmp_path / "b", monitor="val_loss")]
    t = quiet_fit(trainer(tmp_path, max_epochs=1, callbacks=callbacks), Module())
    with pytest.warns(UserWarning, match="multiple `ModelCheckpoint` callbacks"):
        t.test(ckpt_path="best", verbose=False)
    assert t.ckpt_path == callbacks[0].best_model_path


def test_a_path_set_on_the_trainer_stays_until_another_is_passed(fitted):
    t, root = fitted
    t.ckpt_path = root / "last.ckpt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        t.validate(datamodule=DM(), verbose=False)
    assert t.ckpt_path == root / "last.ckpt"
    with pytest.warns(UserWarning, match="The latter will be loaded"):
        t.validate(datamodule=DM(), ckpt_path="best", verbose=False)
    assert os.path.basename(t.ckpt_path) == "epoch=0-step=3.ckpt"


def test_slurm_jobs_continue_their_newest_checkpoint(tmp_path, monkeypatch):
    from jaxlightning.checkpoint._resolve import hpc_save_path

    t = quiet_fit(trainer(tmp_path, max_epochs=1, enable_checkpointing=False), Scripted())
    for expected in ("hpc_ckpt_1.ckpt", "hpc_ckpt_2.ckpt"):
        assert os.path.basename(hpc_save_path(tmp_path)) == expected
        t.save_checkpoint(hpc_save_path(tmp_path))
    monkeypatch.setenv("SLURM_NTASKS", "1")
    monkeypatch.setenv("SLURM_JOB_NAME", "train")
    second = quiet_fit(trainer(tmp_path, max_epochs=2, enable_checkpointing=False), Scripted())
    assert os.path.basename(second.ckpt_path) == "hpc_ckpt_2.ckpt"
    assert second.global_step == 6
    monkeypatch.setenv("SLURM_JOB_NAME", "bash")
    third = quiet_fit(trainer(tmp_path, max_epochs=2, enable_checkpointing=False), Scripted())
    assert third.ckpt_path is None


def test_a_checkpoint_from_before_the_first_step_starts_from_there(tmp_path):
    class Saving(pl.Callback):
        def on_train_start(self, trainer, module):
            trainer.save_checkpoint(tmp_path / "start.ckpt")

    class Data(Scripted):
        def val_dataloader(self):
            return loader(2)

    whole, resumed = Data(), Data()
    trainer(tmp_path, max_epochs=1, enable_checkpointing=False, callbacks=[Saving()]).fit(whole)
    trainer(tmp_path, max_epochs=1, enable_checkpointing=False).fit(resumed, ckpt_path=tmp_path / "start.ckpt")
    for key, value in whole.state_dict().items():
        np.testing.assert_array_equal(resumed.state_dict()[key], value)


def test_another_seed_is_warned_about(tmp_path):
    t = trainer(tmp_path, max_epochs=1, enable_checkpointing=False, seed=3)
    t.fit(Scripted())
    t.save_checkpoint(tmp_path / "a.ckpt")
    second = trainer(tmp_path, max_epochs=2, enable_checkpointing=False, seed=4)
    with pytest.warns(UserWarning, match="run with the seed 3, and this one has the seed 4"):
        second.fit(Scripted(), ckpt_path=tmp_path / "a.ckpt")


def test_a_checkpoint_of_eight_devices_loads_on_one_and_back(tmp_path):
    t = trainer(tmp_path, max_epochs=1, enable_checkpointing=False, devices=8, strategy="ddp")
    quiet_fit(t, Scripted(n_train=32))
    t.save_checkpoint(tmp_path / "a.ckpt")
    kernel = np.asarray(t.lightning_module.state_dict()["layer.kernel"])
    one = trainer(tmp_path, max_epochs=1, enable_checkpointing=False)
    module = Scripted(n_train=32)
    one.validate(module, ckpt_path=tmp_path / "a.ckpt", verbose=False)
    np.testing.assert_array_equal(module.state_dict()["layer.kernel"], kernel)
    one.save_checkpoint(tmp_path / "b.ckpt")
    eight = trainer(tmp_path, max_epochs=1, enable_checkpointing=False, devices=4, strategy="ddp")
    module = Scripted(n_train=32)
    eight.validate(module, ckpt_path=tmp_path / "b.ckpt", verbose=False)
    np.testing.assert_array_equal(module.state_dict()["layer.kernel"], kernel)
    assert isinstance(jnp.asarray(kernel), jax.Array)
