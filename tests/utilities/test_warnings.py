"""Exceptions, warnings that can be silenced, and messages of rank 0 only."""

from __future__ import annotations

import logging
import subprocess
import sys
import warnings

import pytest

from jaxlightning.utilities import rank_zero
from jaxlightning.utilities.exceptions import MisconfigurationException, SIGTERMException
from jaxlightning.utilities.warnings import (
    PossibleUserWarning,
    WarningCache,
    disable_possible_user_warnings,
    warn_once,
)


def test_the_exceptions_are_what_lightning_users_catch():
    assert MisconfigurationException.__bases__ == (Exception,)
    assert issubclass(SIGTERMException, SystemExit)
    assert SIGTERMException().code == 143


@pytest.mark.parametrize("value", ["off", "0", "OFF"])
def test_possible_user_warnings_are_silenced_by_the_environment(monkeypatch, value):
    monkeypatch.setenv("POSSIBLE_USER_WARNINGS", value)
    rank_zero.rank_zero_warn("quiet", category=PossibleUserWarning)
    with pytest.warns(UserWarning, match="loud"):
        rank_zero.rank_zero_warn("loud")


def test_possible_user_warnings_come_otherwise_and_can_be_disabled_in_code():
    with pytest.warns(PossibleUserWarning, match="maybe"):
        rank_zero.rank_zero_warn("maybe", category=PossibleUserWarning)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        disable_possible_user_warnings()
        rank_zero.rank_zero_warn("maybe", category=PossibleUserWarning)


def test_a_cache_says_a_thing_once_until_it_is_cleared():
    cache = WarningCache()
    with pytest.warns(UserWarning, match="once"):
        cache.warn("once")
    cache.warn("once")
    cache.warn("other words", key="once")
    assert "once" in cache
    assert len(cache) == 1
    cache.clear()
    with pytest.warns(DeprecationWarning, match="again"):
        warn_once("once", "again", DeprecationWarning, cache=cache)
    warn_once("once", "again", cache=cache)


def test_only_rank_zero_speaks(monkeypatch, caplog):
    monkeypatch.setattr(rank_zero, "process_rank", lambda: 1)
    caplog.set_level(logging.DEBUG, logger="jaxlightning")
    rank_zero.rank_zero_warn("not heard")
    rank_zero.rank_zero_info("not heard")
    rank_zero.rank_zero_debug("not heard")
    assert rank_zero.rank_zero_only(lambda: 1)() is None
    assert rank_zero.rank_zero_only(lambda: 1, default=5)() == 5
    assert not caplog.records
    monkeypatch.setattr(rank_zero, "process_rank", lambda: 0)
    rank_zero.rank_zero_info("heard %s", 1)
    assert rank_zero.rank_zero_only(lambda: 1)() == 1
    assert [r.message for r in caplog.records] == ["heard 1"]


@pytest.mark.parametrize("variable", ["RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"])
def test_the_rank_is_the_launchers_before_there_is_a_backend_and_asking_starts_none(variable):
    code = (
        "import jax, sys; from jaxlightning.utilities.rank_zero import process_rank\n"
        "assert process_rank() == 3\n"
        "assert not jax._src.xla_bridge.backends_are_initialized()\n"
        "jax.devices(); assert process_rank() == 0"
    )
    env = {"PATH": "", "JAX_PLATFORMS": "cpu", variable: "3"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=env)
