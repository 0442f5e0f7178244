"""Start a module from some weights of another run, or of a plain Orbax tree."""

from __future__ import annotations

import fnmatch
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxlightning.checkpoint import _contents, _layout, _remote, _stored
from jaxlightning.checkpoint._errors import CheckpointError, NotACheckpointError

Include = str | Sequence[str] | Callable[[str], bool]
Rename = Mapping[str, str] | Callable[[str], str]


def load_weights(
    module: Any, path: str | os.PathLike[str], *, include: Include | None = None, rename: Rename | None = None
) -> list[str]:
    """Set some parameters and variables of a module from a checkpoint or from a plain Orbax tree.

    Args:
        module: The module, with or without variables. What a network lacks is created by its first call, as usual.
        path: A checkpoint, or a directory that `orbax.checkpoint.PyTreeCheckpointer` wrote.
        include: Which weights, by their names in the file (`"encoder.*"`, several patterns, or a function); all by
            default.
        rename: New beginnings of names (`{"encoder": "backbone.encoder"}`; the longest one that fits counts, and
            `""` fits every name), or a function from name to name.

    Returns:
        The names in the module that were set.

    Raises:
        FileNotFoundError: There is nothing at the path.
        ValueError: Nothing was chosen, two weights get one name, or the module has no place for one.
        RuntimeError: A shape differs.

    Example:
        ```python
        load_weights(classifier, "pretrained.ckpt", include="encoder.*", rename={"encoder": "backbone"})
        ```
    """
    flat, places = _read(path)
    chosen: dict[str, Any] = {}
    new_places: dict[str, _contents.Place] = {}
    for name, value in flat.items():
        if not _is_included(name, include):
            continue
        target = _renamed(name, rename)
        if target in chosen:
            raise ValueError(f"Two weights of {os.fspath(path)} would both be called {target!r}.")
        chosen[target] = value
        if target == name:
            new_places[target] = places[name]
    if not chosen:
        raise ValueError(
            f"include={include!r} chooses none of the weights in {os.fspath(path)}. They are: {sorted(flat)[:20]}"
        )
    engine = module._require_engine()
    here = engine.state_dict()
    own = _contents.state_dict_places(here["params"], here["variables"])
    networks = [network.name for network in engine.networks()]
    created = {place[1][0] for place, _ in own.values()}
    unknown = [
        name
        for name in chosen
        if name not in own and not any(name.startswith(f"{n}.") for n in networks if n not in created)
    ]
    if unknown:
        raise ValueError(
            f"{type(module).__name__} has no place for {unknown[:20]}. Its networks are {networks}"
            + (f" and its weights {sorted(own)[:20]}" if own else "")
            + ". Choose others with include=..., or give them the module's names with rename={...}."
        )
    new_places.update({name: place for name, (place, _) in own.items()})
    params, variables = _contents.nested_state(chosen, new_places, networks)
    engine.load_state_dict({"params": params, "variables": variables}, strict=False, weights_only=True)
    return sorted(chosen)


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, _contents.Place]]:
    try:
        stored = _stored.StoredCheckpoint(path)
        params, variables = stored.tree("params") or {}, stored.tree("variables") or {}
    except NotACheckpointError:
        params, variables = _read_plain(path), {}
    places = _contents.state_dict_places(params, variables)
    return {name: value for name, (_, value) in places.items()}, {name: place for name, (place, _) in places.items()}


def _read_plain(given: str | os.PathLike[str]) -> dict[str, Any]:
    import orbax.checkpoint as ocp

    if _layout.is_remote(given):
        local = _remote.fetch(given)
        try:
            return _read_plain(local)
        finally:
            shutil.rmtree(local.parent, ignore_errors=True)
    path = Path(given)
    if not path.is_dir():
        _layout.verify(path)
    try:
        with (
            _layout.plainly_named(path.resolve()) as plain,
            ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer,
        ):
            tree = checkpointer.restore(plain)
    except Exception as error:  # Orbax raises many kinds
        raise CheckpointError(f"{path} is neither a checkpoint of jaxlightning nor an Orbax tree: {error}") from error
    if not isinstance(tree, Mapping):
        raise CheckpointError(f"The Orbax tree {path} is a {type(tree).__name__}, not a dict of weights.")
    return {str(key): _as_numpy(value) for key, value in tree.items()}


def _as_numpy(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {str(key): _as_numpy(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return {str(i): _as_numpy(value) for i, value in enumerate(tree)}
    return np.asarray(tree)


def _is_included(name: str, include: Include | None) -> bool:
    if include is None:
        return True
    if callable(include):
        return bool(include(name))
    patterns = [include] if isinstance(include, str) else list(include)
    return any(fnmatch.fnmatchcase(name, p) or name.startswith(f"{p}.") for p in patterns)


def _renamed(name: str, rename: Rename | None) -> str:
    if rename is None:
        return name
    if callable(rename):
        return rename(name)
    for old in sorted(rename, key=len, reverse=True):
        if old in ("", name) or name.startswith(f"{old}."):
            rest = name if old == "" else name[len(old) + 1 :]
            return ".".join(part for part in (rename[old], rest) if part)
    return name
