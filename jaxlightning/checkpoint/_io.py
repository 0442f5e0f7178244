"""Write and read one checkpoint directory: an Orbax composite with one commit.

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
from jaxlightning.checkpoint._errors import CheckpointError
from jaxlightning.checkpoint._migrate import migrate
from jaxlightning.checkpoint._numpy_handler import Pending, lend, registry
from jaxlightning.checkpoint._relative import RelativePaths
from jaxlightning.utilities.host_memory import fresh_copy
from jaxlightning.utilities.serialization import OnUnwritable, decode, dtype_or_none, encode

FORMAT = "jaxlightning-checkpoint"
FORMAT_VERSION = 1

#: The items that may exist, in the order in which they are written.
TREES = ("params", "variables", "optimizer_states", "gradients")
#: Arrays that stand anywhere else (callback states, what hooks added).
EXTRAS = "extras"
#: States of random generators (2.5 to 5 kB) stay in the JSON.
_INLINE_BYTES = 8192
_ITEM_NAME = re.compile(r"^[a-z][a-z_]{0,40}$")


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
            entry["crc32"] = _crc32(array)

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
    pending: list[Pending] = [leaf for tree in trees.values() for leaf in jax.tree.leaves(tree)]
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


class StoredCheckpoint:
    """A checkpoint on disk, opened for reading; arrays are read item by item, when they are asked for.

    Args:
        path: The directory, or a link to it.

    Raises:
        FileNotFoundError: There is nothing.
        CheckpointError: It is not a whole checkpoint of a known format.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        remote = _layout.is_remote(path)
        self.path: Path | str = os.fspath(path) if remote else Path(path)
        local = _remote.fetch_for(self, path) if remote else Path(path)
        _layout.verify(local)
        self._root = local.resolve()
        self.metadata: dict[str, Any] = dict(_layout.read_metadata(self._root))
        self._check_header()
        self._loaded: dict[str, list[np.ndarray]] = {}

    def _check_header(self) -> None:
        if self.metadata.get("format") != FORMAT:
            raise CheckpointError(
                f"{self.path} was not written by jaxlightning (format {self.metadata.get('format')!r})."
            )
        version = self.metadata.get("format_version")
        if not isinstance(version, int) or isinstance(version, bool) or not 1 <= version <= FORMAT_VERSION:
            raise CheckpointError(
                f"{self.path} has the format version {version!r}; this version of jaxlightning reads versions 1 to "
                f"{FORMAT_VERSION}. Install the version that wrote it: {self.metadata.get('jaxlightning_version')!r}."
            )
        self.metadata = migrate(self.metadata, to=FORMAT_VERSION)
        items, body = self.metadata.get("items"), self.metadata.get("checkpoint")
        if not isinstance(items, dict) or not isinstance(body, dict):
            raise CheckpointError(f"The metadata of {self.path} lacks 'items' or 'checkpoint'.")
        for name, item in items.items():
            if not _ITEM_NAME.match(name) or name not in (*TREES, EXTRAS):
                raise CheckpointError(f"The metadata of {self.path} names an unknown item {name!r}.")
            if not isinstance(item, dict) or not isinstance(item.get("arrays"), list):
                raise CheckpointError(f"The metadata of {self.path} describes the item {name!r} wrongly.")

    def has(self, name: str) -> bool:
        """Say whether a tree was saved."""
        return name in self.metadata["items"]

    def tree(self, name: str) -> Any:
        """Read one tree, as numpy arrays.

        Args:
            name: One of `TREES`.

        Returns:
            The tree, or None when it was not saved.

        Raises:
            CheckpointError: It is damaged.
        """
        if not self.has(name):
            return None
        try:
            return decode(_without_jax(self.metadata["items"][name]["tree"]), fetch=self._fetcher(name))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"The item {name!r} of {self.path} is damaged: {error}") from error

    def body(self) -> dict[str, Any]:
        """Read everything that is not a tree: Lightning's keys.

        Raises:
            CheckpointError: It is damaged.
        """
        paths = RelativePaths(self.path if _layout.is_remote(self.path) else self._root)
        values: dict[str, Any] = {}
        for key, encoded in self.metadata["checkpoint"].items():
            try:
                values[key] = decode(encoded, fetch=self._fetcher(EXTRAS), resolve_text=paths.resolve)
            except (ValueError, RecursionError) as error:
                raise CheckpointError(f"The entry {key!r} of {self.path} is damaged: {error}") from error
        return values

    def read_all(self) -> None:
        """Read every array and compare its check sum; what is read here is not read again.

        Raises:
            CheckpointError: It is damaged.
        """
        self.body()
        for name in self.metadata["items"]:
            if name != EXTRAS:
                self.tree(name)

    def _fetcher(self, item: str) -> Any:
        def fetch(name: str) -> np.ndarray:
            if not self.has(item):
                raise CheckpointError(
                    f"The metadata of {self.path} refers to the item {item!r}, which it does not have."
                )
            if item not in self._loaded:
                self._loaded[item] = self._read_arrays(item)
            arrays = self._loaded[item]
            if not (isinstance(name, str) and name.isdigit() and int(name) < len(arrays)):
                raise CheckpointError(f"The item {item!r} of {self.path} has no array {name!r}.")
            return arrays[int(name)]

        return fetch

    def _read_arrays(self, item: str) -> list[np.ndarray]:
        described = [self._described(item, entry) for entry in self.metadata["items"][item]["arrays"]]
        _check_memory(self.path, sum(n for *_, n in described))
        if not described:
            return []
        tree = self._restore(item, [path for path, *_ in described])
        arrays: list[np.ndarray] = []
        for (path, dtype, shape, _), entry in zip(described, self.metadata["items"][item]["arrays"], strict=True):
            value: Any = tree
            for key in path:
                value = value[key]
            array = np.asarray(value)
            name = f"{item}/{'/'.join(path)}"
            if array.dtype != dtype or array.shape != shape:
                raise CheckpointError(
                    f"The array {name} of {self.path} is {array.dtype.name}{list(array.shape)}, but "
                    f"{dtype.name}{list(shape)} was saved. The checkpoint is damaged."
                )
            if _crc32(array) != entry.get("crc32"):
                raise CheckpointError(f"The array {name} of {self.path} is damaged: its check sum does not fit.")
            arrays.append(array)
        return arrays

    def _described(self, item: str, entry: Any) -> tuple[tuple[str, ...], np.dtype[Any], tuple[int, ...], int]:
        try:
            path, shape = tuple(entry["path"]), tuple(entry["shape"])
            dtype = dtype_or_none(entry["dtype"])
            whole = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in shape)
            if dtype is None or not whole or not path or not all(isinstance(key, str) for key in path):
                raise ValueError(entry)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"The metadata of {self.path} describes an array of {item!r} wrongly.") from error
        count = 1
        for n in shape:
            count *= n
        return path, dtype, shape, count * dtype.itemsize

    def _restore(self, item: str, wanted: list[tuple[str, ...]]) -> Any:
        import orbax.checkpoint as ocp

        directory = self._root / item
        if not directory.is_dir():
            raise CheckpointError(f"The checkpoint {self.path} is incomplete: the item {item!r} is missing.")
        arguments: dict[str, Any] = {}
        for path in wanted:
            node = arguments
            for key in path[:-1]:
                node = node.setdefault(key, {})
                if not isinstance(node, dict):
                    raise CheckpointError(f"The metadata of {self.path} places two arrays of {item!r} at one path.")
            node[path[-1]] = ocp.RestoreArgs(restore_type=np.ndarray)
        try:
            with (
                _layout.plainly_named(directory) as plain,
                ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer,
            ):
                return checkpointer.restore(plain, args=ocp.args.PyTreeRestore(restore_args=arguments))
        except Exception as error:  # Orbax and tensorstore raise many kinds
            raise CheckpointError(f"The item {item!r} of {self.path} cannot be read: {error}") from error


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


def _without_jax(encoded: Any) -> Any:
    """Drop the marks that would put arrays on a device: trees are read to the host, the engine places them."""
    if isinstance(encoded, list):
        return [_without_jax(item) for item in encoded]
    if isinstance(encoded, dict):
        return {key: _without_jax(item) for key, item in encoded.items() if not (key == "jax" and item is True)}
    return encoded


def _crc32(array: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _check_memory(path: Path | str, nbytes: int) -> None:
    try:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return
    if nbytes > available:
        raise CheckpointError(
            f"The checkpoint {path} says that its arrays need {nbytes} bytes, more than this machine's {available}."
        )


def _escape_glob(name: str) -> str:
    return re.sub(r"([*?\[])", r"[\1]", name)
