"""What a checkpoint of the Trainer holds, what hooks may change, and how it is found and loaded again."""

from __future__ import annotations

import enum
import json
import logging
import os
import warnings
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from support.checkpoints import Scripted, golden, loader, trainer

import jaxlightning as pl
from jaxlightning.callbacks import EarlyStopping, ModelCheckpoint
from jaxlightning.checkpoint._stored import StoredCheckpoint
from jaxlightning.optim import SGD, Adam
from jaxlightning.optim.lr_scheduler import StepLR
from jaxlightning.utilities.exceptions import MisconfigurationException

GOLDEN = golden("hparams")


class WithHparams(Scripted):
    def __init__(self, n_train=6, a=1, b="x"):
        super().__init__(n_train)
        self.save_hyperparameters()

    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), lr=0.1, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 1), "interval": "epoch"}}


class DM(pl.LightningDataModule):
    def __init__(self, z=3):
        super().__init__()
        self.save_hyperparameters()
        self.loaded = None

    def train_dataloader(self):
        return loader(6)

    def val_dataloader(self):
        return loader(4)

    def state_dict(self):
        return {"pos": 1}

    def load_state_dict(self, state_dict):
        self.loaded = state_dict


def quiet_fit(t, *args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        t.fit(*args, **kwargs)
    return t


@pytest.fixture
def fitted(tmp_path):
    """A trainer after one epoch, and its root directory with `last.ckpt`."""
    callbacks = [ModelCheckpoint(dirpath=tmp_path, save_last=True), EarlyStopping("val_loss")]
    t = trainer(tmp_path, max_epochs=1, callbacks=callbacks)
    return quiet_fit(t, WithHparams(), datamodule=DM()), tmp_path


# --- contents -----------------------------------------------------------------------------------------------------


def keys(value: Any, depth: int) -> Any:
    return {str(k): keys(v, depth - 1) for k, v in value.items()} if isinstance(value, dict) and depth else None


@pytest.mark.catalogue("DM03", "MC28", "MC36")
@pytest.mark.catalogue("RS01", adaptation="the same keys; a directory, with the arrays in items of their own")
def test_a_checkpoint_has_lightnings_keys(fitted):
    want = golden("checkpoint_contents")["last.ckpt"]
    body = StoredCheckpoint(fitted[1] / "last.ckpt").body()
    ours = {"rng", "metrics"}  # besides: the seed with the host's generators, and what was logged
    assert set(body) - ours == set(want) - {"state_dict"}
    assert set(body["loops"]) == set(want["loops"])
    for loop, state in want["loops"].items():
        assert {k: v for k, v in body["loops"][loop].items() if "progress" in k} == {
            k: None if v is None else body["loops"][loop][k] for k, v in state.items() if "progress" in k
        }
    assert keys(body["callbacks"], 2) == {key: dict.fromkeys(state) for key, state in want["callbacks"].items()}
    for key in ("epoch", "global_step", "pytorch-lightning_version", "hparams_name", "hyper_parameters"):
        assert body[key] == want[key]
    for key in ("datamodule_hparams_name", "datamodule_hyper_parameters", "DM"):
        assert body[key] == want[key]
    assert [type(body[key]) for key in ("optimizer_states", "lr_schedulers")] == [list, list]


@pytest.mark.catalogue("RS02")
def test_weights_only_leaves_out_what_training_needs(fitted):
    want = golden("checkpoint_contents")["save_checkpoint_weights_only_after_fit"]
    t, root = fitted
    t.save_checkpoint(root / "w.ckpt", weights_only=True)
    stored = StoredCheckpoint(root / "w.ckpt")
    body = stored.body()
    assert sorted(body) == sorted(set(want["keys"]) - {"state_dict"})
    assert [body["epoch"], body["global_step"]] == [want["epoch"], want["global_step"]]
    assert not stored.has("optimizer_states")
    assert stored.tree("params")


def test_orbax_alone_reads_parameters_and_optimizer_states(fitted):
    t, root = fitted
    params = ocp.PyTreeCheckpointer().restore(root / "last.ckpt" / "params")
    np.testing.assert_array_equal(params["layer"]["kernel"], t.lightning_module.state_dict()["layer.kernel"])
    assert ocp.PyTreeCheckpointer().restore(root / "last.ckpt" / "optimizer_states")


def test_the_json_names_no_machine(fitted):
    root = fitted[1]
    for file in (root / "last.ckpt").rglob("*"):
        if file.is_file():
            assert str(root).encode() not in file.read_bytes(), file


def test_saving_calls_the_hooks_in_lightnings_order(tmp_path):
    calls = []

    class Noting(pl.Callback):
        def __init__(self, name):
            self.name = name

        @property
        def state_key(self):
            return self.name

        def state_dict(self):
            calls.append(f"{self.name}.state_dict")
            return {"a": 1}

        def on_save_checkpoint(self, trainer, module, checkpoint):
            calls.append(f"{self.name}.on_save_checkpoint")
            assert checkpoint["callbacks"]["first"] == {"a": 1}

    class Module(Scripted):
        def on_save_checkpoint(self, checkpoint):
            calls.append("module.on_save_checkpoint")
            checkpoint["mine"] = {"array": np.arange(3), "text": "x"}

    class Data(DM):
        def state_dict(self):
            calls.append("datamodule.state_dict")
            return {"pos": 2}

    t = trainer(tmp_path, max_epochs=1, enable_checkpointing=False, callbacks=[Noting("first"), Noting("second")])
    t.fit(Module(), datamodule=Data())
    t.save_checkpoint(tmp_path / "a.ckpt")
    assert calls == [
        "first.state_dict",
        "second.state_dict",
        "datamodule.state_dict",
        "first.on_save_checkpoint",
        "second.on_save_checkpoint",
        "module.on_save_checkpoint",
    ]
    body = StoredCheckpoint(tmp_path / "a.ckpt").body()
    assert body["mine"]["array"].tolist() == [0, 1, 2]
    calls.clear()
    t.save_checkpoint(tmp_path / "b.ckpt", weights_only=True)
    assert calls == ["datamodule.state_dict", "module.on_save_checkpoint"]


def test_a_state_that_needs_pickle_is_an_error_that_names_it(tmp_path):
    class Bad(pl.Callback):
        def state_dict(self):
            return {"ok": 1, "model": object()}

    t = trainer(tmp_path, max_epochs=1, enable_checkpointing=False, callbacks=[Bad()])
    t.fit(Scripted())
    with pytest.raises(TypeError, match=r"callbacks/.*Bad/model is of type object"):
        t.save_checkpoint(tmp_path / "a.ckpt")
    assert not (tmp_path / "a.ckpt").exists()


def test_saving_before_a_model_is_attached_is_an_attribute_error(tmp_path):
    with pytest.raises(AttributeError, match="only possible if a model is attached"):
        trainer(tmp_path).save_checkpoint(tmp_path / "a.ckpt")


def test_a_save_during_fit_holds_the_state_of_its_own_step(tmp_path):
    """The steps go on, with donated buffers, while the checkpoint is written."""
    wanted = {}

    class Saving(pl.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            wanted[trainer.global_step] = {k: np.array(v) for k, v in module.state_dict().items()}
            trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")

    t = trainer(tmp_path, max_epochs=2, enable_checkpointing=False, callbacks=[Saving()])
    t.fit(Scripted())
    assert len(wanted) == 6
    for step, state in wanted.items():
        params = StoredCheckpoint(tmp_path / f"{step}.ckpt").tree("params")
        for name in ("kernel", "bias"):
            np.testing.assert_array_equal(params["layer"][name], state[f"layer.{name}"])


def test_an_error_in_the_background_ends_fit(tmp_path, monkeypatch):
    from jaxlightning.checkpoint import _io

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(_io, "commit", fail)
    with pytest.raises(OSError, match="disk full"):
        trainer(tmp_path, max_epochs=1, callbacks=[ModelCheckpoint(tmp_path)]).fit(Scripted())


# --- hyper-parameters -------------------------------------------------------------------------------------------------


class Hidden(Scripted):
    def __init__(self, hidden=4, lr=0.1):
        super().__init__()
        self.save_hyperparameters()


class Bs(pl.LightningDataModule):
    def __init__(self, bs=2, lr=None):
        super().__init__()
        self.save_hyperparameters(ignore="lr" if lr is None else None)

    def train_dataloader(self):
        return loader(4)


@pytest.fixture
def hidden(tmp_path):
    t = trainer(tmp_path, max_epochs=1, enable_checkpointing=False, limit_val_batches=0)
    quiet_fit(t, Hidden(hidden=8), datamodule=Bs())
    t.save_checkpoint(tmp_path / "a.ckpt")
    return tmp_path / "a.ckpt"


@pytest.mark.catalogue("HP06", "DM07")
def test_hyper_parameters_are_saved_and_rebuild_the_objects(hidden):
    body = StoredCheckpoint(hidden).body()
    assert {k: v for k, v in body.items() if "param" in k or "hparams" in k} == GOLDEN["ckpt_keys"]
    assert dict(Hidden.load_from_checkpoint(hidden).hparams) == GOLDEN["loaded"]
    assert dict(Hidden.load_from_checkpoint(hidden, hidden=99).hparams) == GOLDEN["loaded_override"]
    assert dict(Hidden.load_from_checkpoint(hidden, nonexistent=1).hparams) == GOLDEN["loaded_extra_kwarg_ignored"]
    assert dict(Bs.load_from_checkpoint(hidden).hparams) == GOLDEN["dm_loaded"]


def test_a_module_loaded_from_a_checkpoint_computes_without_an_example(hidden):
    class Calling(Hidden):
        def forward(self, x):
            return self.layer(x)

    module = Calling.load_from_checkpoint(hidden)
    params = StoredCheckpoint(hidden).tree("params")["layer"]
    x = np.ones((3, 4), np.float32)
    np.testing.assert_allclose(module(x), x @ params["kernel"] + params["bias"], rtol=1e-6)


def test_a_file_may_replace_the_saved_hyper_parameters(hidden, tmp_path):
    (tmp_path / "h.yaml").write_text("hidden: 5\nlr: 0.5\n")
    (tmp_path / "h.csv").write_text("key,value\nhidden,6\n")
    assert dict(Hidden.load_from_checkpoint(hidden, hparams_file=tmp_path / "h.yaml").hparams) == {
        "hidden": 5,
        "lr": 0.5,
    }
    assert Hidden.load_from_checkpoint(hidden, hparams_file=tmp_path / "h.csv").hparams.hidden == 6
    with pytest.raises(ValueError, match=r"csv, .yml or .yaml is required"):
        Hidden.load_from_checkpoint(hidden, hparams_file=tmp_path / "h.json")


def test_what_cannot_be_written_is_warned_about_once_and_must_be_given_again(tmp_path):
    class Activated(Scripted):
        def __init__(self, activation=nn.relu, n=3):
            super().__init__()
            self.save_hyperparameters()

    t = trainer(tmp_path, max_epochs=1, enable_checkpointing=False)
    t.fit(Activated(nn.tanh))
    with pytest.warns(UserWarning, match="Attribute 'activation' of the hyper-parameters cannot be written"):
        t.save_checkpoint(tmp_path / "a.ckpt")
    t.save_checkpoint(tmp_path / "b.ckpt")  # said once: a second warning would be an error here
    assert "tanh" in (tmp_path / "a.ckpt" / "metadata" / "metadata.json").read_text()
    with pytest.raises(MisconfigurationException, match=r"activation=\.\.\."):
        Activated.load_from_checkpoint(tmp_path / "a.ckpt")
    module = Activated.load_from_checkpoint(tmp_path / "a.ckpt", activation=nn.gelu)
    assert module.hparams.activation is nn.gelu
    assert module.hparams.n == 3


def test_hyper_parameters_keep_their_types(tmp_path):
    class Typed(Scripted):
        def __init__(self, **kw):
            super().__init__()
            self.save_hyperparameters()

    from pathlib import Path

    values = {"sizes": (1, 2), "path": Path("x/y"), "nested": {"a": {1: "int"}}, "inf": float("inf"), "none": None}
    t = trainer(tmp_path, max_epochs=1, enable_checkpointing=False)
    t.fit(Typed(**values))
    t.save_checkpoint(tmp_path / "a.ckpt")
    assert dict(Typed.load_from_checkpoint(tmp_path / "a.ckpt").hparams) == values


def test_one_argument_that_holds_all_is_rebuilt(tmp_path):
    class Conf(Scripted):
        def __init__(self, conf):
            super().__init__()
            self.save_hyperparameters(conf)

    t = trainer(tmp_path, max_epochs=1, enable_checkpointing=False)
    t.fit(Conf({"lr": 0.1, "depth": 2}))
    t.save_checkpoint(tmp_path / "a.ckpt")
    assert dict(Conf.load_from_checkpoint(tmp_path / "a.ckpt").hparams) == {"lr": 0.1, "depth": 2}
    assert dict(Conf.load_from_checkpoint(tmp_path / "a.ckpt", lr=1.0).hparams) == {"lr": 1.0, "depth": 2}
    assert dict(Conf.load_from_checkpoint(tmp_path / "a.ckpt", conf={"x": 1}).hparams) == {"x": 1}


def test_a_checkpoint_cannot_choose_what_is_called(hidden):
    file = hidden / "metadata" / "metadata.json"
    data = json.loads(file.read_text())
    data["checkpoint"]["hyper_parameters"]["_instantiator"] = "os.system"
    file.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"asks to be built by 'os.system'"):
        Hidden.load_from_checkpoint(hidden)


def test_loading_on_an_instance_is_a_type_error(hidden):
    for instance in (Hidden(), Bs()):
        with pytest.raises(TypeError, match="cannot be called on an instance"):
            instance.load_from_checkpoint(hidden)


def test_a_datamodule_gets_its_state(fitted):
    assert DM.load_from_checkpoint(fitted[1] / "last.ckpt", z=7).loaded == {"pos": 1}
    assert DM.load_from_checkpoint(fitted[1] / "last.ckpt").hparams.z == 3


# --- strict loading -----------------------------------------------------------------------------------------------


def test_other_networks_shapes_and_names_are_listed(tmp_path):
    t = trainer(tmp_path, max_epochs=1, enable_checkpointing=False)
    t.fit(Scripted())
    t.save_checkpoint(tmp_path / "a.ckpt")

    class More(Scripted):
        def __init__(self):
            super().__init__()
            self.extra = nn.Dense(3)

    class Other(Scripted):
        def __init__(self):
            super().__init__()
            self.other = self.layer
            del self.layer

    class Wider(Scripted):
        def __init__(self):
            super().__init__()
            self.layer = nn.Dense(5)

    with pytest.raises(RuntimeError, match=r"missing.*extra"):
        More.load_from_checkpoint(tmp_path / "a.ckpt")
    with pytest.warns(UserWarning, match=r"in the model state dict but not in the checkpoint: \['extra"):
        More.load_from_checkpoint(tmp_path / "a.ckpt", strict=False)
    with pytest.raises(RuntimeError, match=r"(?s)missing.*other|unexpected.*layer"):
        Other.load_from_checkpoint(tmp_path / "a.ckpt")
    built = Wider()
    built.init((np.ones((2, 4), np.float32),))
    from jaxlightning.checkpoint._weights import load_weights_into

    stored = StoredCheckpoint(tmp_path / "a.ckpt")
    from jaxlightning.checkpoint._weights import load_dictionary

    flat = load_dictionary(stored, training_state=False)["state_dict"]
    with pytest.raises(RuntimeError, match=r"layer/kernel is \(4, 2\) in the checkpoint, \(4, 5\) here"):
        load_weights_into(built, flat, stored=stored, strict=True)


def test_strict_loading_of_the_module_counts_and_may_not_be_contradicted(tmp_path):
    t = trainer(tmp_path, max_epochs=1, enable_checkpointing=False)
    t.fit(Scripted())
    t.save_checkpoint(tmp_path / "a.ckpt")

    class Loose(Scripted):
        def __init__(self):
            super().__init__()
            self.extra = nn.Dense(3)
            self.strict_loading = False

    with pytest.warns(UserWarning, match="extra"):
        Loose.load_from_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match=r"in conflict with `Loose.strict_loading=False`"):
        Loose.load_from_checkpoint(tmp_path / "a.ckpt", strict=True)


def test_hooks_may_rename_and_remove_weights_when_saving_and_loading(tmp_path):
    class Old(Scripted):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["state_dict"] = {f"layer.{k.split('.')[-1]}2": v for k, v in checkpoint["state_dict"].items()}

    class New(Scripted):
        def on_load_checkpoint(self, checkpoint):
            state = checkpoint["state_dict"]
            assert sorted(state) == ["layer.bias2", "layer.kernel2"]
            checkpoint["state_dict"] = {key.removesuffix("2"): value for key, value in state.items()}

    t = trainer(tmp_path, max_epochs=1, enable_checkpointing=False)
    t.fit(Old())
    t.save_checkpoint(tmp_path / "a.ckpt")
    module = New.load_from_checkpoint(tmp_path / "a.ckpt")
    for key, value in t.lightning_module.state_dict().items():
        np.testing.assert_array_equal(module.state_dict()[key], value)


def test_a_checkpoint_without_parameters_is_warned_about(tmp_path):
    class Empty(Scripted):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["state_dict"] = {}

    t = trainer(tmp_path, max_epochs=1, enable_checkpointing=False)
    t.fit(Empty())
    t.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.warns(UserWarning, match="contains no parameters"):
        Scripted.load_from_checkpoint(tmp_path / "a.ckpt")


# --- restoring ------------------------------------------------------------------------------------------------------


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


class Mode(enum.Enum):
    FAST = 1
    EXACT = 2


class Choosing(Scripted):
    def __init__(
        self, mode: Mode = Mode.FAST, other: Mode | None = None, act: Any = nn.relu, loose: Any = None, dtype: Any = int
    ) -> None:
        super().__init__()
        self.save_hyperparameters()


@pytest.mark.filterwarnings("ignore:Attribute .* of the hyper-parameters cannot be written:UserWarning")
def test_what_the_class_itself_names_need_not_be_given_again(tmp_path):
    t = trainer(tmp_path, max_epochs=1, enable_checkpointing=False, limit_train_batches=1, limit_val_batches=0)
    t.fit(Choosing(mode=Mode.EXACT, other=Mode.FAST))
    t.save_checkpoint(tmp_path / "a.ckpt")
    again = Choosing.load_from_checkpoint(tmp_path / "a.ckpt").hparams
    assert again.mode is Mode.EXACT  # the default's enumeration
    assert again.other is Mode.FAST  # the annotation's
    assert again.act is nn.relu
    assert again.dtype is int
    t = trainer(tmp_path, max_epochs=1, enable_checkpointing=False, limit_train_batches=1, limit_val_batches=0)
    t.fit(Choosing(loose=Mode.FAST, act=nn.gelu))
    t.save_checkpoint(tmp_path / "b.ckpt")
    with pytest.raises(MisconfigurationException, match=r"2 hyper-parameter.*act \(it was .*gelu\), loose \(it was "):
        Choosing.load_from_checkpoint(tmp_path / "b.ckpt")
    assert Choosing.load_from_checkpoint(tmp_path / "b.ckpt", loose=1, act=nn.gelu).hparams.act is nn.gelu
