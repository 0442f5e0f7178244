"""What a background save writes is the state of its own step, whatever the steps after it do with its memory."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from support.checkpoints import Scripted, loader, trainer

import jaxlightning as pl
from jaxlightning.checkpoint import _io


class Adamized(Scripted):
    def configure_optimizers(self) -> Any:
        from jaxlightning.optim import Adam

        return Adam(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return loader(24)


class SaveAt(pl.Callback):
    """Saves after one batch, keeps a copy of the state of that moment, and lets the write begin three steps later."""

    def __init__(self, path: Path, gate: threading.Event) -> None:
        self.path, self.gate = path, gate
        self.copy: Any = None
        self.donated: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            state = module._engine.state_dict()
            self.copy = jax.tree.map(np.copy, (state["params"], state["optimizer_states"]))
            self.donated = jax.tree_util.tree_leaves(module._engine.tree.params)
            trainer.save_checkpoint(self.path)
            assert trainer._checkpoint_connector.writer.busy
        if batch_idx == 7:
            assert all(leaf.is_deleted() for leaf in self.donated)  # the memory was given to the steps that followed
            assert not self.path.exists()
            self.gate.set()


@pytest.mark.filterwarnings("ignore::jaxlightning.utilities.warnings.PossibleUserWarning")
def test_a_save_that_is_written_later_holds_its_own_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, commit = threading.Event(), _io.commit

    def late(*arguments: Any) -> None:
        assert gate.wait(60)
        commit(*arguments)

    monkeypatch.setattr(_io, "commit", late)
    saving = SaveAt(tmp_path / "a.ckpt", gate)
    trainer(tmp_path, max_epochs=1, enable_checkpointing=False, callbacks=[saving]).fit(Adamized())
    stored = _io.StoredCheckpoint(tmp_path / "a.ckpt")
    written = (stored.tree("params"), stored.tree("optimizer_states"))
    got, want = (jax.tree_util.tree_leaves(each) for each in (written, saving.copy))
    assert [leaf.tobytes() for leaf in got] == [leaf.tobytes() for leaf in want]
    assert stored.body()["global_step"] == 4
