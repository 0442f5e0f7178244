"""`seed_everything` and `isolate_rng`."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import numpy as np
import pytest

import jaxlightning as pl
from jaxlightning.utilities.seed import isolate_rng, reset_seed


def draws():
    return random.random(), np.random.rand()


@pytest.mark.catalogue("PN07", adaptation="keys are functions of the seed and of the step")
def test_the_same_seed_gives_the_same_draws_and_sets_the_variables():
    assert pl.seed_everything(7, workers=True) == 7
    first = draws()
    assert (os.environ["PL_GLOBAL_SEED"], os.environ["PL_SEED_WORKERS"]) == ("7", "1")
    pl.seed_everything(7)
    assert draws() == first
    assert os.environ["PL_SEED_WORKERS"] == "0"
    reset_seed()
    assert draws() == first


def test_without_a_seed_the_variable_counts_and_zero_otherwise(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "2020")
    assert pl.seed_everything() == 2020
    monkeypatch.delenv("PL_GLOBAL_SEED")
    with pytest.warns(UserWarning, match="No seed found, seed set to 0"):
        assert pl.seed_everything() == 0
    monkeypatch.delenv("PL_GLOBAL_SEED")
    assert pl.seed_everything(verbose=False) == 0


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_out_of_range_is_an_error(seed):
    with pytest.raises(ValueError, match="range"):
        pl.seed_everything(seed)


def test_a_variable_that_is_no_number_is_an_error(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "abc")
    with pytest.raises(ValueError, match="PL_GLOBAL_SEED must hold a whole number, got 'abc'"):
        pl.seed_everything()


def test_numbers_that_are_whole_are_converted():
    assert pl.seed_everything("3") == 3  # type: ignore[arg-type]
    assert pl.seed_everything(np.int64(4)) == 4  # type: ignore[arg-type]


def test_isolate_rng_leaves_the_generators_as_they_were():
    pl.seed_everything(1)
    expected = draws()
    pl.seed_everything(1)
    with isolate_rng():
        draws()
    assert draws() == expected


@pytest.mark.torch
def test_torch_is_seeded_only_when_it_is_there():
    code = (
        "import jaxlightning as pl, sys; pl.seed_everything(5); assert 'torch' not in sys.modules\n"
        "import torch; pl.seed_everything(5); a = torch.rand(1)\n"
        "torch.manual_seed(5); assert (a == torch.rand(1)).all()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
