"""Write one checkpoint directory: an Orbax composite with one commit; `_stored` reads it.

Layout (docs/checkpoint-format.md): one Orbax PyTree item for each of `params`, `variables`, `optimizer_states`,
`gradients` and `extras` that has arrays, and `metadata/metadata.json` for everything else. The JSON
holds the structure of each tree, so that tuples, None, empty and zero-size nodes, integer keys and typed PRNG keys come
back as they were, and a check sum of each array, so that damage is found.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlightning.checkpoint import _layout, _remote
from jaxlightning.checkpoint._numpy_handler import Pending, lend, registry
from jaxlightning.checkpoint._relative import RelativePaths
from jaxlightning.utilities.host_memory import fresh_copy
from jaxlightning.utilities.serialization import OnUnwritable, encode

FORMAT = "jaxlightning-checkpoint"
FORMAT_VERSION = 1

#: The items that may exist, in the order in which they are written.
TREES = ("params", "variables", "optimizer_states", "gradients")
#: Arrays that stand anywhere else (callback states, what hooks added).
EXTRAS = "extras"
#: States of random generators (2.5 to 5 kB) stay in the JSON.
_INLINE_BYTES = 8192


@dataclass(kw_only=True)
class _ArrayStore:
    """Collects the arrays of one item: copies, under the paths that Orbax shows them at."""

    arrays: list[tuple[tuple[str, ...], np.ndarray]] = field(default_factory=list)
    _nodes: set[tuple[str, ...]] = field(default_factory=set)
    _taken: set[str] = field(default_factory=set)
    flat: bool = False
    owned: bool = False

    def __call__(self, path: tuple[str, ...], array: np.ndarray, fresh: bool) -> str:
        place = (str(len(self.arrays)),) if self.flat else self._free(path)
        self.arrays.append((place, array if fresh or self.owned else fresh_copy(array)))
        return str(len(self.arrays) - 1)

    def _free(self, path: tuple[str, ...]) -> tuple[str, ...]:
        # Orbax joins the keys with dots, so {"a": {"b": x}, "a.b": y} would be written to one place.
        place, count = tuple(path) or ("value",), 1
        while ".".join(place) in self._taken or place in self._nodes:
            count += 1
            place = (*path[:-1], f"{path[-1] if path else 'value'}~{count}")
        self._taken.add(".".join(place))
        self._nodes.update(place[:i] for i in range(1, len(place)))
        return place

    def add_check_sums(self, described: list[dict[str, Any]]) -> None:
        """Add the check sum of each array to its description."""
        for entry, (_, array) in zip(described, self.arrays, strict=True):
            entry["crc32"] = check_sum(array)

    def hand_over(self) -> dict[str, Any]:
        """Return the arrays as Orbax's nested dict and forget them: each is gone when it is written."""
        tree: dict[str, Any] = {}
        arrays, self.arrays = self.arrays, []
        for path, array in arrays:
            node = tree
            for key in path[:-1]:
                node = node.setdefault(key, {})
            node[path[-1]] = Pending(array)
        return tree


@dataclass(kw_only=True)
class Payload:
    """A snapshot of everything that one checkpoint will hold, independent of later steps; it is written once.

    Attributes:
        metadata: The JSON.
        stores: Name of an Orbax item to its arrays, which are forgotten one after the other while they are written.
    """

    metadata: dict[str, Any]
    stores: dict[str, _ArrayStore]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for store in self.stores.values() for _, array in store.arrays)


def snapshot(
    checkpoint: Mapping[str, Any],
    trees: Mapping[str, Any],
    *,
    target: str | os.PathLike[str],
    header: Mapping[str, Any],
    trees_are_ours: bool = False,
    ours: Collection[str] = (),
    lenient: Mapping[str, OnUnwritable] | None = None,
) -> Payload:
    """Copy everything to the host.

    Args:
        checkpoint: What goes into the JSON: Lightning's keys, without those in ``trees``.
        trees: Name of an item (one of `TREES`) to a tree of arrays.
        target: Where the checkpoint will lie; paths near it are stored relative to it.
        header: Further top-level entries of the JSON (versions).
        trees_are_ours: The numpy arrays in ``trees`` are copies that nobody changes.
        ours: Keys of ``checkpoint`` of which the same is true.
        lenient: Keys of ``checkpoint`` in which what cannot be written is described instead of refused, after the
            function was told.

    Returns:
        The snapshot; donating or changing the arrays afterwards does not affect it.

    Raises:
        TypeError: Something can be written only with pickle; the message names its place.
    """
    _start_transfers(trees)
    paths = RelativePaths(target)
    stores: dict[str, _ArrayStore] = {}
    items: dict[str, Any] = {}
    for name in TREES:
        if trees.get(name) is None:
            continue
        stores[name] = _ArrayStore(owned=trees_are_ours)
        items[name] = {"tree": encode(trees[name], store=stores[name], inline_bytes=0)}
    extras = _ArrayStore(flat=True)
    body: dict[str, Any] = {}
    for key, value in checkpoint.items():
        extras.owned = key in ours
        body[key] = encode(
            value,
            path=(key,),
            store=extras,
            inline_bytes=_INLINE_BYTES,
            rewrite_text=paths.shorten if key in ("callbacks", "loops") else None,
            **({"on_unwritable": lenient[key]} if lenient and key in lenient else {}),
        )
    if extras.arrays:
        stores[EXTRAS] = extras
        items[EXTRAS] = {"tree": None}
    for name, store in stores.items():
        items[name]["arrays"] = [
            {"path": list(path), "dtype": array.dtype.name, "shape": list(array.shape)} for path, array in store.arrays
        ]
    metadata = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        **header,
        "items": items,
        "checkpoint": body,
    }
    return Payload(metadata=metadata, stores={name: store for name, store in stores.items() if store.arrays})


def commit(payload: Payload, target: str | os.PathLike[str], options: dict[str, Any] | None = None) -> None:
    """Write a snapshot as one checkpoint, replacing what has that name only when the new one is complete.

    Args:
        payload: The snapshot.
        target: The directory to make.
        options: For the file system of a path with a scheme.

    Raises:
        OSError: Writing failed; nothing is left under the final name that was not there before.
    """
    if _layout.is_remote(target):
        with _remote.preparing() as folder:
            commit(payload, Path(folder, "checkpoint"))
            _remote.send(Path(folder, "checkpoint"), target, options)
        return
    import orbax.checkpoint as ocp

    final = Path(os.path.abspath(target))
    final.parent.mkdir(parents=True, exist_ok=True)
    for name, store in payload.stores.items():
        store.add_check_sums(payload.metadata["items"][name]["arrays"])
    staged = _layout.staging_path(final)
    handlers: dict[str, Any] = {
        name: ocp.PyTreeCheckpointHandler(type_handler_registry=registry()) for name in payload.stores
    }
    trees = {name: store.hand_over() for name, store in payload.stores.items()}
    arguments: dict[str, Any] = {name: ocp.args.PyTreeSave(tree) for name, tree in trees.items()}
    # Orbax writes the items by their names.
    pending: list[Pending] = [leaf for _, tree in sorted(trees.items()) for leaf in jax.tree.leaves(tree)]
    del trees
    handlers[_layout.METADATA_ITEM] = ocp.JsonCheckpointHandler(filename=_layout.METADATA_FILE)
    arguments[_layout.METADATA_ITEM] = ocp.args.JsonSave(payload.metadata)
    try:
        lend(pending, final.parent)
        with (
            _layout.plainly_named(final.parent) as folder,
            ocp.Checkpointer(ocp.CompositeCheckpointHandler(**handlers)) as checkpointer,
        ):
            checkpointer.save(folder / staged.name, args=ocp.args.Composite(**arguments))
        # Orbax's notes for storage without renames; they name this machine's directories and nobody reads them here.
        for note in staged.rglob("commit_success.txt"):
            note.unlink()
        _layout.make_durable(staged)
        _layout.publish(staged, final)
    except BaseException:
        for left in final.parent.glob(f"{_escape_glob(staged.name)}*"):
            _layout.delete_tree(left)
        raise
    finally:
        for array in pending:
            array.close()


def _start_transfers(tree: Any) -> None:
    """Start copying all arrays to the host, so that they travel while the first one is waited for."""
    if isinstance(tree, Mapping):
        for item in tree.values():
            _start_transfers(item)
    elif isinstance(tree, list | tuple):
        for item in tree:
            _start_transfers(item)
    elif isinstance(tree, jax.Array) and not jnp.issubdtype(tree.dtype, jax.dtypes.prng_key):
        tree.copy_to_host_async()


def check_sum(array: np.ndarray) -> int:
    """Return the CRC-32 of an array's bytes in C order."""
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _escape_glob(name: str) -> str:
    return re.sub(r"([*?\[])", r"[\1]", name)
