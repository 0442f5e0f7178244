"""Read one checkpoint directory, of which nothing is believed: see `_io` for what should be there."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from jaxlightning.checkpoint import _layout, _remote
from jaxlightning.checkpoint._errors import CheckpointError
from jaxlightning.checkpoint._io import EXTRAS, FORMAT, FORMAT_VERSION, TREES, check_sum
from jaxlightning.checkpoint._migrate import migrate
from jaxlightning.checkpoint._relative import RelativePaths
from jaxlightning.utilities.serialization import decode, dtype_or_none

_ITEM_NAME = re.compile(r"^[a-z][a-z_]{0,40}$")


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
            if check_sum(array) != entry.get("crc32"):
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


def _without_jax(encoded: Any) -> Any:
    """Drop the marks that would put arrays on a device: trees are read to the host, the engine places them."""
    if isinstance(encoded, list):
        return [_without_jax(item) for item in encoded]
    if isinstance(encoded, dict):
        return {key: _without_jax(item) for key, item in encoded.items() if not (key == "jax" and item is True)}
    return encoded


def _check_memory(path: Path | str, nbytes: int) -> None:
    try:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return
    if nbytes > available:
        raise CheckpointError(
            f"The checkpoint {path} says that its arrays need {nbytes} bytes, more than this machine's {available}."
        )
