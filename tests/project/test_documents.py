"""What README.md and MIGRATION.md show is run, or compared with the files that it was taken from."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def blocks(name: str) -> list[str]:
    """Return the Python blocks of a Markdown file."""
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / name).read_text(), flags=re.MULTILINE | re.DOTALL)


QUICK_STARTS = ("README.md", "docs/zh/README.md")


@pytest.mark.parametrize("which", [0, 1], ids=["module", "step"])
def test_the_quick_starts_learn_the_digits(which: int, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    code = blocks("README.md")[which]  # the other language has the same code, see below
    names: dict[str, object] = {"__name__": "quick_start"}
    exec(compile(code, "README.md", "exec"), names)
    accuracy = float(capsys.readouterr().out.strip().splitlines()[-1])
    assert accuracy > 0.85


def test_the_quick_starts_in_both_languages_are_the_same_code() -> None:
    english, chinese = map(blocks, QUICK_STARTS)
    assert len(english) == 2
    assert english == chinese


def test_the_side_by_side_of_the_migration_guide_is_the_code_of_the_examples() -> None:
    lightning, ours = blocks("MIGRATION.md")
    assert lightning in (ROOT / "examples" / "lightning_original.py").read_text()
    assert ours in (ROOT / "examples" / "fashion_mnist_linen.py").read_text()


@pytest.mark.parametrize(
    "document", ["README.md", "MIGRATION.md", "docs/README.md", "docs/guides.md", "docs/zh/README.md"]
)
def test_every_file_and_target_that_a_document_names_exists(document: str) -> None:
    text = (ROOT / document).read_text()
    folders = ("examples", "benchmarks", "docs", "tests", "jaxlightning", "adapters")
    for name in re.findall(rf"`((?:{'|'.join(folders)})/[\w/.]*)`", text):
        assert (ROOT / name).exists(), name
    for link in re.findall(r"\]\(([\w/.-]+)\)", text):
        assert (ROOT / document).parent.joinpath(link).exists(), link
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    commands = "\n".join(re.findall(r"`[^`]*`|^make .*$", text, flags=re.MULTILINE))
    for target in re.findall(r"\bmake ([a-z][\w-]*)[`\n ]", commands):
        assert target in targets, target


def test_importing_the_library_offers_lightnings_names() -> None:
    code = (
        "import jaxlightning as pl\n"
        "for name in ('LightningModule', 'LightningDataModule', 'Trainer', 'Callback', 'seed_everything', 'callbacks',"
        " 'loggers', 'utilities'):\n"
        "    getattr(pl, name)\n"
        "assert pl.LightningModule is pl.JaxLightningModule\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_test_that_the_migration_guide_names_exists() -> None:
    """`verbatim/test_x.py::test_y`, or `::test_y` of the file named before it."""
    path, found = None, 0
    for name, test in re.findall(r"`([\w/]*(?:\.py)?)::(\w+)`", (ROOT / "MIGRATION.md").read_text()):
        path = ROOT / "tests" / name if name else path
        assert path is not None
        assert f"def {test}(" in path.read_text(), f"{path.name}::{test}"
        found += 1
    assert found > 20


DOCUMENTS = ("README.md", "MIGRATION.md", "docs/README.md", "docs/guides.md", "docs/zh/README.md", "docs/data.md")


def test_every_row_of_the_guides_table_names_what_shows_it() -> None:
    text = (ROOT / "docs/guides.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    rows = [row for row in rows if row[0] != "in the guides"]
    assert len(rows) > 30
    for row in rows:
        if "not supported" not in row[1]:
            assert re.search(r"`(tests|examples|benchmarks)/", row[-1]), row
    for name in (
        "Flax|flax", "optax", "Orbax", "tqdm", "tensorboardX", "TensorFlow Datasets", "torchvision", "lr_schedule",
        "static_argnums", "mixed precision", "pmap", "checkify", r"jax\.profiler", r"jax\.debug", "device_put", "VAE",
        "TFLite", "SavedModel", "serving", "jaxboard", "Weights & Biases", "haiku", "Trax", "Jraph", "nn.remat",
        "nn.scan",
        "PyTreeCheckpointer",
    ):  # fmt: skip
        assert re.search(name, text), name


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_flag_and_name_that_a_document_shows_exists(document: str) -> None:
    import inspect

    import jaxlightning

    text = (ROOT / document).read_text()
    flags = {flag for call in re.findall(r"Trainer\(([^()]*)\)", text) for flag in re.findall(r"\b(\w+)=", call)}
    assert flags <= set(inspect.signature(jaxlightning.Trainer.__init__).parameters)
    for dotted in set(re.findall(r"\bjaxlightning\.([a-z_]\w*(?:\.\w+)*)", text)):
        found = jaxlightning
        for name in dotted.removesuffix(".py").split("."):
            found = getattr(found, name)


def test_every_extra_that_the_readme_names_can_be_installed() -> None:
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (sentence,) = re.findall(r"The extras are (.*?)\.\n\n", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    named = set(re.findall(r"`(\w+)`", sentence))
    assert named == set(extras) - {"examples", "reference", "bench", "dev", "all"}


def test_every_bare_name_of_a_test_in_the_migration_guide_exists() -> None:
    """`test_y`, in a table whose letters stand for files."""
    code = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    defined = set(re.findall(r"^def (test_\w+)", code, re.MULTILINE))
    named = re.findall(r"`(test_\w+)`", (ROOT / "MIGRATION.md").read_text())
    assert len(named) > 50
    assert [name for name in named if name not in defined] == []


def test_every_idiom_of_the_migration_guide_names_its_test() -> None:
    text = (ROOT / "MIGRATION.md").read_text()
    idioms = text.partition("## Idioms inside a step")[2].partition("\n## ")[0]
    rows = [line for line in idioms.splitlines() if line.startswith("| ") and not line.endswith("| test |")]
    assert len(rows) > 60
    assert [row for row in rows if "test_" not in row.rsplit("|", 2)[1]] == []
