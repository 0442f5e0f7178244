"""What the trainer's flags say about reading data: vectorize, prefetch_batches, sources with options, functions."""

from __future__ import annotations

import gc
import os
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flax.linen as nn
import numpy as np
import optax
import pytest

import jaxlightning as pl
from jaxlightning.adapters import as_source
from jaxlightning.loops.prefetching import PrefetchedSource

pytestmark = pytest.mark.filterwarnings("ignore::jaxlightning.utilities.warnings.PossibleUserWarning")


class Net(pl.LightningModule):
    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__()
        self.net = nn.Dense(1)
        self.batches: list[Any] = []
        self.fail_at = fail_at

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.net(batch) ** 2).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", (self.net(batch) ** 2).mean())

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.batches.append(np.asarray(batch).copy())
        if batch_idx == self.fail_at:
            raise RuntimeError("planted")

    def configure_optimizers(self) -> Any:
        return optax.sgd(0.01)


def trainer(**options: Any) -> pl.Trainer:
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    defaults: dict[str, Any] = {"max_epochs": 1, "enable_checkpointing": False, "num_sanity_val_steps": 0, **quiet}
    return pl.Trainer(**{**defaults, **options})


class Counting:
    """A sized loader that notes how many batches were taken from it, and whether its iterators were closed."""

    def __init__(self, n: int = 10) -> None:
        self.n = n
        self.pulled: list[int] = []
        self.closed = 0

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[Any]:
        try:
            for i in range(self.n):
                self.pulled.append(i)
                yield np.full((4, 3), i, np.float32)
        finally:
            self.closed += 1


# prefetch_batches


def test_prefetched_training_sees_the_same_batches() -> None:
    plain, ahead = Net(), Net()
    trainer(max_epochs=2).fit(plain, Counting(), Counting(3))
    trainer(max_epochs=2, prefetch_batches=3).fit(ahead, Counting(), Counting(3))
    np.testing.assert_array_equal(plain.batches, ahead.batches)


@pytest.mark.parametrize("size", [1, 2, 7])
def test_prefetching_never_reads_beyond_a_limit(size: int) -> None:
    train, val, predict = Counting(), Counting(), Counting()
    made = trainer(
        prefetch_batches=size, limit_train_batches=3, limit_val_batches=2, limit_predict_batches=4,
        num_sanity_val_steps=1,
    )  # fmt: skip
    module = Net()
    made.fit(module, train, val)
    made.predict(module, predict)
    assert train.pulled == [0, 1, 2]
    assert val.pulled == [0, 0, 1]  # the sanity check, then the epoch
    assert predict.pulled == [0, 1, 2, 3]
    assert (train.closed, val.closed, predict.closed) == (1, 2, 1)


def test_prefetching_joins_the_batches_of_several_devices() -> None:
    loader, module = Counting(), Net()
    trainer(prefetch_batches=2, devices=2, limit_train_batches=3).fit(module, loader)
    assert [batch[:, 0].tolist() for batch in module.batches] == [[0.0] * 4 + [1.0] * 4, [2.0] * 4 + [3.0] * 4,
                                                                  [4.0] * 4 + [5.0] * 4]  # fmt: skip
    assert loader.pulled == [0, 1, 2, 3, 4, 5]


def test_an_error_of_a_prefetched_loader_keeps_its_traceback_and_ends_the_thread() -> None:
    def broken_loader() -> Iterator[Any]:
        yield np.zeros((4, 3), np.float32)
        raise LookupError("no such file")

    before = threading.active_count()
    with pytest.raises(LookupError, match="no such file") as caught:
        trainer(prefetch_batches=2).fit(Net(), broken_loader)
    assert any(frame.name == "broken_loader" for frame in traceback.extract_tb(caught.value.__traceback__))
    assert threading.active_count() == before


def test_an_error_in_a_hook_ends_the_thread_and_closes_the_loader() -> None:
    before, loader = threading.active_count(), Counting()
    with pytest.raises(RuntimeError, match="planted"):
        trainer(prefetch_batches=2).fit(Net(fail_at=2), loader)
    assert threading.active_count() == before
    assert loader.closed == 1


def test_a_checkpoint_of_a_prefetched_run_says_where_the_loop_is(tmp_path: Path) -> None:
    def loader() -> Any:
        return pl.ArrayLoader(np.arange(40.0, dtype=np.float32)[:, None], batch_size=4, shuffle=True)

    class Saving(Net):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if (self.current_epoch, batch_idx) == (1, 3):
                self.trainer.save_checkpoint(tmp_path / "a.ckpt")

    whole, rest = Saving(), Net()
    trainer(max_epochs=2, prefetch_batches=3).fit(whole, loader())
    trainer(max_epochs=2, prefetch_batches=5).fit(rest, loader(), ckpt_path=tmp_path / "a.ckpt")
    assert len(rest.batches) == 6
    np.testing.assert_array_equal(rest.batches, whole.batches[14:])


def test_the_indices_of_prefetched_predictions_belong_to_their_batch() -> None:
    source = PrefetchedSource(as_source(pl.ArrayLoader(np.arange(6.0), batch_size=2), record_indices=True), size=3)
    iterator = iter(source)
    found = []
    for batch in iterator:
        time.sleep(0.01)  # the thread is at the end by now
        found.append((batch.tolist(), source.last_batch_indices))
    assert found == [([0.0, 1.0], [0, 1]), ([2.0, 3.0], [2, 3]), ([4.0, 5.0], [4, 5])]


def test_an_accelerator_gets_its_batches_from_the_thread_and_a_cpu_gets_numpy() -> None:
    import types

    import jax

    from jaxlightning.loops.prefetching import to_device

    assert to_device(types.SimpleNamespace(root_device=jax.devices()[0])) is None
    # No accelerator here: a strategy that says it has one, and places leaves on the second simulated device.
    place = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    strategy = types.SimpleNamespace(
        root_device=types.SimpleNamespace(platform="gpu"), batch_sharding=lambda leaf: place
    )
    move = to_device(strategy)
    assert move is not None
    batch = {"x": np.arange(4.0, dtype=np.float32), "names": ["a"], "o": np.array(["b"], dtype=object), "n": None}
    moved = next(iter(PrefetchedSource(as_source(lambda: iter([batch])), 1, move)))
    assert isinstance(moved["x"], jax.Array)
    assert moved["x"].devices() == {jax.devices()[1]}
    np.testing.assert_array_equal(moved["x"], batch["x"])
    assert (moved["names"], moved["o"].tolist(), moved["n"]) == (["a"], ["b"], None)


@pytest.mark.parametrize("value", [-1, True, 1.5, "2"])
def test_bad_numbers_of_batches_to_prefetch_raise(value: Any) -> None:
    with pytest.raises(ValueError, match="`prefetch_batches` must be"):
        trainer(prefetch_batches=value)


# functions, and sources that the user made


def test_a_function_with_yield_is_a_loader_for_every_epoch() -> None:
    def batches() -> Iterator[Any]:
        for i in range(3):
            yield np.full((4, 3), i, np.float32)

    module = Net()
    trainer(max_epochs=2).fit(module, batches, batches)
    assert [int(batch[0, 0]) for batch in module.batches] == [0, 1, 2] * 2


def test_a_function_that_returns_a_loader_is_told_to_be_called() -> None:
    class Data(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return pl.ArrayLoader(np.zeros((4, 3), np.float32))

    with pytest.raises(TypeError, match=r"Data.train_dataloader returned a ArrayLoader. Pass the loader itself"):
        trainer().fit(Net(), Data().train_dataloader)


def test_a_source_keeps_the_options_that_the_user_gave_it() -> None:
    images = np.zeros((4, 3, 8, 8), np.float32)
    source = as_source(pl.ArrayLoader(images, batch_size=2), channels_last=True)

    class Seeing(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert batch.shape == (2, 8, 8, 3)
            return super().training_step(batch, batch_idx)

    trainer().fit(Seeing(), source)


# vectorize


@pytest.mark.torch
def test_vectorize_of_the_trainer_reaches_the_loaders() -> None:
    import torch
    from torch.utils.data import DataLoader, Dataset, TensorDataset

    class Slow(Dataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            return torch.full((3,), float(index))

    with pytest.raises(ValueError, match=r"vectorize=True, but DataLoader over .*Slow cannot use the fast path"):
        trainer(vectorize=True).fit(Net(), DataLoader(Slow(), batch_size=4))

    class First(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch[0], batch_idx)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            pass

    data = DataLoader(TensorDataset(torch.rand(8, 3)), batch_size=4)
    for value in (True, False, "auto", "distribution"):
        trainer(vectorize=value).fit(First(), data)
    # what the user chose for one loader stays
    trainer(vectorize="auto").fit(First(), as_source(data, vectorize=True))


@pytest.mark.parametrize("value", ["yes", 1, 0, None])
def test_bad_values_of_vectorize_raise(value: Any) -> None:
    with pytest.raises(ValueError, match="`vectorize` must be"):
        trainer(vectorize=value)


# nothing is left behind


def counts() -> tuple[int, int, int]:
    gc.collect()
    children = sum(len(path.read_text().split()) for path in Path("/proc/self/task").glob("*/children"))
    return threading.active_count(), children, len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts by /proc")
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_hundred_short_validations_leave_counts_where_they_were(prefetch: int) -> None:
    module, loader = Net(), Counting()
    made = trainer(limit_val_batches=1, prefetch_batches=prefetch)
    made.validate(module, loader, verbose=False)
    before = counts()
    for _ in range(100):
        made.validate(module, loader, verbose=False)
    assert counts() == before
    assert len(loader.pulled) == loader.closed == 101


def settled() -> tuple[int, int, int]:
    """The counts once threads that end by themselves are gone: equal for half a second."""
    deadline = time.monotonic() + 10
    now, since = counts(), time.monotonic()
    while time.monotonic() < deadline and time.monotonic() - since < 0.5:
        time.sleep(0.05)
        if (latest := counts()) != now:
            now, since = latest, time.monotonic()
    return now


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts by /proc")
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("where", ["hook", "dataset", "limit"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_run_that_ends_within_an_epoch_leaves_no_worker(where: str, prefetch: int) -> None:
    from support import torch_data as td
    from torch.utils.data import DataLoader

    def make() -> Any:
        data = td.Failing(kind="tensor") if where == "dataset" else td.Samples(n=40, kind="tensor")
        return DataLoader(data, batch_size=2, num_workers=2)

    class Reading(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch.reshape(batch.shape[0], -1)[:, :1] * 1.0, batch_idx)

    def run() -> None:
        made = trainer(prefetch_batches=prefetch, limit_train_batches=3 if where == "limit" else 1.0)
        if where == "limit":
            made.fit(Reading(), make())
            return
        with pytest.raises(RuntimeError, match="planted" if where == "hook" else "sample 7 is broken"):
            made.fit(Reading(fail_at=3 if where == "hook" else None), make())

    run()  # the worker server starts with the first loader, and stays
    before = settled()
    for _ in range(3):
        run()
    after = settled()
    assert all(new <= old for new, old in zip(after, before, strict=True)), (before, after)
