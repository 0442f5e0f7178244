"""Containers of other libraries: the real ones where they are installed, and stand-ins with their module names."""

from __future__ import annotations

import collections
from typing import Any

import jax
import numpy as np
import pytest

from jaxlightning.adapters import as_source

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def convert(batch: Any) -> Any:
    return next(iter(as_source(lambda: iter([batch]))))


def stand_in(name: str, module: str, base: Any, body: dict[str, Any] | None = None) -> Any:
    return type(name, (base,), {"__module__": module, **(body or {})})


class _LikeEncoding(collections.UserDict):  # type: ignore[type-arg]
    """What makes a tokenizer's output special: a constructor of other arguments, and keys as attributes."""

    def __init__(self, data: Any = None, encoding: Any = None, n_sequences: int | None = None) -> None:
        super().__init__(data)
        self._encodings = encoding
        self._n_sequences = n_sequences

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


def real_or_stand_in(library: str, real: bool) -> Any:
    if not real:
        return stand_in("BatchEncoding", "transformers.tokenization_utils_base", _LikeEncoding)
    return pytest.importorskip(library).BatchEncoding


@pytest.mark.parametrize("real", [False, True])
def test_a_tokenizers_output_stays_what_it_is(real: bool) -> None:
    cls = real_or_stand_in("transformers", real)
    ids = np.arange(6).reshape(2, 3)
    found = convert((cls({"input_ids": ids, "attention_mask": np.ones((2, 3))}), ["a", "b"]))
    encoding, texts = found
    assert type(encoding) is cls
    assert texts == ["a", "b"]
    assert encoding["input_ids"].dtype == np.int32
    np.testing.assert_array_equal(encoding.input_ids, ids)
    compiled = jax.jit(lambda batch: batch["input_ids"].sum() + batch.attention_mask.sum())
    assert compiled(encoding) == 21
    assert compiled(convert(cls({"input_ids": ids, "attention_mask": np.ones((2, 3))}))) == 21
    assert compiled._cache_size() == 1


class _LikeTensorDict:
    def __init__(self, source: dict[str, Any]) -> None:
        self._tensordict = source


def tensor_dict(real: bool) -> Any:
    if not real:
        base = stand_in("TensorDictBase", "tensordict.base", _LikeTensorDict)
        return stand_in("TensorDict", "tensordict._td", base)({"x": np.ones((2, 3))})
    torch = pytest.importorskip("torch")
    return pytest.importorskip("tensordict").TensorDict({"x": torch.ones(2, 3)}, batch_size=[2])


@pytest.mark.parametrize("real", [False, True])
def test_a_tensordict_is_refused_with_its_path_and_the_way_out(real: bool) -> None:
    batch = tensor_dict(real)
    with pytest.raises(TypeError, match=r"batch\['a'\]\[0\] is a tensordict\..*TensorDict.*Call batch.to_dict\(\)"):
        convert({"a": [batch]})
    if real:  # the way out is one
        np.testing.assert_array_equal(convert({"a": [batch.to_dict()]})["a"][0]["x"], np.ones((2, 3)))


def pyg_batch(real: bool) -> Any:
    if not real:
        base = stand_in("BaseData", "torch_geometric.data.data", object, {})
        return stand_in("DataBatch", "abc", base)()
    torch = pytest.importorskip("torch")
    data = pytest.importorskip("torch_geometric.data")
    one = data.Data(x=torch.ones(2, 3), edge_index=torch.tensor([[0], [1]]))
    return data.Batch.from_data_list([one, one])


@pytest.mark.parametrize("real", [False, True])
def test_a_batch_of_torch_geometric_is_refused_with_its_path_and_the_way_out(real: bool) -> None:
    batch = pyg_batch(real)
    with pytest.raises(TypeError, match=r"batch\[1\] is a abc.DataBatch, whose tensors JAX cannot see.*to_dict"):
        convert((0, batch))
    if real:
        found = convert(batch.to_dict())
        assert found["x"].shape == (4, 3)
        assert found["edge_index"].tolist() == [[0, 2], [1, 3]]


@pytest.mark.torch
def test_a_packed_sequence_is_refused_with_the_way_out() -> None:
    torch = pytest.importorskip("torch")
    packed = torch.nn.utils.rnn.pack_padded_sequence(torch.ones(2, 3), torch.tensor([3, 1]), batch_first=True)
    with pytest.raises(TypeError, match=r"batch\['s'\] is a torch.nn.utils.rnn.PackedSequence.*Return padded tensors"):
        convert({"s": packed})
