"""The engine of hand-written steps has every word that the loops, checkpoints and callbacks say to an engine."""

from __future__ import annotations

import re
from pathlib import Path

import jax.numpy as jnp

from jaxlightning.functional._engine import FunctionalEngine
from jaxlightning.functional._fit import _sort
from jaxlightning.functional._module import StepModule

PACKAGE = Path(__file__).resolve().parents[2] / "jaxlightning"
ONLY_FOR_MODULES = {
    "manual",  # manual optimization
    "load_manual_gradients",
    "padding",  # `pad_batches`, which `fit` refuses
    "outside_trace",  # networks called by a module outside its steps
    "_outside_calls",
}


def test_every_word_that_others_say_to_an_engine_is_known() -> None:
    said: set[str] = set()
    for file in PACKAGE.rglob("*.py"):
        if file.relative_to(PACKAGE).parts[0] not in ("compile", "functional"):
            said |= set(re.findall(r"(?:\b_?engine|_require_engine\(\))\.([a-z_]+)", file.read_text()))
    steps = _sort({"w": jnp.ones(2)}, lambda params, batch: (params, 0.0), None, None, None, None, None, ())
    engine = FunctionalEngine(StepModule(steps, None, lambda names: None))
    assert len(said) > 30
    assert sorted(name for name in said - ONLY_FOR_MODULES if not hasattr(engine, name)) == []
