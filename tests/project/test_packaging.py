"""The package as it is installed: its list of packages, the wheel, and what an import loads and changes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NEVER_ON_IMPORT = ("torch", "tensorflow", "tensorboardX", "lightning", "orbax", "tqdm", "grain", "datasets")


def run(code: str, *, cwd: Path, path: Path | None = None) -> str:
    """Run code in a fresh interpreter without the test run's settings; return what it printed."""
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PYTHONPATH")}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_every_folder_with_code_is_listed_as_a_package() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    inside = {".".join(file.parent.relative_to(ROOT).parts) for file in (ROOT / "jaxlightning").rglob("*.py")} | {
        ".".join(("jaxlightning", *file.parent.relative_to(ROOT).parts)) for file in (ROOT / "adapters").rglob("*.py")
    }
    assert sorted(listed) == sorted(inside)


@pytest.mark.slow
def test_the_wheel_holds_the_adapters_and_works_outside_the_tree(tmp_path: Path) -> None:
    source, wheels, site, elsewhere = (tmp_path / name for name in ("source", "wheels", "site", "elsewhere"))
    elsewhere.mkdir()
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    for name in ("jaxlightning", "adapters"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", wheels, source],
        check=True,
        capture_output=True,
    )
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(site)
    assert "jaxlightning/py.typed" in names
    assert not [name for name in names if name.startswith(("adapters/", "tests/", "examples/", "benchmarks/"))]
    assert any(name.endswith("licenses/LICENSE") for name in names)
    code = "import jaxlightning as j, jaxlightning.adapters as a; j.Trainer, j.ArrayLoader; print(a.__file__)"
    where = run(code, cwd=elsewhere, path=site)
    assert Path(where) == site / "jaxlightning" / "adapters" / "__init__.py"


@pytest.mark.slow
def test_the_source_distribution_is_the_whole_project(tmp_path: Path) -> None:
    source, built = tmp_path / "source", tmp_path / "built"
    for path in ("pyproject.toml", "MANIFEST.in", "Makefile", *(file.name for file in ROOT.glob("*.md")), "LICENSE"):
        source.mkdir(exist_ok=True)
        shutil.copy(ROOT / path, source / path)
    folders = ("jaxlightning", "adapters", "tests", "docs", "examples", "benchmarks")
    for name in folders:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*_output"))
    code = f"import setuptools.build_meta as backend; print(backend.build_sdist({str(built)!r}))"
    with tarfile.open(built / run(code, cwd=source)) as archive:
        held = {str(Path(*Path(name).parts[1:])) for name in archive.getnames()}
    wanted = {
        str(file.relative_to(source))
        for file in source.rglob("*")
        if file.is_file() and not file.is_symlink() and not any(part.endswith(".egg-info") for part in file.parts)
    }
    assert {name for name in wanted if not name.startswith("jaxlightning/adapters/")} - held == set()


def test_import_and_trainer_load_nothing_heavy_and_change_nothing(tmp_path: Path) -> None:
    code = f"""
import json, logging, os, sys
import jax
from jax.extend import backend  # loaded before, so that only our own doing is seen
from jax._src import xla_bridge
environment, options = dict(os.environ), dict(jax.config.values)
handlers, level = list(logging.root.handlers), logging.root.level
import jaxlightning as pl
pl.LightningModule, pl.LightningDataModule, pl.Callback, pl.callbacks, pl.loggers, pl.utilities, pl.ArrayLoader
pl.Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
print(json.dumps({{
    "loaded": [name for name in {NEVER_ON_IMPORT} if name in sys.modules],
    "backend": xla_bridge.backends_are_initialized(),
    "environment": dict(os.environ) != environment,
    "options": dict(jax.config.values) != options,
    "logging": (logging.root.handlers, logging.root.level) != (handlers, level),
}}))
"""
    seen = json.loads(run(code, cwd=tmp_path))
    assert seen == {"loaded": [], "backend": False, "environment": False, "options": False, "logging": False}
