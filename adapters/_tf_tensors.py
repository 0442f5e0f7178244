"""TensorFlow values to numpy. Imported only once a TensorFlow object was met."""

from __future__ import annotations

from typing import Any

from ._leaves import Path, format_path


def tensor_to_numpy(value: Any, path: Path = ()) -> Any:
    """Give the value of an eager tensor as a fresh numpy array, or bytes for a scalar string.

    Args:
        value: A `tf.Tensor` or `tf.Variable`; string tensors give object arrays of bytes.
        path: Position of the tensor, for messages.

    Returns:
        A copy: TensorFlow hands out views of its own buffers otherwise.

    Raises:
        TypeError: For ragged, sparse and symbolic tensors and other TensorFlow objects.
    """
    name = type(value).__qualname__
    if name == "RaggedTensor":
        raise TypeError(
            f"{format_path(path)} is a tf.RaggedTensor, which JAX cannot hold. Call .to_tensor() in the pipeline and "
            "return .row_lengths() beside it, or use as_source(dataset, ragged='pad')."
        )
    if name == "SparseTensor":
        raise TypeError(
            f"{format_path(path)} is a tf.SparseTensor, which JAX cannot hold. Call tf.sparse.to_dense(...) in the "
            "pipeline."
        )
    if not callable(getattr(value, "numpy", None)):
        raise TypeError(
            f"{format_path(path)} is a TensorFlow {name}, which has no numpy form. Return tensors from the pipeline."
        )
    return value.numpy()  # copies
