"""State as JSON: everything that can be written comes back equal and of the same type, and nothing else is written."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections import namedtuple
from datetime import timedelta
from enum import Enum, StrEnum
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxlightning.utilities.parsing import AttributeDict
from jaxlightning.utilities.serialization import TAG, Unwritten, decode, describe, encode


class Color(Enum):
    RED = 1


class Mode(StrEnum):
    MIN = "min"


def there_and_back(value):
    text = json.dumps(encode(value), allow_nan=False)
    return decode(json.loads(text))


def same(a, b):
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray | np.generic | jax.Array):
        return a.dtype == b.dtype and a.shape == b.shape and np.asarray(a).tobytes() == np.asarray(b).tobytes()
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or (a != a and b != b)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        2**80,
        0.1,
        -0.0,
        math.inf,
        -math.inf,
        math.nan,
        "text",
        "",
        b"\x00\xff",
        1 + 2j,
        complex(math.inf, 0),
        (),
        (1, (2,), [3]),
        {1, 2},
        frozenset({"a"}),
        {},
        {"a": {}},
        {1: "int key", "1": "text key", (1, 2): None, None: 0},
        {TAG: "user's own", "b": 1},
        range(1, 10, 2),
        slice(None, 3),
        timedelta(days=1, seconds=2, microseconds=3),
        Path("a/b"),
        Namespace(x=1, y=(2,)),
        AttributeDict(a=AttributeDict(b=1)),
        np.float32(0.1),
        np.int64(5),
        np.bool_(True),
        ml_dtypes.bfloat16(1.5),
        np.array(3.0),
        np.zeros((0, 3), np.float32),
        np.arange(6, dtype=">i4").reshape(2, 3).astype("<i4"),
        np.array([1.5, -2], ml_dtypes.bfloat16),
        np.array([1, 2], ml_dtypes.int4),
        np.array([1j]),
        np.array([["a", "bc"]]),
        np.array([np.nan, np.inf]),
    ],
    ids=repr,
)
def test_a_value_comes_back_equal_and_of_the_same_type(value):
    assert same(there_and_back(value), value)


def test_jax_arrays_come_back_as_jax_arrays():
    for value in (jnp.float32(2.5), jnp.arange(3), jnp.ones((2, 2), jnp.bfloat16), jnp.zeros((0,))):
        assert same(there_and_back(value), value)
        assert isinstance(there_and_back(value), jax.Array)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_typed_keys_keep_their_implementation(impl):
    key = jax.random.split(jax.random.key(7, impl=impl), 3)
    back = there_and_back({"key": key})["key"]
    assert str(jax.random.key_impl(back)) == str(jax.random.key_impl(key))
    assert (jax.random.key_data(back) == jax.random.key_data(key)).all()


def test_a_text_enum_is_written_as_its_value():
    assert there_and_back(Mode.MIN) == "min"


@pytest.mark.parametrize("value", [Color.RED, len, object(), lambda: 1, namedtuple("P", "x")(1), np.array([object()])])
def test_what_names_a_class_or_code_is_refused_with_its_place(value):
    with pytest.raises(TypeError, match="callbacks/a/0 is of type"):
        encode({"a": [value]}, path=("callbacks",))


def test_a_refused_value_can_be_stored_as_a_description_without_memory_addresses():
    seen = []
    encoded = encode({"f": describe, "o": object()}, on_unwritable=lambda path, value: seen.append(path))
    assert seen == [("f",), ("o",)]
    assert "0x" not in json.dumps(encoded)
    back = decode(encoded)
    assert back["f"] == Unwritten("jaxlightning.utilities.serialization.describe", "function")
    assert back["o"] == Unwritten("<object object>", "object")


def test_a_container_that_contains_itself_is_refused():
    loop = []
    loop.append(loop)
    with pytest.raises(ValueError, match="contains itself"):
        encode(loop)


def test_the_same_object_twice_is_no_loop():
    shared = [1]
    assert encode([shared, shared]) == [[1], [1]]


def test_large_arrays_go_to_the_store_and_come_back():
    stored = {}

    def store(path, array, fresh):
        stored["/".join(path)] = array
        return "/".join(path)

    big, scalar = np.arange(1000.0), np.float32(3)
    encoded = encode({"a": [big, scalar]}, store=store)
    assert list(stored) == ["a/0"]
    back = decode(json.loads(json.dumps(encoded)), fetch=stored.__getitem__)
    assert same(back, {"a": [big, scalar]})


@pytest.mark.parametrize(
    "damaged",
    [
        {TAG: "no such tag"},
        {TAG: "array", "dtype": "object", "shape": [1], "data": ""},
        {TAG: "array", "dtype": "float32", "shape": [-1], "data": ""},
        {TAG: "array", "dtype": "float32", "shape": [10**12], "data": "AAAA"},
        {TAG: "array", "dtype": "float32", "shape": [1], "data": "***"},
        {TAG: "array", "shape": [1]},
        {TAG: "stored", "dtype": "float32", "shape": [1], "name": "x"},
        {TAG: "dict", "items": [1]},
        {TAG: "dict", "items": [[[], 1]]},
        {
            TAG: "prng_key",
            "impl": "no such",
            "data": {TAG: "array", "dtype": "uint32", "shape": [1], "data": "AAAAAA=="},
        },
        {TAG: ["not", "a", "word"]},
        {TAG: "float", "value": "one"},
    ],
    ids=repr,
)
def test_damaged_json_is_a_value_error(damaged):
    with pytest.raises(ValueError):
        decode(damaged)
