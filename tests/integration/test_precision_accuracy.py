"""A shortened run of benchmarks/precision.py: the CNN learns in 16 bits what it learns in 32."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
POINTS = 0.02
"""The benchmark allows 0.7 points for means of three long runs; these are single runs of 92 updates each, of which the
loss scale leaves out one or two."""


def _benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("benchmark_precision", ROOT / "benchmarks" / "precision.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_cnn_learns_as_much_in_mixed_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    train = _benchmark().train
    runs = {name: train(name, 0, 2, 6000, None) for name in ("32-true", "bf16-mixed", "16-mixed")}
    best = runs["32-true"]["test_acc"]
    assert best > 0.7
    for name, run in runs.items():
        assert run["test_acc"] == pytest.approx(best, abs=POINTS), name
        assert run["parameters"] == ["float32"]
        assert run["traces"] == 1
        assert run["skipped"] <= 3
