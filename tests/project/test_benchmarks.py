"""The arithmetic of the benchmarks, and one short run of each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import _harness

    yield _harness
    del sys.modules["_harness"]


def test_pairs_alternate_their_order(harness) -> None:
    assert list(harness.orders(3)) == [(0, 1), (1, 0), (0, 1)]


def test_the_spread_of_equal_measurements_is_zero_and_a_shift_of_one_half_is_seen(harness) -> None:
    assert harness.aa_spread([1.0] * 8) == 0.0
    assert harness.aa_spread([1.1, 1.0, 1.0, 1.1] * 4) == pytest.approx(0.1)


def test_a_drift_over_the_run_hardly_counts_as_spread(harness) -> None:
    assert harness.aa_spread([1.0 + 0.01 * i for i in range(32)]) < 0.01


def test_the_ratio_is_that_of_the_medians(harness) -> None:
    assert harness.ratio_of_medians([2.0, 2.0, 100.0], [1.0, 1.0, 1.0]) == 2.0


def test_a_check_is_held_against_its_limit_and_the_spread(harness, tmp_path: Path) -> None:
    report = harness.Report("example", tmp_path / "example.json")
    report.check("within", 1.05, 1.0, 0.06)
    report.check("more is better", 9.0, 10.0, 0.2, at_least=True)
    report.check("only shown", 5.0, None)
    assert [row["passed"] for row in report.result["checks"]] == [True, True, None]
    report.check("beyond", 1.05, 1.0, 0.01)
    report.check("too little", 7.0, 10.0, 0.2, at_least=True)
    report.check("a machine too busy to tell", 0.5, 1.0, 0.9)
    assert [row["passed"] for row in report.result["checks"]][3:] == [False, False, False]
    assert report.finish() == 1
    assert json.loads((tmp_path / "example.json").read_text())["passed"] is False


def test_the_order_of_epochs_and_passes_alternates(harness, monkeypatch: pytest.MonkeyPatch) -> None:
    from _interleave import WARM_UP, Clock

    order: list[str] = []
    clock = Clock(lambda: order.append("other") or 1.0, 4, 10)
    for _ in range(clock.epochs):
        order.append("fit")
        clock.epoch_ended()
    assert order[2 * WARM_UP :] == ["fit", "other", "other", "fit", "fit", "other", "other", "fit"]
    assert len(clock.fit) == len(clock.other) == 4
    del sys.modules["_interleave"]


NEEDS = {"vision": "torchvision"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["import_time", "overhead", "nnx", "template", "step_profile", "memory", "scaling", "vision"]
)
def test_a_benchmark_runs_and_its_result_is_in_the_report(name: str, tmp_path: Path) -> None:
    pytest.importorskip(NEEDS.get(name, "jax"))
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    # The time of nothing is judged here: 1 says that a limit was missed.
    done = subprocess.run(
        [
            sys.executable, str(ROOT / "benchmarks" / "run.py"), "--quick", "--only", name, "--results",
            str(tmp_path / "results"), "--report", str(tmp_path / "RESULTS.md"),
        ],
        env=environment,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode in (0, 1)
    result = json.loads((tmp_path / "results" / f"{name}.json").read_text())
    assert result["machine"]["versions"]["jax"]
    assert result["benchmark"] == name
    assert f"## {name}" in (tmp_path / "RESULTS.md").read_text()
