"""Loaders that are not torch's: two epochs of ours equal two of plain iteration, bit for bit and in order.

`test_torch_parity.py` has the torch loaders, with the fast path on and off.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import jaxlightning as pl
from jaxlightning.adapters import as_source, bucketed, mapped

NARROWED = {"int64": "int32", "uint64": "uint32", "float64": "float32", "complex128": "complex64"}
Pair = collections.namedtuple("Pair", "x y")
N = 22


def plain_array(value: Any) -> np.ndarray[Any, Any]:
    """A leaf of plain iteration as numpy, by its own framework."""
    array = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
    return array.astype(NARROWED.get(array.dtype.name, array.dtype))


def assert_same(plain: Any, ours: Any, where: str = "batch") -> None:
    if isinstance(plain, dict):
        assert type(plain) is type(ours), where
        assert list(plain) == list(ours), where
        for key in plain:
            assert_same(plain[key], ours[key], f"{where}[{key!r}]")
    elif isinstance(plain, (list, tuple)):
        assert type(plain) is type(ours), where
        assert len(plain) == len(ours), where
        for index, (left, right) in enumerate(zip(plain, ours, strict=True)):
            assert_same(left, right, f"{where}[{index}]")
    elif plain is None or isinstance(plain, (str, bytes)):
        assert plain == ours, where
    else:
        array = plain_array(plain)
        if array.dtype.kind in "OSU":
            assert np.asarray(ours).tolist() == array.tolist(), where
            return
        assert isinstance(ours, np.ndarray), where
        assert (ours.dtype, ours.shape) == (array.dtype, array.shape), where
        assert ours.tobytes() == array.tobytes(), where
        assert not np.shares_memory(ours, array), where


def compare(make: Callable[[], Any], **options: Any) -> None:
    origin, source = make(), as_source(make(), **options)
    for epoch in range(2):
        if hasattr(origin, "set_epoch"):
            origin.set_epoch(epoch)
        source.set_epoch(epoch)
        plain = list(origin() if callable(origin) else origin)
        ours = list(source)
        assert len(plain) == len(ours) > 0
        for index, (left, right) in enumerate(zip(plain, ours, strict=True)):
            assert_same(left, right, f"epoch {epoch}, batch {index}")
    source.close()


# anything that can be iterated


class Sized:
    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[Any]:
        return (self.make(i) for i in range(5))


class Reshuffled(Sized):
    """Another order in each epoch, by `set_epoch`."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return (self.make(int(i)) for i in np.random.default_rng(self.epoch).permutation(5))


def numbers(i: int, dtype: str = "float32") -> Any:
    return (np.arange(6).reshape(2, 3) + i).astype(dtype)


ANY: dict[str, Callable[[], Any]] = {
    **{
        f"object of {dtype}": lambda dtype=dtype: Sized(lambda i: numbers(i, dtype))
        for dtype in ("bool", "uint8", "int8", "uint16", "int64", "uint64", "float16", "float64", "complex128")
    },
    "tuples": lambda: Sized(lambda i: (numbers(i), i)),
    "dicts": lambda: Sized(lambda i: {"b": numbers(i), "a": [numbers(i, "int64"), None, "text"]}),
    "namedtuples": lambda: Sized(lambda i: Pair(numbers(i), {"n": np.float64(i)})),
    "strided": lambda: Sized(lambda i: np.asfortranarray(numbers(i))[::-1, ::2]),
    "empty and 0-d": lambda: Sized(lambda i: (np.zeros((0, 3)), np.array(i))),
    "generator function": lambda: lambda: ({"x": numbers(i)} for i in range(4)),
    "function over a list": lambda: lambda: iter([numbers(1), numbers(2)]),
    "epochs of its own": lambda: Reshuffled(numbers),
}


@pytest.mark.parametrize("name", ANY)
def test_iterables(name: str) -> None:
    compare(ANY[name])


def test_an_object_that_is_only_indexed() -> None:
    class OnlyIndexed:
        def __getitem__(self, index: int) -> Any:
            if index >= 5:
                raise IndexError(index)
            return numbers(index)

    compare(OnlyIndexed)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
def test_arrays(shuffle: bool, drop_last: bool) -> None:
    data = {"x": np.arange(N * 3, dtype=np.float64).reshape(N, 3), "y": np.arange(N)}
    loader = pl.ArrayLoader(data, batch_size=5, shuffle=shuffle, drop_last=drop_last, seed=3)
    for epoch in range(2):
        order = loader.order(epoch)
        rows = np.arange(N) if order is None else order
        batches = list(loader)
        assert len(batches) == len(loader) == (4 if drop_last else 5)
        for index, batch in enumerate(batches):
            chosen = rows[index * 5 : index * 5 + 5]
            assert_same({name: column[chosen] for name, column in data.items()}, batch)


def test_wrapped_loaders() -> None:
    compare(lambda: mapped(Sized(numbers), lambda batch: batch))
    compare(lambda: bucketed(Sized(numbers), [3]))


# grain


def grain_cases() -> dict[str, Callable[[], Any]]:
    import grain.python as grain

    def source() -> Any:
        return grain.MapDataset.source(np.arange(N)).map(lambda i: {"x": np.full((2, 2), i), "i": i})

    return {
        "MapDataset": lambda: source().batch(4),
        "MapDataset shuffled": lambda: source().shuffle(seed=1).batch(4),
        "MapDataset, tuples, rest dropped": lambda: (
            source().map(lambda row: (row["x"].astype(np.float16), row["i"])).batch(4, drop_remainder=True)
        ),
        "IterDataset": lambda: source().shuffle(seed=1).to_iter_dataset().batch(4),
        "DataLoader": lambda: grain.DataLoader(
            data_source=np.arange(N),
            sampler=grain.SequentialSampler(N, grain.ShardOptions(0, 1)),
            operations=[grain.Batch(4)],
        ),
        "DataLoader shuffled": lambda: grain.DataLoader(
            data_source=np.arange(N),
            sampler=grain.IndexSampler(N, grain.ShardOptions(0, 1), shuffle=True, num_epochs=1, seed=2),
            operations=[grain.Batch(4)],
        ),
    }


GRAIN = [
    "MapDataset",
    "MapDataset shuffled",
    "MapDataset, tuples, rest dropped",
    "IterDataset",
    "DataLoader",
    "DataLoader shuffled",
]


@pytest.mark.grain
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", GRAIN)
def test_grain(name: str) -> None:
    cases = grain_cases()
    assert list(cases) == GRAIN
    compare(cases[name])


# Hugging Face datasets


def hugging_face_cases() -> dict[str, Callable[[], Any]]:
    import datasets

    def made() -> Any:
        rows = {"x": [[float(i), i / 2] for i in range(N)], "y": list(range(N)), "s": [str(i) for i in range(N)]}
        return datasets.Dataset.from_dict(rows)

    return {
        "map style": lambda: made().batch(4).with_format("numpy"),
        "map style shuffled": lambda: made().shuffle(seed=1).batch(4).with_format("numpy"),
        "columns": lambda: made().select_columns(["y", "x"]).batch(4, drop_last_batch=True).with_format("numpy"),
        "streamed": lambda: made().to_iterable_dataset().batch(4).with_format("numpy"),
        "streamed, shuffled by epoch": lambda: (
            made().to_iterable_dataset(num_shards=2).shuffle(seed=1, buffer_size=8).batch(4).with_format("numpy")
        ),
    }


HUGGING_FACE = ["map style", "map style shuffled", "columns", "streamed", "streamed, shuffled by epoch"]


@pytest.mark.slow
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_hugging_face(name: str) -> None:
    pytest.importorskip("datasets")
    cases = hugging_face_cases()
    assert list(cases) == HUGGING_FACE
    compare(cases[name])


# torchdata


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("shuffle", [False, True])
def test_stateful_dataloader(shuffle: bool) -> None:
    torch = pytest.importorskip("torch")
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    data = torch.utils.data.TensorDataset(torch.arange(N * 2.0).reshape(N, 2), torch.arange(N))

    def make() -> Any:
        return stateful.StatefulDataLoader(
            data, batch_size=4, shuffle=shuffle, generator=torch.Generator().manual_seed(1)
        )

    compare(make)


# tf.data


def tf_cases() -> dict[str, Callable[[], Any]]:
    import tensorflow as tf

    data = tf.data.Dataset
    rows = np.arange(N * 3, dtype=np.float32).reshape(N, 3)
    many = {"x": rows, "y": (np.arange(N), np.arange(N, dtype=np.uint8))}
    return {
        "tuples": lambda: data.from_tensor_slices((rows, np.arange(N))).batch(4),
        "nested dicts": lambda: data.from_tensor_slices(many).batch(4, drop_remainder=True),
        "shuffled with a seed": lambda: data.from_tensor_slices(rows).shuffle(N, seed=4).batch(4),
        "strings": lambda: data.from_tensor_slices({"s": [str(i) for i in range(N)], "x": rows}).batch(5),
        "bfloat16": lambda: data.from_tensor_slices(tf.cast(rows, tf.bfloat16)).batch(4),
        "float16, bool and uint16": lambda: data.from_tensor_slices(
            (rows.astype(np.float16), rows > 5, rows.astype(np.uint16))
        ).batch(4),
        "mapped and prefetched": lambda: (
            data.range(N)
            .map(lambda i: {"i": i, "f": tf.cast(i, tf.float64) / 3}, num_parallel_calls=2, deterministic=True)
            .batch(4)
            .prefetch(2)
        ),
        "padded": lambda: data.range(1, 9).map(lambda i: tf.fill([i], i)).padded_batch(3),
        "from a generator": lambda: data.from_generator(
            lambda: iter(rows), output_signature=tf.TensorSpec((3,), tf.float32)
        ).batch(4),
        "interleaved": lambda: data.range(4).interleave(lambda i: data.from_tensors(i).repeat(3), 2, 1).batch(5),
    }


TF = [
    "tuples",
    "nested dicts",
    "shuffled with a seed",
    "strings",
    "bfloat16",
    "float16, bool and uint16",
    "mapped and prefetched",
    "padded",
    "from a generator",
    "interleaved",
]


@pytest.mark.tf
@pytest.mark.slow
@pytest.mark.parametrize("name", TF)
def test_tf_data(name: str) -> None:
    cases = tf_cases()
    assert list(cases) == TF
    compare(cases[name])
