"""Five of the moments of `benchmarks/kill.py`: a process killed in steps and in saves loses nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "kill.json"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the benchmark forks and reads /proc")
def test_five_kills_lose_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_ENABLE_COMPILATION_CACHE": "true"}
    environment.pop("XLA_FLAGS", None)
    command = [sys.executable, str(ROOT / "benchmarks" / "kill.py"), "--moments", "5", "--seed", "3"]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "kill.json")], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "kill.json").read_text())
    assert result["kills"] == 5
    assert result["problems"] == []


def test_the_committed_result_is_of_sixty_kills_and_without_problems() -> None:
    result = json.loads(RESULT.read_text())
    assert result["kills"] >= 60
    assert result["killed while a checkpoint was being written"] >= 10
    assert result["problems"] == []
    assert all(result["identical"].values())
