"""The golden traces are those that were recorded with Lightning: nobody has edited a byte."""

from __future__ import annotations

import hashlib
from pathlib import Path

HERE = Path(__file__).parent


def test_every_golden_file_is_as_it_was_recorded() -> None:
    listed = dict(line.split()[::-1] for line in (HERE / "golden.sha256").read_text().splitlines())
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (HERE / "golden").iterdir()}
    assert found == listed
