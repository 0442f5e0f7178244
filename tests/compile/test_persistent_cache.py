"""The compilation cache of a run: where it is, whose choice wins, and that nothing in it can break a run."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest

import jaxlightning as jl
from jaxlightning.compile import persistent_cache as module
from jaxlightning.compile.persistent_cache import default_cache_folder, persistent_cache, prune
from jaxlightning.utilities.exceptions import MisconfigurationException

NAMES = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
    "jax_enable_compilation_cache",
)


class Small(jl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Dense(4)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return optax.softmax_cross_entropy_with_integer_labels(self.net(x), y).mean()

    def configure_optimizers(self):
        return optax.sgd(0.1)


def options() -> dict[str, object]:
    return {name: getattr(jax.config, name) for name in NAMES}


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The cache is allowed, and the user's cache directory is an empty one; the folder that a run will use."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setattr(module, "MIN_COMPILE_S", 0.0)
    jax.config.update("jax_enable_compilation_cache", True)
    module._reopen()
    yield default_cache_folder()
    jax.config.update("jax_enable_compilation_cache", False)
    module._reopen()


def loader() -> jl.ArrayLoader:
    rng = np.random.default_rng(0)
    return jl.ArrayLoader((rng.normal(size=(16, 6)).astype(np.float32), rng.integers(0, 4, 16)), batch_size=8)


def fit(**flags: object) -> jl.Trainer:
    trainer = jl.Trainer(
        max_steps=2, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        **flags,
    )  # fmt: skip
    trainer.fit(Small(), loader())
    return trainer


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("jit_step-*-cache"))


def test_the_test_suite_runs_without_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    fit()
    assert not (tmp_path / "xdg").exists()


def test_a_run_writes_to_the_users_cache_directory_and_puts_jaxs_options_back(cache: Path) -> None:
    before = options()
    fit()
    assert entries(cache)
    assert options() == before
    assert cache.is_relative_to(os.environ["XDG_CACHE_HOME"])
    assert cache.stat().st_mode & 0o077 == 0


def test_what_is_compiled_after_a_run_is_not_kept(cache: Path) -> None:
    fit()
    count = len(list(cache.iterdir()))
    jax.jit(lambda x: x * 3 + 1).lower(np.ones(7, np.float32)).compile()
    assert len(list(cache.iterdir())) == count


def test_a_second_run_reads_what_the_first_wrote_and_computes_the_same(cache: Path) -> None:
    hits: list[str] = []

    def listen(event: str, **_: object) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            hits.append(event)

    first = fit().state.params
    jax.clear_caches()
    jax.monitoring.register_event_listener(listen)
    try:
        second = fit().state.params
    finally:
        jax.monitoring.unregister_event_listener(listen)
    assert hits
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_options_are_put_back_after_a_failed_run(cache: Path) -> None:
    before = options()

    class Broken(Small):
        def training_step(self, batch, batch_idx):
            raise ZeroDivisionError

    trainer = jl.Trainer(max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(Broken(), loader())
    assert options() == before


def test_false_switches_it_off(cache: Path) -> None:
    fit(compilation_cache=False)
    assert not cache.exists()


def test_a_path_puts_it_there(cache: Path, tmp_path: Path) -> None:
    fit(compilation_cache=tmp_path / "elsewhere")
    assert entries(tmp_path / "elsewhere")
    assert not cache.exists()


def test_the_environment_can_give_the_flag(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_TRAINER_COMPILATION_CACHE", str(tmp_path / "elsewhere"))
    fit()
    assert entries(tmp_path / "elsewhere")


@pytest.mark.parametrize("value", [None, 3, ""])
def test_another_value_is_refused(value: object) -> None:
    with pytest.raises(MisconfigurationException, match="compilation_cache"):
        jl.Trainer(compilation_cache=value)


def test_the_users_own_configuration_wins(cache: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    jax.config.update("jax_compilation_cache_dir", str(own))
    try:
        fit()
        assert jax.config.jax_compilation_cache_dir == str(own)
        assert not cache.exists()
        with pytest.warns(UserWarning, match="has no effect"):
            fit(compilation_cache=tmp_path / "elsewhere")
        assert not (tmp_path / "elsewhere").exists()
    finally:
        jax.config.update("jax_compilation_cache_dir", None)


def test_the_users_environment_wins(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "own"))
    fit()
    assert not cache.exists()


def test_the_users_threshold_is_kept(cache: Path) -> None:
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1000.0)
    try:
        fit()
        assert not entries(cache)
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    path.write_bytes(
        {
            "empty": b"",
            "truncated": content[: len(content) // 2],
            "garbage": np.random.default_rng(0).bytes(len(content)),
            "of another format": b"something else entirely",
        }[how]
    )


@pytest.mark.parametrize(
    "how",
    ["truncated", *(pytest.param(how, marks=pytest.mark.slow) for how in ("empty", "garbage", "of another format"))],
)
def test_a_damaged_entry_costs_a_compilation_and_is_made_anew(cache: Path, how: str) -> None:
    expected = fit().state.params
    for path in cache.glob("*-cache"):
        damage(path, how)
    jax.clear_caches()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = fit().state.params
    jax.tree.map(np.testing.assert_array_equal, expected, got)
    assert not entries(cache)  # damaged ones are gone
    assert not list(cache.glob("jit_create-*-cache"))
    jax.clear_caches()
    fit()
    assert entries(cache)


def test_files_of_others_in_the_folder_are_left_alone(cache: Path) -> None:
    cache.mkdir(parents=True, mode=0o700)
    (cache / "notes.txt").write_text("mine")
    (cache / "jit_step-00-cache").mkdir()
    fit()
    assert (cache / "notes.txt").read_text() == "mine"
    assert (cache / "jit_step-00-cache").is_dir()


def test_a_file_in_the_way_means_no_cache(cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("")
    fit()
    assert cache.read_text() == ""


def test_a_file_in_the_way_of_a_given_folder_is_an_error(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MisconfigurationException, match="cannot be made or written"):
        fit(compilation_cache=tmp_path / "file")


def test_a_folder_that_others_may_write_to_is_not_used(cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    fit()
    assert not list(cache.iterdir())


def test_a_relative_xdg_path_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_folder().is_relative_to(tmp_path / ".cache" / "jaxlightning")


def test_a_choice_that_user_code_makes_during_the_run_stays(cache: Path, tmp_path: Path) -> None:
    try:
        with persistent_cache(True):
            jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "mine")
    finally:
        jax.config.update("jax_compilation_cache_dir", None)


def test_the_oldest_entries_go_first(tmp_path: Path) -> None:
    for age, name in enumerate(("c", "b", "a")):
        path = tmp_path / f"{name}-cache"
        path.write_bytes(b"0" * 100)
        os.utime(path, (1000 - age, 1000 - age))
    (tmp_path / "other.txt").write_bytes(b"0" * 1000)
    prune(tmp_path, 150)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c-cache", "other.txt"]
