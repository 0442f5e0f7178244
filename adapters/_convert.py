"""Walk a foreign batch and give the same structure with numpy leaves."""

from __future__ import annotations

import collections
import dataclasses
import enum
import numbers
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from . import _containers, _leaves
from ._leaves import Attribute, Path, format_path

# Containers of other libraries that hide their tensors from JAX and have a plain form.
_WAY_OUT = {
    ("tensordict", "TensorDictBase"): "Call batch.to_dict() in the loader's collate_fn.",
    ("torch_geometric", "BaseData"): "Return batch.to_dict() from a wrapper of the loader.",
    ("torch.nn.utils.rnn", "PackedSequence"): "Return padded tensors and their lengths from the collate_fn instead.",
}

# Those of most batches; NumPy has one object for each.
_FLOATS, _INTEGERS, _NARROW_INTEGERS = np.dtype(np.float32), np.dtype(np.int64), np.dtype(np.int32)


def module_names(cls: type) -> list[tuple[str, str]]:
    """List (module, class name) of a class and its bases, by which foreign types are recognised."""
    return [(base.__module__ or "", base.__qualname__) for base in cls.__mro__]


def from_library(cls: type, library: str, *names: str) -> bool:
    """Tell whether a class is, or derives from, one of the named classes of a library, without importing it."""
    for module, name in module_names(cls):
        if (module == library or module.startswith(library + ".")) and (not names or name in names):
            return True
    return False


class Converter:
    """Turn batches into pytrees with numpy leaves; everything else stays in place as a host leaf.

    Attributes:
        copy: Whether buffers may be overwritten by their owner later, so that leaves are copied.
        channels_last: Whether NCHW image leaves become NHWC (see `to_channels_last`).
    """

    def __init__(self, *, copy: bool = True, channels_last: bool = False) -> None:
        self.copy = copy
        self.channels_last = channels_last
        self._rules: dict[type, Callable[[Any, Path], Any]] = {
            type(None): _same,
            str: _same,
            bytes: _same,
            dict: self._dict,
            list: self._list,
            tuple: self._tuple,
            np.ndarray: self._array,
            bool: self._scalar,
            int: self._scalar,
            float: self._scalar,
            complex: self._scalar,
        }
        self._tensor_to_numpy: Callable[[Any, Path], Any] = _same
        self._tensor: Any = None  # torch's, once one was met and if tensors go on as they are
        self._x64 = False
        self._kept = _leaves.kept_dtypes(False)
        self._copies = copy and not channels_last

    def __call__(self, batch: Any) -> Any:
        """Convert one batch.

        Args:
            batch: Any nesting of containers with arrays, tensors, numbers, strings and other objects.

        Returns:
            The same nesting; arrays, tensors and numbers are numpy arrays in the dtypes that JAX would use, `jax.Array`
            leaves are kept, everything else is the object itself.

        Raises:
            TypeError: If a leaf or container cannot be represented; the message names its path.
            OverflowError: If a 64-bit value does not fit and JAX's 64-bit mode is off.
        """
        self.refresh()
        return self.again(batch)

    def again(self, batch: Any) -> Any:
        """Convert one batch in the 64-bit mode that `refresh` found: for the batches of one pass."""
        kind = type(batch)
        if kind is not list and kind is not tuple:
            return self.walk(batch, ())
        leaves = []
        tensor, kept = self._tensor, self._kept
        if tensor is not None:
            # After a hundred calls of a dataset's Python nothing of this is in the processor's caches. What counts then
            # is how many functions and objects are touched, so the commonest tensors are dealt with right here.
            floats, integers = _FLOATS, None if self._x64 else _INTEGERS
            for value in batch:
                if type(value) is not tensor or not value.is_contiguous():
                    return self._by_rules(batch)
                try:
                    array = value.numpy()
                    dtype = array.dtype
                    if dtype is integers:
                        array = array.astype(_NARROW_INTEGERS, casting="same_value")  # type: ignore[call-overload,unused-ignore]
                    elif dtype is not floats and dtype not in kept:
                        return self._by_rules(batch)
                    elif self.copy:
                        array = array.copy()
                except (TypeError, ValueError, RuntimeError):
                    # torch shows only what is plain: dense, on the host, without gradients; NumPy refuses what does not
                    # fit, or does not know the word before 2.4
                    return self._by_rules(batch)
                leaves.append(array)
        elif self._copies:
            # Arrays, at a third of the general price.
            array_type = np.ndarray
            for value in batch:
                if type(value) is not array_type or value.dtype not in kept:
                    return self.walk(batch, ())
                leaves.append(value.copy())
        else:
            return self.walk(batch, ())
        return leaves if kind is list else tuple(leaves)

    def _by_rules(self, batch: Any) -> Any:
        """Convert a batch with something else in it, and look for nothing else from now on: no leaf is made twice."""
        self._tensor = None
        return self.walk(batch, ())

    def refresh(self) -> None:
        """Read JAX's 64-bit mode again, before `again`, `finish` and `walk` are used directly."""
        self._x64 = _leaves.x64_enabled()
        self._kept = _leaves.kept_dtypes(self._x64)

    def finish(self, value: Any, path: Path) -> Any:
        """Convert an array that is known to be fresh."""
        value = _leaves.canonical_array(np.asarray(value), path, x64=self._x64, copy=False)
        return _leaves.to_channels_last(value) if self.channels_last else value

    def walk(self, value: Any, path: Path) -> Any:
        """Convert the part of a batch that lies at a path."""
        rule = self._rules.get(type(value))
        if rule is None:
            rule = self._rules.setdefault(type(value), self._choose(value, path))
        return rule(value, path)

    # containers

    def _dict(self, value: Any, path: Path) -> Any:
        return {key: self.walk(item, (*path, key)) for key, item in value.items()}

    def _list(self, value: Any, path: Path) -> Any:
        return [self.walk(item, (*path, index)) for index, item in enumerate(value)]

    def _tuple(self, value: Any, path: Path) -> Any:
        return tuple([self.walk(item, (*path, index)) for index, item in enumerate(value)])

    def _namedtuple(self, value: Any, path: Path) -> Any:
        items = [self.walk(item, (*path, Attribute(name))) for name, item in zip(value._fields, value, strict=True)]
        return type(value)._make(items)

    def _attributes(self, value: Any, path: Path) -> Any:
        names = _containers.attribute_names(value)
        items = [self.walk(getattr(value, name), (*path, Attribute(name))) for name in names]
        return _containers.rebuild_attributes(type(value), names, items)

    def _mapping(self, value: Any, path: Path) -> Any:
        structure = _containers.mapping_structure(value)
        items = [self.walk(value[key], (*path, key)) for key in structure[0]]
        return _containers.rebuild_mapping(type(value), structure, items)

    def _node(self, value: Any, path: Path) -> Any:
        # a class that somebody registered with JAX: take it apart by one level
        children, structure = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda part: part is not value)
        items = [self.walk(child, (*path, *map(_path_element, keys))) for keys, child in children]
        return jax.tree_util.tree_unflatten(structure, items)

    # leaves

    def _array(self, value: Any, path: Path) -> Any:
        if self.channels_last and _leaves.is_channels_first_image(value.shape, value.dtype):
            value = _leaves.to_channels_last(value)
            return _leaves.canonical_array(value, path, x64=self._x64, copy=False)
        return _leaves.canonical_array(value, path, x64=self._x64, copy=self.copy)

    def _scalar(self, value: Any, path: Path) -> Any:
        return _leaves.canonical_foreign(value, path, x64=self._x64)

    def _subarray(self, value: Any, path: Path) -> Any:
        if isinstance(value, np.ma.MaskedArray):
            return _leaves.canonical_foreign(value, path, x64=self._x64)
        return self._array(np.asarray(value), path)

    def _jax(self, value: Any, path: Path) -> Any:
        if not self.channels_last or jax.numpy.issubdtype(value.dtype, jax.dtypes.extended):
            return value
        images = _leaves.is_channels_first_image(value.shape, np.dtype(value.dtype))
        return value.transpose(0, 2, 3, 1) if images else value

    def _torch(self, value: Any, path: Path) -> Any:
        return self._array(self._tensor_to_numpy(value, path), path)

    def _tensorflow(self, value: Any, path: Path) -> Any:
        from ._tf_tensors import tensor_to_numpy

        converted = tensor_to_numpy(value, path)
        return self.finish(converted, path) if isinstance(converted, (np.ndarray, np.generic)) else converted

    def _choose(self, value: Any, path: Path) -> Callable[[Any, Path], Any]:
        cls = type(value)
        if isinstance(value, np.ndarray):
            return self._subarray
        if isinstance(value, jax.Array):
            return self._jax
        if isinstance(value, enum.Enum):
            return _same
        if isinstance(value, (np.generic, bool, numbers.Number)) and not isinstance(value, (np.flexible, np.object_)):
            # np.datetime64, Decimal and Fraction become arrays that JAX cannot hold: leave the object itself
            return self._scalar if _leaves.is_device_dtype(np.array(value).dtype) or isinstance(value, int) else _same
        if from_library(cls, "torch", "Tensor"):
            from ._torch_tensors import tensor_to_numpy

            self._tensor_to_numpy = tensor_to_numpy
            if cls.__module__ == "torch" and cls.__qualname__ == "Tensor" and not self.channels_last:
                self._tensor = cls
            return self._torch
        if from_library(cls, "tensorflow"):
            return self._tensorflow
        for (library, name), way_out in _WAY_OUT.items():
            if from_library(cls, library, name):
                raise TypeError(
                    f"{format_path(path)} is a {cls.__module__}.{cls.__qualname__}, whose tensors JAX cannot see. "
                    f"{way_out}"
                )
        if _is_registered(value):
            if isinstance(value, tuple) and hasattr(value, "_fields"):
                return self._namedtuple
            return self._node
        if isinstance(value, collections.abc.Mapping):
            _containers.register_mapping_class(cls, value, path)
            return self._mapping
        if dataclasses.is_dataclass(cls) or hasattr(cls, "__attrs_attrs__"):
            _containers.register_attributes_class(cls)
            return self._attributes
        if isinstance(value, (list, tuple)):  # subclasses, such as torch.Size, that JAX would take for leaves
            return self._list if isinstance(value, list) else self._tuple
        _refuse_hidden_tensors(value, path)
        return _refusing_host


def _same(value: Any, path: Path) -> Any:
    return value


def _refusing_host(value: Any, path: Path) -> Any:
    _refuse_hidden_tensors(value, path)
    return value


def _refuse_hidden_tensors(value: Any, path: Path) -> None:
    for name, item in getattr(value, "__dict__", {}).items():
        if isinstance(item, (np.ndarray, jax.Array)) or from_library(type(item), "torch", "Tensor"):
            cls = type(value)
            raise TypeError(
                f"{format_path(path)} is a {cls.__module__}.{cls.__qualname__} that holds an array in `.{name}`, and "
                "JAX does not know how to take it apart. Make it a dataclass, a namedtuple or a dict, or register it "
                "with jax.tree_util.register_pytree_node."
            )


def _is_registered(value: Any) -> bool:
    structure = jax.tree_util.tree_structure(value, is_leaf=lambda part: part is not value)
    # not `treedef_is_leaf`, which takes a node without children for a leaf
    return not _same_structure(structure, jax.tree_util.tree_structure(0))


def _same_structure(left: Any, right: Any) -> bool:
    return bool(left == right)


def _path_element(key: Any) -> Any:
    if isinstance(key, jax.tree_util.GetAttrKey):
        return Attribute(key.name)
    for field in ("key", "idx"):
        if hasattr(key, field):
            return getattr(key, field)
    return str(key)
