"""CSVLogger: layout, columns, versions, resuming; beside Lightning where it is installed."""

from __future__ import annotations

import pickle
from argparse import Namespace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxlightning.loggers import CSVLogger

CALLS: list[tuple[dict[str, float], int]] = [
    ({"b": 1.0, "a": 0.5}, 0),
    ({"b": 2.0}, 1),
    ({"c": 3.0, "epoch": 0}, 1),
    ({"a": float("nan"), "c": 1e-9}, 2),
]


def _write(logger: Any, saves: tuple[int, ...]) -> str:
    for index, (metrics, step) in enumerate(CALLS):
        logger.log_metrics(dict(metrics), step=step)
        if index in saves:
            logger.save()
    logger.finalize("success")
    return (Path(logger.log_dir) / "metrics.csv").read_text()


@pytest.mark.lightning
@pytest.mark.parametrize("saves", [(), (0, 1, 2, 3), (1,)])
@pytest.mark.parametrize("prefix", ["", "p"])
@pytest.mark.catalogue("LO03", "LO04")
def test_the_file_is_lightnings(tmp_path: Path, saves: tuple[int, ...], prefix: str) -> None:
    from lightning.pytorch.loggers import CSVLogger as Reference

    ours = CSVLogger(tmp_path / "ours", prefix=prefix)
    reference = Reference(tmp_path / "theirs", prefix=prefix)
    assert _write(ours, saves) == _write(reference, saves)
    assert Path(ours.log_dir).relative_to(tmp_path / "ours") == Path(reference.log_dir).relative_to(tmp_path / "theirs")


@pytest.mark.lightning
@pytest.mark.parametrize(
    "options", [{}, {"name": None}, {"name": ""}, {"name": "exp", "version": 7}, {"version": "best"}, {"name": "a/b"}]
)
@pytest.mark.catalogue("LO02")
def test_the_directories_are_lightnings(tmp_path: Path, options: dict[str, Any]) -> None:
    from lightning.pytorch.loggers import CSVLogger as Reference

    for existing in ("version_0", "version_3", "version_x", "other"):
        (tmp_path / (options.get("name", "lightning_logs") or "") / existing).mkdir(parents=True)
    ours, reference = CSVLogger(tmp_path, **options), Reference(tmp_path, **options)
    for word in ("name", "version", "save_dir", "root_dir", "log_dir", "group_separator"):
        assert getattr(ours, word) == getattr(reference, word), word


def test_hyperparameters_are_written_only_when_there_are_some(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"a": 1.0}, 0)
    logger.save()
    assert [file.name for file in Path(logger.log_dir).iterdir()] == ["metrics.csv"]
    logger.log_hyperparams(Namespace(lr=0.1))
    logger.log_hyperparams({"n": 3})
    assert (Path(logger.log_dir) / "hparams.yaml").read_text() == "lr: 0.1\nn: 3\n"


def test_arrays_are_written_as_numbers_and_rows_are_numbered(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"a": jnp.float32(1.5), "b": np.float64(2.5)})
    logger.log_metrics({"a": np.array([3])})
    assert logger.experiment.metrics == [{"a": 1.5, "b": 2.5, "step": 0}, {"a": 3, "step": 1}]
    logger.save()
    assert logger.experiment.metrics == []
    assert (Path(logger.log_dir) / "metrics.csv").read_text() == "a,b,step\n1.5,2.5,0\n3,,1\n"


def test_rows_are_flushed_at_every_n_steps(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=2)
    file = Path(logger.log_dir) / "metrics.csv"
    logger.log_metrics({"a": 1.0}, 0)
    assert not file.exists()
    logger.log_metrics({"a": 1.0}, 1)
    assert len(file.read_text().splitlines()) == 3


@pytest.mark.catalogue("LO05")
def test_a_fresh_run_into_a_used_directory_deletes_its_metrics_and_says_so(tmp_path: Path) -> None:
    _write(CSVLogger(tmp_path, version=0), ())
    again = CSVLogger(tmp_path, version=0)
    with pytest.warns(UserWarning, match="Experiment logs directory .* exists and is not empty"):
        experiment = again.experiment
    assert not Path(experiment.metrics_file_path).exists()


def _run(logger: CSVLogger, epochs: range) -> None:
    """Three steps, two validation batches and two epoch rows per epoch, as a trainer writes them."""
    for epoch in epochs:
        for i in range(3):
            logger.log_metrics({"lr": 0.1}, 3 * epoch + i)
            logger.log_metrics({"loss": 1.0, "epoch": epoch}, 3 * epoch + i)
        for i in range(2):
            logger.log_metrics({"val_step": 1.0}, 2 * epoch + i)
        logger.log_metrics({"val": 1.0, "epoch": epoch}, 3 * epoch + 2)
        logger.log_metrics({"train": 1.0, "epoch": epoch}, 3 * epoch + 2)
        logger.save()


@pytest.mark.catalogue("LO05")
def test_a_resumed_run_keeps_the_rows_before_its_step(tmp_path: Path) -> None:
    """LO05 in DIFFERENCES: Lightning deletes the file."""
    straight = CSVLogger(tmp_path / "straight")
    _run(straight, range(3))
    interrupted = CSVLogger(tmp_path / "resumed", version=0)
    _run(interrupted, range(2))
    interrupted.log_metrics({"loss": 9.0, "late": 1.0, "epoch": 2}, 6)
    interrupted.save()
    resumed = CSVLogger(tmp_path / "resumed", version=0)
    resumed.resume()  # before anything is opened
    assert resumed.experiment.metrics_keys  # the trainer opens every logger before its hooks run
    resumed.resume(6)  # the checkpoint has told the step
    _run(resumed, range(2, 3))
    rows = (Path(resumed.log_dir) / "metrics.csv").read_text().splitlines()
    assert len(rows) == len((Path(straight.log_dir) / "metrics.csv").read_text().splitlines())
    assert "9.0" not in "".join(rows)


def test_a_file_without_an_epoch_is_cut_by_its_own_step(tmp_path: Path) -> None:
    first = CSVLogger(tmp_path, version=0)
    for step in range(5):
        first.log_metrics({"a": float(step)}, step)
    first.save()
    again = CSVLogger(tmp_path, version=0)
    again.resume(3)
    again.log_metrics({"a": 30.0}, 3)
    again.save()
    assert (Path(first.log_dir) / "metrics.csv").read_text().split() == ["a,step", "0.0,0", "1.0,1", "2.0,2", "30.0,3"]


def test_resuming_without_an_earlier_file_starts_one(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, version=0)
    logger.resume(3)
    logger.log_metrics({"a": 1.0}, 3)
    logger.save()
    assert (Path(logger.log_dir) / "metrics.csv").read_text().split() == ["a,step", "1.0,3"]


def test_a_pickled_logger_goes_on_in_its_file(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"a": 1.0}, 0)
    again = pickle.loads(pickle.dumps(logger))
    again.log_metrics({"a": 2.0}, 1)
    again.save()
    assert (Path(logger.log_dir) / "metrics.csv").read_text().split() == ["a,step", "1.0,0", "2.0,1"]


def test_only_the_first_process_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import jaxlightning.loggers.logger as module
    import jaxlightning.utilities.rank_zero as rank_zero

    for place in (module, rank_zero):
        monkeypatch.setattr(place, "process_rank", lambda: 1)
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"a": 1.0}, 0)
    logger.log_hyperparams({"a": 1})
    logger.experiment[0].anything(1)
    logger.finalize("success")
    assert list(tmp_path.iterdir()) == []


def test_remote_directories_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="remote file systems"):
        CSVLogger("s3://bucket/logs")
