"""The format as docs/checkpoint-format.md states it: readable without this library, versioned, migrated."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import Scripted, trainer

from jaxlightning.checkpoint import CheckpointError, _io, _stored
from jaxlightning.checkpoint._migrate import MIGRATIONS, migrate

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "checkpoint-format.md"

READER = """
import json, sys
import numpy as np
import orbax.checkpoint as ocp

tree = ocp.PyTreeCheckpointer().restore(sys.argv[1])
assert not any(name.partition(".")[0] in ("jaxlightning", "flax", "lightning") for name in sys.modules)
print(json.dumps({name: np.asarray(tree["layer"][name]).tolist() for name in ("kernel", "bias")}))
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    root = tmp_path_factory.mktemp("format")
    t = trainer(root, max_epochs=1, enable_checkpointing=False)
    module = Scripted()
    t.fit(module)
    t.save_checkpoint(root / "a.ckpt")
    return root / "a.ckpt", module


@pytest.mark.slow
def test_parameters_are_read_without_this_library(saved: tuple[Path, Any]) -> None:
    path, module = saved
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", READER, str(path / "params")], capture_output=True, text=True, cwd=path
    )
    assert done.returncode == 0, done.stderr
    read = json.loads(done.stdout)
    state = {name.rpartition(".")[2]: np.asarray(value).tolist() for name, value in module.state_dict().items()}
    assert read == state


def test_the_document_describes_what_is_written(saved: tuple[Path, Any]) -> None:
    text, path = DOCUMENT.read_text(), saved[0]
    assert f"Format version **{_io.FORMAT_VERSION}**" in text
    metadata = json.loads((path / "metadata" / "metadata.json").read_text())
    for key in (*metadata, *metadata["checkpoint"]):
        assert f"`{key}`" in text, key
    for item in (*_io.TREES, _io.EXTRAS):
        assert f"  {item}/" in text
    assert {entry.name for entry in path.iterdir()} <= {"_CHECKPOINT_METADATA", "metadata", *_io.TREES, _io.EXTRAS}


def test_a_checkpoint_names_no_place_and_no_class(saved: tuple[Path, Any]) -> None:
    path, _ = saved
    for file in path.rglob("*"):
        if file.is_file():
            raw = file.read_bytes()
            assert str(path.parent).encode() not in raw, file
            assert b"jaxlightning." not in raw, file


def test_older_versions_are_migrated_step_by_step_and_newer_ones_refused(
    saved: tuple[Path, Any], tmp_path: Path
) -> None:
    old = {"format_version": 1, "name": "x"}
    steps = {1: lambda m: {"title": m["name"]}, 2: lambda m: {**m, "title": m["title"].upper()}}
    assert migrate(dict(old), to=3, migrations=steps) == {"format_version": 3, "title": "X"}
    assert migrate(old, to=1) is old
    assert set(MIGRATIONS) == set(range(1, _io.FORMAT_VERSION))
    newer = tmp_path / "newer.ckpt"
    shutil.copytree(saved[0], newer)
    file = newer / "metadata" / "metadata.json"
    file.write_text(file.read_text().replace('"format_version": 1', '"format_version": 99'))
    with pytest.raises(CheckpointError, match=r"format version 99.*reads versions 1 to"):
        _stored.StoredCheckpoint(newer)
