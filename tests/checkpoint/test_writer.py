"""The background writer: order, errors, names that are taken, waiting."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

from jaxlightning.checkpoint import _io, _layout, _stored, newest_checkpoint
from jaxlightning.checkpoint._writer import CheckpointWriter


def payload(target, **body):
    return _io.snapshot(body, {"params": {"w": np.ones(3)}}, target=target, header={})


@pytest.fixture
def slow(monkeypatch):
    """Lets commits wait for a gate."""
    gate, started, commit = threading.Event(), threading.Event(), _io.commit

    def wait(*args):
        started.set()
        assert gate.wait(20)
        commit(*args)

    monkeypatch.setattr(_io, "commit", wait)
    return gate, started


def test_a_background_save_returns_early_and_wait_ends_with_it_on_disk(tmp_path, slow):
    gate, started = slow
    writer = CheckpointWriter(background=True)
    writer.save(payload(tmp_path / "a.ckpt", epoch=1), tmp_path / "a.ckpt")
    assert started.wait(20)
    assert writer.busy
    assert writer.exists(tmp_path / "a.ckpt")
    assert not (tmp_path / "a.ckpt").exists()
    gate.set()
    writer.wait()
    assert not writer.busy
    assert _stored.StoredCheckpoint(tmp_path / "a.ckpt").body() == {"epoch": 1}


def test_a_deletion_follows_the_commit_of_the_save_before_it(tmp_path, slow):
    gate, _ = slow
    gate.set()
    writer = CheckpointWriter(background=True)
    writer.save(payload(tmp_path / "a.ckpt"), tmp_path / "a.ckpt")
    writer.wait()
    gate.clear()
    writer.save(payload(tmp_path / "b.ckpt"), tmp_path / "b.ckpt")
    writer.remove(tmp_path / "a.ckpt")
    assert (tmp_path / "a.ckpt").exists()
    assert not writer.exists(tmp_path / "a.ckpt")
    gate.set()
    writer.wait()
    assert os.listdir(tmp_path) == ["b.ckpt"]


def test_after_a_failed_save_nothing_is_deleted_and_the_error_surfaces_once(tmp_path, monkeypatch):
    writer = CheckpointWriter(background=True)
    writer.save(payload(tmp_path / "a.ckpt"), tmp_path / "a.ckpt")
    writer.wait()
    gate = threading.Event()

    def fail(*args):
        gate.wait(20)
        raise OSError("disk full")

    monkeypatch.setattr(_io, "commit", fail)
    writer.save(payload(tmp_path / "b.ckpt"), tmp_path / "b.ckpt")
    writer.remove(tmp_path / "a.ckpt")
    gate.set()
    with pytest.raises(OSError, match="disk full"):
        writer.wait()
    writer.wait()
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_the_next_save_raises_what_went_wrong_before(tmp_path, monkeypatch):
    writer = CheckpointWriter(background=True)
    commit = _io.commit
    monkeypatch.setattr(_io, "commit", lambda *args: (_ for _ in ()).throw(OSError("disk full")))
    writer.save(payload(tmp_path / "a.ckpt"), tmp_path / "a.ckpt")
    with pytest.raises(OSError, match="disk full"):
        writer.save(payload(tmp_path / "b.ckpt"), tmp_path / "b.ckpt")
    monkeypatch.setattr(_io, "commit", commit)
    writer.save(payload(tmp_path / "b.ckpt"), tmp_path / "b.ckpt")
    writer.wait()
    assert os.listdir(tmp_path) == ["b.ckpt"]


def test_a_link_is_relative_and_replaced_in_one_step(tmp_path):
    writer = CheckpointWriter(background=True)
    for name in ("a.ckpt", "b.ckpt"):
        writer.save(payload(tmp_path / name, name=name), tmp_path / name)
        writer.link(tmp_path / name, tmp_path / "last.ckpt")
    writer.wait()
    assert os.readlink(tmp_path / "last.ckpt") == "b.ckpt"
    assert _stored.StoredCheckpoint(tmp_path / "last.ckpt").body() == {"name": "b.ckpt"}


def test_a_kill_during_a_deletion_leaves_nothing_under_the_name(tmp_path, monkeypatch):
    writer = CheckpointWriter(background=False)
    writer.save(payload(tmp_path / "a.ckpt"), tmp_path / "a.ckpt")

    def killed(path, **options):
        (path / "_CHECKPOINT_METADATA").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_layout.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            writer.remove(tmp_path / "a.ckpt")
    (left,) = tmp_path.iterdir()
    assert left.name.startswith("a.ckpt.deleting-")
    assert not writer.exists(tmp_path / "a.ckpt")
    assert newest_checkpoint(tmp_path) is None  # and it is cleaned up, without a warning
    assert not list(tmp_path.iterdir())


def test_only_checkpoints_are_deleted(tmp_path):
    writer = CheckpointWriter(background=False)
    (tmp_path / "thesis").mkdir()
    with pytest.warns(UserWarning, match="it was left alone"):
        writer.remove(tmp_path / "thesis")
    assert os.listdir(tmp_path) == ["thesis"]
    writer.remove(tmp_path / "nothing")


def test_folders_that_a_slash_made_go_with_their_last_checkpoint(tmp_path):
    writer = CheckpointWriter(background=False)
    place = tmp_path / "ck" / "epoch=0-val" / "acc=1.ckpt"
    writer.save(payload(place), place)
    writer.remove(place, within=tmp_path / "ck")
    assert os.listdir(tmp_path) == ["ck"]
    assert os.listdir(tmp_path / "ck") == []


@pytest.mark.slow
def test_the_end_of_the_interpreter_waits_for_what_is_being_written(tmp_path):
    """google/orbax#605: a script that ends right after an asynchronous save lost it and exited with 0."""
    code = """
        import sys, time, numpy as np
        from jaxlightning.checkpoint import _io, _layout, _stored, newest_checkpoint
        from jaxlightning.checkpoint._writer import CheckpointWriter
        writer = CheckpointWriter(background=True)
        path = sys.argv[1] + "/a.ckpt"
        big = {"params": {f"w{i}": np.random.default_rng(0).random((300, 1000)) for i in range(20)}}
        writer.save(_io.snapshot({"epoch": 1}, big, target=path, header={}), path)
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)], capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0, result.stderr
    assert _stored.StoredCheckpoint(tmp_path / "a.ckpt").tree("params")["w19"].shape == (300, 1000)
