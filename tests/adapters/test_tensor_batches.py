"""Lists and tuples of tensors are converted on a short way; what it gives is what the rules give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from jaxlightning.adapters._convert import Converter  # noqa: E402

pytestmark = pytest.mark.torch

BATCHES: dict[str, Callable[[], Any]] = {
    "images and labels": lambda: [torch.rand(4, 1, 3, 3), torch.tensor([1, 2, 3, -4])],
    "a tuple": lambda: (torch.rand(4, 2), torch.tensor([0, 1, 2, 3])),
    "bytes and flags": lambda: [torch.arange(4, dtype=torch.uint8), torch.tensor([True, False])],
    "half precision": lambda: [torch.rand(3).half(), torch.rand(3).bfloat16()],
    "doubles": lambda: [torch.rand(3, dtype=torch.float64), torch.rand(3)],
    "a number": lambda: [torch.tensor(3), torch.tensor(0.5)],
    "nothing": lambda: [torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64)],
    "strides": lambda: [torch.rand(3, 4).T, torch.arange(8)[::2]],
    "gradients": lambda: [torch.rand(3, requires_grad=True), torch.tensor([1])],
    "names": lambda: [torch.rand(3, 2), ["a", "b", "c"], torch.tensor([1, 2, 3])],
    "arrays": lambda: [torch.rand(3), np.arange(3)],
    "nested": lambda: [[torch.rand(2)], {"y": torch.tensor([1, 2])}],
    "a dict": lambda: {"x": torch.rand(2), "y": torch.tensor([1, 2])},
}


def kinds(batch: Any) -> Any:
    return jax.tree.map(lambda leaf: (leaf.dtype, leaf.shape) if isinstance(leaf, np.ndarray) else leaf, batch)


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("name", BATCHES)
def test_later_batches_are_converted_like_the_first(name: str, copy: bool) -> None:
    batches = [BATCHES[name]() for _ in range(3)]
    converter = Converter(copy=copy)
    converter.refresh()
    for batch in batches:
        got, want = converter.again(batch), Converter(copy=copy)(batch)
        assert type(got) is type(want)
        assert kinds(got) == kinds(want)
        jax.tree.map(np.testing.assert_array_equal, got, want)
        assert all(leaf.flags.c_contiguous for leaf in jax.tree.leaves(got) if isinstance(leaf, np.ndarray))


def test_batches_of_changing_kinds_are_converted_by_the_rules() -> None:
    converter = Converter(copy=False)
    converter.refresh()
    for make in BATCHES.values():
        for batch in (BATCHES["images and labels"](), make()):
            jax.tree.map(np.testing.assert_array_equal, converter.again(batch), Converter(copy=False)(batch))


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_label_that_does_not_fit_is_refused_in_every_batch(index: int) -> None:
    converter = Converter(copy=False)
    converter.refresh()
    for _ in range(index):
        converter.again([torch.rand(2), torch.tensor([1, 2])])
    with pytest.raises(OverflowError, match=r"batch\[1\] holds int64 values from 1 to 2147483648"):
        converter.again([torch.rand(2), torch.tensor([1, 2**31])])


def test_with_64_bits_labels_stay_as_they_are() -> None:
    with jax.enable_x64(True):
        converter = Converter(copy=False)
        converter.refresh()
        for _ in range(2):
            images, labels = converter.again([torch.rand(2), torch.tensor([1, 2**40])])
            assert (images.dtype, labels.dtype) == (np.float32, np.int64)
            assert labels.tolist() == [1, 2**40]


def test_copies_do_not_follow_a_buffer_that_is_filled_again() -> None:
    converter, buffers = Converter(copy=True), [torch.zeros(3), torch.zeros(3, dtype=torch.int64)]
    converter.refresh()
    seen = []
    for value in range(3):
        for buffer in buffers:
            buffer.fill_(value)
        seen.append(converter.again(buffers))
    assert [[leaf.tolist() for leaf in batch] for batch in seen] == [[[v] * 3, [v] * 3] for v in range(3)]


def test_a_mixed_batch_makes_no_leaf_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    converter = Converter(copy=True)
    converter.refresh()
    batch = [torch.rand(3), ["a"]]
    converter.again(batch)
    converter.again(batch)  # found out here
    made: list[int] = []
    plain = torch.Tensor.numpy
    monkeypatch.setattr(torch.Tensor, "numpy", lambda self: (made.append(1), plain(self))[1])
    converter.again(batch)
    assert made == [1]
