"""A checkpoint knows nothing of devices: saved on eight, loaded on one and on four, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from support.checkpoints import Scripted, loader, trainer

COUNTS = (8, 1, 4)


class Momentum(Scripted):
    def configure_optimizers(self) -> Any:
        from jaxlightning.optim import Adam

        return Adam(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return loader(32)


def run(root: Path, devices: int, ckpt_path: Any = None, epochs: int = 1) -> tuple[Any, Any]:
    module = Momentum()
    t = trainer(
        root,
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        max_epochs=epochs,
        enable_checkpointing=False,
        limit_val_batches=0,
        num_sanity_val_steps=0,
    )
    t.fit(module, ckpt_path=ckpt_path)
    return t, module


def leaves(path: Path) -> list[Any]:
    from jaxlightning.checkpoint._stored import StoredCheckpoint

    stored = StoredCheckpoint(path)
    trees = [stored.tree(name) for name in ("params", "optimizer_states")]
    return [np.asarray(leaf) for leaf in jax.tree_util.tree_leaves(trees)]


@pytest.mark.parametrize("first", COUNTS)
@pytest.mark.parametrize("second", COUNTS)
def test_a_state_moves_to_another_number_of_devices_bit_for_bit(first: int, second: int, tmp_path: Path) -> None:
    t, _ = run(tmp_path, first)
    t.save_checkpoint(tmp_path / "a.ckpt")
    t, module = run(tmp_path, second, ckpt_path=tmp_path / "a.ckpt")  # has reached max_epochs: loads and ends
    t.save_checkpoint(tmp_path / "b.ckpt")
    saved, again = leaves(tmp_path / "a.ckpt"), leaves(tmp_path / "b.ckpt")
    assert len(saved) == len(again) > 2
    assert all(np.array_equal(a, b) for a, b in zip(saved, again, strict=True))
    on = {len(leaf.sharding.device_set) for leaf in jax.tree_util.tree_leaves(module._engine.tree.params)}
    assert on == {second}
    t, module = run(tmp_path, second, ckpt_path=tmp_path / "b.ckpt", epochs=2)  # and trains on from there
    assert t.current_epoch == 2
    assert not np.array_equal(
        leaves(tmp_path / "b.ckpt")[0], np.asarray(jax.tree_util.tree_leaves(module._engine.params)[0])
    )
