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


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["overhead.py", "--pairs", "4", "--steps", "50", "--limit", "1000"],
        ["import_time.py", "--pairs", "1"],
        pytest.param(
            ["input.py", "--pairs", "4", "--plain-batches", "3", "--our-batches", "20", "--limit-factor", "0"],
            marks=[pytest.mark.torch, pytest.mark.lightning],
        ),
    ],
    ids=["overhead", "import_time", "input"],
)
def test_a_benchmark_runs_and_writes_its_result(options: list[str], tmp_path: Path) -> None:
    script, *rest = options
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script), *rest, "--json", str(tmp_path / "result.json")],
        check=True,
        env=environment,
        stdout=subprocess.DEVNULL,
    )
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["machine"]["versions"]["jax"]
    assert result["benchmark"] == script.removesuffix(".py")
