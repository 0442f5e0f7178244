"""TensorBoardLogger: layout, tags and events, read back with TensorBoard's own reader."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxlightning.loggers import TensorBoardLogger


def read(directory: str | Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory))
    events.Reload()
    return events


def scalars(directory: str | Path) -> dict[str, list[tuple[int, float]]]:
    events = read(directory)
    return {tag: [(e.step, round(e.value, 5)) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_scalars_have_the_names_and_steps_of_the_metrics(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.log_metrics({"loss": 0.5, "group/acc": 1}, 3)
    logger.log_metrics({"loss": jnp.float32(0.25), "nan": float("nan")}, 4)
    logger.save()
    found = scalars(logger.log_dir)
    assert found["loss"] == [(3, 0.5), (4, 0.25)]
    assert found["group/acc"] == [(3, 1.0)]
    assert np.isnan(found["nan"][0][1])
    logger.finalize("success")


@pytest.mark.lightning
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"name": None},
        {"name": "exp", "version": 7},
        {"version": "best"},
        {"sub_dir": "events"},
        {"sub_dir": "$GROUP/x", "name": ""},
    ],
)
@pytest.mark.catalogue("LO02")
def test_directories_and_files_are_lightnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    from lightning.pytorch.loggers import TensorBoardLogger as Reference

    monkeypatch.setenv("GROUP", "grouped")
    trees = []
    for cls, base in ((TensorBoardLogger, tmp_path / "ours"), (Reference, tmp_path / "theirs")):
        (base / (options.get("name", "lightning_logs") or "") / "version_2").mkdir(parents=True)
        logger = cls(base, **options)
        logger.log_hyperparams({"lr": 0.1, "net": {"width": 3}})
        logger.log_metrics({"a": 1.0}, 0)
        logger.save()
        logger.finalize("success")
        words = [getattr(logger, word) for word in ("name", "version", "save_dir", "root_dir", "log_dir", "sub_dir")]
        files = sorted(str(f.relative_to(base)).split("tfevents")[0] for f in base.rglob("*") if f.is_file())
        trees.append(([str(word).replace(str(base), "") for word in words], files))
        assert scalars(logger.log_dir) == {"hp_metric": [(0, -1.0)], "a": [(0, 1.0)]}
    assert trees[0] == trees[1]


def test_hparams_yaml_is_always_written(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.save()
    assert (Path(logger.log_dir) / "hparams.yaml").read_text() == "{}\n"
    logger.finalize("success")
    other = TensorBoardLogger(tmp_path)
    other.log_hyperparams({"lr": 0.1, "n": 5})
    other.save()
    assert (Path(other.log_dir) / "hparams.yaml").read_text() == "lr: 0.1\nn: 5\n"
    other.finalize("failed")
    assert other.version == 1


def _hparams(directory: str | Path) -> dict[str, Any]:
    from tensorboard.plugins.hparams import plugin_data_pb2

    metadata = read(directory).SummaryMetadata("_hparams_/session_start_info")
    data = plugin_data_pb2.HParamsPluginData.FromString(metadata.plugin_data.content)
    values = data.session_start_info.hparams
    return {name: getattr(value, value.WhichOneof("kind")) for name, value in values.items()}


def test_hyperparameters_are_flat_and_plain(tmp_path: Path) -> None:
    def warmup() -> float:
        raise RuntimeError

    logger = TensorBoardLogger(tmp_path)
    logger.log_hyperparams(
        {
            "lr": np.float32(0.5),
            "n": np.int64(3),
            "flag": True,
            "name": "x",
            "nothing": None,
            "nested": {"a": {"b": 1}, "list": [{"c": 2}]},
            "function": warmup,
            "class": dict,
            "sizes": [1, 2],
        }
    )
    logger.finalize("failed")  # hparams.yaml would leave some of them out, with a warning
    assert _hparams(logger.log_dir) == {
        "lr": 0.5,
        "n": 3.0,
        "flag": True,
        "name": "x",
        "nothing": "None",
        "nested/a/b": 1.0,
        "nested/list/0/c": 2.0,
        "function": "warmup",
        "class": "dict",
        "sizes": "[1, 2]",
    }


def test_the_placeholder_metric_gives_way(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], Any, dict[str, Any]]] = [
        ({}, None, {"hp_metric": [(0, -1.0)]}),
        ({"default_hp_metric": False}, None, {}),
        ({}, {"acc": 0.5}, {"acc": [(0, 0.5)]}),
        ({}, 0.25, {"hp_metric": [(0, 0.25)]}),
    ]
    for options, metrics, expected in cases:
        logger = TensorBoardLogger(tmp_path, **options)
        logger.log_hyperparams({"lr": 0.1}, metrics)
        logger.save()
        assert scalars(logger.log_dir) == expected
        logger.finalize("success")


def test_a_prefix_goes_before_every_key(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, prefix="run")
    logger.log_metrics({"a": 1.0}, 0)
    logger.save()
    assert list(scalars(logger.log_dir)) == ["run-a"]
    logger.finalize("success")


def test_dictionaries_become_charts_and_other_values_an_error(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.log_metrics({"both": {"a": 1.0, "b": 2.0}}, 0)
    logger.save()
    assert scalars(Path(logger.log_dir) / "both" / "a") == {"both": [(0, 1.0)]}
    with pytest.raises(ValueError, match="'text' has the value 'x'"):
        logger.log_metrics({"text": "x"}, 0)
    logger.finalize("failed")


def test_a_resumed_run_hides_the_events_that_come_again(tmp_path: Path) -> None:
    """Whether the writer was open already or not, and only once."""
    for opened in (False, True):
        first = TensorBoardLogger(tmp_path / str(opened), version=0)
        for step in range(5):
            first.log_metrics({"a": float(step)}, step)
        first.finalize("failed")
        again = TensorBoardLogger(tmp_path / str(opened), version=0)
        again.resume()
        if opened:
            _ = again.experiment
        again.resume(3)
        again.log_metrics({"a": 30.0}, 3)
        again.finalize("success")
        again.log_metrics({"a": 40.0}, 4)  # a second file, which hides nothing
        again.finalize("success")
        assert scalars(first.log_dir) == {"a": [(0, 0.0), (1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0)]}


def test_the_graph_is_logged_only_when_asked_for(tmp_path: Path) -> None:
    class Model:
        example_input_array: Any = None

        def __call__(self, x: Any) -> Any:
            return jnp.tanh(x)

    model = Model()
    quiet, loud = TensorBoardLogger(tmp_path), TensorBoardLogger(tmp_path, log_graph=True)
    model.example_input_array = np.ones(3, np.float32)
    quiet.log_graph(model)
    assert not tmp_path.joinpath("lightning_logs").exists()
    loud.log_graph(model)
    loud.save()
    events = read(loud.log_dir)
    (event,) = events.Tensors("graph/text_summary")
    assert b"tanh" in event.tensor_proto.string_val[0]
    model.example_input_array = None
    with pytest.warns(UserWarning, match="example_input_array"):
        loud.log_graph(model)
    loud.finalize("success")


def test_a_pickled_logger_writes_on(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, filename_suffix=".mine")
    logger.log_metrics({"a": 1.0}, 0)
    again = pickle.loads(pickle.dumps(logger))
    again.log_metrics({"a": 2.0}, 1)
    logger.finalize("success")
    again.finalize("success")
    assert scalars(logger.log_dir)["a"] == [(0, 1.0), (1, 2.0)]
    assert all(file.name.endswith(".mine") for file in Path(logger.log_dir).glob("events*"))


def test_events_are_in_the_file_after_a_save_and_at_the_latest_after_ten(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    for step in range(9):
        logger.log_metrics({"a": 1.0}, step)
    assert scalars(logger.log_dir) == {}
    logger.log_metrics({"a": 1.0}, 9)
    assert len(scalars(logger.log_dir)["a"]) == 10
    logger.log_metrics({"a": 1.0}, 10)
    logger.save()
    assert len(scalars(logger.log_dir)["a"]) == 11
    writer = logger.experiment
    logger.finalize("success")
    assert logger.experiment is not writer
    logger.finalize("success")


def test_neither_torch_nor_tensorflow_is_imported(tmp_path: Path) -> None:
    program = f"""
import sys
from jaxlightning.loggers import TensorBoardLogger
assert "tensorboardX" not in sys.modules
logger = TensorBoardLogger({str(tmp_path)!r})
logger.log_hyperparams({{"lr": 0.1}})
logger.log_metrics({{"a": 1.0, "b": {{"c": 1.0}}}}, 0)
logger.experiment.add_text("t", "x")
logger.finalize("success")
assert "tensorboardX" in sys.modules
print(sorted({{"torch", "tensorflow", "tensorboard", "lightning"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
