"""One checkpoint directory: what is written comes back bit for bit, readable with Orbax alone, and damage is found."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxlightning.checkpoint import _io, _layout, _stored
from jaxlightning.checkpoint._errors import CheckpointError, IncompleteCheckpointError, NotACheckpointError
from jaxlightning.utilities.serialization import TAG

TREES = {
    "params": {
        "net": {"Dense_0": {"kernel": jnp.arange(12.0).reshape(4, 3), "bias": jnp.zeros(3, jnp.bfloat16)}},
        "blocks.0": {"scale": jnp.float32(2.5), "empty": jnp.zeros((0, 4)), "none": None, "nothing": {}},
        "1": {"a/b": jnp.ones(2, jnp.int8)},
    },
    "variables": {},
    "optimizer_states": [
        {"mu/net/kernel": jnp.ones((2, 2)), "count": jnp.int32(3), "key": jax.random.key(1)},
        {5: (np.arange(3), None)},
        {},
    ],
}


def save(path, body=None, trees=TREES):
    payload = _io.snapshot(body or {"epoch": 1}, trees, target=path, header={"jaxlightning_version": "0"})
    _io.commit(payload, path)
    return payload


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "epoch=0-step=3.ckpt"
    save(path, {"epoch": 0, "big": np.arange(500), "callbacks": {"c": {"path": str(tmp_path / "x.ckpt")}}})
    return path


def same(a, b):
    leaves_a, structure_a = jax.tree_util.tree_flatten(a)
    leaves_b, structure_b = jax.tree_util.tree_flatten(b)
    if structure_a != structure_b:
        return False
    for x, y in zip(leaves_a, leaves_b, strict=True):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        if x.dtype != y.dtype or x.shape != y.shape or np.asarray(x).tobytes() != np.asarray(y).tobytes():
            return False
    return True


def test_every_tree_comes_back_with_its_structure_and_bits(saved):
    stored = _stored.StoredCheckpoint(saved)
    for name, tree in TREES.items():
        assert same(stored.tree(name), tree), name
    assert stored.tree("gradients") is None
    assert stored.body()["big"].tolist() == list(range(500))


def test_trees_are_read_as_numpy_so_that_the_topology_does_not_matter(saved):
    leaves = jax.tree_util.tree_leaves(_stored.StoredCheckpoint(saved).tree("params"))
    assert all(isinstance(leaf, np.ndarray) for leaf in leaves)


def test_orbax_alone_reads_the_parameters(saved):
    params = ocp.PyTreeCheckpointer().restore(saved / "params")
    np.testing.assert_array_equal(params["net"]["Dense_0"]["kernel"], np.arange(12.0).reshape(4, 3))
    assert params["net"]["Dense_0"]["bias"].dtype == jnp.bfloat16


def test_the_json_reads_without_the_library_and_holds_no_absolute_path(saved, tmp_path):
    text = (saved / "metadata" / "metadata.json").read_text()
    data = json.loads(text)
    assert data["format"] == "jaxlightning-checkpoint"
    assert data["format_version"] == 1
    assert data["checkpoint"]["epoch"] == 0
    assert str(tmp_path) not in text
    for file in saved.rglob("*"):
        if file.is_file():
            assert str(tmp_path).encode() not in file.read_bytes(), file


def test_paths_of_callbacks_follow_a_moved_run(saved, tmp_path):
    moved = tmp_path / "elsewhere" / "deep"
    moved.mkdir(parents=True)
    shutil.move(saved, moved / "a.ckpt")
    assert _stored.StoredCheckpoint(moved / "a.ckpt").body()["callbacks"]["c"]["path"] == str(moved / "x.ckpt")


def test_no_file_of_a_checkpoint_is_a_pickle(saved):
    for file in saved.rglob("*"):
        if file.is_file():
            assert not file.read_bytes().startswith(b"\x80"), file


def test_colliding_names_stay_apart(tmp_path):
    tree = {"a": {"b": np.ones(2)}, "a.b": np.zeros(3), 1: np.full(1, 7.0), "1": np.full(2, 8.0)}
    save(tmp_path / "x.ckpt", trees={"params": tree})
    back = _stored.StoredCheckpoint(tmp_path / "x.ckpt").tree("params")
    assert list(back) == ["a", "a.b", 1, "1"]
    assert (back["a"]["b"].tolist(), back["a.b"].tolist()) == ([1, 1], [0, 0, 0])
    assert (back[1].tolist(), back["1"].tolist()) == ([7], [8, 8])


def test_a_snapshot_does_not_see_what_donating_steps_write_later(tmp_path):
    step = jax.jit(lambda tree: jax.tree_util.tree_map(lambda x: x * 2 + 1, tree), donate_argnums=0)
    state = {"w": jnp.arange(4096.0)}
    before = np.array(state["w"])
    payload = _io.snapshot({}, {"params": state}, target=tmp_path / "a.ckpt", header={})
    for _ in range(5):
        state = step(state)
    jax.block_until_ready(state)
    _io.commit(payload, tmp_path / "a.ckpt")
    np.testing.assert_array_equal(_stored.StoredCheckpoint(tmp_path / "a.ckpt").tree("params")["w"], before)


def test_sharded_arrays_of_eight_devices_come_back_whole(tmp_path):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    tree = {"w": jax.device_put(jnp.arange(64.0).reshape(16, 4), sharding)}
    save(tmp_path / "a.ckpt", trees={"params": tree})
    np.testing.assert_array_equal(_stored.StoredCheckpoint(tmp_path / "a.ckpt").tree("params")["w"], tree["w"])


def test_saving_over_a_checkpoint_replaces_it_as_a_whole(tmp_path):
    path = tmp_path / "last.ckpt"
    save(path, {"epoch": 1})
    save(path, {"epoch": 2}, {"params": {"w": np.ones(1)}})
    stored = _stored.StoredCheckpoint(path)
    assert stored.body() == {"epoch": 2}
    assert not stored.has("optimizer_states")
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_saving_over_a_link_leaves_what_it_points_to(tmp_path):
    save(tmp_path / "a.ckpt", {"epoch": 1})
    (tmp_path / "last.ckpt").symlink_to("a.ckpt")
    assert _stored.StoredCheckpoint(tmp_path / "last.ckpt").body() == {"epoch": 1}
    save(tmp_path / "last.ckpt", {"epoch": 2})
    assert _stored.StoredCheckpoint(tmp_path / "a.ckpt").body() == {"epoch": 1}
    assert _stored.StoredCheckpoint(tmp_path / "last.ckpt").body() == {"epoch": 2}


def test_a_failed_save_leaves_the_old_checkpoint_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "last.ckpt"
    save(path, {"epoch": 1})

    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(_layout, "publish", fail)
    with pytest.raises(OSError, match="disk full"):
        save(path, {"epoch": 2})
    assert os.listdir(tmp_path) == ["last.ckpt"]
    assert _stored.StoredCheckpoint(path).body() == {"epoch": 1}


def test_folders_named_by_a_slash_in_a_metric_are_made(tmp_path):
    save(tmp_path / "epoch=0-val" / "acc=0.50.ckpt")
    assert _stored.StoredCheckpoint(tmp_path / "epoch=0-val" / "acc=0.50.ckpt").body() == {"epoch": 1}


def test_what_an_interrupted_process_left_is_cleaned_up(tmp_path):
    save(tmp_path / "a.ckpt", {"epoch": 1})
    save(tmp_path / "b.ckpt", {"epoch": 2})
    os.rename(tmp_path / "b.ckpt", tmp_path / "b.ckpt.replaced-01234567")  # killed between the two renames
    (tmp_path / "c.ckpt.saving-01234567").mkdir()
    (tmp_path / "d.ckpt.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "a.ckpt.replaced-01234567").mkdir()
    (tmp_path / "mine").mkdir()
    _layout.clean_up(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt", "b.ckpt", "mine"]
    assert _stored.StoredCheckpoint(tmp_path / "b.ckpt").body() == {"epoch": 2}


# --- broken and hostile checkpoints --------------------------------------------------------------------------


def test_a_missing_path_is_a_file_not_found_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="Checkpoint file not found"):
        _stored.StoredCheckpoint(tmp_path / "no.ckpt")


def test_a_pickle_is_never_opened(tmp_path):
    (tmp_path / "model.ckpt").write_bytes(b"PK\x03\x04rest")
    with pytest.raises(NotACheckpointError, match="PyTorch checkpoint"):
        _stored.StoredCheckpoint(tmp_path / "model.ckpt")


def test_another_directory_is_no_checkpoint(tmp_path):
    (tmp_path / "d.ckpt").mkdir()
    (tmp_path / "d.ckpt" / "readme.txt").write_text("hello")
    with pytest.raises(NotACheckpointError, match=r"readme\.txt"):
        _stored.StoredCheckpoint(tmp_path / "d.ckpt")


def test_an_uncommitted_checkpoint_is_incomplete(saved):
    marker = saved / "_CHECKPOINT_METADATA"
    data = json.loads(marker.read_text())
    marker.write_text(json.dumps({**data, "commit_timestamp_nsecs": None}))
    with pytest.raises(IncompleteCheckpointError):
        _stored.StoredCheckpoint(saved)
    marker.unlink()
    with pytest.raises(IncompleteCheckpointError, match="_CHECKPOINT_METADATA is missing"):
        _stored.StoredCheckpoint(saved)


def edit_metadata(path, change):
    file = path / "metadata" / "metadata.json"
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))


def read_all(path):
    stored = _stored.StoredCheckpoint(path)
    stored.body()
    for name in _io.TREES:
        stored.tree(name)


def data_files(path, item):
    return [f for f in (path / item).rglob("*") if f.is_file() and f.parent.name == "d"]


def truncate_arrays(path):
    for file in data_files(path, "params"):
        file.write_bytes(file.read_bytes()[:10])


def flip_bits(path):
    for file in data_files(path, "params"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 0xFF
        file.write_bytes(bytes(data))


def link_item(path):
    os.rename(path / "params", path.parent / "away")
    (path / "params").symlink_to(path.parent / "away")


def swap_items(path):
    os.rename(path / "params", path / "swap")
    os.rename(path / "optimizer_states", path / "params")
    os.rename(path / "swap", path / "optimizer_states")


def swap_arrays(data):
    arrays = data["items"]["params"]["arrays"]
    arrays[0]["path"], arrays[1]["path"] = arrays[1]["path"], arrays[0]["path"]


def set_array(**changes):
    return lambda data: data["items"]["params"]["arrays"][0].update(changes)


DAMAGE = {
    "truncated arrays": truncate_arrays,
    "flipped bits": flip_bits,
    "swapped items": swap_items,
    "item removed": lambda p: shutil.rmtree(p / "params"),
    "array files removed": lambda p: [f.unlink() for f in data_files(p, "params")],
    "item metadata removed": lambda p: (p / "params" / "_METADATA").unlink(),
    "item replaced by a file": lambda p: (shutil.rmtree(p / "params"), (p / "params").write_text("x")),
    "json is not json": lambda p: (p / "metadata" / "metadata.json").write_text("{"),
    "json is a list": lambda p: (p / "metadata" / "metadata.json").write_text("[]"),
    "json is too deep": lambda p: (p / "metadata" / "metadata.json").write_text("[" * 100000),
    "json is yaml with a tag": lambda p: (p / "metadata" / "metadata.json").write_text("!!python/name:os.system"),
    "json is a pickle": lambda p: (p / "metadata" / "metadata.json").write_bytes(b"\x80\x04."),
    "marker is not json": lambda p: (p / "_CHECKPOINT_METADATA").write_text("no"),
    "marker is a list": lambda p: (p / "_CHECKPOINT_METADATA").write_text("[]"),
    "link to a file outside": lambda p: (p / "params" / "evil").symlink_to("/etc/passwd"),
    "item is a link": link_item,
    "special file": lambda p: os.mkfifo(p / "params" / "pipe"),
}
EDITS = {
    "other format": lambda d: d.update(format="zip"),
    "newer version": lambda d: d.update(format_version=99),
    "version is text": lambda d: d.update(format_version="1"),
    "no items": lambda d: d.pop("items"),
    "items is a list": lambda d: d.update(items=[]),
    "item name climbs out": lambda d: d["items"].update({"../../etc": d["items"]["params"]}),
    "item name is absolute": lambda d: d["items"].update({"/etc": d["items"]["params"]}),
    "unknown item": lambda d: d["items"].update({"evil": d["items"]["params"]}),
    "item without arrays": lambda d: d["items"]["params"].pop("arrays"),
    "huge shape": set_array(shape=[10**15]),
    "negative shape": set_array(shape=[-4, -3]),
    "shape is text": set_array(shape="12"),
    "object dtype": set_array(dtype="object"),
    "other dtype": set_array(dtype="int32"),
    "other shape": set_array(shape=[3, 4]),
    "no path": set_array(path=[]),
    "path climbs out": set_array(path=["..", "..", "metadata"]),
    "path through a leaf": set_array(path=["net", "Dense_0", "bias", "x"]),
    "wrong check sum": set_array(crc32=1),
    "arrays swapped": swap_arrays,
    "structure refers to nothing": lambda d: d["items"]["params"]["arrays"].pop(),
    "structure has an unknown tag": lambda d: d["items"]["params"].update(tree={TAG: "os.system"}),
    "structure names a class": lambda d: d["items"]["params"].update(tree={TAG: "object", "class": "os.system"}),
    "body has an unknown tag": lambda d: d["checkpoint"].update(epoch={TAG: "pickle", "data": "gASVAA=="}),
    "path in the body is absolute": lambda d: d["checkpoint"].update(
        callbacks={TAG: "beside_checkpoint", "path": "/etc/passwd"}
    ),
}


# When one array cannot be read, Orbax closes its event loop while tensorstore still reports on the others.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", [*DAMAGE, *EDITS])
def test_a_damaged_or_hostile_checkpoint_is_an_error(saved, kind):
    if kind in DAMAGE:
        DAMAGE[kind](saved)
    else:
        edit_metadata(saved, EDITS[kind])
    outside = {f for f in saved.parent.rglob("*") if saved not in f.parents and f != saved}
    with pytest.raises(CheckpointError):
        read_all(saved)
    assert {f for f in Path(saved.parent).rglob("*") if saved not in f.parents and f != saved} == outside


@pytest.mark.parametrize("name", ["lr=[1,2]/a.ckpt", "x/a[0]*?{b}.ckpt", "a b/ü=%20'.ckpt", "[!x]/{y}.ckpt"])
def test_names_that_look_like_patterns_are_only_names(tmp_path, name):
    path = tmp_path / name
    tree = {"w": np.arange(6.0), "layer": {"b": np.ones(2)}}
    for _ in range(2):  # also in place of an older one
        save(path, trees={"params": tree})
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    back = _stored.StoredCheckpoint(path).tree("params")
    assert back["w"].tolist() == tree["w"].tolist()
    assert back["layer"]["b"].tolist() == [1, 1]
