"""What `detect_anomaly` says and keeps when a number is not finite: the leaf, the step, and the batch.

The compiled step only tells that something went wrong, and with which loss or gradient. Where it came from is looked
for here, on the host, once: a parameter that was not finite before, then a leaf of the batch, then the loss or
gradient.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np

__all__ = ["culprit", "load_batch", "raise_anomaly", "save_batch"]


def raise_anomaly(
    name: str, batch: Any, micro_step: int, where: str, module: Any, *, params: Any = None, variables: Any = None
) -> NoReturn:
    """Saves the batch and raises.

    Args:
        name: What the step found to be not finite first: a loss or a gradient.
        batch: The batch.
        micro_step: Its number over the run, from 0.
        where: Whose step it was.
        module: The module; its trainer knows where files go.
        params: The parameters before this batch.
        variables: The other variables before this batch.

    Raises:
        RuntimeError: Always.
    """
    found = culprit(params, variables, batch) or name
    after = "" if found == name else f", and {name} with it"
    saved = _save_beside(module, batch, micro_step)
    raise RuntimeError(
        f"`detect_anomaly=True`: {found} is not finite in training batch {micro_step} (counted over the run, from 0) "
        f"of {where}{after}. The parameters are those before this batch.{saved}"
    )


def culprit(params: Any, variables: Any, batch: Any) -> str | None:
    """The first leaf that was not finite before the step ran, None if all were.

    Args:
        params: Nested parameters.
        variables: Nested other variables.
        batch: The batch.

    Returns:
        A phrase such as ``"the parameter net/Dense_0/kernel"``.
    """
    for word, tree in (("the parameter", params), ("the variable", variables), ("the batch leaf", batch)):
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            if not _is_finite(leaf):
                place = jax.tree_util.keystr(path, simple=True, separator="/") or "(the batch itself)"
                return f"{word} {place}"
    return None


def _is_finite(leaf: Any) -> bool:
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic | float):
        return True
    dtype = getattr(leaf, "dtype", np.dtype(float))
    if not jax.numpy.issubdtype(dtype, np.inexact):
        return True
    return bool(np.isfinite(np.asarray(leaf, np.complex64 if dtype.kind == "c" else np.float64)).all())


def _save_beside(module: Any, batch: Any, micro_step: int) -> str:
    trainer = vars(module).get("_trainer")
    if trainer is None or not trainer.is_global_zero:
        return ""
    path = Path(trainer.log_dir or trainer.default_root_dir) / "anomaly" / f"batch_{micro_step}.npz"
    save_batch(path, batch)
    return f" The batch is in {path}: `jaxlightning.utilities.load_batch(path)` reads it."


def save_batch(path: str | os.PathLike[str], batch: Any) -> None:
    """Writes a batch to an `.npz` file, without pickle.

    Args:
        path: The file; its folder is made.
        batch: Nested tuples, lists and dictionaries of arrays, numbers and strings. Other containers become
            dictionaries by path, other leaves their text.
    """
    arrays: dict[str, Any] = {}

    def describe(value: Any) -> Any:
        if isinstance(value, tuple) and not hasattr(value, "_fields"):
            return {"tuple": [describe(item) for item in value]}
        if isinstance(value, list):
            return {"list": [describe(item) for item in value]}
        if isinstance(value, Mapping):
            return {"dict": [[str(key), describe(item)] for key, item in value.items()]}
        if isinstance(value, jax.Array | np.ndarray | np.generic) and np.asarray(value).dtype.kind not in "OV":
            name = f"leaf_{len(arrays)}"
            arrays[name] = np.asarray(value)
            return {"array": name}
        if value is None or isinstance(value, bool | int | float | str):
            return {"value": value}
        inner = jax.tree_util.tree_flatten_with_path(value)[0]
        if len(inner) == 1 and not inner[0][0]:
            if hasattr(value, "dtype"):  # a dtype that numpy's format does not know, such as bfloat16
                return describe(np.asarray(value, np.float32))
            return {"value": str(value)}
        return describe({jax.tree_util.keystr(p, simple=True, separator="/"): leaf for p, leaf in inner})

    structure = json.dumps(describe(batch))
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        np.savez(file, structure=np.array(structure), **arrays)


def load_batch(path: str | os.PathLike[str]) -> Any:
    """Reads a batch that `detect_anomaly` saved.

    Args:
        path: The file.

    Returns:
        The batch, of NumPy arrays.
    """
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}

    def build(node: Mapping[str, Any]) -> Any:
        ((kind, content),) = node.items()
        if kind == "array":
            return arrays[content]
        if kind == "dict":
            return {key: build(item) for key, item in content}
        if kind in ("tuple", "list"):
            items = [build(item) for item in content]
            return tuple(items) if kind == "tuple" else items
        return content

    return build(json.loads(str(arrays.pop("structure"))))
