"""Stop after any batch of two epochs, resume in a fresh process's state: nothing is lost and nothing is doubled.

By default every stop of each model on arrays and of the MLP on each source; the full cross is slow.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.resume import BATCHES, EPOCHS, FURTHER, MODELS, differing, run
from support.resume_data import SOURCES

pytestmark = [
    pytest.mark.usefixtures("compiled_once"),
    # Row 1 of a window is written by hand here; few cores are fine.
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore::jaxlightning.utilities.warnings.PossibleUserWarning"),
]

MARKS = {
    "torch 0": [pytest.mark.torch],
    "torch 2": [pytest.mark.torch],
    "tf.data": [pytest.mark.tf],
    "grain": [pytest.mark.grain],
}


def _pairs() -> Iterator[object]:
    for model in MODELS:
        for source in SOURCES:
            short = source == "arrays" or model == "MLP"
            marks = MARKS.get(source, []) + ([] if short else [pytest.mark.slow])
            yield pytest.param(model, source, marks=marks, id=f"{model}, {source}")
    for model in FURTHER:
        yield pytest.param(model, "arrays", marks=pytest.mark.slow, id=f"{model}, arrays")


@pytest.mark.parametrize(("model", "source"), list(_pairs()))
def test_every_stop_continues_exactly(model: str, source: str, tmp_path: Path) -> None:
    want, _ = run(tmp_path / "undisturbed", model, source)
    saving, rows = run(tmp_path, model, source, keep="on_train_batch_end")
    assert differing(saving, want) == []  # saving after every batch changes nothing
    assert len(rows) == EPOCHS * BATCHES
    problems = []
    for stop, sent in rows.items():
        home = tmp_path / str(stop)
        got, _ = run(home, model, source, ckpt_path=home / "stop.ckpt")
        got["rows"] = want["rows"][:sent] + got["rows"]  # what was sent before the stop is not sent again
        problems += [f"stopped after batch {stop}: {name}" for name in differing(got, want)]
    assert problems == []
