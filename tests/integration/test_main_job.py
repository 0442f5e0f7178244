"""The main job through the Trainer: exact, compiled once, and never waiting for the host."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.models import Classifier, LinenNet

import jaxlightning as pl
from jaxlightning import ArrayLoader, functionalize
from jaxlightning.callbacks import ModelCheckpoint, TQDMProgressBar
from jaxlightning.compile.paths import flatten
from jaxlightning.loggers import CSVLogger


def _data(n: int, dtype: Any = np.float32) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n, 6)).astype(dtype)
    return x, x[:, :4].argmax(-1).astype(np.int32)


def _quiet(tmp_path: Path, **options: Any) -> pl.Trainer:
    settings: dict[str, Any] = {
        "default_root_dir": tmp_path, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False,
    }  # fmt: skip
    return pl.Trainer(**{**settings, **options})


@contextmanager
def counted_reads() -> Iterator[Counter[str]]:
    """Counts host reads of device arrays; on a CPU the transfer guard does not see them."""
    from jax._src import array

    counts: Counter[str] = Counter()
    value, get = array.ArrayImpl._value, jax.device_get
    inside = []

    def counted_value(self: Any) -> Any:
        if not inside:
            counts["value"] += 1
        return value.fget(self)

    def counted_get(tree: Any) -> Any:
        counts["device_get"] += 1
        inside.append(1)
        try:
            return get(tree)
        finally:
            inside.pop()

    array.ArrayImpl._value = property(counted_value)
    jax.device_get = counted_get
    try:
        yield counts
    finally:
        array.ArrayImpl._value = value
        jax.device_get = get


class TrainOnly(Classifier):
    validation_step = None  # type: ignore[assignment]


class TenLogs(TrainOnly):
    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        loss = super().training_step(batch, batch_idx)
        for i in range(9):
            self.log(f"value_{i}", loss * i, prog_bar=True, on_step=True, on_epoch=True)
        return loss


def test_no_host_read_between_log_points(tmp_path: Path) -> None:
    per_batch: list[int] = []

    class Loader:
        """Notes how many reads happened when each batch is asked for."""

        def __init__(self, counts: Counter[str]) -> None:
            self.counts = counts

        def __len__(self) -> int:
            return 100

        def __iter__(self) -> Iterator[Any]:
            x, y = _data(8)
            for _ in range(100):
                per_batch.append(self.counts.total())
                yield x, y

    with counted_reads() as counts:
        trainer = _quiet(
            tmp_path, max_epochs=1, logger=CSVLogger(tmp_path), enable_progress_bar=True, callbacks=[TQDMProgressBar()],
            log_every_n_steps=50, num_sanity_val_steps=0,
        )  # fmt: skip
        trainer.fit(TenLogs(), Loader(counts))
    reads = np.diff(per_batch)
    # Two log points (after steps 50 and 100): the first is fetched a little after its step, the second after the last.
    assert not reads[:49].any()
    assert reads.sum() <= 1
    assert counts["device_get"] <= 3  # two log points and the epoch's end
    assert counts["value"] == 0
    rows = next(Path(tmp_path).rglob("metrics.csv")).read_text().splitlines()
    assert len(rows) == 4


def test_constant_shapes_compile_each_step_once_over_two_epochs(tmp_path: Path) -> None:
    x, y = _data(64)
    trainer = _quiet(tmp_path, max_epochs=2)
    trainer.fit(Classifier(), ArrayLoader(x, y, batch_size=16), ArrayLoader(x, y, batch_size=16))
    assert trainer._engine.trace_counts == {"train": 1, "validate": 1}


def test_the_same_seed_gives_identical_parameters_twice(tmp_path: Path) -> None:
    def run() -> Any:
        pl.seed_everything(7)
        x, y = _data(64)
        model = TrainOnly(LinenNet(dropout=0.2))
        _quiet(tmp_path, max_epochs=3).fit(model, ArrayLoader(x, y, batch_size=16, shuffle=True))
        return model.state_dict()

    first, second = run(), run()
    assert all(np.array_equal(first[path], second[path]) for path in first)


def test_an_own_loop_of_100_steps_equals_fit_bit_for_bit(tmp_path: Path) -> None:
    x, y = _data(160)
    loader = ArrayLoader(x, y, batch_size=16)
    model = TrainOnly(LinenNet(dropout=0.1))
    _quiet(tmp_path, max_epochs=10).fit(model, loader)
    state, train_step, _, _ = functionalize(TrainOnly(LinenNet(dropout=0.1)), (x[:16], y[:16]))
    step = jax.jit(train_step, donate_argnums=0)
    for i in range(100):
        begin = 16 * (i % 10)
        state, _ = step(state, (x[begin : begin + 16], y[begin : begin + 16]))
    mine = flatten(model._engine.params)
    for path, leaf in flatten(state.params).items():
        assert np.array_equal(leaf, mine[path]), path
    for a, b in zip(jax.tree.leaves(state.variables), jax.tree.leaves(model._engine.variables), strict=True):
        assert np.array_equal(a, b)


def _losses(root: Path, dtype: str, batch_size: int = 32, **options: Any) -> tuple[list[float], dict[str, Any]]:
    losses = []

    class Keep(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            losses.append(float(outputs["loss"]))

    x, y = _data(32 * 20, dtype)
    with jax.enable_x64(dtype == "float64"):
        model = TrainOnly(LinenNet(dtype=jnp.dtype(dtype)))
        _quiet(root, max_epochs=1, callbacks=[Keep()], **options).fit(model, ArrayLoader(x, y, batch_size=batch_size))
        return losses, jax.tree.map(np.asarray, flatten(model._engine.params))


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Losses and weights of a compiled run on one device, by dtype."""
    return functools.cache(lambda dtype: _losses(tmp_path_factory.mktemp("one"), dtype))


@pytest.mark.parametrize("other", ["eager", "ddp"])
@pytest.mark.parametrize(
    ("dtype", "loss_tolerance", "tolerance"),
    [("float64", 1e-8, 1e-8), pytest.param("float32", 1e-5, 1e-4, marks=pytest.mark.slow)],
)
def test_eager_and_eight_devices_agree_with_one(
    tmp_path: Path, one_device: Any, other: str, dtype: str, loss_tolerance: float, tolerance: float
) -> None:
    one, weights = one_device(dtype)
    options = {"jit": False} if other == "eager" else {"devices": 8, "strategy": "ddp", "accelerator": "cpu"}
    same, same_weights = _losses(tmp_path, dtype, 32 if other == "eager" else 4, **options)
    assert len(one) == len(same) == 20
    np.testing.assert_allclose(same, one, rtol=loss_tolerance)
    for path, value in weights.items():
        if path != "net/Dense_0/bias":  # before a normalisation: its true gradient is zero
            np.testing.assert_allclose(same_weights[path], value, atol=tolerance, err_msg=path)


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.slow), 0.2])
def test_resuming_at_an_epoch_boundary_is_exact(tmp_path: Path, dropout: float) -> None:
    x, y = _data(64)
    make = lambda: Classifier(LinenNet(dropout=dropout))  # noqa: E731
    loader = lambda shuffle=True: ArrayLoader(x, y, batch_size=16, shuffle=shuffle, seed=3)  # noqa: E731
    whole = make()
    _quiet(tmp_path, max_epochs=4).fit(whole, loader(), loader(False))
    saver = ModelCheckpoint(dirpath=tmp_path / "ckpt", save_top_k=-1)
    _quiet(tmp_path, max_epochs=2, enable_checkpointing=True, callbacks=[saver]).fit(make(), loader(), loader(False))
    resumed = make()
    again = ModelCheckpoint(dirpath=tmp_path / "ckpt", save_top_k=-1)
    trainer = _quiet(tmp_path, max_epochs=4, enable_checkpointing=True, callbacks=[again])
    trainer.fit(resumed, loader(), loader(False), ckpt_path=saver.best_model_path)
    assert trainer.global_step == 16
    assert trainer.current_epoch == 4
    for path, value in whole.state_dict().items():
        assert np.array_equal(value, resumed.state_dict()[path]), path


def test_state_can_be_read_and_set_through_the_trainer(tmp_path: Path) -> None:
    x, y = _data(32)

    class Halves(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                trainer.state.params = jax.tree.map(lambda leaf: leaf * 0, trainer.state.params)
            else:
                self.after = trainer.state.params

    callback = Halves()

    class Still(TrainOnly):
        def configure_optimizers(self) -> Any:
            return optax.sgd(0.0)

    trainer = _quiet(tmp_path, max_epochs=1, callbacks=[callback])
    trainer.fit(Still(), ArrayLoader(x, y, batch_size=16))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(callback.after))
    assert trainer.state.opt_state is not None


def test_load_from_checkpoint_rebuilds_without_an_example(tmp_path: Path) -> None:
    x, y = _data(32)

    class Configured(TrainOnly):
        def __init__(self, dropout: float = 0.1, lr: float = 1e-2) -> None:
            super().__init__(LinenNet(dropout=dropout), lr)
            self.save_hyperparameters()

    trainer = _quiet(tmp_path, max_epochs=1)
    model = Configured(dropout=0.3)
    trainer.fit(model, ArrayLoader(x, y, batch_size=16))
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    loaded = Configured.load_from_checkpoint(tmp_path / "model.ckpt", lr=0.5)
    assert loaded.hparams.dropout == 0.3
    assert loaded.lr == 0.5
    model.eval()
    loaded.eval()
    np.testing.assert_array_equal(loaded(x), model(x))


def test_example_input_array_creates_variables_before_the_first_batch(tmp_path: Path) -> None:
    x, y = _data(32)
    seen = []

    class Example(TrainOnly):
        def on_train_start(self) -> None:
            seen.append(self.trainer._engine.has_variables)

    model = Example()
    model.example_input_array = x[:2]
    _quiet(tmp_path, max_epochs=1).fit(model, ArrayLoader(x, y, batch_size=16))
    plain = Example()
    _quiet(tmp_path, max_epochs=1).fit(plain, ArrayLoader(x, y, batch_size=16))
    assert seen == [True, False]
    for path, value in plain.state_dict().items():
        assert np.array_equal(value, model.state_dict()[path])
