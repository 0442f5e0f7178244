"""Collects how every test that carries rows of the catalogue ended, and which recordings it looked at.

`--write-status` writes that down. What this run did not run keeps what it had.
"""

from __future__ import annotations

import json
from collections.abc import Generator

import pytest
from conformance import table
from support import golden

pytest.register_assert_rewrite("support.beside")

_OUTCOMES = pytest.StashKey[dict[str, str]]()
_READ = pytest.StashKey[dict[str, set[str]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--write-status`."""
    parser.addoption(
        "--write-status", action="store_true", help="write the results of this run to tests/conformance/STATUS.md"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Start with no outcome."""
    config.stash[_OUTCOMES] = {}
    config.stash[_READ] = {}
    config.pluginmanager.register(_Collector(config), "catalogue-outcomes")


class _Collector:
    def __init__(self, config: pytest.Config) -> None:
        self._found = config.stash[_OUTCOMES]
        self._read = config.stash[_READ]
        self._cited = {each.id: each.golden for each in table.rows()}

    def pytest_runtest_setup(self) -> None:
        """Begin with nothing looked at."""
        golden.forget()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None]:
        """Put what a test looked at, of the places that its rows cite, on its report."""
        yield
        rows = [name for mark in item.iter_markers("catalogue") for name in mark.args]
        if cited := {place for name in rows for place in self._cited.get(name, ())}:
            item.user_properties.append(("golden", golden.looked_at(sorted(cited))))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the worst outcome of a test's cases and phases; with pytest-xdist this runs where it is printed."""
        if "catalogue" not in report.keywords:
            return
        name = report.nodeid.partition("[")[0]
        if report.failed:
            self._found[name] = "failed"
        elif report.when == "call" and report.passed:
            self._found.setdefault(name, "passed")
            for key, places in report.user_properties:
                if key == "golden":
                    self._read.setdefault(name, set()).update(places)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the results and the page, in the process that prints."""
    config = session.config
    if not config.getoption("--write-status") or hasattr(config, "workeroutput"):
        return
    known = table.cited()
    merged = {**table.last_results(), **config.stash[_OUTCOMES]}
    results = {name: outcome for name, outcome in sorted(merged.items()) if name in known}
    table.RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    # A case or two of a test may not be all that it looks at: what was seen before stays while the test cites it.
    seen = table.places_read()
    for name, places in config.stash[_READ].items():
        seen[name] = sorted(places | (set(seen.get(name, ())) & known.get(name, set())))
    table.PLACES.write_text(
        json.dumps({name: places for name, places in sorted(seen.items()) if known.get(name)}, indent=1) + "\n"
    )
    table.STATUS.write_text(table.render(results))
