"""How a precision policy reaches the layers of a network, inside the trace of a step.

Flax layers have a `dtype` of their own; one that is None takes the policy's compute dtype, so that the layer casts its
inputs and parameters itself and keeps its statistics in float32. What other modules read with `self.param` (or hold as
an `nnx.Param`) is cast when it is read. Only the modules of the trace are touched, never the user's objects.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import flax.linen as nn

from jaxlightning.compile.precision import Precision, cast_floats

__all__ = ["linen_layers", "plain_class", "prepare_nnx"]

_inside = threading.local()


def _is_flax_layer(kind: type) -> bool:
    """Whether the class is one of Flax's own layers, or made from one."""
    bases = ("flax.linen.module", "flax.nnx.module", "flax.nnx.pytreelib", "flax.nnx.object", "flax.core")
    return any(
        base.__module__.startswith("flax.") and not base.__module__.startswith(bases) and base is not object
        for base in kind.__mro__
    )


def _has_dtype(module: Any) -> bool:
    return _is_flax_layer(type(module)) and hasattr(module, "dtype") and hasattr(module, "param_dtype")


def linen_layers(policy: Precision) -> AbstractContextManager[Any]:
    """A context in which linen modules compute in the policy's dtype.

    Args:
        policy: The policy.

    Returns:
        The context; nothing happens in it for a policy without a compute dtype.
    """
    compute = policy.compute_dtype
    if compute is None:
        return nullcontext()

    def intercept(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        if _has_dtype(module):
            if module.dtype is None:
                object.__setattr__(module, "dtype", compute)
        elif "param" not in module.__dict__:
            # The module is a copy that lives as long as this call of `apply`.
            object.__setattr__(module, "param", _reader(module.param, compute))
        return call(*args, **kwargs)

    layers: AbstractContextManager[Any] = nn.intercept_methods(intercept)
    return layers


def _reader(read: Callable[..., Any], compute: Any) -> Callable[..., Any]:
    @functools.wraps(read)
    def read_cast(*args: Any, **kwargs: Any) -> Any:
        return cast_floats(read(*args, **kwargs), compute)

    return read_cast


def prepare_nnx(policy: Precision, networks: dict[str, Any]) -> bool:
    """Lets merged NNX modules compute in the policy's dtype.

    Args:
        policy: The policy.
        networks: The modules of a trace by path; changed in place.

    Returns:
        Whether anything changed.
    """
    if not policy.casts:
        return False
    from flax import nnx

    compute = policy.compute_dtype
    if compute is not None:
        for network in networks.values():
            for _, module in nnx.iter_modules(network):
                if _has_dtype(module):
                    if module.dtype is None:
                        module.dtype = compute
                else:
                    for value in vars(module).values():
                        if isinstance(value, nnx.Param):
                            value.set_value(cast_floats(value.get_value(), compute))
    for network in networks.values():
        if not hasattr(type(network), "_precision_original"):  # one object may stand under two names
            object.__setattr__(network, "__class__", _casting_class(type(network), policy))
    return True


def plain_class(network: Any) -> None:
    """Takes back the class that `prepare_nnx` gave a network, before its structure is compared."""
    original = getattr(type(network), "_precision_original", None)
    if original is not None:
        object.__setattr__(network, "__class__", original)


_classes: dict[tuple[type, Precision], type] = {}


def _casting_class(kind: type, policy: Precision) -> type:
    """A sub-class whose methods cast what comes in and goes out when they are called from the step."""
    made = _classes.get((kind, policy))
    if made is None:
        made = _classes[kind, policy] = _make_casting_class(kind, policy)
    return made


def _make_casting_class(kind: type, policy: Precision) -> type:

    def casting(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(_inside, "network", False):  # called by another method, of this network or one around it
                return method(self, *args, **kwargs)
            _inside.network = True
            try:
                args, kwargs = policy.convert_compute((args, kwargs))
                return policy.convert_output(method(self, *args, **kwargs))
            finally:
                _inside.network = False

        return call

    wrapped = {
        name: casting(value)
        for base in reversed(kind.__mro__)
        if not base.__module__.startswith("flax.nnx") or _is_flax_layer(base)
        for name, value in vars(base).items()
        if callable(value) and hasattr(value, "__code__") and (name == "__call__" or not name.startswith("_"))
    }
    return type(kind)(kind.__name__, (kind,), {**wrapped, "_precision_original": kind, "__module__": kind.__module__})
