"""What a test looks at in a recording is noticed, and only that."""

from __future__ import annotations

import json
import operator
from typing import Any

import pytest
from support import golden

CITED = ["flags", "flags.max_steps_0", "flags.max_steps_0.global_step", "flags.max_steps_25", "errors"]


@pytest.mark.parametrize(
    ("look", "found"),
    [
        (lambda flags: None, []),
        (lambda flags: "max_steps_0" in flags and flags.keys() and len(flags), []),
        (lambda flags: flags["max_steps_0"], CITED[:2]),
        (lambda flags: flags.get("max_steps_0"), CITED[:2]),
        (lambda flags: flags["max_steps_0"]["global_step"], CITED[:3]),
        (lambda flags: flags["max_steps_0"] == {"other": 1}, CITED[:3]),
        (lambda flags: flags["max_steps_0"] != {"other": 1}, CITED[:3]),
        (lambda flags: operator.eq({"other": 1}, flags), CITED[:4]),
        (lambda flags: list(flags.values()), [*CITED[:2], CITED[3]]),
        (lambda flags: {**flags}, [*CITED[:2], CITED[3]]),
        (lambda flags: json.dumps(flags), CITED[:4]),
    ],
)  # fmt: skip
def test_places_that_were_looked_at(look: Any, found: list[str]) -> None:
    recording = golden.read("flags")
    golden.forget()
    look(recording)
    assert golden.looked_at(CITED) == found


def test_a_recording_reads_like_the_file() -> None:
    plain = json.loads((golden.GOLDEN / "flags.json").read_text())["data"]
    recording = golden.read("flags")
    assert recording == plain
    assert plain == recording
    assert dict(recording) == plain
    assert json.loads(json.dumps(recording)) == plain
    assert recording != {**plain, "max_steps_0": None}
    assert golden.read("flags") is not recording
