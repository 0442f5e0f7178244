"""What a batch looks like after conversion: leaves, containers, narrowing, errors that name the path."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import logging
import types
from typing import Any

import attrs
import flax.struct
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxlightning.adapters import _leaves, as_source, to_channels_last

Pair = collections.namedtuple("Pair", ["x", "y"])


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    y: Any = None


@dataclasses.dataclass(slots=True)
class Slotted:
    x: Any


@dataclasses.dataclass
class WithExtra:
    x: Any

    def __post_init__(self) -> None:
        self.doubled = self.x * 2


class Checked:
    def __init__(self, x: Any) -> None:
        self.x = x


@dataclasses.dataclass
class Strict:
    x: Any

    def __post_init__(self) -> None:
        if not isinstance(self.x, np.ndarray):
            raise TypeError("needs an array")


@attrs.define
class Attrs:
    x: Any
    tag: str = "a"


@flax.struct.dataclass
class Struct:
    x: Any
    name: str = flax.struct.field(pytree_node=False, default="s")


class Encoding(collections.UserDict):
    """Like a tokenizer's BatchEncoding."""

    def __init__(self, data: Any = None, encodings: Any = None) -> None:
        super().__init__(data)
        self._encodings = encodings

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


class MyDict(dict):
    pass


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    HIGH = 3


class LikeArray:
    """An object that is no pytree and holds an array."""

    def __init__(self) -> None:
        self.values = np.zeros(3)


def convert(batch: Any, **options: Any) -> Any:
    return next(iter(as_source(lambda: iter([batch]), **options)))


X = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.mark.parametrize(
    "batch",
    [
        X,
        (X, X),
        [X, [X]],
        {"a": X, "b": {"c": X}},
        Pair(X, None),
        Frozen(X),
        Slotted(X),
        Strict(X),
        Attrs(X, tag=None),
        Struct(X),
        Encoding({"input_ids": X}),
        MyDict(a=X),
        collections.OrderedDict(b=X, a=X),
        collections.defaultdict(list, a=X),
        types.MappingProxyType({"a": X}),
        {1: X, "a": X},
        None,
        (),
        {},
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_containers_are_kept_as_pytrees(batch: Any) -> None:
    found = convert(batch)
    assert type(found) is type(batch)
    if isinstance(batch, dict) and set(map(type, batch)) == {int, str}:
        assert list(found) == list(batch)  # JAX itself cannot sort such keys
        return
    for leaf in jax.tree_util.tree_leaves(found):
        assert isinstance(leaf, np.ndarray)
        assert leaf.tobytes() == X.tobytes()
        assert not np.shares_memory(leaf, X)


@pytest.mark.parametrize(
    "batch",
    [Frozen(X), Slotted(X), Attrs(X), Encoding({"x": X}), MyDict(x=X), Strict(X)],
    ids=lambda batch: type(batch).__name__,
)
def test_containers_go_through_a_compiled_function(batch: Any) -> None:
    found = convert(batch)
    if isinstance(batch, Attrs):
        found = attrs.evolve(found, tag=None)
    compiled = jax.jit(lambda tree: tree)
    again = compiled(found)
    assert type(again) is type(batch)
    value = again["x"] if isinstance(batch, (Encoding, MyDict)) else again.x
    assert np.array_equal(value, X)
    compiled(convert(batch) if not isinstance(batch, Attrs) else found)
    assert compiled._cache_size() == 1


def test_mapping_attributes_work_after_conversion() -> None:
    found = convert(Encoding({"input_ids": X}, encodings=[object()]))
    assert np.array_equal(found.input_ids, X)
    assert found._encodings is None


def test_attributes_that_are_no_fields_are_kept() -> None:
    found = convert(WithExtra(X))
    assert np.array_equal(found.doubled, X * 2)


def test_leaves_that_jax_cannot_hold_stay_in_place() -> None:
    when = datetime.date(2020, 1, 1)
    batch = {
        "s": "text",
        "b": b"bytes",
        "d": when,
        "e": Colour.RED,
        "o": np.array(["a", None], dtype=object),
        "u": np.array(["a", "b"]),
        "t": np.array(["2020-01-01"], "datetime64[D]"),
        "m": decimal.Decimal("1.5"),
        "t0": np.datetime64("2020-01-01"),
    }
    found = convert(batch)
    assert found["d"] is when
    assert found["s"] == "text"
    assert found["e"] is Colour.RED
    assert found["o"].tolist() == ["a", None]
    assert found["u"].tolist() == ["a", "b"]
    assert found["t"].dtype == batch["t"].dtype
    assert found["m"] is batch["m"]
    assert found["t0"] == batch["t0"]


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (True, "bool"),
        (3, "int32"),
        (Level.HIGH, None),
        (0.5, "float32"),
        (1j, "complex64"),
        (np.int64(3), "int32"),
        (np.float16(3), "float16"),
        (np.uint8(3), "uint8"),
        (np.bool_(True), "bool"),
    ],
)
def test_numbers_become_0d_arrays(value: Any, dtype: str | None) -> None:
    found = convert({"n": value})["n"]
    if dtype is None:
        assert found is value
        return
    assert isinstance(found, np.ndarray)
    assert (found.shape, found.dtype.name) == ((), dtype)
    assert found == value


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "int4", "uint4"])
def test_extension_dtypes_are_kept(dtype: str) -> None:
    value = np.arange(5).astype(getattr(ml_dtypes, dtype))
    found = convert(value)
    assert found.dtype == value.dtype
    assert found.tobytes() == value.tobytes()
    assert jnp.asarray(found).dtype == value.dtype


def test_jax_arrays_and_keys_are_kept() -> None:
    array, key = jnp.ones(3), jax.random.key(0)
    found = convert({"a": array, "k": key}, channels_last=True)
    assert found["a"] is array
    assert found["k"] is key


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1])
def test_integers_that_do_not_fit_raise(value: int) -> None:
    with pytest.raises(OverflowError, match=r"batch\['a'\]\[1\]\.x holds int64 values"):
        convert({"a": (0, Pair(np.array([value]), None))})
    with pytest.raises(OverflowError, match=r"batch holds int64"):
        convert(value)


def test_integers_beyond_64_bits_raise() -> None:
    with pytest.raises(OverflowError, match=rf"batch\['id'\] is the integer {2**70}"):
        convert({"id": 2**70})


def test_uint64_is_checked() -> None:
    assert convert(np.array([2**32 - 1], np.uint64)).dtype == np.uint32
    with pytest.raises(OverflowError, match="uint64"):
        convert(np.array([2**32], np.uint64))


def test_finite_floats_that_do_not_fit_raise_and_infinities_pass() -> None:
    found = convert(np.array([np.inf, -np.inf, np.nan, 1e-60]))
    assert np.array_equal(found, np.array([np.inf, -np.inf, np.nan, 0], np.float32), equal_nan=True)
    with pytest.raises(OverflowError, match="beyond the range of float32"):
        convert(np.array([1e39]))


def test_narrowing_of_floats_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    _leaves._told.clear()
    with caplog.at_level(logging.INFO, logger="jaxlightning"):
        convert({"x": np.zeros(3), "y": np.zeros(3)})
        convert(np.zeros(3))
    assert [r.message for r in caplog.records if "becomes float32" in r.message] == [
        "batch['x'] is float64 and becomes float32, as everywhere in JAX without 64-bit mode (jax_enable_x64). Other "
        "leaves are treated the same way without a further message."
    ]


def test_64_bit_mode_keeps_everything() -> None:
    with jax.enable_x64(True):
        found = convert({"i": np.array([2**40]), "f": np.zeros(2), "n": 3, "c": np.zeros(1, np.complex128)})
    assert [found[key].dtype.name for key in "ifnc"] == ["int64", "float64", "int64", "complex128"]


def test_byte_order_and_strides_are_normalised() -> None:
    big = np.arange(6, dtype=">i4").reshape(2, 3)
    found = convert({"big": big, "f": np.asfortranarray(X), "r": X[::-1, ::2]})
    assert found["big"].dtype == np.dtype("int32")
    assert np.array_equal(found["big"], big)
    assert np.array_equal(found["r"], X[::-1, ::2])
    assert all(leaf.flags.c_contiguous for leaf in found.values())


def test_read_only_and_memory_mapped_arrays_become_writable_copies(tmp_path: Any) -> None:
    np.save(tmp_path / "x.npy", X)
    found = convert(np.load(tmp_path / "x.npy", mmap_mode="r"))
    assert type(found) is np.ndarray
    assert found.flags.writeable


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"m": np.ma.masked_array([1.0, 2.0], [True, False])}, r"batch\['m'\] is a numpy masked array"),
        ({"m": np.ma.masked_array([1, 2], [True, False])}, r"batch\['m'\] is a numpy masked array"),
        ([LikeArray()], r"batch\[0\] is a .*LikeArray that holds an array in `.values`"),
    ],
)
def test_what_would_lose_data_raises(batch: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        convert(batch)


def test_a_mapping_that_cannot_be_rebuilt_raises() -> None:
    class Lazy(collections.abc.Mapping):
        def __init__(self, a: int, b: int) -> None:
            self.items_ = {"a": a, "b": b}

        def __getitem__(self, key: str) -> Any:
            return self.items_[key]

        def __iter__(self) -> Any:
            return iter(self.items_)

        def __len__(self) -> int:
            return 2

    with pytest.raises(TypeError, match=r"batch\['inner'\] is a mapping of type .*Lazy that cannot be rebuilt"):
        convert({"inner": Lazy(1, 2)})


@pytest.mark.parametrize(
    ("shape", "dtype", "moved"),
    [
        ((2, 3, 5, 6), "float32", True),
        ((2, 1, 5, 6), "uint8", True),
        ((2, 4, 5, 6), "float16", True),
        ((2, 3, 5, 6), ml_dtypes.bfloat16, True),
        ((2, 2, 5, 6), "float32", False),
        ((2, 3, 5, 6), "int32", False),
        ((2, 3, 5, 6), "bool", False),
        ((3, 5, 6), "float32", False),
        ((1, 2, 3, 5, 6), "float32", False),
    ],
)
def test_channels_last_rule(shape: tuple[int, ...], dtype: Any, moved: bool) -> None:
    value = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    for found in (convert(value, channels_last=True), to_channels_last(value)):
        expected = value.transpose(0, 2, 3, 1) if moved else value
        assert found.shape == expected.shape
        assert found.tobytes() == np.ascontiguousarray(expected).tobytes()
    if dtype != "bool":
        assert convert(jnp.asarray(value), channels_last=True).shape == expected.shape
    assert convert(value).shape == shape
