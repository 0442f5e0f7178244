"""Bad input gets a clear error, and nothing is lost."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from support.models import Classifier, LinenNet

import jaxlightning as pl
from jaxlightning import ArrayLoader
from jaxlightning.callbacks import EarlyStopping, ModelCheckpoint
from jaxlightning.loggers import CSVLogger
from jaxlightning.utilities.exceptions import MisconfigurationException

pytestmark = pytest.mark.usefixtures("compiled_once")


class TrainOnly(Classifier):
    validation_step = None  # type: ignore[assignment]


def _data(n: int = 32) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n, 6)).astype(np.float32)
    return x, x[:, :4].argmax(-1).astype(np.int32)


def _loader(n: int = 32) -> ArrayLoader:
    return ArrayLoader(*_data(n), batch_size=8)


def _trainer(path: Path, **options: Any) -> pl.Trainer:
    settings: dict[str, Any] = {
        "default_root_dir": path, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False, "max_epochs": 1,
    }  # fmt: skip
    return pl.Trainer(**{**settings, **options})


def test_a_collection_of_arrays_names_array_loader(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="ArrayLoader"):
        _trainer(tmp_path).fit(TrainOnly(), list(_data()))


def test_strings_in_a_batch_reach_hooks_and_not_the_step(tmp_path: Path) -> None:
    seen = []

    class Named(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append(batch["name"])

    class Reads(TrainOnly):
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            return super().training_step((batch["x"], batch["y"]), batch_idx)

    class Uses(Reads):
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            return super().training_step(batch, batch_idx) * len(batch["name"][0])

    class Batches:
        def __iter__(self) -> Iterator[Any]:
            x, y = _data(8)
            yield {"x": x, "y": y, "name": np.array(["a"] * 8)}

    _trainer(tmp_path, callbacks=[Named()]).fit(Reads(), Batches())
    assert list(seen[0]) == ["a"] * 8
    with pytest.raises(TypeError, match=r"batch leaf .*name"):
        _trainer(tmp_path).fit(Uses(), Batches())


@pytest.mark.parametrize(
    "leaf",
    [np.zeros(8, dtype=[("a", "f4"), ("b", "i4")]), np.zeros(8, "V3"), np.array(["a"] * 8, np.dtypes.StringDType())],
)
def test_records_and_strings_of_numpy_stay_on_the_host(tmp_path: Path, leaf: Any) -> None:
    class Reads(TrainOnly):
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            return super().training_step(batch["data"], batch_idx) * (len(batch["leaf"]) if self.uses else 1)

    class Batches:
        def __iter__(self) -> Iterator[Any]:
            yield {"data": _data(8), "leaf": leaf}

    module = Reads()
    module.uses = False
    trainer = _trainer(tmp_path)
    trainer.fit(module, Batches())
    assert trainer.global_step == 1
    module.uses = True
    with pytest.raises(TypeError, match=r"batch leaf .*leaf"):
        _trainer(tmp_path).fit(module, Batches())


def test_networks_with_slashes_in_their_names_fit_their_own_checkpoint(tmp_path: Path) -> None:
    import flax.linen as nn

    class Named(TrainOnly):
        def __init__(self) -> None:
            super().__init__()
            self.net = {"a/b": nn.Dense(4), "a": {"b": nn.Dense(4)}}

        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            return ((self.net["a/b"](batch[0]) + self.net["a"]["b"](batch[0])) ** 2).mean()

        def predict_step(self, batch: Any, batch_idx: Any) -> Any:
            return self.net["a/b"](batch[0]) + 2 * self.net["a"]["b"](batch[0])

    module, trainer = Named(), _trainer(tmp_path)
    trainer.fit(module, _loader())
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    expected = trainer.predict(module, _loader())
    got = _trainer(tmp_path).predict(Named(), _loader(), ckpt_path=tmp_path / "one.ckpt")
    np.testing.assert_array_equal(got, expected)


def test_a_loader_that_raises_keeps_its_traceback_after_a_clean_teardown(tmp_path: Path) -> None:
    class Breaks:
        def __len__(self) -> int:
            return 20

        def __iter__(self) -> Iterator[Any]:
            for i in range(20):
                if i == 7:
                    raise OSError("disk gone")
                yield _data(8)

    events = []

    class Watch(pl.Callback):
        def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
            events.append(type(exception))

    trainer = _trainer(tmp_path, callbacks=[Watch()], logger=CSVLogger(tmp_path), log_every_n_steps=1)
    with pytest.raises(OSError, match="disk gone") as caught:
        trainer.fit(TrainOnly(), Breaks())
    assert caught.traceback[-1].name == "__iter__"
    assert events == [OSError]
    assert trainer.interrupted
    assert trainer.global_step == 7
    rows = next(tmp_path.rglob("metrics.csv")).read_text().splitlines()
    assert len(rows) == 8  # a header and every step that ran


@pytest.mark.filterwarnings("ignore:.*train_dataloader.*yield")
@pytest.mark.filterwarnings("ignore:.*zero.length|.*length of 0|.*returned 0|.*no batch|.*yielded no")
def test_an_empty_loader_trains_nothing_and_says_so(tmp_path: Path) -> None:
    class Empty:
        def __len__(self) -> int:
            return 0

        def __iter__(self) -> Iterator[Any]:
            return iter(())

    trainer = _trainer(tmp_path)
    with pytest.warns(UserWarning, match="zero|0|empty|no "):
        trainer.fit(TrainOnly(), Empty())
    assert trainer.global_step == 0


def test_no_optimizer_method_is_an_error(tmp_path: Path) -> None:
    class Without(pl.LightningModule):
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            return jnp.zeros(())

    with pytest.raises(MisconfigurationException, match="configure_optimizers"):
        _trainer(tmp_path).fit(Without(), _loader())


def test_a_forgotten_super_init_is_named(tmp_path: Path) -> None:
    class Forgets(TrainOnly):
        def __init__(self) -> None:
            self.net = LinenNet()

    with pytest.raises(Exception, match=r"Forgets.*super\(\).__init__\(\)"):
        _trainer(tmp_path).fit(Forgets(), _loader())


@pytest.mark.lightning
@pytest.mark.torch
def test_a_torch_module_is_refused_with_our_name(tmp_path: Path) -> None:
    import lightning.pytorch as lightning

    with pytest.raises(TypeError, match=r"JaxLightningModule|jaxlightning"):
        _trainer(tmp_path).fit(lightning.LightningModule(), _loader())


def test_a_misspelt_monitor_lists_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"accurracy.*accuracy"):
        _trainer(tmp_path, callbacks=[EarlyStopping(monitor="accurracy")]).fit(Classifier(), _loader(), _loader())
    saver = ModelCheckpoint(tmp_path, monitor="accurracy")
    with pytest.raises(MisconfigurationException, match=r"accurracy.*accuracy"):
        _trainer(tmp_path, enable_checkpointing=True, callbacks=[saver]).fit(Classifier(), _loader(), _loader())


def test_an_unknown_flag_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="max_epoch"):
        pl.Trainer(max_epoch=3)  # type: ignore[call-arg]


@pytest.mark.parametrize("kind", ["missing", "empty", "file", "incomplete"])
def test_a_directory_that_is_no_checkpoint_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "broken.ckpt"
    if kind == "empty":
        path.mkdir()
    elif kind == "file":
        path.write_text("not a checkpoint")
    elif kind == "incomplete":
        trainer = _trainer(tmp_path)
        trainer.fit(TrainOnly(), _loader())
        trainer.save_checkpoint(path)
        for marker in list(path.rglob("_CHECKPOINT_METADATA")) + list(path.glob("*.json")):
            marker.unlink()
    with pytest.raises((FileNotFoundError, RuntimeError, ValueError, MisconfigurationException), match=r"broken\.ckpt"):
        _trainer(tmp_path).fit(TrainOnly(), _loader(), ckpt_path=path)


def test_a_checkpoint_of_another_architecture_lists_the_paths(tmp_path: Path) -> None:
    import flax.linen as nn

    trainer = _trainer(tmp_path)
    trainer.fit(TrainOnly(), _loader())
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    other = TrainOnly(nn.Dense(4)).init(_data(8))
    with pytest.raises(RuntimeError, match=r"(?s)kernel.*Dense_0"):
        _trainer(tmp_path).fit(other, _loader(), ckpt_path=tmp_path / "one.ckpt")
    # A network without variables of its own can only be compared when a step calls it.
    match = r"(?s)missing: params/net/bias \(4,\).*unexpected: params/net/Dense_0/kernel \(6, 16\)"
    with pytest.raises(RuntimeError, match=match):
        _trainer(tmp_path, max_epochs=2).fit(TrainOnly(nn.Dense(4)), _loader(), ckpt_path=tmp_path / "one.ckpt")

    class Wider(nn.Module):
        @nn.compact
        def __call__(self, x: Any, train: bool = False) -> Any:
            x = nn.BatchNorm(use_running_average=not train)(nn.Dense(17)(x))
            return nn.Dense(4)(x)

    with pytest.raises(
        RuntimeError, match=r"differing: params/net/Dense_0/kernel is \(6, 16\) in the checkpoint, \(6, 17\)"
    ):
        _trainer(tmp_path, max_epochs=2).fit(TrainOnly(Wider()), _loader(), ckpt_path=tmp_path / "one.ckpt")


@pytest.mark.filterwarnings("ignore:Ctrl-C")
def test_an_interrupt_finishes_the_step_saves_and_exits(tmp_path: Path) -> None:
    class Interrupts(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    saver = ModelCheckpoint(tmp_path / "saved", save_top_k=-1, every_n_train_steps=1)
    trainer = _trainer(
        tmp_path,
        callbacks=[Interrupts(), saver],
        enable_checkpointing=True,
        logger=CSVLogger(tmp_path),
        log_every_n_steps=1,
    )
    with pytest.raises(SystemExit) as caught:
        trainer.fit(TrainOnly(), _loader())
    assert caught.value.code == 1
    assert trainer.interrupted
    assert trainer.global_step == 3
    assert sorted(p.name for p in (tmp_path / "saved").iterdir()) == [f"epoch=0-step={i}.ckpt" for i in (1, 2, 3)]
    assert len(next(tmp_path.rglob("metrics.csv")).read_text().splitlines()) == 4
    assert signal.getsignal(signal.SIGINT) is before
    assert threading.active_count() < 50


def test_detect_anomaly_names_the_leaf(tmp_path: Path) -> None:
    class Explodes(TrainOnly):
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            return super().training_step(batch, batch_idx) * jnp.where(batch_idx == 2, jnp.nan, 1.0)

    with pytest.raises(RuntimeError, match="the loss is not finite in training batch 2"):
        _trainer(tmp_path, detect_anomaly=True).fit(Explodes(), _loader())
    trainer = _trainer(tmp_path)
    trainer.fit(Explodes(), _loader())  # as in Lightning, nobody looks otherwise
    assert trainer.global_step == 4


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"precision": "bf16-lowered"}, "Precision"),
        ({"strategy": "fsdp"}, "strategy"),
        ({"num_nodes": 2}, "num_nodes"),
        ({"profiler": "nope"}, "profiler"),
    ],
)
def test_flags_that_are_not_built_say_so(tmp_path: Path, options: Any, match: str) -> None:
    with pytest.raises((NotImplementedError, MisconfigurationException, ValueError), match=match):
        _trainer(tmp_path, **options).fit(TrainOnly(), _loader())
