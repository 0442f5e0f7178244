"""Writes down the last result of the full cross of models and sources: `pytest --write-status` on `tests/resume`."""

from __future__ import annotations

import datetime
import platform
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "resume" / "RESULT.md"
TEST = "test_every_stop.py::test_every_stop_continues_exactly["

_CELLS = pytest.StashKey[dict[str, str]]()


def pytest_configure(config: pytest.Config) -> None:
    """Start with no cell."""
    config.stash[_CELLS] = {}
    config.pluginmanager.register(_Collector(config), "resume-cells")


class _Collector:
    def __init__(self, config: pytest.Config) -> None:
        self._cells = config.stash[_CELLS]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the outcome of each cell; with pytest-xdist this runs where it is printed."""
        _, found, name = report.nodeid.partition(TEST)
        if found and (report.when == "call" or report.failed):
            self._cells[name.removesuffix("]")] = "exact" if report.passed else "DIFFERS"


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the page when every cell of the cross has run."""
    config = session.config
    cells = config.stash[_CELLS]
    if not config.getoption("--write-status") or hasattr(config, "workeroutput") or not cells:
        return
    from support.resume import FURTHER, MODELS
    from support.resume_data import SOURCES

    wanted = {f"{model}, {source}" for model in MODELS for source in SOURCES}
    if not (wanted | {f"{model}, arrays" for model in FURTHER}) - cells.keys():
        PAGE.write_text(render(cells))


def render(cells: dict[str, str]) -> str:
    """The page; a cell that did not run is empty.

    Args:
        cells: `"<model>, <source>"` to the outcome.
    """
    import jax

    from support.resume import FURTHER, MODELS
    from support.resume_data import SOURCES

    lines = [
        "# The full cross of resumes",
        "",
        f"Written by `pytest --write-status tests/resume` on {datetime.date.today().isoformat()} with Python "
        f"{platform.python_version()} and JAX {jax.__version__}; do not edit. Each cell is eight stops, one after "
        "every batch of two epochs; *exact* means that parameters, other variables, optimizer states, schedulers, "
        "counters, callbacks, metrics, random streams, files and the CSV file of every resumed run are those of the "
        "run that was never stopped, bit for bit. An empty cell did not run.",
        "",
        "| model | " + " | ".join(SOURCES) + " |",
        "|---|" + "---|" * len(SOURCES),
    ]
    for model in (*MODELS, *FURTHER):
        row = [cells.get(f"{model}, {source}", "") for source in SOURCES]
        lines.append(f"| {model} | " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"
