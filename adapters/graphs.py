"""jraph's `GraphsTuple` in one shape: padding with extra graphs, as `jraph.pad_with_graphs` lays it out.

jraph is not imported: a GraphsTuple is a namedtuple and is recognised by its module and name.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ._convert import from_library
from ._leaves import Array, Path, format_path
from .mapped import MappedSource

_FIELDS = ("nodes", "edges", "receivers", "senders", "globals", "n_node", "n_edge")


def is_graphs_tuple(value: Any) -> bool:
    """Tell whether a value is a GraphsTuple of jraph (or a namedtuple of the same name and fields)."""
    if not isinstance(value, tuple) or getattr(value, "_fields", ()) != _FIELDS:
        return False
    return from_library(type(value), "jraph") or type(value).__name__ == "GraphsTuple"


def pad_graphs(
    loader: Any, *, n_node: int | None = None, n_edge: int | None = None, n_graph: int | None = None
) -> MappedSource:
    """Pad every GraphsTuple of a loader's batches to a fixed number of nodes, edges and graphs.

    The padding is one graph that holds all padding nodes and edges (its edges connect the first padding node with
    itself), followed by graphs without nodes: the layout of `jraph.pad_with_graphs`, so that
    `jraph.get_graph_padding_mask`, `get_node_padding_mask` and `unpad_with_graphs` work on the result.

    Args:
        loader: A loader whose batches hold GraphsTuples at any depth.
        n_node: Nodes of every batch, at least one more than it has. None rounds up to a power of two.
        n_edge: Edges of every batch. None rounds up to a power of two.
        n_graph: Graphs of every batch, at least one more than it has. None adds one.

    Returns:
        A loader for the Trainer, with the position and order of the one given.

    Raises:
        ValueError: While reading, if a batch does not fit.
        TypeError: While reading, if a batch holds no GraphsTuple.
    """
    wanted = (n_node, n_edge, n_graph)

    def pad(batch: Any) -> Any:
        found = False

        def one(keys: Any, value: Any) -> Any:
            nonlocal found
            if not is_graphs_tuple(value):
                return value
            found = True
            path = tuple(getattr(key, "key", getattr(key, "idx", getattr(key, "name", str(key)))) for key in keys)
            return _pad(value, wanted, path)

        padded = jax.tree_util.tree_map_with_path(one, batch, is_leaf=is_graphs_tuple)
        if not found:
            raise TypeError(
                f"pad_graphs found no jraph.GraphsTuple in a batch of type {type(batch).__qualname__}. Return one (or "
                "a container of them) from the loader; jraph.batch_np joins several graphs to one."
            )
        return padded

    return MappedSource(loader, pad)


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def _pad(graph: Any, wanted: tuple[int | None, int | None, int | None], path: Path) -> Any:
    have_node, have_edge, have_graph = int(np.sum(graph.n_node)), int(np.sum(graph.n_edge)), len(graph.n_node)
    n_node = _power_of_two(have_node + 1) if wanted[0] is None else wanted[0]
    n_edge = _power_of_two(have_edge) if wanted[1] is None else wanted[1]
    n_graph = have_graph + 1 if wanted[2] is None else wanted[2]
    for name, have, size, least in (
        ("nodes", have_node, n_node, have_node + 1),
        ("edges", have_edge, n_edge, have_edge),
        ("graphs", have_graph, n_graph, have_graph + 1),
    ):
        if size < least:
            raise ValueError(
                f"{format_path(path)} has {have} {name}, and pad_graphs has room for {size} (the padding graph takes "
                f"one node and one graph). Give a larger number, at least {least}, or None to round up."
            )
    more_node, more_edge, more_graph = n_node - have_node, n_edge - have_edge, n_graph - have_graph
    counts = np.asarray(graph.n_node).dtype

    def grown(tree: Any, more: int, fill: int = 0) -> Any:
        return jax.tree.map(lambda leaf: _grown(np.asarray(leaf), more, fill), tree)

    return graph._replace(
        nodes=grown(graph.nodes, more_node),
        edges=grown(graph.edges, more_edge),
        receivers=grown(graph.receivers, more_edge, have_node),
        senders=grown(graph.senders, more_edge, have_node),
        globals=grown(graph.globals, more_graph),
        n_node=np.concatenate([graph.n_node, [more_node], np.zeros(more_graph - 1, counts)]).astype(counts),
        n_edge=np.concatenate([graph.n_edge, [more_edge], np.zeros(more_graph - 1, counts)]).astype(counts),
    )


def _grown(array: Array, more: int, fill: int) -> Array:
    padding = np.full((more, *array.shape[1:]), fill, array.dtype)
    return np.concatenate([array, padding])
