"""torch tensors to numpy, bit for bit. Imported only once a torch tensor was met."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch

from ._leaves import Array, Path, format_path

# dtypes without a numpy counterpart: read their bits through an integer type of the same width
_THROUGH_BITS: dict[str, tuple[str, Any]] = {
    "torch.bfloat16": ("int16", ml_dtypes.bfloat16),
    "torch.float8_e4m3fn": ("uint8", ml_dtypes.float8_e4m3fn),
    "torch.float8_e5m2": ("uint8", ml_dtypes.float8_e5m2),
    "torch.float8_e4m3fnuz": ("uint8", ml_dtypes.float8_e4m3fnuz),
    "torch.float8_e5m2fnuz": ("uint8", ml_dtypes.float8_e5m2fnuz),
    "torch.float8_e8m0fnu": ("uint8", ml_dtypes.float8_e8m0fnu),
}


def tensor_to_numpy(tensor: Any, path: Path = ()) -> Array:
    """Give the values of a tensor as a numpy array that may share its memory.

    Args:
        tensor: A `torch.Tensor` or subclass, of any shape, strides and device; gradients are detached.
        path: Position of the tensor, for messages.

    Returns:
        An array of the same shape and bits; dtypes that numpy lacks come from `ml_dtypes`.

    Raises:
        TypeError: For sparse, nested, quantized and meta tensors and dtypes that JAX lacks.
    """
    if type(tensor) is torch.Tensor:
        # What torch cannot show it refuses, so the commonest tensor needs no look at its layout, device and flags: 10
        # us of a batch, whose code is cold after a hundred calls of the dataset.
        try:
            plain: Array = tensor.numpy()
        except (TypeError, RuntimeError):
            pass
        else:
            return plain
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.").replace("_", " ").strip()
        shape = "" if tensor.is_nested else f" of shape {tuple(tensor.shape)}"  # a nested one has no single shape
        raise TypeError(
            f"{format_path(path)} is a {kind} tensor{shape}, which JAX cannot hold. Call "
            f"{'.to_padded_tensor(0.0)' if tensor.is_nested else '.to_dense()'} in the dataset or its collate function."
        )
    if tensor.is_quantized:
        raise TypeError(
            f"{format_path(path)} is a quantized tensor ({tensor.dtype}), which JAX cannot hold. Call .dequantize() or "
            ".int_repr() in the dataset or its collate function."
        )
    if tensor.is_meta:
        raise TypeError(f"{format_path(path)} is a tensor on the meta device: it has a shape but no values.")
    tensor = tensor.detach()
    if type(tensor) is not torch.Tensor:
        tensor = tensor.as_subclass(torch.Tensor)
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    if tensor.is_conj():
        tensor = tensor.resolve_conj()
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    through = _THROUGH_BITS.get(str(tensor.dtype))
    if through is not None:
        bits, dtype = through
        array: Array = tensor.view(getattr(torch, bits)).numpy().view(dtype)
        return array
    try:
        result = tensor.numpy()
    except (TypeError, RuntimeError) as error:
        raise TypeError(
            f"{format_path(path)} is a tensor of dtype {tensor.dtype}, which has no counterpart in JAX. Convert it in "
            "the dataset or its collate function."
        ) from error
    return np.asarray(result)
