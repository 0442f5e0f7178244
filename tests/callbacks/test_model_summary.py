from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlightning.callbacks import ModelSummary, RichModelSummary
from jaxlightning.callbacks._summary import human_readable_bytes, human_readable_count, summarize
from jaxlightning.module import JaxLightningModule

MakeTrainer = Callable[..., Any]


class _Encoder(nn.Module):
    @nn.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        x = nn.Dense(8)(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return nn.Dense(3, name="out")(nn.relu(x))


class _Model(JaxLightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.enc = _Encoder()
        self.head = nn.Dense(2)
        self.calls = 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return self.head(self.enc(x))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.head(self.enc(batch)).sum()


class _Owns:
    """An optimizer handle that owns the parameters below a prefix."""

    def __init__(self, prefix: str) -> None:
        self.owns = SimpleNamespace(matches=lambda path: path.startswith(prefix))


@pytest.fixture
def model() -> _Model:
    return _Model().init(np.ones((2, 4), np.float32))


def _run(summary: ModelSummary, make_trainer: MakeTrainer, model: Any, **changes: Any) -> Any:
    trainer = make_trainer(_engine=model._engine, **changes)
    summary.on_fit_start(trainer, model)
    return trainer


def test_counts_sizes_and_shapes_of_each_network(model: _Model) -> None:
    summary = summarize(model)
    assert summary.layer_names == ["enc", "head"]
    assert summary.layer_types == ["_Encoder", "Dense"]
    assert summary.param_nums == [4 * 8 + 8 + 8 + 8 + 8 * 3 + 3, 3 * 2 + 2]
    assert summary.total_parameters == 91
    assert summary.model_bytes == 4 * 91
    assert summary.model_size == pytest.approx(364e-6)
    assert summary.variables == {"batch_stats": 16}
    assert [row.arrays for row in summary.rows] == ["6 arrays", "bias[2] kernel[3, 2]"]
    assert summary.missing == ()


def test_the_depth_shows_layers(model: _Model) -> None:
    summary = summarize(model, -1)
    assert summary.layer_names == ["enc", "enc.BatchNorm_0", "enc.Dense_0", "enc.out", "head"]
    assert summary.layer_types == ["_Encoder", "BatchNorm", "Dense", "", "Dense"]
    assert summary.param_nums == [83, 16, 40, 27, 8]
    assert summarize(model, 2).layer_names == summary.layer_names
    assert summarize(model, 0).rows == ()
    assert summarize(model, 0).total_parameters == 91


@pytest.mark.catalogue("CB06", adaptation="sizes come from an abstract evaluation")
def test_an_example_input_adds_sizes_types_and_layers_without_parameters(model: _Model) -> None:
    model.example_input_array = np.ones((5, 4), np.float32)
    before = dict(vars(model))
    summary = summarize(model, -1)
    found = {row.name: (row.layer_type, row.in_size, row.out_size) for row in summary.rows}
    assert list(found) == ["enc", "enc.Dense_0", "enc.BatchNorm_0", "enc.Dropout_0", "enc.out", "head"]
    assert found == {
        "enc": ("_Encoder", [5, 4], [5, 3]),
        "enc.Dense_0": ("Dense", [5, 4], [5, 8]),
        "enc.BatchNorm_0": ("BatchNorm", [5, 8], [5, 8]),
        "enc.Dropout_0": ("Dropout", [5, 8], [5, 8]),
        "enc.out": ("Dense", [5, 8], [5, 3]),
        "head": ("Dense", [5, 3], [5, 2]),
    }
    assert vars(model) == before, "the abstract run left something on the module"


def test_an_example_that_does_not_fit_costs_the_sizes_only(model: _Model) -> None:
    model.example_input_array = np.ones((5, 7), np.float32)
    with pytest.warns(UserWarning, match=r"`_Model.forward\(example_input_array\)` raised"):
        assert summarize(model).in_sizes == [None, None]


def test_nnx_layers_have_types_and_sizes_too() -> None:
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.norm = nnx.BatchNorm(4, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)
            self.blocks = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])

        def __call__(self, x: Any) -> Any:
            x = self.drop(self.norm(x))
            for block in self.blocks:
                x = block(x)
            return x

    class Model(JaxLightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(nnx.Rngs(0))
            self.head = nn.Dense(1)
            self.example_input_array = np.ones((3, 4), np.float32)

        def forward(self, x: Any) -> Any:
            return self.head(self.net(x))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self(batch).sum()

    calls = {klass: vars(klass).get("__call__") for klass in (Net, nnx.Linear, nnx.BatchNorm, nnx.Dropout, nnx.List)}
    rows = summarize(Model().init(np.ones((3, 4), np.float32)), -1).rows
    assert {row.name: (row.layer_type, row.num_parameters, row.in_size, row.out_size) for row in rows} == {
        "head": ("Dense", 5, [3, 4], [3, 1]),
        "net": ("Net", 48, [3, 4], [3, 4]),
        "net.norm": ("BatchNorm", 8, [3, 4], [3, 4]),
        "net.drop": ("Dropout", 0, [3, 4], [3, 4]),
        "net.blocks": ("List", 40, None, None),
        "net.blocks.0": ("Linear", 20, [3, 4], [3, 4]),
        "net.blocks.1": ("Linear", 20, [3, 4], [3, 4]),
    }
    assert calls == {klass: vars(klass).get("__call__") for klass in calls}, "a class was left patched"


def test_layers_are_counted_not_spelled() -> None:
    class Deep(JaxLightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential([nn.Dense(1) for _ in range(11)])

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch).sum()

    names = summarize(Deep().init(np.ones((1, 1), np.float32)), 2).layer_names
    assert names == ["net", *(f"net.layers_{i}" for i in range(11))]


def test_what_no_optimizer_owns_is_not_trainable(model: _Model) -> None:
    assert summarize(model).trainable_parameters == 91
    assert summarize(model, optimizers=[_Owns("head/")]).trainable_parameters == 8
    assert summarize(model, optimizers=[_Owns("head/"), _Owns("enc/out/")]).trainable_parameters == 35


def test_prints_a_table(model: _Model, make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str]) -> None:
    _run(ModelSummary(), make_trainer, model, optimizers=[_Owns("head/")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["|", "Name", "|", "Type", "|", "Params", "|", "Size", "|", "Mode", "|", "Arrays"]
    assert [cell.strip() for cell in lines[2].split("|")] == [
        "0",
        "enc",
        "_Encoder",
        "83",
        "332 B",
        "train",
        "6 arrays",
    ]
    assert lines[5:] == [
        "8         Trainable params",
        "83        Non-trainable params",
        "91        Total params",
        "0.000     Total estimated model params size (MB)",
        "16        Values in `batch_stats`",
        "2         Networks in train mode",
        "0         Networks in eval mode",
    ]


def test_prints_through_the_bar_on_the_first_process_only(model: _Model, make_trainer: MakeTrainer) -> None:
    printed: list[str] = []
    bar = SimpleNamespace(print=printed.append)
    _run(ModelSummary(), make_trainer, model, progress_bar_callback=bar)
    assert len(printed) == 1
    _run(ModelSummary(), make_trainer, model, progress_bar_callback=bar, is_global_zero=False)
    _run(ModelSummary(max_depth=0), make_trainer, model, progress_bar_callback=bar)
    assert len(printed) == 1


def test_waits_for_the_step_that_creates_the_variables(
    make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str]
) -> None:
    model = _Model()
    model._require_engine()
    summary = ModelSummary()
    trainer = _run(summary, make_trainer, model)
    assert capsys.readouterr().out == ""
    model.init(np.ones((2, 4), np.float32))
    assert "91        Total params" in capsys.readouterr().out
    summary.on_train_epoch_end(trainer, model)
    assert capsys.readouterr().out == ""


def test_a_network_that_no_step_calls_does_not_hold_it_back_for_ever(
    make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str]
) -> None:
    class Idle(_Model):
        def __init__(self) -> None:
            super().__init__()
            self.idle = nn.Dense(7)

    model = Idle().init(jnp.ones((2, 4)))
    summary = ModelSummary()
    trainer = _run(summary, make_trainer, model)
    assert capsys.readouterr().out == ""
    summary.on_train_epoch_end(trainer, model)
    out = capsys.readouterr().out
    assert "Not counted, because no step has called them yet: idle" in out
    assert "| idle | Dense    | ?      | ?" in out
    summary.on_train_epoch_end(trainer, model)
    summary.on_fit_end(trainer, model)
    assert capsys.readouterr().out == ""


def test_a_subclass_may_write_another_table(
    model: _Model, make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str]
) -> None:
    class Short(ModelSummary):
        def summarize(self, summary: Any) -> str:
            return f"{summary.total_parameters} parameters"

    _run(Short(), make_trainer, model)
    assert capsys.readouterr().out == "91 parameters\n"


@pytest.mark.parametrize("depth", [-2, "temp", 1.5, True])
def test_another_depth_is_refused(depth: Any) -> None:
    with pytest.raises(ValueError, match="`max_depth` can be -1, 0 or > 0, got"):
        ModelSummary(max_depth=depth)
    with pytest.raises(ValueError, match="`max_depth` can be -1, 0 or > 0, got"):
        summarize(object(), depth)


@pytest.mark.lightning
def test_counts_are_abbreviated_as_in_lightning() -> None:
    from lightning.pytorch.utilities.model_summary.model_summary import get_human_readable_count

    for number in (0, 7, 123, 999, 1000, 1234, 99_999, 123_456, 2_000_000, 3 * 10**9, 4 * 10**14, 5 * 10**15):
        assert human_readable_count(number) == get_human_readable_count(number)


def test_bytes_are_abbreviated() -> None:
    sizes = [human_readable_bytes(n) for n in (0, 999, 1000, 52_000, 3_400_000, 10**15)]
    assert sizes == ["0 B", "999 B", "1.0 kB", "52.0 kB", "3.4 MB", "1000.0 TB"]


def test_the_rich_summary_shows_the_same_numbers(
    model: _Model, make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    _run(RichModelSummary(max_depth=2), make_trainer, model)
    out = capsys.readouterr().out
    assert "Total params: 91" in out
    row = next(line for line in out.splitlines() if "head" in line)
    assert [cell.strip() for cell in row.split("\u2502")[1:-1]] == [
        "4", "head", "Dense", "8", "32 B", "train", "bias[2] kernel[3, 2]",
    ]  # fmt: skip
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"jaxlightning\[rich\]"):
        RichModelSummary()
