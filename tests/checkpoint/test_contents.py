"""What a checkpoint of the Trainer holds, and what hooks may change in it."""

from __future__ import annotations

from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
from support.checkpoints import DM, Scripted, golden, trainer

import jaxlightning as pl
from jaxlightning.callbacks import ModelCheckpoint
from jaxlightning.checkpoint._stored import StoredCheckpoint

pytestmark = pytest.mark.usefixtures("compiled_once")


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
