"""Weights of a checkpoint that are not the module's: what is refused, warned about and renamed."""

from __future__ import annotations

import flax.linen as nn
import numpy as np
import pytest
from support.checkpoints import Scripted, trainer

from jaxlightning.checkpoint._stored import StoredCheckpoint


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
