"""Checkpoints on other file systems: the same as on a local one, and the commit marker decides."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import Scripted, trainer

from jaxlightning.callbacks import ModelCheckpoint
from jaxlightning.checkpoint import CheckpointError, load_weights
from jaxlightning.utilities.exceptions import MisconfigurationException

fsspec = pytest.importorskip("fsspec")

pytestmark = pytest.mark.filterwarnings("ignore::jaxlightning.utilities.warnings.PossibleUserWarning")


@pytest.fixture(params=["memory", "file"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty directory somewhere else."""
    if request.param == "file":
        yield f"file://{tmp_path}/far"
        return
    memory = fsspec.filesystem("memory")
    yield "memory://far"
    if memory.exists("/far"):
        memory.rm("/far", recursive=True)


def names(directory: str) -> list[str]:
    fs, path = fsspec.core.url_to_fs(directory)
    return sorted(each.rstrip("/").rpartition("/")[2] for each in fs.ls(path, False)) if fs.exists(path) else []


def weights(module: Any) -> dict[str, Any]:
    return {name: np.asarray(value) for name, value in module.state_dict().items()}


def same(a: Any, b: Any) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def test_save_load_resume_and_warm_start(remote: str, tmp_path: Path) -> None:
    t = trainer(tmp_path, max_epochs=1, enable_checkpointing=False)
    module = Scripted()
    t.fit(module)
    t.save_checkpoint(f"{remote}/a.ckpt")
    assert names(remote) == ["a.ckpt"]
    loaded = Scripted.load_from_checkpoint(f"{remote}/a.ckpt")
    assert same(weights(loaded), weights(module))
    other = Scripted()
    fresh = trainer(tmp_path, max_epochs=2, enable_checkpointing=False)
    fresh.fit(other, ckpt_path=f"{remote}/a.ckpt")
    assert fresh.global_step == 6
    t.fit_loop.max_epochs = 2
    t.fit(module)
    assert same(weights(other), weights(module))
    warm = Scripted()
    trainer(tmp_path, max_epochs=1, enable_checkpointing=False, limit_train_batches=1).fit(warm)
    load_weights(warm, f"{remote}/a.ckpt")
    assert same(weights(warm), weights(loaded))


def test_a_checkpoint_callback_keeps_its_files_there(remote: str, tmp_path: Path) -> None:
    saving = ModelCheckpoint(f"{remote}/ck", monitor="val_loss", save_top_k=2, save_last=True)
    t = trainer(tmp_path, max_epochs=4, callbacks=[saving])
    t.fit(Scripted())
    assert names(f"{remote}/ck") == ["epoch=2-step=9.ckpt", "epoch=3-step=12.ckpt", "last.ckpt"]
    assert saving.best_model_path == f"{remote}/ck/epoch=2-step=9.ckpt"
    assert saving.last_model_path == f"{remote}/ck/last.ckpt"
    t = trainer(tmp_path, max_epochs=5, callbacks=[ModelCheckpoint(f"{remote}/ck", monitor="val_loss", save_last=True)])
    t.fit(Scripted(), ckpt_path="last")
    assert t.ckpt_path == f"{remote}/ck/last.ckpt"
    assert t.global_step == 15


def test_without_its_marker_a_directory_is_no_checkpoint(remote: str, tmp_path: Path) -> None:
    t = trainer(tmp_path, max_epochs=1, enable_checkpointing=False)
    t.fit(Scripted())
    t.save_checkpoint(f"{remote}/a.ckpt")
    fs, path = fsspec.core.url_to_fs(f"{remote}/a.ckpt")
    fs.rm_file(f"{path}/_CHECKPOINT_METADATA")
    with pytest.raises(CheckpointError, match="incomplete"):
        Scripted.load_from_checkpoint(f"{remote}/a.ckpt")
    with pytest.raises(FileNotFoundError, match="Checkpoint file not found"):
        Scripted.load_from_checkpoint(f"{remote}/b.ckpt")
    with pytest.warns(UserWarning, match="it is none; it was left alone"):
        t._checkpoint_connector.remove_checkpoint(f"{remote}/a.ckpt")
    assert names(remote) == ["a.ckpt"]


def test_a_failing_transfer_leaves_the_old_one(remote: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    t = trainer(tmp_path, max_epochs=1, enable_checkpointing=False)
    module = Scripted()
    t.fit(module)
    t.save_checkpoint(f"{remote}/a.ckpt")
    fs, _ = fsspec.core.url_to_fs(remote)
    put, calls = type(fs).put_file, [0]

    def broken(self: Any, *arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] > 3:
            raise OSError("the line is cut")
        return put(self, *arguments, **options)

    monkeypatch.setattr(type(fs), "put_file", broken)
    with pytest.raises(OSError, match="line is cut"):
        t.save_checkpoint(f"{remote}/a.ckpt")
    monkeypatch.undo()
    assert names(remote) == ["a.ckpt"]
    assert same(weights(Scripted.load_from_checkpoint(f"{remote}/a.ckpt")), weights(module))
    t.save_checkpoint(f"{remote}/a.ckpt")
    assert names(remote) == ["a.ckpt"]
    Scripted.load_from_checkpoint(f"{remote}/a.ckpt")


def test_what_cannot_be_is_said(tmp_path: Path) -> None:
    t = trainer(tmp_path, max_epochs=1, enable_checkpointing=False)
    t.fit(Scripted())
    with pytest.raises(ValueError, match=r"No file system is known for 'nowhere://a.ckpt'.*s3fs"):
        t.save_checkpoint("nowhere://a.ckpt")
    with pytest.raises(TypeError, match="for paths with a scheme"):
        t.save_checkpoint(tmp_path / "a.ckpt", storage_options={"key": "x"})
    with pytest.raises(MisconfigurationException, match="on another file system"):
        trainer("memory://far", max_epochs=1, auto_resume=True, enable_checkpointing=False).fit(Scripted())
    assert trainer(f"file://{tmp_path}").default_root_dir == str(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("moto", "s3fs", "flask")),
    reason="needs a local S3 server: pip install 'moto[server]' s3fs",
)
def test_an_s3_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0)
    server.start()
    try:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "testing")
        host, port = server.get_host_and_port()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        fsspec.filesystem("s3").mkdir("bucket")
        test_a_checkpoint_callback_keeps_its_files_there("s3://bucket/far", tmp_path)
        test_save_load_resume_and_warm_start("s3://bucket/near", tmp_path)
    finally:
        server.stop()
        fsspec.filesystem("s3").clear_instance_cache()
