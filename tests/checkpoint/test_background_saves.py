"""What a background save writes is the state of its own step, whatever the steps after it do with its memory."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from support.checkpoints import Scripted, loader, trainer

import jaxlightning as pl
from jaxlightning.checkpoint import _io, _numpy_handler, _stored


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
    stored = _stored.StoredCheckpoint(tmp_path / "a.ckpt")
    written = (stored.tree("params"), stored.tree("optimizer_states"))
    got, want = (jax.tree_util.tree_leaves(each) for each in (written, saving.copy))
    assert [leaf.tobytes() for leaf in got] == [leaf.tobytes() for leaf in want]
    assert stored.body()["global_step"] == 4


def test_the_snapshot_shrinks_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_numpy_handler, "_SLICE_BYTES", 4096)
    arrays = {str(index): np.full((4, 500), index, np.float32) for index in range(6)}
    alive = [weakref.ref(array) for array in arrays.values()]
    payload = _io.snapshot({}, {"params": arrays}, target=tmp_path / "a.ckpt", header={}, trees_are_ours=True)
    del arrays
    left: list[int] = []
    take = _numpy_handler.Pending.take

    def counted(self: Any) -> Any:
        left.append(sum(array() is not None for array in alive))
        return take(self)

    monkeypatch.setattr(_numpy_handler.Pending, "take", counted)
    _io.commit(payload, tmp_path / "a.ckpt")
    assert left == [6, 5, 4, 3, 2, 1]  # when one is taken to be written, those before it are gone
    assert all(array() is None for array in alive)
    back = _stored.StoredCheckpoint(tmp_path / "a.ckpt").tree("params")
    assert all((array == int(name)).all() for name, array in back.items())


@pytest.mark.parametrize("shape", [(), (7,), (3, 1000), (1, 1, 997, 3), (2, 3, 211), (5000,)])
@pytest.mark.parametrize("order", ["C", "F"])
def test_what_is_written_in_slices_is_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], order: Any
) -> None:
    import orbax.checkpoint as ocp

    monkeypatch.setattr(_numpy_handler, "_SLICE_BYTES", 1000)
    array = np.asarray(np.random.RandomState(0).randn(*shape), np.float32, order=order)
    pieces = list(_numpy_handler._boxes(shape, _numpy_handler._chunk_shape(shape, 4, 1000)))
    assert sum(array[place].size for place in pieces) == array.size
    assert all(array[place].nbytes <= 1000 for place in pieces)
    payload = _io.snapshot({}, {"params": {"w": array}}, target=tmp_path / "a.ckpt", header={})
    _io.commit(payload, tmp_path / "a.ckpt")
    np.testing.assert_array_equal(_stored.StoredCheckpoint(tmp_path / "a.ckpt").tree("params")["w"], array)
    plain = ocp.PyTreeCheckpointer().restore(tmp_path / "a.ckpt" / "params")["w"]
    np.testing.assert_array_equal(plain, array)


class Both(pl.Callback):
    """Saves two checkpoints of one state, and one of a later state, while nothing can be written."""

    def __init__(self, root: Path, gate: threading.Event) -> None:
        self.root, self.gate = root, gate
        self.shared = False

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        writer = trainer._checkpoint_connector.writer
        if batch_idx == 1:
            trainer.save_checkpoint(self.root / "a.ckpt")
            trainer.save_checkpoint(self.root / "b.ckpt")  # returns, although nothing is on disk
            writer.link(self.root / "b.ckpt", self.root / "c.ckpt")
            assert writer.busy
            self.shared = not any((self.root / name).exists() for name in ("a.ckpt", "b.ckpt", "c.ckpt"))
            threading.Timer(0.2, self.gate.set).start()
        if batch_idx == 2:
            trainer.save_checkpoint(self.root / "d.ckpt")
            assert (self.root / "c.ckpt").exists()  # another state waits for what is being written


def test_checkpoints_of_one_state_share_their_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, commit, payloads = threading.Event(), _io.commit, []

    def late(payload: Any, *arguments: Any) -> None:
        payloads.append([array for _, array in payload.stores["params"].arrays])
        assert gate.wait(60)
        commit(payload, *arguments)

    monkeypatch.setattr(_io, "commit", late)
    saving = Both(tmp_path, gate)
    trainer(tmp_path, max_epochs=1, enable_checkpointing=False, callbacks=[saving]).fit(Adamized())
    assert saving.shared
    first, second, third = payloads
    assert all(a is b for a, b in zip(first, second, strict=True))
    assert not any(a is b for a, b in zip(first, third, strict=True))
    a, b, d = (_stored.StoredCheckpoint(tmp_path / f"{name}.ckpt").tree("params") for name in "abd")
    assert jax.tree.all(jax.tree.map(np.array_equal, a, b))
    assert not jax.tree.all(jax.tree.map(np.array_equal, a, d))


def test_hooks_that_see_the_arrays_get_their_own(tmp_path: Path) -> None:
    class Changing(Adamized):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            for array in checkpoint["state_dict"].values():
                array += 1.0

    class Twice(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                trainer.save_checkpoint(tmp_path / "a.ckpt")
                trainer.save_checkpoint(tmp_path / "b.ckpt")

    trainer(tmp_path, max_epochs=1, enable_checkpointing=False, callbacks=[Twice()]).fit(Changing())
    a, b = (_stored.StoredCheckpoint(tmp_path / f"{name}.ckpt").tree("params") for name in "ab")
    assert jax.tree.all(jax.tree.map(np.array_equal, a, b))  # changed once each
