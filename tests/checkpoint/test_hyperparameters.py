"""Hyper-parameters in checkpoints: how they are kept, and how module and datamodule are rebuilt from them."""

from __future__ import annotations

import enum
import json
from typing import Any

import flax.linen as nn
import numpy as np
import pytest
from support.checkpoints import DM, Scripted, golden, loader, quiet_fit, trainer

import jaxlightning as pl
from jaxlightning.checkpoint._stored import StoredCheckpoint
from jaxlightning.utilities.exceptions import MisconfigurationException

pytestmark = pytest.mark.usefixtures("compiled_once")

GOLDEN = golden("hparams")


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
