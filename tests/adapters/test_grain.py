"""grain pipelines and Hugging Face datasets."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from jaxlightning.adapters import as_source


@pytest.fixture(scope="module")
def grain() -> Any:
    return pytest.importorskip("grain")


def map_dataset(grain: Any) -> Any:
    return grain.MapDataset.range(10).seed(3).shuffle().map(lambda i: {"x": np.full(2, i), "i": i}).batch(4)


@pytest.mark.grain
@pytest.mark.parametrize("style", ["map", "iter"])
def test_grain_datasets(grain: Any, style: str) -> None:
    dataset = map_dataset(grain)
    if style == "iter":
        dataset = dataset.to_iter_dataset()
    plain = [batch["i"].tolist() for batch in dataset]
    source = as_source(dataset)
    assert source.length == (3 if style == "map" else None)
    for _ in range(2):
        found = list(source)
        assert [batch["i"].tolist() for batch in found] == plain
        assert found[0]["x"].dtype == np.int32
    assert as_source(grain.MapDataset.range(3).repeat()).length is None


@pytest.mark.grain
@pytest.mark.parametrize("style", ["map", "iter", "loader"])
def test_grain_resumes_by_its_own_state(grain: Any, style: str) -> None:
    def make() -> Any:
        if style == "loader":
            return grain.DataLoader(
                data_source=list(range(10)),
                sampler=grain.samplers.IndexSampler(10, shuffle=True, seed=1, num_epochs=1),
                operations=[grain.transforms.Batch(4)],
                worker_count=0,
            )
        return map_dataset(grain) if style == "map" else map_dataset(grain).to_iter_dataset()

    def flat(batch: Any) -> list[int]:
        return (batch["i"] if isinstance(batch, dict) else batch).tolist()

    source = as_source(make())
    iterator = iter(source)
    next(iterator)
    state = json.loads(json.dumps(source.state_dict()))
    assert "iterator" in state
    rest = [flat(batch) for batch in iterator]
    fresh = as_source(make())
    fresh.load_state_dict(state)
    assert [flat(batch) for batch in fresh] == rest
    assert len(list(fresh)) == 3


@pytest.fixture(scope="module")
def hf() -> Any:
    return pytest.importorskip("datasets")


def rows(hf: Any) -> Any:
    return hf.Dataset.from_dict({"x": [[i, i + 1] for i in range(10)], "y": list(range(10)), "s": list("abcdefghij")})


@pytest.mark.slow
def test_hugging_face_map_datasets(hf: Any) -> None:
    dataset = rows(hf).batch(4)
    source = as_source(dataset)
    assert (source.length, source.is_shuffled) == (3, False)
    for _ in range(2):
        found = list(source)
    assert found[0]["x"].tolist() == [[0, 1], [1, 2], [2, 3], [3, 4]]
    assert found[0]["y"].dtype == np.int32
    assert list(found[2]["s"]) == ["i", "j"]
    iterator = iter(source)
    next(iterator)
    fresh = as_source(rows(hf).batch(4))
    fresh.load_state_dict(source.state_dict())
    assert [batch["y"].tolist() for batch in fresh] == [[4, 5, 6, 7], [8, 9]]


@pytest.mark.slow
def test_hugging_face_streams(hf: Any) -> None:
    def make() -> Any:
        return rows(hf).to_iterable_dataset(num_shards=2).batch(2)

    source = as_source(make())
    assert source.length is None
    plain = [batch["y"].tolist() for batch in source]
    iterator = iter(source)
    next(iterator)
    state = json.loads(json.dumps(source.state_dict()))
    fresh = as_source(make())
    fresh.load_state_dict(state)
    assert [batch["y"].tolist() for batch in fresh] == plain[1:]
    source.set_epoch(2)


@pytest.mark.slow
def test_an_unbatched_hugging_face_dataset_gets_a_hint(hf: Any) -> None:
    with pytest.warns(UserWarning, match="column 'y' holds one number per row"):
        as_source(rows(hf))


@pytest.mark.slow
@pytest.mark.torch
def test_a_torch_loader_over_a_hugging_face_dataset(hf: Any) -> None:
    torch_data = pytest.importorskip("torch.utils.data")
    loader = torch_data.DataLoader(rows(hf).with_format("torch"), batch_size=4)
    batch = next(iter(as_source(loader)))
    assert batch["x"].tolist() == [[0, 1], [1, 2], [2, 3], [3, 4]]
    assert batch["s"] == ["a", "b", "c", "d"]
