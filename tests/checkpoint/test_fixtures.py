"""Checkpoints of other versions of Python and JAX load here, value for value, and training goes on from them."""

from __future__ import annotations

import functools
import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

HERE = Path(__file__).parent / "fixtures"
NAMES = sorted(path.name.removesuffix(".ckpt") for path in HERE.glob("*.ckpt"))


@functools.cache
def make() -> Any:
    spec = importlib.util.spec_from_file_location("fixtures_make", HERE / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where Flax's dataclasses look up annotations
    spec.loader.exec_module(module)
    return module


def test_there_is_one_of_each_supported_pair() -> None:
    assert {name.split("-")[0] for name in NAMES} >= {"py311", "py312"}
    assert len({name.split("-")[1] for name in NAMES}) >= 2
    for name in NAMES:
        size = sum(path.stat().st_size for path in (HERE / f"{name}.ckpt").rglob("*") if path.is_file())
        assert size < 100_000, name


@pytest.mark.parametrize("name", NAMES)
def test_it_loads_value_for_value(name: str) -> None:
    fixture, want = make(), json.loads((HERE / f"{name}.json").read_text())
    module = fixture.Fixture.load_from_checkpoint(HERE / f"{name}.ckpt")
    assert module.hparams.width == 3
    assert module.hparams.names == ("a", "b")
    assert fixture.describe(module) == want["state"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore:The dirpath has changed:UserWarning")
def test_training_goes_on_from_it(name: str, tmp_path: Path) -> None:
    fixture = make()
    copy = tmp_path / "run" / f"{name}.ckpt"
    shutil.copytree(HERE / f"{name}.ckpt", copy)
    module, t = fixture.Fixture(width=3), fixture.trainer(tmp_path / "run")
    t.fit(module, *fixture.loaders(), ckpt_path=copy)
    assert (t.global_step, t.current_epoch) == (12, 2)
    again, other = fixture.Fixture(width=3), fixture.trainer(tmp_path / "other")
    other.fit(again, *fixture.loaders())  # the whole run with this version
    # Compilers round differently, and the gradients pass through bfloat16 weights, whose step is 2**-8 of the value.
    got, want = fixture.describe(module), fixture.describe(again)
    for key, value in want.items():
        np.testing.assert_allclose(got[key]["values"], value["values"], rtol=2**-7, atol=2**-8)


def test_this_version_writes_what_the_fixtures_hold(tmp_path: Path) -> None:
    """A change of the format is noticed: the newest fixture and a fresh checkpoint have the same layout."""
    fixture = make()
    fixture.trainer(tmp_path, fixture.SaveAt(tmp_path / "fresh.ckpt")).fit(fixture.Fixture(width=3), *fixture.loaders())
    fresh, old = (
        json.loads((folder / "metadata" / "metadata.json").read_text())
        for folder in (tmp_path / "fresh.ckpt", HERE / f"{NAMES[-1]}.ckpt")
    )
    assert fresh["format_version"] == old["format_version"]
    assert fresh.keys() == old.keys()
    assert fresh["checkpoint"].keys() == old["checkpoint"].keys()
    for name, item in old["items"].items():
        same = [(array["path"], array["dtype"], array["shape"]) for array in item["arrays"]]
        assert [(array["path"], array["dtype"], array["shape"]) for array in fresh["items"][name]["arrays"]] == same
