"""From training to serving: a module's `forward`, or any pure function, in the formats of other runtimes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxlightning.export._formats import FORMATS, write_safetensors
from jaxlightning.export._function import forward_of as forward_of
from jaxlightning.utilities.exceptions import MisconfigurationException

__all__ = ["export_function", "export_module", "forward_of"]


def export_module(
    module: Any,
    path: str | os.PathLike[str],
    *,
    format: str = "stablehlo",
    inputs: Any = None,
    batch: int | None = None,
) -> Path:
    """Writes a module for another runtime; `module.export` calls this.

    Args:
        module: The module, with weights.
        path: The file, or the directory of a SavedModel.
        format: `"stablehlo"`, `"saved_model"`, `"tflite"`, `"onnx"` or `"safetensors"` (weights alone).
        inputs: Example inputs of `forward`, whose shapes count; by default `module.example_input_array`.
        batch: A fixed size of axis 0; any size by default.

    Returns:
        The path.

    Raises:
        ValueError: For an unknown format.
        MisconfigurationException: If there is nothing to export, or no example input.
        ModuleNotFoundError: If a package is missing; the message says which.
    """
    check_format(format)
    if format == "safetensors":
        weights = module.state_dict()
        if not weights:
            raise MisconfigurationException(f"`{type(module).__name__}` has no weights yet: train it, or load some.")
        target = _ready(path)
        write_safetensors(weights, target)
        return target
    if inputs is None:
        inputs = module.example_input_array
    if inputs is None:
        raise MisconfigurationException(
            f"`export` needs to know the inputs of `{type(module).__name__}.forward`: pass `inputs=` an example, or "
            "set `self.example_input_array`."
        )
    return export_function(forward_of(module), inputs, path, format=format, batch=batch)


def export_function(
    function: Callable[..., Any],
    inputs: Any,
    path: str | os.PathLike[str],
    *,
    format: str = "stablehlo",
    batch: int | None = None,
) -> Path:
    """Writes a pure function with its constants for another runtime.

    Args:
        function: For example `lambda x: state.apply_fn({"params": state.params}, x)`.
        inputs: Example inputs: an array or a tuple of arrays, with the batch on axis 0.
        path: The file, or the directory of a SavedModel.
        format: As in `export_module`, but not `"safetensors"`.
        batch: A fixed size of axis 0; any size by default.

    Returns:
        The path.

    Raises:
        ValueError: For an unknown format.
        ModuleNotFoundError: If a package is missing; the message says which.
    """
    check_format(format)
    if format == "safetensors":
        raise ValueError(
            "`export_function` writes functions; safetensors holds weights: `safetensors.numpy.save_file`."
        )
    target = _ready(path)
    FORMATS[format](function, inputs, target, batch=batch)
    return target


def check_format(format: str) -> None:
    """Refuses a format that is not there.

    Raises:
        ValueError: With the list.
    """
    if format not in FORMATS:
        raise ValueError(f"`export(format={format!r})` is unknown. The formats are {list(FORMATS)}.")


def _ready(path: str | os.PathLike[str]) -> Path:
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    return target
