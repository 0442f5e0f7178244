"""Stretches of batches between which nothing is due: the same results and counters as the ordinary loop gives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jaxlightning as pl
from jaxlightning.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, Timer, TQDMProgressBar
from jaxlightning.loggers import CSVLogger
from jaxlightning.loops import quiet_batches

pytestmark = pytest.mark.usefixtures("compiled_once")


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Dense(3)

    def training_step(self, batch: Any, batch_idx: int) -> jax.Array:
        x, y = batch
        loss = optax.softmax_cross_entropy_with_integer_labels(self.net(x), y).mean()
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val", optax.softmax_cross_entropy_with_integer_labels(self.net(x), y).mean())

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(1e-2)


class Loader:
    """Batches in order; `on_batch(index)` runs in the loader, between two steps."""

    def __init__(self, n: int, on_batch: Any = None, sizes: dict[int, int] | None = None) -> None:
        self.n, self.on_batch, self.sizes = n, on_batch, sizes or {}

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[Any]:
        rng = np.random.default_rng(0)
        for index in range(self.n):
            if self.on_batch is not None:
                self.on_batch(index)
            size = self.sizes.get(index, 8)
            yield rng.normal(size=(size, 4)).astype(np.float32), rng.integers(0, 3, size).astype(np.int32)


def _trainer(folder: Path, **options: Any) -> pl.Trainer:
    defaults: dict[str, Any] = {
        "max_epochs": 2,
        "logger": CSVLogger(folder, name=None, version=0),
        "enable_progress_bar": True,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 5,
        "default_root_dir": folder,
    }
    return pl.Trainer(**{**defaults, **options})


def _result(folder: Path, loader: Loader, **options: Any) -> tuple[Any, ...]:
    trainer, module = _trainer(folder, **options), Net()
    trainer.fit(module, loader, Loader(2))
    rows = (folder / "version_0" / "metrics.csv").read_text()
    counters = trainer.fit_loop.epoch_loop.state_dict()
    return rows, counters, {k: float(v) for k, v in trainer.callback_metrics.items()}, module.state_dict()


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no_logging_points": {"log_every_n_steps": 0},
    "validation_within_the_epoch": {"val_check_interval": 7},
    "max_steps": {"max_steps": 17, "max_epochs": -1},
    "limit": {"limit_train_batches": 13},
    "checkpoints": {"callbacks": lambda: [ModelCheckpoint(every_n_train_steps=4, save_top_k=-1)]},
    "rates": {"callbacks": lambda: [LearningRateMonitor("step"), EarlyStopping("val"), Timer()]},
    "clipping": {"gradient_clip_val": 0.1},
    "unrecorded": {"logger": False},
}


@pytest.mark.parametrize("case", CASES)
def test_quiet_stretches_change_nothing_that_can_be_seen(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = dict(CASES[case])
    callbacks = options.pop("callbacks", list)
    stretches: list[int] = []
    run = quiet_batches.QuietBatches.run

    def counting(self: Any, room: int, results: Any) -> Any:
        before = self._loop.batch_progress.current.ready
        pending = run(self, room, results)
        stretches.append(self._loop.batch_progress.current.ready - before)
        return pending

    monkeypatch.setattr(quiet_batches.QuietBatches, "run", counting)
    loader = Loader(20, sizes={9: 5})
    if "logger" in options:
        (tmp_path / "a" / "version_0").mkdir(parents=True)
        (tmp_path / "b" / "version_0").mkdir(parents=True)
        for side in "ab":
            (tmp_path / side / "version_0" / "metrics.csv").write_text("")
    quick = _result(tmp_path / "a", loader, callbacks=callbacks(), **options)
    assert sum(stretches) > 5
    with monkeypatch.context() as patch:
        patch.setattr(quiet_batches.QuietBatches, "of", classmethod(lambda *_: None))
        slow = _result(tmp_path / "b", loader, callbacks=callbacks(), **options)
    assert quick[:3] == slow[:3]
    for name, value in slow[3].items():
        np.testing.assert_array_equal(quick[3][name], value)
    saved = [sorted(p.name for p in (tmp_path / side).rglob("*.ckpt")) for side in "ab"]
    assert saved[0] == saved[1]


def test_a_hook_of_the_user_runs_at_every_batch(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append((batch_idx, trainer.global_step))

    _trainer(tmp_path, max_epochs=1, callbacks=[Watch()]).fit(Net(), Loader(12), Loader(1))
    assert seen == [(i, i + 1) for i in range(12)]


def test_a_loader_sees_the_counters_of_every_step(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    trainer = _trainer(tmp_path, max_epochs=1, log_every_n_steps=20)
    loader = Loader(20, on_batch=lambda i: seen.append((i, trainer.global_step)))
    trainer.fit(Net(), loader, Loader(1))
    assert seen == [(i, i) for i in range(20)]


def test_an_exception_of_the_loader_leaves_exact_counters(tmp_path: Path) -> None:
    def fail(index: int) -> None:
        if index == 8:
            raise OSError("the disk is gone")

    trainer = _trainer(tmp_path, max_epochs=1, log_every_n_steps=20)
    with pytest.raises(OSError, match="the disk is gone"):
        trainer.fit(Net(), Loader(20, on_batch=fail), Loader(1))
    progress = trainer.fit_loop.epoch_loop.batch_progress.current
    assert (progress.ready, progress.started, progress.processed, progress.completed) == (8, 8, 8, 8)
    assert trainer.global_step == 8


def test_a_stop_asked_for_in_the_loader_ends_training_after_that_batch(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, max_epochs=1, log_every_n_steps=20)

    def stop(index: int) -> None:
        if index == 6:
            trainer.should_stop = True

    trainer.fit(Net(), Loader(20, on_batch=stop), Loader(1))
    assert trainer.global_step == 7


def test_an_attribute_changed_in_the_loader_is_used_by_the_next_step(tmp_path: Path) -> None:
    class Scaled(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scale = 1.0

        def training_step(self, batch: Any, batch_idx: int) -> jax.Array:
            self.log("scale", self.scale, on_step=False, on_epoch=True, reduce_fx="sum")
            return super().training_step(batch, batch_idx)

    module = Scaled()

    def change(index: int) -> None:
        if index == 10:
            module.scale = 3.0

    trainer = _trainer(tmp_path, max_epochs=1, log_every_n_steps=20)
    trainer.fit(module, Loader(20, on_batch=change), Loader(1))
    assert float(trainer.callback_metrics["scale"]) == 10 + 10 * 3.0


def test_a_due_bar_is_drawn_within_a_stretch(tmp_path: Path) -> None:
    class Bar(TQDMProgressBar):
        draws = 0

        def _draw(self, bar: Any, now: float) -> None:
            type(self).draws += 1
            self._next_draw = now  # due again at once

        def _restart(self, *args: Any) -> None:
            super()._restart(*args)
            self._next_draw = 0.0

    _trainer(tmp_path, max_epochs=1, log_every_n_steps=20, callbacks=[Bar()]).fit(Net(), Loader(20), Loader(1))
    assert Bar.draws >= 10


class Counting(Net):
    """Computes with numbers of the host, decides by them and writes one."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def training_step(self, batch: Any, batch_idx: int) -> jax.Array:
        x, y = batch
        self.count += 2
        loss = optax.softmax_cross_entropy_with_integer_labels(self.net(x), y).mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("mixed", 1.5 * batch_idx + self.global_step / 4 + self.count, on_step=True, on_epoch=True)
        if batch_idx % 4 == 1:
            self.log("sometimes", loss * self.count)
        return loss * 0.5 if self.count % 6 == 0 else loss


def test_numbers_of_the_host_follow_in_quiet_stretches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = [0]
    step = quiet_batches.RepeatedStep.__call__

    def counted(self: Any, batch: Any, row: Any) -> bool:
        done = step(self, batch, row)
        ran[0] += done
        return done

    monkeypatch.setattr(quiet_batches.RepeatedStep, "__call__", counted)
    results = []
    for side, options in {"quick": {}, "slow": {}, "eager": {"jit": False}}.items():
        if side == "slow":
            monkeypatch.setattr(quiet_batches.QuietBatches, "of", classmethod(lambda *_: None))
        trainer, module = _trainer(tmp_path / side, log_every_n_steps=10, **options), Counting()
        trainer.fit(module, Loader(20), Loader(1))
        assert module.count == 80
        assert ran[0] > 10
        results.append(({k: float(v) for k, v in trainer.logged_metrics.items()}, module.state_dict()))
    quick, slow, eager = results
    assert quick[0] == slow[0]
    assert quick[0] == pytest.approx(eager[0], rel=1e-5)
    for name, value in slow[1].items():
        np.testing.assert_array_equal(quick[1][name], value)


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_an_ordinary_step_needs_nothing_on_the_host(kind: str, tmp_path: Path) -> None:
    """Logging, dropout, BatchNorm, constants and metric objects cost a batch no more than the compiled call."""

    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
            x = nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(x))
            return nn.Dense(3)(nn.Dropout(0.2, deterministic=not train)(x))

    class NNX(nnx.Module):
        def __init__(self) -> None:
            rngs = nnx.Rngs(0)
            self.first, self.norm = nnx.Linear(4, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
            self.drop, self.last = nnx.Dropout(0.2, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.last(self.drop(self.norm(self.first(x))))

    class Ordinary(pl.LightningModule):
        def __init__(self, weight: float = 0.5) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = Linen() if kind == "linen" else NNX()
            self.accuracy = pl.metrics.Accuracy(task="multiclass", num_classes=3)
            self.names = ["a", "b"]

        def training_step(self, batch: Any, batch_idx: int) -> jax.Array:
            x, y = batch
            x = x + 0.01 * jax.random.normal(self.next_rng(), x.shape)
            logits = self.net(x)
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean() * self.hparams.weight
            self.accuracy(logits, y)
            self.log_dict({f"{name}_loss": loss for name in self.names}, prog_bar=True)
            self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
            return loss

        def configure_optimizers(self) -> optax.GradientTransformation:
            return optax.adam(1e-2)

    trainer = _trainer(tmp_path, max_epochs=1, check_val_every_n_epoch=None, limit_val_batches=0)
    trainer.fit(Ordinary(), Loader(6))
    step = trainer._engine.compiled["train"]
    assert step.plain, (step.info.host and step.info.host.guards, step.info.effects)
