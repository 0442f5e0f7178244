"""tf.data pipelines (TFDS included): element_spec is checked before anything is read."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, Self

from ._leaves import Attribute, Path, format_path
from ._source import BatchIterator, Source, SourceOptions

_ACCELERATORS = ("GPU", "TPU")


def hide_tensorflow_accelerators() -> tuple[str, ...]:
    """Keep TensorFlow off GPUs and TPUs, whose memory belongs to JAX.

    Call this before the first TensorFlow op; sources do it too, but a dataset has often run ops when they see it.

    Returns:
        Kinds of devices that TensorFlow had already taken, so that they could not be hidden.
    """
    import tensorflow as tf

    too_late = []
    for kind in _ACCELERATORS:
        if not tf.config.list_physical_devices(kind) or not tf.config.get_visible_devices(kind):
            continue
        try:
            tf.config.set_visible_devices([], kind)
        except RuntimeError:  # TensorFlow's runtime is already up
            too_late.append(kind)
    return tuple(too_late)


class TFDataSource(Source):
    """Read a tf.data.Dataset; each element is a batch."""

    resumes_by = "by reading on (tf.data's skip)"

    def __init__(self, origin: Any, options: SourceOptions | None = None) -> None:
        super().__init__(origin, options)
        too_late = hide_tensorflow_accelerators()
        if too_late:
            warnings.warn(
                f"TensorFlow had already taken the {' and '.join(too_late)} when this dataset reached jaxlightning, "
                "and reserves memory there that JAX needs. Call jaxlightning.adapters.hide_tensorflow_accelerators(), "
                "or tf.config.set_visible_devices([], 'GPU'), right after importing TensorFlow.",
                UserWarning,
                stacklevel=4,
            )
        self._check(origin.element_spec, ())
        self._hint_unbatched()
        self._length: int | None = _cardinality(origin)
        self._passes = 0  # iterators made so far: each one moves the seed of a reshuffling `shuffle` on
        self._passes_before = 0  # those that the run before a resume had made

    @property
    def length(self) -> int | None:
        """The dataset's cardinality, or None if it is infinite or unknown."""
        return self._length

    @property
    def batch_size(self) -> int | None:
        """First axis of the first leaf, if the pipeline fixes it."""
        for _, spec in _leaves_of(self.origin.element_spec, ()):
            shape = getattr(spec, "shape", None)
            if shape is not None and shape.rank:
                size = shape[0]
                return int(size) if size is not None else None
        return None

    def _check(self, spec: Any, path: Path) -> None:
        for where, leaf in _leaves_of(spec, path):
            kind = type(leaf).__name__
            if kind == "RaggedTensorSpec":
                if self.options.ragged == "pad" and leaf.ragged_rank == 1:
                    continue
                reason = "has more than one ragged dimension" if self.options.ragged == "pad" else "is a ragged tensor"
                raise TypeError(
                    f"{format_path(where)} of the tf.data pipeline {reason} (shape {leaf.shape}), which JAX cannot "
                    "hold. Pad it in the pipeline, for example with padded_batch or .map(lambda r: r.to_tensor()), or "
                    "use as_source(dataset, ragged='pad'), which gives {'values': padded, 'lengths': lengths}."
                )
            if kind == "SparseTensorSpec":
                raise TypeError(
                    f"{format_path(where)} of the tf.data pipeline is a sparse tensor (shape {leaf.shape}), which JAX "
                    "cannot hold. Add .map(...) with tf.sparse.to_dense to the pipeline."
                )
            if kind not in ("TensorSpec", "NoneTensorSpec", "NoneType"):
                raise TypeError(
                    f"{format_path(where)} of the tf.data pipeline is a {kind}, which has no numpy form. Return "
                    "tensors from the pipeline."
                )
            dtype = getattr(leaf, "dtype", None)
            if dtype is not None and (dtype.is_quantized or dtype.name in ("resource", "variant")):
                raise TypeError(
                    f"{format_path(where)} of the tf.data pipeline has dtype {dtype.name}, which JAX lacks. Convert it "
                    "in the pipeline."
                )

    def _hint_unbatched(self) -> None:
        scalars = []
        for where, leaf in _leaves_of(self.origin.element_spec, ()):
            shape = getattr(leaf, "shape", None)
            if shape is None or shape.rank is None:
                return
            if shape.rank and shape[0] is None:
                return  # a free first axis: the pipeline makes batches
            if shape.rank == 0:
                scalars.append(format_path(where))
        if scalars:
            self._warn(
                f"The tf.data pipeline looks unbatched: {', '.join(scalars[:3])} has no axis, so every element is one "
                "sample and every sample becomes a step. Add .batch(batch_size) at its end."
            )

    def _open(self, skip: int) -> BatchIterator:
        while self._passes < self._passes_before:
            iter(self.origin)  # not read: making it is what counts
            self._passes += 1
        self._passes += 1
        dataset = self.origin.skip(skip) if skip else self.origin
        raw: Iterator[Any] = iter(dataset)
        if self.options.ragged == "pad":
            raw = map(_pad_ragged, raw)
        return BatchIterator(self, raw, self._converter())

    def state_dict(self) -> dict[str, Any]:
        """Position, and the number of earlier passes."""
        before = max(self._passes, self._passes_before) - int(self._iterator is not None)
        return {**super().state_dict(), "passes": before}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position, in the order of that pass."""
        super().load_state_dict(state)
        self._passes_before = int(state.get("passes", 0))

    def _copy(self) -> Self:
        new = super()._copy()
        new._passes = new._passes_before = 0
        return new


def _pad_ragged(value: Any) -> Any:
    if type(value).__name__ == "RaggedTensor":
        return {"values": value.to_tensor(), "lengths": value.row_lengths()}
    if isinstance(value, dict):
        return type(value)((key, _pad_ragged(item)) for key, item in value.items())
    if isinstance(value, tuple):
        items = [_pad_ragged(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def _leaves_of(spec: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(spec, dict):
        for key, item in spec.items():
            yield from _leaves_of(item, (*path, key))
    elif isinstance(spec, tuple) and hasattr(spec, "_fields"):
        for name, item in zip(spec._fields, spec, strict=True):
            yield from _leaves_of(item, (*path, Attribute(name)))
    elif isinstance(spec, (tuple, list)):
        for index, item in enumerate(spec):
            yield from _leaves_of(item, (*path, index))
    elif hasattr(type(spec), "__attrs_attrs__"):
        for attribute in type(spec).__attrs_attrs__:
            yield from _leaves_of(getattr(spec, attribute.name), (*path, Attribute(attribute.name)))
    else:
        yield path, spec


def _cardinality(dataset: Any) -> int | None:
    size = int(dataset.cardinality().numpy())
    return size if size >= 0 else None  # -1 is infinite, -2 unknown


def make_source(obj: Any, options: SourceOptions) -> Source:
    """Make a source from a tf.data.Dataset.

    Args:
        obj: The dataset.
        options: How to read it.

    Returns:
        The source.

    Raises:
        TypeError: If its element_spec has something that JAX cannot hold.
    """
    return TFDataSource(obj, options)
