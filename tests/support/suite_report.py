"""Writes down how the tests stand: `pytest --write-status`, which `make test-all` passes, writes `tests/RESULT.md`.

The record is kept per file, for its ordinary and its slow tests apart, with the day and the versions. A run replaces
what it has run whole and leaves the rest alone, so the suite can be run in pieces; each line of the page says on which
days. A file of which some tests were picked or left out is not recorded.
"""

from __future__ import annotations

import datetime
import json
import platform
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
RECORD = TESTS / "result.json"
PAGE = TESTS / "RESULT.md"
KINDS = ("fast", "slow")
PACKAGES = ("jax", "flax", "optax", "torch", "lightning")

Record = dict[str, Any]

_FOUND = pytest.StashKey[dict[str, dict[str, int]]]()
_LEFT_OUT = pytest.StashKey[dict[str, dict[str, int]]]()
_ENDED = pytest.StashKey[dict[str, dict[str, Any]]]()


def _kind(words: Any) -> str:
    return "slow" if "slow" in words else "fast"


def note_collected(config: pytest.Config, kept: Iterable[pytest.Item], dropped: Iterable[pytest.Item]) -> None:
    """Take what was collected, before `-m` and `-k` choose.

    Args:
        config: The run's.
        kept: The tests that can run here.
        dropped: Those whose packages are not installed.
    """
    for key, items in ((_FOUND, kept), (_LEFT_OUT, dropped)):
        counts: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(KINDS, 0))
        for item in items:
            counts[item.nodeid.partition("::")[0]][_kind(item.keywords)] += 1
        config.stash[key] = dict(counts)


def pytest_configure(config: pytest.Config) -> None:
    """Start with nothing."""
    config.stash[_FOUND], config.stash[_LEFT_OUT], config.stash[_ENDED] = {}, {}, {}
    config.pluginmanager.register(_Collector(config), "suite-report")


class _Collector:
    def __init__(self, config: pytest.Config) -> None:
        self._ended = config.stash[_ENDED]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep how each test ended and what its phases took; with pytest-xdist this runs where it is printed."""
        test = self._ended.setdefault(report.nodeid, {"seconds": 0.0, "kind": _kind(report.keywords)})
        test["seconds"] += report.duration
        if report.failed:
            test["outcome"] = "failed"
        elif report.skipped:
            test.setdefault("outcome", "skipped")
        elif report.when == "call":
            test.setdefault("outcome", "passed")

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Take what a pytest-xdist worker has collected; every worker collects everything."""
        found = getattr(node, "workeroutput", {})
        if "suite_found" in found:
            node.config.stash[_FOUND], node.config.stash[_LEFT_OUT] = found["suite_found"], found["suite_left_out"]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand the counts of a worker on; write the record in the process that prints."""
    config = session.config
    output: dict[str, Any] | None = getattr(config, "workeroutput", None)
    if output is not None:
        output["suite_found"], output["suite_left_out"] = config.stash[_FOUND], config.stash[_LEFT_OUT]


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(config: pytest.Config) -> None:
    """Write the record and the page."""
    if not config.getoption("--write-status") or any("::" in each for each in config.args):
        return
    fresh = results_of(config.stash[_FOUND], config.stash[_LEFT_OUT], config.stash[_ENDED])
    if fresh:
        record = read_record()
        for file, kinds in fresh.items():
            record["files"].setdefault(file, {}).update(kinds)
        write(record)


def results_of(
    found: dict[str, dict[str, int]], left_out: dict[str, dict[str, int]], ended: dict[str, dict[str, Any]]
) -> dict[str, Record]:
    """What a run says about each file, for the kinds of tests of which it ran all.

    Args:
        found: File to kind to the number of tests that can run here.
        left_out: The same of those that need something that is not installed.
        ended: Test to its `outcome`, `seconds` and `kind`.
    """
    counts: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: {kind: Counter() for kind in KINDS})
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    for name, test in ended.items():
        file = name.partition("::")[0]
        counts[file][test["kind"]][test.get("outcome", "failed")] += 1
        seconds[file, test["kind"]] += test["seconds"]
    fresh: dict[str, Record] = {}
    for file, kinds in counts.items():
        for kind, outcomes in kinds.items():
            if outcomes and outcomes.total() == found.get(file, {}).get(kind):
                fresh.setdefault(file, {})[kind] = {
                    **{name: outcomes[name] for name in ("passed", "skipped", "failed")},
                    "left out": left_out.get(file, {}).get(kind, 0),
                    "seconds": round(seconds[file, kind], 1),
                    **_when(),
                }
    return fresh


def _when() -> dict[str, str]:
    def version(package: str) -> str:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return "none"

    versions = " ".join(f"{each} {version(each)}" for each in PACKAGES)
    return {"date": datetime.date.today().isoformat(), "with": f"Python {platform.python_version()} {versions}"}


def read_record() -> Record:
    """What is known."""
    found: Record = json.loads(RECORD.read_text()) if RECORD.exists() else {"files": {}, "commands": {}}
    return found


def note_command(name: str, said: str, seconds: float) -> None:
    """Record how a command ended that is no test.

    Args:
        name: The command.
        said: Its last line.
        seconds: What it took.
    """
    record = read_record()
    record["commands"][name] = {"said": said, "seconds": round(seconds, 1), **_when()}
    write(record)


def write(record: Record) -> None:
    """Write the record, without files that are gone, and the page."""
    files = {name: kinds for name, kinds in sorted(record["files"].items()) if (TESTS.parent / name).exists()}
    record = {"files": files, "commands": dict(sorted(record["commands"].items()))}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    PAGE.write_text(render(record))


def render(record: Record) -> str:
    """The page.

    Args:
        record: What `read_record` returns.
    """
    lines = [
        "# How the tests ended when they last ran",
        "",
        "Written by `pytest --write-status` (`make test-all`), do not edit. The suite may be run in pieces: each line "
        "has the days on which its files last ran whole. Skipped tests say why in the run's output; what is left out "
        "needs a package that was not installed. Seconds are those of the tests themselves, one after another, on "
        "whatever machine and beside whatever else ran there.",
        "",
        "| tests in | kind | files | passed | skipped | failed | left out | seconds | run on |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for file, kinds in record["files"].items():
        for kind, result in kinds.items():
            groups[_directory(file), kind].append(result)
    for (directory, kind), results in sorted(groups.items()):
        lines.append(_line(f"`{directory}` | {kind}", results))
    everything = [result for results in groups.values() for result in results]
    lines.append(_line("**all** | ", everything))
    lines += [_unrun(record), "", "| command | ended with | seconds | run on |", "|---|---|---|---|"]
    for name, result in record["commands"].items():
        lines.append(f"| `{name}` | {result['said']} | {result['seconds']:.0f} | {result['date']} |")
    versions = sorted({result["with"] for result in [*everything, *record["commands"].values()]})
    lines += ["", *(f"With {each}." for each in versions)]
    return "\n".join(lines) + "\n"


def _directory(file: str) -> str:
    parts = Path(file).parts
    return parts[1] if len(parts) > 2 else parts[0]


def _line(name: str, results: list[Record]) -> str:
    sums = [sum(result[key] for result in results) for key in ("passed", "skipped", "failed", "left out")]
    dates = sorted({result["date"] for result in results})
    days = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}" if dates else ""
    seconds = sum(result["seconds"] for result in results)
    return f"| {name} | {len(results)} | " + " | ".join(map(str, sums)) + f" | {seconds:.0f} | {days} |"


def _unrun(record: Record) -> str:
    known = record["files"]
    files = [path.relative_to(TESTS.parent).as_posix() for path in sorted(TESTS.rglob("test_*.py"))]
    missing = Counter(_directory(each) for each in files if each not in known)
    listed = ", ".join(f"{number} in `{directory}`" for directory, number in missing.items())
    return f"\nFiles not recorded yet: {listed or 'none'}."


if __name__ == "__main__":
    sys.stdout.write(render(read_record()))
