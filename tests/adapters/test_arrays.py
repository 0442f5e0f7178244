"""ArrayLoader: order, shapes, position."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlightning.adapters import ArrayLoader, as_source


def order(loader: Any) -> list[int]:
    return np.concatenate([batch[1] for batch in loader]).tolist()


def make(**options: Any) -> ArrayLoader:
    return ArrayLoader(np.arange(20, dtype=np.float32).reshape(10, 2), np.arange(10), **{"batch_size": 4, **options})


def test_batches_have_the_structure_of_the_arrays() -> None:
    x, y = next(iter(make()))
    assert (x.dtype, x.shape, y.dtype) == (np.float32, (4, 2), np.int32)
    single = next(iter(ArrayLoader(np.zeros((3, 2)), batch_size=2)))
    assert single.shape == (2, 2)
    nested = next(iter(ArrayLoader({"a": np.zeros(3), "b": [np.ones(3)]}, batch_size=2)))
    assert nested["b"][0].tolist() == [1, 1]
    assert next(iter(ArrayLoader(jnp.arange(3), batch_size=2))).tolist() == [0, 1]


@pytest.mark.parametrize(("drop_last", "sizes"), [(False, [4, 4, 2]), (True, [4, 4])])
def test_last_batch(drop_last: bool, sizes: list[int]) -> None:
    loader = make(drop_last=drop_last)
    assert len(loader) == loader.length == len(sizes)
    assert [len(batch[0]) for batch in loader] == sizes


def test_order_is_a_function_of_seed_and_epoch() -> None:
    loader, other = make(shuffle=True, seed=3), make(shuffle=True, seed=3)
    orders = [order(loader) for _ in range(3)]
    assert [order(other) for _ in range(3)] == orders
    assert len({tuple(found) for found in orders}) == 3
    loader.set_epoch(1)
    assert order(loader) == orders[1]
    assert order(make(shuffle=True, seed=4)) != orders[0]
    assert sorted(orders[0]) == list(range(10))


def test_position_in_an_epoch_is_restored_without_reading() -> None:
    loader = make(shuffle=True, seed=3)
    loader.set_epoch(2)
    iterator = iter(loader)
    next(iterator)
    state = json.loads(json.dumps(loader.state_dict()))
    rest = [batch[1].tolist() for batch in iterator]
    fresh = make(shuffle=True, seed=0)
    fresh.load_state_dict(state)
    fresh.set_epoch(2)
    assert [batch[1].tolist() for batch in fresh] == rest
    following = order(fresh)
    loader.set_epoch(3)
    assert order(loader) == following


def test_position_between_epochs_is_the_next_epoch() -> None:
    loader = make(shuffle=True)
    order(loader)
    state = loader.state_dict()
    assert (state["epoch"], state["batch"]) == (1, 0)
    expected = order(loader)
    fresh = make(shuffle=True)
    fresh.load_state_dict(state)
    assert order(fresh) == expected


def test_batches_do_not_share_memory_with_the_arrays() -> None:
    values = np.zeros(8, np.float32)
    for shuffle in (False, True):
        (batch, *_) = ArrayLoader(values, batch_size=8, shuffle=shuffle)
        values += 1
        assert batch.max() < values.max()


def test_changes_of_arrays_that_need_no_conversion_are_seen() -> None:
    values = np.zeros(8, np.float32)
    loader = ArrayLoader(values, batch_size=8)
    next(iter(loader))
    values[:] = 5
    assert next(iter(loader)).tolist() == [5] * 8


def test_variants() -> None:
    loader = make(shuffle=True)
    ordered = loader.sequential()
    assert order(ordered) == list(range(10))
    assert loader.is_shuffled is True
    assert ordered.is_shuffled is False
    assert ordered.sequential() is ordered
    assert as_source(loader) is loader
    images = ArrayLoader(np.zeros((4, 3, 5, 6), np.float32), batch_size=2)
    assert next(iter(as_source(images, channels_last=True))).shape == (2, 5, 6, 3)
    assert next(iter(images)).shape == (2, 3, 5, 6)


def test_indices_of_the_batch_delivered_last() -> None:
    loader = as_source(make(shuffle=True), record_indices=True)
    for batch in loader:
        assert loader.last_batch_indices == batch[1].tolist()


def test_64_bit_mode_is_followed() -> None:
    loader = make()
    assert next(iter(loader))[1].dtype == np.int32
    with jax.enable_x64(True):
        assert next(iter(loader))[1].dtype == np.int64


def test_host_leaves_are_indexed_too() -> None:
    batch = next(iter(ArrayLoader({"x": np.zeros(3), "name": np.array(["a", "b", "c"])}, batch_size=2)))
    assert batch["name"].tolist() == ["a", "b"]


@pytest.mark.torch
def test_torch_tensors_are_arrays_too() -> None:
    torch = pytest.importorskip("torch")
    batch = next(iter(ArrayLoader(torch.arange(3).to(torch.bfloat16), batch_size=2)))
    assert batch.dtype.name == "bfloat16"


@pytest.mark.parametrize(
    ("arrays", "options", "error", "message"),
    [
        ((), {}, ValueError, "at least one array"),
        (({},), {}, ValueError, "without leaves"),
        ((np.zeros(3), np.zeros(4)), {}, ValueError, r"batch\[0\]: 3, batch\[1\]: 4"),
        ((np.zeros(3), "abc"), {}, TypeError, r"batch\[1\] is str \('abc'\)"),
        (({"a": np.float32(1)},), {}, ValueError, r"batch\['a'\] is 0-dimensional"),
        ((np.zeros(3),), {"batch_size": 0}, ValueError, "batch_size must be a positive integer"),
        ((np.zeros(3),), {"batch_size": 1.5}, ValueError, "batch_size must be a positive integer"),
        ((np.zeros(3),), {"seed": -1}, ValueError, "seed must be"),
    ],
)
def test_bad_arguments_raise(arrays: Any, options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        ArrayLoader(*arrays, **options)


def test_values_that_do_not_fit_raise_with_their_path() -> None:
    with pytest.raises(OverflowError, match=r"batch\['id'\] holds int64"):
        next(iter(ArrayLoader({"id": np.array([2**40])})))


def test_description() -> None:
    assert repr(make()) == (
        "ArrayLoader of float32[10, 2], int64[10] (batch_size=4, shuffle=False, drop_last=False, seed=0)"
    )
