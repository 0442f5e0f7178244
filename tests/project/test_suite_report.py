"""The record of the tests says what ran, and nothing else."""

from __future__ import annotations

from typing import Any

from support import suite_report

ENDED = {
    "tests/a/test_x.py::test_one": {"outcome": "passed", "seconds": 1.0, "kind": "fast"},
    "tests/a/test_x.py::test_two[1]": {"outcome": "failed", "seconds": 2.0, "kind": "fast"},
    "tests/a/test_x.py::test_long": {"outcome": "skipped", "seconds": 0.0, "kind": "slow"},
    "tests/b/test_y.py::test_one": {"seconds": 1.0, "kind": "fast"},  # it never ended
}


def test_a_file_that_ran_whole_is_counted_and_one_that_did_not_is_left_alone() -> None:
    found = {"tests/a/test_x.py": {"fast": 2, "slow": 3}, "tests/b/test_y.py": {"fast": 1, "slow": 0}}
    fresh = suite_report.results_of(found, {"tests/a/test_x.py": {"fast": 4, "slow": 0}}, ENDED)
    assert list(fresh) == ["tests/a/test_x.py", "tests/b/test_y.py"]
    assert list(fresh["tests/a/test_x.py"]) == ["fast"]  # of the three slow ones only one ran
    result = fresh["tests/a/test_x.py"]["fast"]
    assert [result[key] for key in ("passed", "skipped", "failed", "left out", "seconds")] == [1, 0, 1, 4, 3.0]
    assert fresh["tests/b/test_y.py"]["fast"]["failed"] == 1


def test_the_page_adds_up_by_directory_and_gives_every_day() -> None:
    def result(passed: int, date: str) -> dict[str, Any]:
        zero = {"skipped": 0, "failed": 0, "left out": 0}
        return {"passed": passed, **zero, "seconds": 2.5, "date": date, "with": "Python 3"}

    record = {
        "files": {
            "tests/a/test_x.py": {"fast": result(3, "2026-01-02"), "slow": result(1, "2026-01-05")},
            "tests/a/test_y.py": {"fast": result(4, "2026-01-01")},
        },
        "commands": {},
    }
    page = suite_report.render(record)
    assert "| `a` | fast | 2 | 7 | 0 | 0 | 0 | 5 | 2026-01-01 to 2026-01-02 |" in page
    assert "| `a` | slow | 1 | 1 | 0 | 0 | 0 | 2 | 2026-01-05 |" in page
    assert "| **all** |  | 3 | 8 | 0 | 0 | 0 | 8 | 2026-01-01 to 2026-01-05 |" in page
    assert " in `project`" in page.rpartition("Files not recorded yet:")[2]  # what has no record is counted


def test_the_page_is_that_of_the_record() -> None:
    """Seconds and results come from runs; a page written by hand would not match."""
    if suite_report.PAGE.exists():
        assert (
            suite_report.PAGE.read_text().split("\nFiles not recorded")[0]
            == (suite_report.render(suite_report.read_record()).split("\nFiles not recorded")[0])
        )
