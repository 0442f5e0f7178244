"""Collects the outcome of every test that carries rows of the catalogue; `--write-status` writes them down."""

from __future__ import annotations

import json

import pytest
from conformance import table

pytest.register_assert_rewrite("support.beside")

_OUTCOMES = pytest.StashKey[dict[str, str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--write-status`."""
    parser.addoption(
        "--write-status", action="store_true", help="write the results of this run to tests/conformance/STATUS.md"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Start with no outcome."""
    config.stash[_OUTCOMES] = {}
    config.pluginmanager.register(_Collector(config), "catalogue-outcomes")


class _Collector:
    def __init__(self, config: pytest.Config) -> None:
        self._found = config.stash[_OUTCOMES]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the worst outcome of a test's cases and phases; with pytest-xdist this runs where it is printed."""
        if "catalogue" not in report.keywords:
            return
        name = report.nodeid.partition("[")[0]
        if report.failed:
            self._found[name] = "failed"
        elif report.when == "call" and report.passed:
            self._found.setdefault(name, "passed")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the results and the page, in the process that prints."""
    config = session.config
    if not config.getoption("--write-status") or hasattr(config, "workeroutput"):
        return
    known = {each.test for each in table.carriers()}
    merged = {**table.last_results(), **config.stash[_OUTCOMES]}
    results = {name: outcome for name, outcome in sorted(merged.items()) if name in known}
    table.RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    table.STATUS.write_text(table.render(results))
