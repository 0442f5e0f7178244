"""Choose the adapter for an object by the module names of its class, without importing any framework."""

from __future__ import annotations

import importlib
import importlib.metadata
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from ._convert import from_library, module_names
from ._source import Source, SourceOptions, Vectorize, describe_object

Factory = Callable[[Any, SourceOptions], Source]

ENTRY_POINT_GROUP = "jaxlightning.adapters"

_PACKAGE = __name__.rpartition(".")[0]
# "module" matches classes of that module and its submodules; "module:Class" only that class and its subclasses.
_builtin: dict[str, str] = {
    "torch.utils.data.dataloader:DataLoader": "torch_loader:make_source",
    "torchdata.stateful_dataloader:StatefulDataLoader": "torch_loader:make_source",
    "tensorflow.python.data:DatasetV2": "tf_data:make_source",
    "grain": "grain_data:make_source",
    "datasets:Dataset": "hf_datasets:make_source",
    "datasets:IterableDataset": "hf_datasets:make_source",
    "lightning.pytorch.utilities.combined_loader:CombinedLoader": "lightning_objects:refuse_combined",
    "pytorch_lightning.utilities.combined_loader:CombinedLoader": "lightning_objects:refuse_combined",
}
_registered: dict[str, Factory] = {}
_entry_points_loaded = False


def register_adapter(key: str, factory: Factory) -> None:
    """Teach jaxlightning a new kind of loader.

    Adapters registered later, and those of users before built-in ones, win. Packages can do this without being imported
    by declaring an entry point in the group `jaxlightning.adapters` whose name is free and whose object is called with
    `register_adapter`.

    Args:
        key: `"package.module"` for classes of a module and its submodules, or `"package.module:Class"` for one class;
            subclasses are included.
        factory: Called with the object and the `SourceOptions`; returns a `Source`.
    """
    _registered.pop(key, None)
    _registered[key] = factory


def unregister_adapter(key: str) -> None:
    """Forget an adapter that `register_adapter` added."""
    _registered.pop(key, None)


def _matches(key: str, names: Iterable[tuple[str, str]]) -> bool:
    module, _, name = key.partition(":")
    for base_module, base_name in names:
        if name:
            # re-exported or moved classes keep their package and their name
            if base_name == name and (base_module == module or base_module.startswith(module + ".")):
                return True
        elif base_module == module or base_module.startswith(module + "."):
            return True
    return False


def _load_entry_points() -> None:
    global _entry_points_loaded
    if _entry_points_loaded:
        return
    _entry_points_loaded = True
    for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        try:
            entry.load()(register_adapter)
        except Exception as error:
            warnings.warn(
                f"The adapter entry point {entry.name!r} ({entry.value}) could not be loaded and is left out: "
                f"{type(error).__name__}: {error}",
                UserWarning,
                stacklevel=3,
            )


def find_factory(cls: type) -> Factory | None:
    """Find the adapter for a class.

    Args:
        cls: Class of the user's object.

    Returns:
        The factory, or None if only the adapter for any iterable fits.
    """
    _load_entry_points()
    names = module_names(cls)
    for key in reversed(_registered):
        if _matches(key, names):
            return _registered[key]
    for key, target in _builtin.items():
        if _matches(key, names):
            module, _, attribute = target.partition(":")
            factory: Factory = getattr(importlib.import_module(f"{_PACKAGE}.{module}"), attribute)
            return factory
    return None


def _is_array(value: Any) -> bool:
    cls = type(value)
    return (
        from_library(cls, "numpy", "ndarray", "generic")
        or from_library(cls, "jax")
        or from_library(cls, "jaxlib")
        or from_library(cls, "torch", "Tensor")
        or from_library(cls, "tensorflow", "Tensor")
    )


def _refuse_collections(value: Any) -> None:
    if _is_array(value):
        raise TypeError(
            f"Received an array ({type(value).__module__}.{type(value).__qualname__}) where a loader is expected. "
            "Use jaxlightning.ArrayLoader(array, batch_size=..., shuffle=...) to make batches of arrays."
        )
    if isinstance(value, (list, tuple, Mapping)):
        items = list(value.values()) if isinstance(value, Mapping) else list(value)
        kind = type(value).__name__
        if items and all(_is_array(item) for item in items):
            raise TypeError(
                f"Received a {kind} of {len(items)} arrays where a loader is expected. A {kind} is a collection of "
                "loaders. Use jaxlightning.ArrayLoader(*arrays, batch_size=..., shuffle=...) to make batches of arrays."
            )
        raise TypeError(
            f"Received a {kind} where one loader is expected. Collections of loaders are read by the Trainer, each "
            "element as one loader. For a list of ready batches pass an object with __iter__, or a function that "
            "returns iter(batches)."
        )


def as_source(
    obj: Any,
    *,
    channels_last: bool = False,
    vectorize: Vectorize = "auto",
    ragged: Literal["error", "pad"] = "error",
    record_indices: bool = False,
) -> Source:
    """Make a source of batches from any loader.

    Args:
        obj: A torch DataLoader, tf.data.Dataset, grain or Hugging Face dataset, `ArrayLoader`, or any other iterable of
            batches; a function without arguments that returns one (called for every pass); or a source.
        channels_last: Turn NCHW image leaves into NHWC: 4-d leaves of a floating dtype or uint8 whose axis 1 has length
            1, 3 or 4.
        vectorize: Fast path for torch loaders over in-memory datasets: "auto" where it is exact, True raises where it
            cannot be used, False never; "distribution" also replaces random crops and flips by ones that draw other
            numbers from the same distribution.
        ragged: Ragged and sparse TensorFlow tensors: "error", or "pad" with zeros (ragged only) plus lengths.
        record_indices: Keep the dataset indices of each batch for `last_batch_indices` (torch loaders and arrays).

    Returns:
        The source.

    Raises:
        TypeError: If the object is no loader.
    """
    options = SourceOptions(
        channels_last=channels_last, vectorize=vectorize, ragged=ragged, record_indices=record_indices
    )
    if isinstance(obj, Source):
        return obj.with_options(options)
    factory = find_factory(type(obj))
    if factory is not None:
        return factory(obj, options)
    _refuse_collections(obj)
    from .iterables import make_source

    return make_source(obj, options)


__all__ = ["Factory", "as_source", "describe_object", "find_factory", "register_adapter", "unregister_adapter"]
