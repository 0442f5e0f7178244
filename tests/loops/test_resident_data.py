"""`Trainer(data_on_device=...)`: steps gather the rows, and nothing that can be seen differs from host batches."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn

import jaxlightning as jl
from jaxlightning.compile.resident import ResidentBatch, RowLayout, on_host
from jaxlightning.loops import resident
from jaxlightning.loops.stream import concatenate
from jaxlightning.utilities.exceptions import MisconfigurationException

pytestmark = [
    pytest.mark.usefixtures("compiled_once"),
    pytest.mark.filterwarnings("ignore::jaxlightning.utilities.warnings.PossibleUserWarning"),
]

ROWS, FEATURES = 203, 4


class Net(jl.LightningModule):
    """With dropout, so that the random keys of the steps matter."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.drop = nn.Dense(3), nn.Dropout(0.3)

    def training_step(self, batch: Any, batch_idx: int) -> jax.Array:
        x, y = batch
        assert type(batch) in (tuple, list)
        loss = optax.softmax_cross_entropy_with_integer_labels(self.net(self.drop(x.reshape(len(x), -1))), y).mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(0.01)


class Plain(Net):
    def __init__(self) -> None:
        super().__init__()
        self.drop = lambda x: x


def _data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(ROWS, FEATURES)).astype(np.float32), rng.integers(0, 3, ROWS)


def _arrays(**options: Any) -> jl.ArrayLoader:
    return jl.ArrayLoader(*_data(), batch_size=16, **{"shuffle": True, **options})


def _torch() -> Any:
    torch = pytest.importorskip("torch")
    torch.manual_seed(7)
    data = torch.utils.data.TensorDataset(*map(torch.from_numpy, _data()))
    return torch.utils.data.DataLoader(data, 16, shuffle=True)


def _subset() -> Any:
    torch = pytest.importorskip("torch")
    torch.manual_seed(7)
    parts = [torch.utils.data.TensorDataset(*map(torch.from_numpy, _data())) for _ in range(2)]
    joined = torch.utils.data.ConcatDataset(parts)
    chosen = torch.utils.data.Subset(joined, [-1, *range(100, 300)])
    return torch.utils.data.DataLoader(chosen, sampler=[-1, *range(150), 3], batch_size=16)


def _fit(folder: Path, loader: Any, on_device: Any, module: Any = None, **options: Any) -> tuple[Any, Any, str]:
    trainer = jl.Trainer(
        **{
            "max_epochs": 3,
            "logger": jl.loggers.CSVLogger(folder, name=None, version=0),
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "log_every_n_steps": 5,
            "default_root_dir": folder,
            "data_on_device": on_device,
            **options,
        }
    )
    module = Net() if module is None else module
    trainer.fit(module, loader)
    return trainer, module, (folder / "version_0" / "metrics.csv").read_text()


def _assert_same(left: Any, right: Any) -> None:
    left, right = left.state_dict(), right.state_dict()
    assert left.keys() == right.keys()
    for name, value in left.items():
        np.testing.assert_array_equal(value, right[name], err_msg=name)


def _is_resident(trainer: Any) -> bool:
    source = trainer.fit_loop.feed.resident
    return source is not None and not source._refused


@pytest.mark.parametrize("make", [_arrays, pytest.param(_torch, marks=pytest.mark.torch)])
@pytest.mark.parametrize(
    "options", [{}, pytest.param({"steps_per_dispatch": 2}, marks=pytest.mark.slow), {"strategy": "ddp", "devices": 2}]
)
def test_training_is_bit_identical_to_batches_of_the_host(make: Any, options: dict[str, Any], tmp_path: Path) -> None:
    device, ours, rows = _fit(tmp_path / "device", make(), True, **options)
    _, plain, expected = _fit(tmp_path / "host", make(), False, **options)
    assert _is_resident(device)
    assert rows == expected
    _assert_same(ours, plain)
    step = device._engine.compiled["train"]
    assert [leaf.shape for leaf in step.jaxpr.in_avals if leaf.shape[:1] == (ROWS,)] == [(ROWS, FEATURES), (ROWS,)]
    if "steps_per_dispatch" in options:
        assert device._engine.trace_counts["train_fused"] == 1


@pytest.mark.torch
def test_subsets_and_negative_indices_find_their_rows(tmp_path: Path) -> None:
    device, ours, rows = _fit(tmp_path / "device", _subset(), True, max_epochs=1)
    _, plain, expected = _fit(tmp_path / "host", _subset(), False, max_epochs=1)
    assert _is_resident(device)
    assert rows == expected
    _assert_same(ours, plain)


@pytest.mark.torch
def test_images_of_torchvision_are_on_the_device_as_their_transform_gives_them(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torchvision = pytest.importorskip("torchvision")
    data = torchvision.datasets.MNIST.__new__(torchvision.datasets.MNIST)
    rng = np.random.default_rng(1)
    data.data = torch.from_numpy(rng.integers(0, 256, (60, 28, 28)).astype(np.uint8))
    data.targets = torch.from_numpy(rng.integers(0, 3, 60))
    steps = [torchvision.transforms.ToTensor(), torchvision.transforms.Normalize((0.3,), (0.4,))]
    data.transform, data.target_transform = torchvision.transforms.Compose(steps), None

    def loader() -> Any:
        torch.manual_seed(1)
        return torch.utils.data.DataLoader(data, 16, shuffle=True)

    device, ours, rows = _fit(tmp_path / "device", loader(), True, channels_last=True)
    _, plain, expected = _fit(tmp_path / "host", loader(), False, channels_last=True)
    assert _is_resident(device)
    assert device.fit_loop.feed.resident._columns[0].shape == (60, 28, 28, 1)
    assert rows == expected
    _assert_same(ours, plain)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_resume_in_the_middle_of_an_epoch_continues_with_the_same_rows(tmp_path: Path) -> None:
    _, whole, _ = _fit(tmp_path / "whole", _arrays(), False, Plain(), max_steps=26, max_epochs=-1)
    saving = jl.callbacks.ModelCheckpoint(tmp_path / "kept", filename="middle", every_n_train_steps=18)
    options: dict[str, Any] = {"callbacks": [saving], "enable_checkpointing": True, "max_steps": 26, "max_epochs": -1}
    first, _, _ = _fit(tmp_path / "first", _arrays(), True, Plain(), **options)
    assert _is_resident(first)
    trainer = jl.Trainer(
        max_steps=26, max_epochs=-1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, data_on_device=True,
    )  # fmt: skip
    again = Plain()
    trainer.fit(again, _arrays(), ckpt_path=saving.best_model_path)
    assert _is_resident(trainer)
    _assert_same(again, whole)


def test_data_goes_to_the_device_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    placed: list[int] = []
    place = resident.ResidentSource._place
    monkeypatch.setattr(resident.ResidentSource, "_place", lambda self, data: placed.append(1) or place(self, data))
    trainer, _, _ = _fit(tmp_path, _arrays(), True, max_epochs=4)
    assert len(placed) == 1
    assert trainer._engine.trace_counts["train"] == 2  # the short last batch is the second


def test_data_that_changes_between_two_passes_is_seen_as_on_the_host(tmp_path: Path) -> None:
    class Change(jl.Callback):
        def __init__(self, array: np.ndarray) -> None:
            self.array = array

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            self.array[[3, 4]] = self.array[[4, 3]]

    results = []
    for on_device in (0.5, False):
        x, y = _data()
        loader = jl.ArrayLoader(x, y, batch_size=16)
        _, module, rows = _fit(tmp_path / str(on_device), loader, on_device, callbacks=[Change(x)])
        results.append((module, rows))
    assert results[0][1] == results[1][1]
    _assert_same(results[0][0], results[1][0])


@pytest.mark.parametrize("where", ["callback", "module", "transfer"])
def test_hooks_that_receive_batches_get_arrays(where: str, tmp_path: Path) -> None:
    seen: list[Any] = []

    class Watch(jl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append(batch)

    class Watching(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            seen.append(batch)

    class Moving(Net):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            seen.append(batch)
            return batch

    module = {"callback": Net, "module": Watching, "transfer": Moving}[where]()
    options = {"callbacks": [Watch()]} if where == "callback" else {}
    _fit(tmp_path / "auto", _arrays(), 0.5, module, max_epochs=1, **options)
    assert {type(leaf) for batch in seen for leaf in batch} == {np.ndarray}
    with pytest.raises(MisconfigurationException, match="cannot be kept on the device"):
        _fit(tmp_path / "true", _arrays(), True, module, **options)


@pytest.mark.slow
def test_a_hook_that_comes_with_the_training_gets_arrays(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Watch(jl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append(batch)

    class Adds(jl.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                trainer.callbacks.append(Watch())

    _, ours, _ = _fit(tmp_path / "auto", _arrays(), 0.5, callbacks=[Adds()])
    _, plain, _ = _fit(tmp_path / "host", _arrays(), False)
    assert {type(leaf) for batch in seen for leaf in batch} <= {np.ndarray}
    _assert_same(ours, plain)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"jit": False}, "not compiled"),
        ({"pad_batches": True}, "padded"),
        ({"prefetch_batches": 2}, "prefetch_batches"),
        ({"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders"),
        ({"detect_anomaly": True}, "detect_anomaly"),
    ],
)
def test_what_prevents_it_is_said(
    options: dict[str, Any], why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Masked(Net):
        def training_step(self, batch: Any, batch_idx: int) -> jax.Array:
            x, y = batch
            losses = optax.softmax_cross_entropy_with_integer_labels(self.net(x), y)
            return jax.numpy.mean(losses, where=self.batch_mask)

    caplog.set_level(logging.INFO, "jaxlightning")
    trainer = jl.Trainer(
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, data_on_device=0.5,
        enable_model_summary=False, default_root_dir=tmp_path, limit_train_batches=3, **options,
    )  # fmt: skip
    trainer.fit(Masked(), _arrays())
    assert any("stays on the host" in text and why in text for text in caplog.messages)


def test_data_beyond_the_budget_stays_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    x, y = _data()
    monkeypatch.setattr(resident, "device_memory", lambda device: 4 * (x.nbytes + y.nbytes // 2) - 4)
    caplog.set_level(logging.INFO, "jaxlightning")
    trainer, _, _ = _fit(tmp_path / "quarter", _arrays(), 0.25, max_epochs=1)
    assert not _is_resident(trainer)
    assert any("more than the" in text for text in caplog.messages)
    trainer, _, _ = _fit(tmp_path / "half", _arrays(), 0.5, max_epochs=1)
    assert _is_resident(trainer)


def test_by_itself_data_goes_to_accelerators_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jaxlightning")
    trainer, _, _ = _fit(tmp_path, _arrays(), "auto", max_epochs=1, log_compiles=True)
    on_cpu = jax.devices()[0].platform == "cpu"
    assert (trainer.fit_loop.feed.resident is None) is on_cpu
    assert any("gains nothing" in text for text in caplog.messages) is on_cpu


def test_a_loader_without_arrays_is_read_as_ever(tmp_path: Path) -> None:
    class Batches:
        def __len__(self) -> int:
            return 5

        def __iter__(self) -> Any:
            x, y = _data()
            return iter([(x[:16], y[:16])] * 5)

    trainer, _, _ = _fit(tmp_path / "auto", Batches(), 0.5, max_epochs=1)
    assert not _is_resident(trainer)
    with pytest.raises(MisconfigurationException, match="not read from arrays"):
        _fit(tmp_path / "true", Batches(), True)


def test_the_fingerprint_of_arrays_changes_with_any_word() -> None:
    from jaxlightning.adapters.in_memory import fingerprint

    rng = np.random.default_rng(0)
    array = rng.integers(0, 255, (3000, 30)).astype(np.uint8)
    before = fingerprint([array])
    assert fingerprint([array]) == before
    for left, right in ((0, 1), (5, 2999), (100, 1200)):
        array[[left, right]] = array[[right, left]]
        assert fingerprint([array]) != before
        array[[left, right]] = array[[right, left]]
        assert fingerprint([array]) == before
    array[-1, -1] ^= 1
    assert fingerprint([array]) != before


def test_rows_are_gathered_and_joined() -> None:
    x, y = _data()
    layout = RowLayout(jax.tree_util.tree_structure((0, 0)))
    columns = (jax.numpy.asarray(x), jax.numpy.asarray(y))
    parts = [ResidentBatch(np.array(rows, np.int32), columns, layout) for rows in ([5, 2], [7])]
    joined = concatenate(parts)
    found = on_host(joined)
    np.testing.assert_array_equal(found[0], x[[5, 2, 7]])
    np.testing.assert_array_equal(found[1], y[[5, 2, 7]])
    assert all(type(leaf) is np.ndarray for leaf in found)


@pytest.mark.parametrize("value", [0, 1, 1.5, 0.0, "yes", None])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="data_on_device"):
        jl.Trainer(data_on_device=value)
