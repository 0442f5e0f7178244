"""jraph's GraphsTuple: kept as it is, and padded to one shape."""

from __future__ import annotations

import collections
from typing import Any

import jax
import numpy as np
import pytest

from jaxlightning.adapters import as_source, is_graphs_tuple, pad_graphs

FIELDS = ("nodes", "edges", "receivers", "senders", "globals", "n_node", "n_edge")
GraphsTuple = collections.namedtuple("GraphsTuple", FIELDS)  # as jraph has it, for machines without jraph


def graph(n_node: int, n_edge: int, *, kind: Any = GraphsTuple, n_graph: int = 1) -> Any:
    rng = np.random.default_rng(n_node)
    split = np.array([n_node - n_graph + 1] + [1] * (n_graph - 1), np.int32)
    return kind(
        nodes={"x": rng.normal(size=(n_node, 2)).astype(np.float32)},
        edges=rng.normal(size=(n_edge, 3)).astype(np.float32),
        receivers=rng.integers(0, n_node, n_edge).astype(np.int32),
        senders=rng.integers(0, n_node, n_edge).astype(np.int32),
        globals=None,
        n_node=split,
        n_edge=np.array([n_edge] + [0] * (n_graph - 1), np.int32),
    )


def real() -> Any:
    jraph = pytest.importorskip("jraph")
    return jraph


def assert_same(left: Any, right: Any) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert np.asarray(one).dtype.kind == np.asarray(other).dtype.kind  # jraph widens its indices to int64
        np.testing.assert_array_equal(one, other)


def test_a_graph_goes_through_unchanged() -> None:
    batch = (graph(4, 5), np.arange(1))
    found = next(iter(as_source(lambda: iter([batch]))))
    assert type(found[0]) is GraphsTuple
    assert is_graphs_tuple(found[0])
    assert not is_graphs_tuple((1, 2))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("sizes", [(9, 8, 3), (5, 5, 2), (None, None, None)])
def test_padding_is_laid_out_as_jraph_does(sizes: tuple[int | None, int | None, int | None]) -> None:
    jraph = real()
    batch = graph(4, 5, kind=jraph.GraphsTuple)
    found = next(iter(pad_graphs(lambda: iter([batch]), n_node=sizes[0], n_edge=sizes[1], n_graph=sizes[2])))
    assert type(found) is jraph.GraphsTuple
    n_node, n_edge, n_graph = sizes if sizes[0] is not None else (8, 8, 2)
    assert_same(found, jraph.pad_with_graphs(batch, n_node, n_edge, n_graph))
    assert np.asarray(jraph.get_graph_padding_mask(found)).tolist() == [True] + [False] * (n_graph - 1)
    assert int(np.sum(jraph.get_node_padding_mask(found))) == 4
    assert_same(jraph.unpad_with_graphs(found), batch)


def test_graphs_at_any_depth_get_one_shape() -> None:
    batches = [{"graph": graph(n, e, n_graph=2), "y": np.arange(2)} for n, e in ((3, 1), (5, 6), (7, 2))]
    source = pad_graphs(lambda: iter(batches), n_node=8, n_edge=6, n_graph=3)
    found = list(source)
    assert len({str(jax.tree.map(np.shape, batch)) for batch in found}) == 1
    for plain, padded in zip(batches, found, strict=True):
        n = plain["graph"].n_node.sum()
        np.testing.assert_array_equal(padded["graph"].nodes["x"][:n], plain["graph"].nodes["x"])
        assert padded["graph"].n_node.tolist() == [*plain["graph"].n_node, 8 - n]
        assert (padded["graph"].receivers[plain["graph"].n_edge.sum() :] == n).all()
        np.testing.assert_array_equal(padded["y"], [0, 1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_node": 4}, r"batch\['g'\] has 4 nodes, and pad_graphs has room for 4.*at least 5"),
        ({"n_edge": 4}, "has 5 edges"),
        ({"n_graph": 1}, "has 1 graphs"),
    ],
)
def test_a_graph_that_does_not_fit_raises(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        next(iter(pad_graphs(lambda: iter([{"g": graph(4, 5)}]), **options)))


def test_a_batch_without_a_graph_raises() -> None:
    with pytest.raises(TypeError, match=r"found no jraph.GraphsTuple in a batch of type dict"):
        next(iter(pad_graphs(lambda: iter([{"x": np.zeros(2)}]))))
