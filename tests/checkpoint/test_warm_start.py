"""Loading some weights under other names, and finding the checkpoint to continue from."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import flax.linen as nn
import numpy as np
import orbax.checkpoint as ocp
import pytest
from support.checkpoints import Scripted, trainer

import jaxlightning as pl
from jaxlightning.callbacks import ModelCheckpoint
from jaxlightning.checkpoint import load_weights, newest_checkpoint


class Other(pl.LightningModule):
    """The same layer under another name, beside one that the checkpoint does not have."""

    def __init__(self, features: int = 2) -> None:
        super().__init__()
        self.backbone = nn.Dense(features)
        self.head = nn.Dense(3)

    def training_step(self, batch, batch_idx):
        return self.head(self.backbone(batch[0])).mean()


BATCH = (np.ones((2, 4), np.float32),)


@pytest.fixture
def saved(tmp_path):
    t = trainer(tmp_path, max_epochs=1, enable_checkpointing=False)
    t.fit(Scripted())
    t.save_checkpoint(tmp_path / "a.ckpt")
    return tmp_path / "a.ckpt", np.asarray(t.lightning_module.state_dict()["layer.kernel"])


@pytest.mark.parametrize("created", [True, False])
@pytest.mark.parametrize("rename", [{"layer": "backbone"}, lambda name: name.replace("layer", "backbone")])
def test_weights_are_set_under_their_new_names_before_and_after_creation(saved, rename, created):
    path, kernel = saved
    module = Other()
    if created:
        module.init(BATCH)
    assert load_weights(module, path, rename=rename) == ["backbone.bias", "backbone.kernel"]
    module.init(BATCH)
    state = module.state_dict()
    np.testing.assert_array_equal(state["backbone.kernel"], kernel)
    assert state["head.kernel"].shape == (2, 3)


def test_patterns_choose(saved):
    path, kernel = saved
    module = Other().init(BATCH)
    before = np.asarray(module.state_dict()["backbone.bias"]) + 0
    assert load_weights(module, path, include="*.kernel", rename={"layer": "backbone"}) == ["backbone.kernel"]
    np.testing.assert_array_equal(module.state_dict()["backbone.kernel"], kernel)
    np.testing.assert_array_equal(module.state_dict()["backbone.bias"], before)
    with pytest.raises(ValueError, match="chooses none of the weights"):
        load_weights(module, path, include=["encoder.*"])


def test_what_has_no_place_or_another_shape_is_an_error(saved):
    path, _ = saved
    with pytest.raises(ValueError, match=r"has no place for \['layer.bias', 'layer.kernel'\]"):
        load_weights(Other(), path)
    with pytest.raises(RuntimeError, match=r"\(4, 2\) in the checkpoint, \(4, 5\) here"):
        load_weights(Other(5).init(BATCH), path, rename={"layer": "backbone"})
    with pytest.raises(ValueError, match="would both be called"):
        load_weights(Other(), path, rename=lambda name: "backbone.kernel")
    with pytest.raises(FileNotFoundError):
        load_weights(Other(), path.parent / "no.ckpt")


def test_a_plain_orbax_tree_works_too(tmp_path):
    tree = {"params": {"kernel": np.full((4, 2), 2.0, np.float32), "bias": np.zeros(2, np.float32)}}
    ocp.PyTreeCheckpointer().save(tmp_path / "tree", tree)
    module = Other().init(BATCH)
    load_weights(module, tmp_path / "tree", rename={"params": "backbone"})
    np.testing.assert_array_equal(module.state_dict()["backbone.kernel"], tree["params"]["kernel"])
    ocp.PyTreeCheckpointer().save(tmp_path / "bare", tree["params"])
    load_weights(Other(), tmp_path / "bare", rename={"": "backbone"})


# --- the newest one -----------------------------------------------------------------------------------------------


def test_the_newest_whole_checkpoint_is_found_and_damaged_ones_are_named(tmp_path):
    trainer(tmp_path, max_epochs=3, callbacks=[ModelCheckpoint(tmp_path / "run" / "ck", save_top_k=-1)]).fit(Scripted())
    folder = tmp_path / "run" / "ck"
    assert newest_checkpoint(tmp_path) == str(folder / "epoch=2-step=9.ckpt")
    (folder / "epoch=2-step=9.ckpt" / "_CHECKPOINT_METADATA").unlink()
    (folder / "epoch=3-step=12.ckpt").mkdir()
    (folder / "epoch=4-step=15.ckpt.saving-01234567").mkdir()
    with pytest.warns(UserWarning, match="is passed over") as caught:
        assert newest_checkpoint(tmp_path) == str(folder / "epoch=1-step=6.ckpt")
    assert {Path(str(w.message).split()[2]).name for w in caught} == {"epoch=2-step=9.ckpt", "epoch=3-step=12.ckpt"}
    assert not (folder / "epoch=4-step=15.ckpt.saving-01234567").exists()


def test_weights_alone_links_and_other_directories_do_not_count(tmp_path):
    t = trainer(tmp_path, max_epochs=1, callbacks=[ModelCheckpoint(tmp_path / "ck", save_weights_only=True)])
    t.fit(Scripted())
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "data").mkdir()
    assert newest_checkpoint(tmp_path) is None
    assert newest_checkpoint(tmp_path / "nowhere") is None
    assert len(os.listdir(tmp_path / "ck")) == 1


def test_a_kill_between_the_two_renames_of_a_replacement_loses_nothing(tmp_path):
    t = trainer(tmp_path, max_epochs=1, enable_checkpointing=False)
    t.fit(Scripted())
    t.save_checkpoint(tmp_path / "last.ckpt")
    os.rename(tmp_path / "last.ckpt", tmp_path / "last.ckpt.replaced-01234567")
    shutil.copytree(tmp_path / "last.ckpt.replaced-01234567", tmp_path / "last.ckpt.saving-89abcdef")
    assert newest_checkpoint(tmp_path) == str(tmp_path / "last.ckpt")
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt"]
