"""What `Trainer(logger=...)` accepts, and what all loggers get at the start of a run."""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxlightning.loggers import (
    CSVLogger,
    DummyLogger,
    Logger,
    TensorBoardLogger,
    configure_loggers,
    log_hyperparams,
    logger_version,
)
from jaxlightning.loggers._params import flatten_dict, sanitize_params
from jaxlightning.utilities.exceptions import MisconfigurationException


class Duck:
    """A logger that knows none of our classes."""

    version: Any = 3

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.seen.append((metrics, step))

    def log_hyperparams(self, params: Any) -> None:
        self.seen.append(params)

    def save(self) -> None: ...

    def finalize(self, status: str) -> None: ...

    def after_save_checkpoint(self, callback: Any) -> None: ...


def test_the_default_is_tensorboard_or_else_csv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (logger,) = configure_loggers(True, tmp_path)
    assert type(logger) is TensorBoardLogger
    assert (logger.save_dir, logger.name, logger.version) == (str(tmp_path), "lightning_logs", 0)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tensorboardX" else find(name))
    (logger,) = configure_loggers(True, tmp_path)
    assert type(logger) is CSVLogger


def test_a_slurm_job_gives_the_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1234")
    assert configure_loggers(True, tmp_path)[0].version == 1234
    monkeypatch.setenv("SLURM_JOB_NAME", "bash")
    assert configure_loggers(True, tmp_path)[0].version == 0


def test_none_one_and_several(tmp_path: Path) -> None:
    csv, duck = CSVLogger(tmp_path), Duck()
    assert (
        configure_loggers(False, tmp_path) == configure_loggers(None, tmp_path) == configure_loggers([], tmp_path) == []
    )
    assert configure_loggers(csv, tmp_path) == [csv]
    assert configure_loggers(iter((csv, duck)), tmp_path) == [csv, duck]


@pytest.mark.lightning
def test_loggers_of_lightning_are_accepted(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger as Reference

    logger = Reference(tmp_path)
    assert configure_loggers(logger, tmp_path) == [logger]


@pytest.mark.parametrize("wrong", [5, "tensorboard", CSVLogger, object(), [3]])
def test_anything_else_is_refused_by_name(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(MisconfigurationException, match=r"Trainer\(logger=\.\.\.\)` received"):
        configure_loggers(wrong, tmp_path)


def test_versions_of_several_loggers_are_joined() -> None:
    assert logger_version([Duck()]) == 3
    other = Duck()
    other.version = "x"
    assert logger_version([Duck(), other, Duck()]) == "3_x"


def test_the_dummy_swallows_everything() -> None:
    dummy = DummyLogger()
    dummy.log_metrics({"a": 1}, step=0)
    dummy.log_hyperparams({}, 1, x=2)
    dummy.save()
    dummy.finalize("success")
    dummy.log_image(1, key="x")
    dummy[0].experiment[3].add_image("x", None)
    dummy.experiment["a"] = 1
    assert (dummy.name, dummy.version, dummy.save_dir) == ("", "", None)


def test_a_logger_of_ones_own_needs_four_words() -> None:
    class Mine(Logger):
        name, version = "mine", "v"

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None: ...

        def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None: ...

    mine = Mine()
    assert (mine.save_dir, mine.root_dir, mine.log_dir, mine.group_separator) == (None, None, None, "/")
    mine.finalize("success")
    mine.after_save_checkpoint(None)
    mine.log_graph(None)
    mine.resume(3)
    with pytest.raises(TypeError, match="abstract"):
        type("Half", (Logger,), {})()


def _trainer(module: dict[str, Any] | None, datamodule: dict[str, Any] | None, logger: Any) -> Any:
    def holder(params: dict[str, Any] | None) -> Any:
        return SimpleNamespace(_log_hyperparams=params is not None, hparams_initial=params or {"hidden": 1})

    return SimpleNamespace(
        loggers=[logger], lightning_module=holder(module), datamodule=None if datamodule is None else holder(datamodule)
    )


def test_hyperparameters_of_module_and_datamodule_are_merged() -> None:
    array = np.ones(2)
    cases: list[tuple[Any, Any, list[Any]]] = [
        ({"lr": 0.1}, None, [{"lr": 0.1}]),
        ({"lr": 0.1, "_class_path": "x"}, {"n": 2, "_class_path": "y"}, [{"lr": 0.1, "n": 2}]),
        (None, {"n": 2}, [{"n": 2}]),
        (None, None, []),
        ({"lr": 0.1, "a": array}, {"lr": 0.1, "a": array}, [{"lr": 0.1, "a": array}]),
    ]
    for module, datamodule, expected in cases:
        duck = Duck()
        log_hyperparams(_trainer(module, datamodule, duck))
        assert duck.seen == expected


@pytest.mark.parametrize("other", [0.2, "0.1", np.ones(2)])
def test_different_values_under_one_name_are_refused(other: Any) -> None:
    with pytest.raises(RuntimeError, match=r"Error while merging hparams: the keys .*lr"):
        log_hyperparams(_trainer({"lr": 0.1}, {"lr": other}, Duck()))


@pytest.mark.lightning
@pytest.mark.catalogue("LO15")
def test_flattening_is_lightnings() -> None:
    from lightning.fabric.utilities.logger import _flatten_dict

    @dataclass
    class Config:
        width: int = 3

    params = {
        5: {"a": 123},
        "dl": [{"a": 1, "c": 3}, {"b": 2}],
        "l": [1, 2],
        "ns": Namespace(x=Namespace(y=1)),
        "config": Config(),
        "cls": Config,
    }
    assert flatten_dict(params) == _flatten_dict(params)
    assert flatten_dict({"empty": []}) == {"empty": []}  # Lightning loses it
    assert flatten_dict({"a": {"b": 1}}, ".") == {"a.b": 1}


@pytest.mark.lightning
@pytest.mark.catalogue("LO15")
def test_plain_values_are_lightnings() -> None:
    from lightning.fabric.utilities.logger import _sanitize_params

    params = {
        "float": 0.3,
        "bool": True,
        "text": "abc",
        "list": [1, 2, 3],
        "none": None,
        "np.bool": np.bool_(1),
        "np.int": np.int64(3),
        "np.float": np.float32(0.5),
        "ns": Namespace(foo=3),
    }
    ours = sanitize_params(params)
    assert ours == _sanitize_params(dict(params))
    assert {type(value) for value in ours.values()} == {float, bool, str, int}
