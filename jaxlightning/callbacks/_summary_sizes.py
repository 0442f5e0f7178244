"""Layer types, and input and output shapes from an abstract run of `forward` on `example_input_array`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax

from jaxlightning.compile.trace import activate
from jaxlightning.utilities.rank_zero import rank_zero_warn


@dataclass(frozen=True)
class Sizes:
    """What one call of a layer took and returned.

    Attributes:
        layer_type: The layer's class name.
        in_size: Shape of its input as a list, or a list of shapes.
        out_size: Shape of its output as a list, or a list of shapes.
    """

    layer_type: str
    in_size: Any
    out_size: Any


def nnx_layer_types(engine: Any) -> dict[str, str]:
    """Return the class name of every layer of the NNX networks, by its path `"network.layer"`."""
    group = engine.binding.nnx
    if group is None:
        return {}
    return {path: type(layer).__name__ for path, layer in _nnx_layers(group.modules)}


def measure_sizes(module: Any, names: Sequence[str]) -> dict[str, Sizes]:
    """Find the shapes of every layer that `forward` calls; nothing is computed.

    Args:
        module: The module; its networks must have variables.
        names: The names of its networks.

    Returns:
        For each layer, as `"network.layer"`, the shapes of its first call. Empty without an `example_input_array` and
        while variables are missing.
    """
    example = getattr(module, "example_input_array", None)
    engine = module._engine
    if example is None or not engine.has_variables or not names:
        return {}
    found: dict[str, Sizes] = {}
    current = [names[0]]
    # what `forward` assigns holds abstract values, and showing a table must change no random draw
    before, calls = dict(vars(module)), engine._outside_calls
    trace = engine.outside_trace()
    key_of = trace.network_key

    def network_key(path: str) -> Any:  # asked once per call of a linen network: that is how its name is known
        current[0] = path
        return key_of(path)

    def watch(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        output = call(*args, **kwargs)
        if context.method_name == "__call__":
            path = ".".join((current[0], *context.module.path))
            found.setdefault(path, Sizes(type(context.module).__name__, _shapes(args), _shapes(output)))
        return output

    def run(inputs: Any) -> Any:
        with activate(trace), engine.binding.bound(trace), _watch_nnx(engine, found):
            if isinstance(inputs, dict):
                return module(**inputs)
            return module(*inputs) if isinstance(inputs, tuple) else module(inputs)

    trace.network_key = network_key
    try:
        with nn.intercept_methods(watch):
            jax.eval_shape(run, example)
    except Exception as error:  # a summary must not end a run that could do without it
        rank_zero_warn(
            f"The summary shows no input and output sizes: `{type(module).__name__}.forward(example_input_array)` "
            f"raised {type(error).__name__}: {error}"
        )
        return {}
    finally:
        vars(module).clear()
        vars(module).update(before)
        engine._outside_calls = calls
    return found


@contextmanager
def _watch_nnx(engine: Any, found: dict[str, Sizes]) -> Iterator[None]:
    """Record the calls of bound NNX layers.

    NNX offers no hook around a call, so for the length of the run the `__call__` of each class is a recording one.
    """
    group = engine.binding.nnx
    if group is None:
        yield
        return
    layers = {id(layer): (path, layer) for path, layer in _nnx_layers(group._merged)}
    originals = {
        klass: klass.__call__ for klass in {type(layer) for _, layer in layers.values()} if _is_callable(klass)
    }

    def recording(original: Any) -> Any:
        def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
            output = original(self, *args, **kwargs)
            known = layers.get(id(self))
            if known is not None:
                found.setdefault(known[0], Sizes(type(self).__name__, _shapes(args), _shapes(output)))
            return output

        return __call__

    own = {klass: "__call__" in vars(klass) for klass in originals}
    for klass, original in originals.items():
        klass.__call__ = recording(original)
    try:
        yield
    finally:
        for klass, original in originals.items():
            if own[klass]:
                klass.__call__ = original
            else:
                del klass.__call__


def _is_callable(klass: type) -> bool:
    """Whether instances of a class can be called."""
    return any("__call__" in vars(base) for base in klass.__mro__)


def _nnx_layers(modules: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    from flax import nnx

    for name, network in modules.items():
        for path, layer in nnx.iter_modules(network):
            if isinstance(layer, (nnx.Rngs, nnx.RngStream)):  # random state is no layer
                continue
            yield ".".join((name, *map(str, path))), layer


def _shapes(value: Any) -> Any:
    shapes = [list(leaf.shape) for leaf in jax.tree_util.tree_leaves(value) if hasattr(leaf, "shape")]
    if not shapes:
        return None
    return shapes[0] if len(shapes) == 1 else shapes
