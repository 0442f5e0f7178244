"""Stops that are not the end of a train batch: within a validation, a sanity check, at an epoch's end, by a signal."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from support.resume import differing, run

import jaxlightning as pl

pytestmark = [
    pytest.mark.usefixtures("compiled_once"),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::jaxlightning.utilities.warnings.PossibleUserWarning"),
]


# Hook to the number of its calls. Sanity check: 1 batch; validation: 3 batches.
HOOKS = {
    "on_validation_batch_end": 7,
    "on_validation_start": 3,
    "on_validation_end": 3,
    "on_train_epoch_start": 2,
    "on_train_epoch_end": 2,
    "on_sanity_check_start": 1,
}


@pytest.mark.parametrize("hook", HOOKS)
def test_a_stop_in_another_hook_continues_exactly(hook: str, tmp_path: Path) -> None:
    model = "MLP" if hook == "on_train_epoch_start" else "CNN with BatchNorm and dropout"
    want, _ = run(tmp_path / "undisturbed", model, "arrays")
    saving, stops = run(tmp_path, model, "arrays", keep=hook)
    assert differing(saving, want) == []
    assert len(stops) == HOOKS[hook]
    problems = []
    for stop in stops:
        home = tmp_path / str(stop)
        got, _ = run(home, model, "arrays", ckpt_path=home / "stop.ckpt")
        got["rows"] = want["rows"]  # this logger is new; the CSV file tells
        problems += [f"call {stop}: {name}" for name in differing(got, want)]
    assert problems == []


class Terminated(pl.Callback):
    """A scheduler takes the machine away at the n-th call of a hook."""

    def __init__(self, hook: str, call: int) -> None:
        self.left = call
        setattr(self, hook, self._strike)

    def _strike(self, *arguments: Any) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    ("hook", "call", "model"),
    [
        ("on_validation_batch_start", 1, "MLP"),  # in the sanity check
        ("on_train_batch_start", 2, "accumulation 3"),  # in a window
        ("on_validation_batch_start", 3, "MLP"),
        ("on_validation_batch_start", 4, "accumulation 3"),  # its last batch
        ("on_train_epoch_end", 1, "MLP"),
    ],
)
def test_after_a_sigterm_the_run_continues_by_itself(hook: str, call: int, model: str, tmp_path: Path) -> None:
    want, _ = run(tmp_path / "undisturbed", model, "arrays")
    home = tmp_path / "run"
    with pytest.raises(pl.utilities.exceptions.SIGTERMException):
        run(home, model, "arrays", auto_resume=True, stop=Terminated(hook, call))
    assert (home / "top" / "interrupted.ckpt").is_dir()
    got, _ = run(home, model, "arrays", auto_resume=True)
    got["rows"] = want["rows"]
    got["files"].remove("interrupted.ckpt")
    assert differing(got, want) == []
