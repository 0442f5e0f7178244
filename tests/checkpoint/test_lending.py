"""A part of a large snapshot lies on disk while the rest is written, so that both are never more than the state."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxlightning.checkpoint import _io, _numpy_handler, _stored
from jaxlightning.checkpoint._numpy_handler import Pending, lend


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lend from a few kilobytes on: four slices of 1,000 bytes."""
    for name, value in (("_LENDING_FROM_BYTES", 30_000), ("_SLICE_BYTES", 1000), ("_LIBRARY_BYTES", 0)):
        monkeypatch.setattr(_numpy_handler, name, value)


def arrays(*sizes: int) -> list[Pending]:
    return [Pending(np.arange(size, dtype=np.uint8)) for size in sizes]


def lent(pending: list[Pending]) -> list[int]:
    return [index for index, array in enumerate(pending) if array._file is not None]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([10_000, 9_000, 6_000, 8_000], [2]),  # the smallest that is enough
        ([5_000, 30_000, 7_000, 7_000, 7_000], [2]),
        ([4_500, 10_000, 30_000], [1]),  # no early one, and none that is a large part
        ([3_000] * 12, [2, 3]),  # several, of those that come late enough
        ([15_000, 16_000], []),  # each is half of the snapshot
        ([5_000, 5_000, 5_000], []),  # a small snapshot
    ],
)
def test_what_is_lent_is_enough_and_comes_late(tmp_path: Path, sizes: list[int], expected: list[int]) -> None:
    pending = arrays(*sizes)
    lend(pending, tmp_path)
    assert lent(pending) == expected
    assert os.listdir(tmp_path) == []  # the files have no names
    for array, size in zip(pending, sizes, strict=True):
        np.testing.assert_array_equal(array.take(), np.arange(size, dtype=np.uint8))
        with pytest.raises(RuntimeError, match="gone"):
            array.take()


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.bool_, ml_dtypes.bfloat16, np.complex64])
@pytest.mark.parametrize("shape", [(100, 60), (6000,), (1, 20, 300)])
def test_a_lent_array_comes_back_as_it_was(tmp_path: Path, dtype: Any, shape: tuple[int, ...]) -> None:
    array = np.random.RandomState(0).randn(*shape).astype(dtype)
    pending = Pending(array)
    pending.lend(tmp_path)
    back = pending.take()
    assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, array.shape, array.tobytes())


def snapshot(tmp_path: Path) -> tuple[_io.Payload, dict[str, np.ndarray]]:
    random = np.random.RandomState(0)
    tree = {f"w{index}": random.randn(30, 50).astype(np.float32) for index in range(8)}
    return _io.snapshot({}, {"params": tree}, target=tmp_path / "a.ckpt", header={}), tree


def test_a_checkpoint_of_which_a_part_was_lent_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    payload, tree = snapshot(tmp_path)
    seen: list[list[int]] = []
    monkeypatch.setattr(_io, "lend", lambda pending, folder: (lend(pending, folder), seen.append(lent(pending))))
    _io.commit(payload, tmp_path / "a.ckpt")
    assert len(seen[0]) == 1
    back = _stored.StoredCheckpoint(tmp_path / "a.ckpt").tree("params")
    assert {name: leaf.tobytes() for name, leaf in back.items()} == {n: leaf.tobytes() for n, leaf in tree.items()}
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_the_order_of_writing_is_the_one_that_was_counted_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trees = {
        "params": {"b": np.zeros(1), "a": np.zeros(2)},
        "variables": {"x": np.zeros(3)},
        "optimizer_states": [{"m/b": np.zeros(4), "m/a": np.zeros(5)}],
        "gradients": {"b": np.zeros(6)},
    }
    payload = _io.snapshot({"callbacks": {"c": np.zeros(2000)}}, trees, target=tmp_path / "a.ckpt", header={})
    counted_on: list[Pending] = []
    taken: list[Pending] = []
    take = Pending.take
    monkeypatch.setattr(_io, "lend", lambda pending, folder: counted_on.extend(pending))
    monkeypatch.setattr(Pending, "take", lambda self: (taken.append(self), take(self))[1])
    _io.commit(payload, tmp_path / "a.ckpt")
    assert [array.shape for array in taken] == [array.shape for array in counted_on]
    assert len(taken) == 7


def test_a_full_disk_leaves_the_array_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def write(self, data: memoryview) -> int:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(_numpy_handler.tempfile, "TemporaryFile", lambda **_: Full())
    pending = arrays(10_000, 9_000, 6_000, 8_000)
    lend(pending, tmp_path)
    assert lent(pending) == []
    assert pending[2].take().nbytes == 6_000


def test_a_part_that_cannot_be_read_back_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    payload, _ = snapshot(tmp_path)
    close: list[Any] = []

    def shorten(pending: list[Pending], folder: Path) -> None:
        lend(pending, folder)
        for array in pending:
            if array._file is not None:
                array._file.truncate(10)
                close.append(array._file)

    monkeypatch.setattr(_io, "lend", shorten)
    with pytest.raises(Exception, match="cannot be read back"):
        _io.commit(payload, tmp_path / "a.ckpt")
    assert os.listdir(tmp_path) == []
    assert [file.closed for file in close] == [True]


def test_a_save_that_fails_early_closes_what_it_lent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    payload, _ = snapshot(tmp_path)
    files: list[Any] = []

    def fail(pending: list[Pending], folder: Path) -> None:
        lend(pending, folder)
        files.extend(array._file for array in pending if array._file is not None)
        raise KeyboardInterrupt

    monkeypatch.setattr(_io, "lend", fail)
    with pytest.raises(KeyboardInterrupt):
        _io.commit(payload, tmp_path / "a.ckpt")
    assert [file.closed for file in files] == [True]
    assert os.listdir(tmp_path) == []
