"""Checkpoints on other file systems: the same as on a local one, and the commit marker decides."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import Scripted, trainer

import jaxlightning as pl
from jaxlightning.callbacks import ModelCheckpoint
from jaxlightning.checkpoint import CheckpointError, _remote, _stored, load_weights
from jaxlightning.checkpoint._resolve import hpc_resume_path, hpc_save_path

fsspec = pytest.importorskip("fsspec")

pytestmark = [
    pytest.mark.usefixtures("compiled_once"),
    pytest.mark.filterwarnings("ignore::jaxlightning.utilities.warnings.PossibleUserWarning"),
]


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
    assert trainer(f"file://{tmp_path}").default_root_dir == str(tmp_path)


class Goes(pl.Callback):
    """The machine goes away before a batch."""

    def __init__(self, before: int | None) -> None:
        self.before = before

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if self.before == trainer.fit_loop.total_batch_idx:
            raise OSError("the machine goes away")


def run(remote: str, before: int | None = None, **options: Any) -> tuple[Any, Any]:
    """One process of a run whose root directory is somewhere else: 3 epochs of 3 batches, a checkpoint every 2."""
    options = {"every_n_train_steps": 2, "save_last": True, **options}
    t = trainer(remote, max_epochs=3, auto_resume=True, callbacks=[ModelCheckpoint(**options), Goes(before)])
    module = Scripted()
    if before is None:
        t.fit(module)
    else:
        with pytest.raises(OSError, match="goes away"):
            t.fit(module)
    return t, module


def test_a_run_there_goes_on_by_itself(remote: str) -> None:
    _, undisturbed = run(f"{remote}/a")
    for before in (3, 5, 8):
        t, _ = run(f"{remote}/b", before)
    t, module = run(f"{remote}/b")
    assert t.ckpt_path == there(f"{remote}/b/checkpoints/last.ckpt")
    assert t.global_step == 9
    assert same(weights(module), weights(undisturbed))
    assert names(f"{remote}/b/checkpoints") == names(f"{remote}/a/checkpoints")
    assert run(f"{remote}/b")[0].global_step == 9  # finished


def there(path: str) -> str:
    """A `file://` root is a path of this machine for the trainer."""
    return path.removeprefix("file://")


def test_there_too_only_whole_commits_count(remote: str) -> None:
    run(remote, 8, save_top_k=-1, save_last=False)
    folder = f"{remote}/checkpoints"
    steps = [f"epoch={(step - 1) // 3}-step={step}.ckpt" for step in (2, 4, 6, 8)]
    assert names(folder) == sorted(steps)
    fs, inner = fsspec.core.url_to_fs(folder)
    data = max(fs.find(f"{inner}/{steps[3]}/params"), key=fs.size)
    raw = bytearray(fs.cat_file(data))
    raw[len(raw) // 2] ^= 255
    fs.pipe_file(data, bytes(raw))  # an array with another content: only its check sum tells
    fs.rm_file(f"{inner}/{steps[2]}/_CHECKPOINT_METADATA")  # never committed
    # One process was killed while it sent, one between the deletion of the old and the move of the new.
    for name in fs.find(f"{inner}/{steps[0]}"):
        relative = name[name.index(steps[0]) + len(steps[0]) :]
        for left in ("x.ckpt.saving-01234567", "last.ckpt.saving-89abcdef"):
            if not (left[0] == "x" and "_CHECKPOINT_METADATA" in name):
                fs.makedirs(f"{inner}/{left}{relative}".rpartition("/")[0], exist_ok=True)
                fs.copy(name, f"{inner}/{left}{relative}")
    with pytest.warns(UserWarning, match="cannot be used and is passed over") as caught:
        t, _ = run(remote, save_top_k=-1, save_last=False)
    named = " ".join(str(each.message) for each in caught)
    assert all(there(f"{folder}/{name}") in named for name in steps[2:])
    assert t.ckpt_path == there(f"{folder}/{steps[1]}")
    assert t.global_step == 9
    assert not [name for name in names(folder) if ".saving-" in name]
    if not remote.startswith("file"):  # the staging directory of another file system may hold the only whole copy
        assert _stored.StoredCheckpoint(f"{folder}/last.ckpt").body()["global_step"] == 2


def test_paths_there_are_relative_so_that_a_run_can_be_moved(remote: str, tmp_path: Path) -> None:
    saving = ModelCheckpoint(f"{remote}/run/ck", monitor="val_loss", save_last=True)
    trainer(tmp_path, max_epochs=2, callbacks=[saving]).fit(Scripted())
    fs, inner = fsspec.core.url_to_fs(remote)
    for name in fs.find(f"{inner}/run"):
        place = name.replace(f"{inner}/run", f"{inner}/moved")
        fs.makedirs(place.rpartition("/")[0], exist_ok=True)
        fs.copy(name, place)
    fs.rm(f"{inner}/run", recursive=True)
    text = fs.cat_file(f"{inner}/moved/ck/last.ckpt/metadata/metadata.json").decode()
    assert remote not in text
    again = ModelCheckpoint(f"{remote}/moved/ck", monitor="val_loss", save_last=True)
    t = trainer(tmp_path, max_epochs=4, callbacks=[again])
    t.fit(Scripted(), ckpt_path=f"{remote}/moved/ck/last.ckpt")
    assert again.last_model_path == f"{remote}/moved/ck/last.ckpt"
    assert sorted(again.best_k_models)[0].startswith(f"{remote}/moved/ck/")
    assert set(names(f"{remote}/moved/ck")) >= {"last.ckpt", again.best_model_path.rpartition("/")[2]}


def test_names_that_look_like_patterns_are_only_names_there_too(remote: str, tmp_path: Path) -> None:
    t = trainer(tmp_path, max_epochs=1, enable_checkpointing=False)
    module = Scripted()
    t.fit(module)
    for name in ("lr=[1,2]/a.ckpt", "lr=1/a.ckpt"):
        for _ in range(2):  # the second one replaces the first
            t.save_checkpoint(f"{remote}/{name}")
    assert same(weights(Scripted.load_from_checkpoint(f"{remote}/lr=[1,2]/a.ckpt")), weights(module))
    assert names(f"{remote}/lr=[1,2]") == ["a.ckpt"]
    t._checkpoint_connector.remove_checkpoint(f"{remote}/lr=[1,2]/a.ckpt")
    assert names(f"{remote}/lr=[1,2]") == []
    assert names(f"{remote}/lr=1") == ["a.ckpt"]


def test_a_requeued_job_finds_its_checkpoint_there(remote: str, tmp_path: Path) -> None:
    t = trainer(tmp_path, max_epochs=1, enable_checkpointing=False)
    t.fit(Scripted())
    for number in (1, 2):
        assert hpc_save_path(remote) == f"{remote}/hpc_ckpt_{number}.ckpt"
        t.save_checkpoint(hpc_save_path(remote))
    assert hpc_resume_path(remote) == f"{remote}/hpc_ckpt_2.ckpt"


def test_what_a_killed_process_prepared_here_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    for name in (f"jaxlightning-{process.pid}-abc", f"jaxlightning-{os.getpid()}-abc", "jaxlightning-notes-abc"):
        (tmp_path / name).mkdir()
    _remote.remove_abandoned()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [f"jaxlightning-{os.getpid()}-abc", "jaxlightning-notes-abc"]
    )


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
        test_a_run_there_goes_on_by_itself("s3://bucket/root")
        test_there_too_only_whole_commits_count("s3://bucket/damaged")
        test_paths_there_are_relative_so_that_a_run_can_be_moved("s3://bucket/paths", tmp_path)
        test_names_that_look_like_patterns_are_only_names_there_too("s3://bucket/patterns", tmp_path)
    finally:
        server.stop()
        fsspec.filesystem("s3").clear_instance_cache()
