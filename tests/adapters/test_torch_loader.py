"""Torch loaders: options, position, variants and errors."""

from __future__ import annotations

import json
import random
import warnings
from typing import Any

import numpy as np
import pytest

from jaxlightning.adapters import as_source

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

from support import torch_data as td  # noqa: E402
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, TensorDataset  # noqa: E402
from torch.utils.data.distributed import DistributedSampler  # noqa: E402


def data(n: int = 12) -> TensorDataset:
    return TensorDataset(torch.arange(n))


def values(source: Any) -> list[list[int]]:
    return [batch[0].tolist() for batch in source]


def test_length_batch_size_and_workers() -> None:
    source = as_source(DataLoader(data(), batch_size=5))
    assert (source.length, source.batch_size, source.num_workers) == (3, 5, 0)
    assert as_source(DataLoader(td.Stream(), batch_size=5)).length is None
    assert as_source(DataLoader(td.Stream(sized=True), batch_size=4)).length == 3
    sampler = BatchSampler(SequentialSampler(data()), 4, False)
    assert as_source(DataLoader(data(), batch_sampler=sampler)).batch_size == 4


def test_shuffling_is_known_where_torch_decides() -> None:
    assert as_source(DataLoader(data())).is_shuffled is False
    assert as_source(DataLoader(data(), shuffle=True)).is_shuffled is True
    assert (
        as_source(DataLoader(data(), batch_sampler=BatchSampler(RandomSampler(data()), 2, False))).is_shuffled is True
    )
    assert as_source(DataLoader(td.Stream())).is_shuffled is None
    assert as_source(DataLoader(data(), sampler=[1, 2])).is_shuffled is None
    distributed = DistributedSampler(data(), num_replicas=1, rank=0, shuffle=False)
    assert as_source(DataLoader(data(), sampler=distributed)).is_shuffled is False


def test_set_epoch_reaches_sampler_and_batch_sampler() -> None:
    class Counting(SequentialSampler):
        epochs: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    sampler = Counting(data())
    as_source(DataLoader(data(), sampler=sampler)).set_epoch(3)
    as_source(DataLoader(data(), batch_sampler=BatchSampler(sampler, 2, False))).set_epoch(4)
    assert sampler.epochs == [3, 4]


def test_sequential_reads_the_same_samples_in_order() -> None:
    loader = DataLoader(data(), batch_size=5, shuffle=True)
    source = as_source(loader)
    ordered = source.sequential()
    assert values(ordered) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11]]
    assert ordered.is_shuffled is False
    assert ordered.sequential() is ordered
    assert source.is_shuffled is True
    own = as_source(DataLoader(data(), batch_sampler=BatchSampler(RandomSampler(data()), 6, True))).sequential()
    assert values(own) == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]


def test_sequential_warns_where_it_is_impossible() -> None:
    source = as_source(DataLoader(td.Stream(), batch_size=2))
    with pytest.warns(UserWarning, match="cannot be made sequential"):
        assert source.sequential() is source


def test_pin_memory_is_left_out_with_one_warning() -> None:
    source = as_source(DataLoader(td.Samples(), batch_size=4, pin_memory=True))
    with pytest.warns(UserWarning, match="pin_memory=True of DataLoader over Samples is left out"):
        list(source)
    list(source)  # a second warning would be an error


@pytest.mark.parametrize("vectorize", [True, False])
@pytest.mark.parametrize("workers", [0, 1])
def test_indices_of_the_batch_delivered_last(vectorize: bool, workers: int) -> None:
    torch.manual_seed(0)
    loader = DataLoader(data(), batch_size=5, shuffle=True, num_workers=workers)
    source = as_source(loader, vectorize=vectorize, record_indices=True)
    seen = [(batch[0].tolist(), source.last_batch_indices) for batch in source]
    assert [left for left, _ in seen] == [right for _, right in seen]
    assert sorted(index for _, right in seen for index in right) == list(range(12))
    source.close()


def test_indices_with_persistent_workers_in_every_epoch() -> None:
    loader = DataLoader(data(), batch_size=5, shuffle=True, num_workers=1, persistent_workers=True)
    source = as_source(loader, vectorize=False, record_indices=True)
    for _ in range(2):
        for batch in source:
            assert batch[0].tolist() == source.last_batch_indices
    source.close()


def test_indices_are_unknown_for_streams_and_when_not_asked_for() -> None:
    source = as_source(DataLoader(td.Stream(), batch_size=5), record_indices=True)
    list(source)
    assert source.last_batch_indices is None
    source = as_source(DataLoader(data(), batch_size=5))
    list(source)
    assert source.last_batch_indices is None


class Counted(td.RandomlyNoisy):
    reads = 0

    def __getitem__(self, index: int) -> Any:
        type(self).reads += 1
        return super().__getitem__(index)


def resumed(make: Any, stop: int, epoch: int = 1, **options: Any) -> tuple[list[Any], list[Any]]:
    """Run two epochs and a half; and again in a fresh start from the state after `stop` batches of an epoch."""

    def seed(value: int) -> None:
        torch.manual_seed(value)
        np.random.seed(value)
        random.seed(value)

    seed(1)
    source = as_source(make(), **options)
    state: Any = None
    run = []
    for number in range(3):
        source.set_epoch(number)
        for index, batch in enumerate(source):
            run.append((number, batch))
            if number == epoch and index == stop - 1:
                state = json.loads(json.dumps(source.state_dict()))
    source.close()

    seed(999)
    source = as_source(make(), **options)
    source.load_state_dict(state)
    rest = []
    for number in range(epoch, 3):
        source.set_epoch(number)
        rest += [(number, batch) for batch in source]
    source.close()
    return run, rest


def assert_tail(run: list[Any], rest: list[Any]) -> None:
    tail = run[len(run) - len(rest) :]
    for (number, one), (other_number, other) in zip(tail, rest, strict=True):
        assert number == other_number
        for left, right in zip(one, other, strict=True):
            assert left.tobytes() == right.tobytes()


@pytest.mark.parametrize("vectorize", [True, False])
@pytest.mark.parametrize("generator", [False, True])
def test_resume_in_an_epoch_continues_the_same_order(vectorize: bool, generator: bool) -> None:
    def make() -> Any:
        own = torch.Generator().manual_seed(4) if generator else None
        return DataLoader(data(), batch_size=3, shuffle=True, generator=own)

    run, rest = resumed(make, stop=2, vectorize=vectorize)
    assert len(rest) == 6
    assert_tail(run, rest)


def test_resume_skips_without_reading_and_keeps_random_streams() -> None:
    Counted.reads = 0
    run, rest = resumed(lambda: DataLoader(Counted(12), batch_size=3, shuffle=True), stop=3)
    assert Counted.reads == 36 + 3 + 12
    assert_tail(run, rest)


def test_resume_of_a_stream_reads_on() -> None:
    run, rest = resumed(lambda: DataLoader(td.Stream(12), batch_size=3), stop=3)
    assert len(rest) == 5
    assert_tail(run, rest)


def test_resume_with_workers_continues_the_same_order() -> None:
    run, rest = resumed(lambda: DataLoader(td.Samples(12), batch_size=3, shuffle=True, num_workers=1), stop=2)
    assert_tail(run, rest)


def test_resume_between_epochs_restores_the_random_streams() -> None:
    def make() -> Any:
        return DataLoader(data(), batch_size=3, shuffle=True)

    torch.manual_seed(1)
    source = as_source(make())
    values(source)
    state = json.loads(json.dumps(source.state_dict()))
    expected = values(source)
    torch.manual_seed(5)
    fresh = as_source(make())
    fresh.load_state_dict(state)
    assert values(fresh) == expected


def test_resume_into_another_epoch_drops_the_position() -> None:
    source = as_source(DataLoader(data(), batch_size=3))
    source.set_epoch(1)
    iterator = iter(source)
    next(iterator)
    state = source.state_dict()
    fresh = as_source(DataLoader(data(), batch_size=3))
    fresh.load_state_dict(state)
    fresh.set_epoch(2)
    assert len(values(fresh)) == 4


def test_resume_refuses_the_state_of_another_kind() -> None:
    source = as_source(DataLoader(data()))
    with pytest.raises(ValueError, match="is of a IterableSource, but the loader is now DataLoader over TensorDataset"):
        source.load_state_dict({"kind": "IterableSource", "epoch": 0, "batch": 1})


def test_stateful_dataloader_resumes_by_its_own_state() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> Any:
        return stateful.StatefulDataLoader(td.Samples(12), batch_size=3, shuffle=True)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*set_vital.*")
        run, rest = resumed(make, stop=2)
    assert len(rest) == 6
    assert_tail(run, rest)


def test_an_error_of_the_dataset_keeps_its_traceback() -> None:
    source = as_source(DataLoader(td.Failing(), batch_size=2))
    with pytest.raises(RuntimeError, match="sample 7 is broken") as caught:
        list(source)
    assert any(entry.name == "__getitem__" and "torch_data" in str(entry.path) for entry in caught.traceback)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: x.to_sparse(), r"batch\['a'\]\[0\] is a sparse coo tensor"),
        (lambda x: x.to_sparse_csr(), r"is a sparse csr tensor"),
        (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), "quantized tensor"),
        (lambda x: x.to("meta"), "meta device"),
        (lambda x: x.to(torch.complex32), r"dtype torch.complex32, which has no counterpart in JAX"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore:.*torch.*:UserWarning")
def test_tensors_that_jax_lacks_name_their_path(make: Any, message: str) -> None:
    loader = DataLoader([0, 1], collate_fn=lambda samples: {"a": [make(torch.ones(2, 2))]})
    with pytest.raises(TypeError, match=message):
        list(as_source(loader))


def test_a_64_bit_integer_that_does_not_fit_names_its_path() -> None:
    loader = DataLoader(TensorDataset(torch.tensor([1, 2**31])), batch_size=2)
    for vectorize in ("auto", False):
        with pytest.raises(OverflowError, match=r"batch\[0\] holds int64 values from 1 to 2147483648"):
            list(as_source(loader, vectorize=vectorize))


def test_channels_last_moves_images_only() -> None:
    sets = TensorDataset(torch.rand(4, 3, 5, 6), torch.rand(4, 2, 5, 6), torch.zeros(4, 1, 5, 6, dtype=torch.uint8))
    for vectorize in (True, False):
        x, y, z = next(iter(as_source(DataLoader(sets, batch_size=4), channels_last=True, vectorize=vectorize)))
        assert (x.shape, y.shape, z.shape) == ((4, 5, 6, 3), (4, 2, 5, 6), (4, 5, 6, 1))
        assert x.tobytes() == sets.tensors[0].permute(0, 2, 3, 1).contiguous().numpy().tobytes()


def test_reused_buffers_never_change_a_delivered_batch() -> None:
    import jax

    class Steps(td.Samples):
        def __init__(self) -> None:
            super().__init__(800, "tensor")
            self.values = torch.arange(800 * 1024, dtype=torch.float32).reshape(800, 1024)

    dataset = Steps()
    loader = DataLoader(dataset, batch_size=4, collate_fn=td.KeepsItsBuffer((4, 1024)))
    step = jax.jit(lambda total, x: total * 0.5 + x.sum(axis=1))
    total = np.zeros(4, np.float32)
    kept = []
    for batch in as_source(loader):
        total = step(total, batch)
        kept.append(batch)
    expected = np.zeros(4, np.float32)
    for start in range(0, 800, 4):
        expected = step(expected, dataset.values[start : start + 4].numpy().copy())
    assert np.asarray(total).tobytes() == np.asarray(expected).tobytes()
    assert np.concatenate(kept).tobytes() == dataset.values.numpy().tobytes()
