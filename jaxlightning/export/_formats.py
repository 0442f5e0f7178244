"""One function for every format; what each needs is imported where it is used."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxlightning.export._function import input_shapes
from jaxlightning.utilities.exceptions import MisconfigurationException

__all__ = ["FORMATS", "write_onnx", "write_safetensors", "write_saved_model", "write_stablehlo", "write_tflite"]

PLATFORMS = ("cpu", "cuda", "tpu")


def need(package: str, what: str, extra: str = "export") -> Any:
    """Imports a package, or says how to get it.

    Raises:
        ModuleNotFoundError: With the way to install it.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ModuleNotFoundError(
            f"`export(format={what!r})` needs `{package.partition('.')[0]}`, which cannot be imported here ({error}): "
            f"`pip install 'jaxlightning[{extra}]'`."
        ) from error


def write_stablehlo(function: Callable[..., Any], inputs: Any, path: Path, *, batch: int | None) -> None:
    """StableHLO as `jax.export` serialises it, for CPU, CUDA and TPU.

    Any JAX within its compatibility window reads it back, without this library:
    `jax.export.deserialize(open(path, "rb").read()).call(x)`.
    """
    from jax import export

    exported = _traced(
        lambda: export.export(jax.jit(function), platforms=PLATFORMS)(*input_shapes(inputs, batch)), batch
    )
    path.write_bytes(exported.serialize())


def write_saved_model(function: Callable[..., Any], inputs: Any, path: Path, *, batch: int | None) -> None:
    """A TensorFlow SavedModel with the signature `serving_default`; `tf.saved_model.load(path).f(x)` runs it."""
    tf = need("tensorflow", "saved_model", "tf")
    module = tf.Module()
    module.f = _tensorflow_function(tf, function, inputs, batch, "saved_model")
    _remove(path)
    tf.saved_model.save(module, os.fspath(path), signatures={"serving_default": module.f})


def write_tflite(function: Callable[..., Any], inputs: Any, path: Path, *, batch: int | None) -> None:
    """A flat buffer for LiteRT (TFLite); its batch can be resized unless it was fixed."""
    tf = need("tensorflow", "tflite", "tf")
    concrete = _tensorflow_function(tf, function, inputs, batch, "tflite").get_concrete_function()
    converter = tf.lite.TFLiteConverter.from_concrete_functions([concrete], tf.Module())
    try:
        path.write_bytes(converter.convert())
    except Exception as error:
        error.add_note(
            "LiteRT has no operation for a part of `forward`. What it has is listed at "
            "https://ai.google.dev/edge/litert; keep such parts (sorting, random numbers, ...) outside."
        )
        raise


def write_onnx(function: Callable[..., Any], inputs: Any, path: Path, *, batch: int | None) -> None:
    """An ONNX graph, made by jax2onnx; inputs are `x0`, `x1`, ... unless `forward` names them."""
    converter = need("jax2onnx", "onnx", "onnx")
    shapes = jax.tree.leaves(input_shapes(inputs, 1))
    given = [("B" if batch is None else batch, *shape.shape[1:]) for shape in shapes]
    specs = [
        jax.ShapeDtypeStruct(size, shape.dtype) if batch is not None else size  # type: ignore[no-untyped-call]
        for size, shape in zip(given, shapes, strict=True)
    ]
    if batch is None and any(shape.dtype != np.float32 for shape in shapes):
        raise MisconfigurationException(
            "`export(format='onnx')` makes a variable batch for float32 inputs only. Give `batch=` a number, or cast "
            "inside `forward`."
        )
    try:
        model = converter.to_onnx(function, specs)
    except Exception as error:
        error.add_note(
            "jax2onnx could not translate a part of `forward`. It puts functions of its own in the place of Flax's "
            "while it traces, and some of these want their options by name: `nn.avg_pool(x, window_shape=(2, 2))`."
        )
        raise
    path.write_bytes(model.SerializeToString())


def write_safetensors(weights: Mapping[str, Any], path: Path) -> None:
    """The weights alone, by dotted name, as Hugging Face's format without code in it."""
    files = need("safetensors.numpy", "safetensors")
    files.save_file({name: np.ascontiguousarray(value) for name, value in weights.items()}, os.fspath(path))


def _tensorflow_function(tf: Any, function: Callable[..., Any], inputs: Any, batch: int | None, what: str) -> Any:
    try:
        from jax.experimental import jax2tf
    except ImportError as error:
        raise ModuleNotFoundError(
            f"`export(format={what!r})` needs `jax.experimental.jax2tf`, which this JAX {jax.__version__} does not "
            "have: export StableHLO or ONNX."
        ) from error
    given = inputs if isinstance(inputs, tuple) else (inputs,)
    if any(not hasattr(each, "shape") for each in given):
        raise MisconfigurationException(f"`export(format={what!r})` takes arrays as inputs, no nested ones.")
    shapes = input_shapes(inputs, 1)
    specs = [
        tf.TensorSpec((batch, *shape.shape[1:]), tf.dtypes.as_dtype(shape.dtype), name=f"x{i}")
        for i, shape in enumerate(shapes)
    ]
    polymorphic = ["(batch, ...)"] * len(specs) if batch is None else None
    converted = jax2tf.convert(function, polymorphic_shapes=polymorphic, with_gradient=False)
    return tf.function(converted, autograph=False, input_signature=specs)


def _traced(call: Callable[[], Any], batch: int | None) -> Any:
    try:
        return call()
    except Exception as error:
        if batch is None:
            error.add_note(
                "`export` traced `forward` with a batch of any size. Where a shape depends on the batch in a way that "
                "JAX cannot follow, give `batch=` a number."
            )
        raise


def _remove(path: Path) -> None:
    if path.is_dir():
        if not (path / "saved_model.pb").exists() and any(path.iterdir()):
            raise FileExistsError(f"{path} exists and is no SavedModel, so it is not replaced.")
        shutil.rmtree(path)


FORMATS: dict[str, Callable[..., None]] = {
    "stablehlo": write_stablehlo,
    "saved_model": write_saved_model,
    "tflite": write_tflite,
    "onnx": write_onnx,
    "safetensors": write_safetensors,
}
