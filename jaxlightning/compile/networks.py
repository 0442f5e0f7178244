"""Linen networks on a module: found by walking its attributes and wrapped so that calls use the current variables.

`discover` finds networks, `LinenNetwork` is what a user's `self.net` becomes, `nnx_networks.NnxGroup` holds all NNX
modules. Wrapping happens when the trainer attaches and not in `__setattr__`, because `Model(encoder=self.enc)` in the
user's `__init__` must see the plain Flax module.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import flax.linen as nn
import jax

from jaxlightning.compile.paths import merge, plain
from jaxlightning.compile.precision import Precision
from jaxlightning.compile.precision_layers import linen_layers
from jaxlightning.compile.selection import ParameterSelection
from jaxlightning.compile.trace import Trace, activate, current_trace, path_hash
from jaxlightning.utilities.warnings import warn_once

if TYPE_CHECKING:
    from jaxlightning.compile.engine import Engine

__all__ = ["LinenNetwork", "NetworkInfo", "is_linen", "is_network", "is_nnx", "rebuild", "stamp_origin", "walk"]

_MODE_WORDS = {"train": True, "training": True, "deterministic": False, "use_running_average": False}
"""Arguments of `__call__` that say the mode, with their value while training."""


@dataclass(frozen=True, kw_only=True)
class NetworkInfo:
    """What a summary shows of one network.

    Attributes:
        name: Its path on the module, for example `"encoder"` or `"blocks.0"`.
        type_name: Its class name.
        params: Nested parameters, or None before they exist.
        variables: Nested other variables (batch statistics ...), or None before they exist.
        mode: `"train"` or `"eval"`.
    """

    name: str
    type_name: str
    params: Any
    variables: Any
    mode: str


def _mro_has(value: Any, module: str, name: str) -> bool:
    return any(c.__module__.startswith(module) and c.__name__ == name for c in type(value).__mro__)


def is_linen(value: Any) -> bool:
    """Whether the object is an unwrapped linen module."""
    return isinstance(value, nn.Module)


def is_nnx(value: Any) -> bool:
    """Whether the object is an NNX module or Variable; by name, because importing nnx costs a linen user time."""
    return _mro_has(value, "flax.nnx", "Module") or is_nnx_variable(value)


def is_nnx_variable(value: Any) -> bool:
    """Whether the object is an NNX Variable, such as an `nnx.Param` on the module itself."""
    return _mro_has(value, "flax.nnx", "Variable")


def is_network(value: Any) -> bool:
    """Whether the object is a network of any kind that the engine binds."""
    return isinstance(value, LinenNetwork) or is_linen(value) or is_nnx(value) or _is_foreign(value)


def _is_foreign(value: Any) -> bool:
    from jaxlightning.compile.foreign_networks import is_foreign

    return is_foreign(value)


_MAX_DEPTH = 6
_MAX_LENGTH = 4096
"""Containers deeper or longer than this hold data and no networks; looking through them would cost time."""


def walk(value: Any, path: str, depth: int = 0) -> list[tuple[str, Any]]:
    """Networks in an attribute value, also inside lists, tuples and dictionaries, with their paths."""
    if is_network(value):
        return [(path, value)]
    if depth > _MAX_DEPTH or not isinstance(value, list | tuple | Mapping) or len(value) > _MAX_LENGTH:
        return []
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    return [pair for key, item in items for pair in walk(item, f"{path}.{key}", depth + 1)]


def rebuild(value: Any, replace: Callable[[Any], Any]) -> Any:
    """A copy of an attribute value with its networks replaced; containers keep their types."""
    if is_network(value):
        return replace(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(rebuild(item, replace) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(rebuild(item, replace) for item in value)
    if isinstance(value, dict):
        fresh = copy.copy(value)
        fresh.clear()
        fresh.update({key: rebuild(item, replace) for key, item in value.items()})
        return fresh
    return value


_origins = iter(range(1, 1 << 62))


def stamp_origin(value: Any) -> None:
    """Marks linen modules so that a later `copy.deepcopy` of one is known to be its copy (both then start equal)."""
    for _, network in walk(value, ""):
        if is_linen(network) and "_jaxlightning_origin" not in network.__dict__:
            object.__setattr__(network, "_jaxlightning_origin", next(_origins))


@functools.lru_cache(maxsize=256)
def _mode_arguments(function: Callable[..., Any]) -> tuple[inspect.Signature | None, tuple[str, ...]]:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None, ()
    return signature, tuple(name for name in _MODE_WORDS if name in signature.parameters)


class LinenNetwork:
    """A linen module bound to the variables that the engine holds.

    Calling it applies the module to the current variables: traced ones inside a step, copies of the trainer's outside.
    Methods other than `__call__` are called by name (`net.encode(x)`), fields read through. While training every
    persistent collection is threaded, and `train` / `training` / `deterministic` / `use_running_average` are passed
    when the method has such an argument that the caller left out.
    """

    def __init__(self, module: nn.Module, path: str, engine: Engine, init_path: str) -> None:
        self._module = module
        self._path = path
        self._engine = engine
        self._init_path = init_path
        self._copy_of: str | None = None
        self.training = True

    def __call__(self, *args: Any, method: Any = None, rngs: Any = None, mutable: Any = None, **kwargs: Any) -> Any:
        """Applies the network.

        Args:
            *args: Inputs of the linen method.
            method: Name of another method, or the function, as in `nn.Module.apply`.
            rngs: Own keys by stream name; the framework supplies fresh ones otherwise.
            mutable: As in `nn.Module.apply`; when given, the result is `(output, updated collections)`.
            **kwargs: Keyword inputs of the linen method.

        Returns:
            What the linen method returns.

        Raises:
            RuntimeError: Outside a step, before the variables exist.
            ValueError: If the input does not fit the variables.
        """
        trace = current_trace()
        if trace is None:
            return self._call_outside(args, kwargs, method, rngs, mutable)
        return self._call_in(trace, args, kwargs, method, rngs, mutable)

    def _call_in(self, trace: Trace, args: Any, kwargs: Any, method: Any, rngs: Any, mutable: Any) -> Any:
        function = self._function(method)
        kwargs = self._with_mode(function, args, kwargs)
        variables = self._variables_in(trace)
        if rngs is None:
            key = trace.network_key(self._path)
            rngs = {"params": key, "dropout": jax.random.fold_in(key, 1)}
        if trace.creating:
            return self._create(trace, args, kwargs, method, rngs, mutable)
        if not variables and self._path not in trace.params:
            raise RuntimeError(
                f"Network `self.{self._path}` has no variables yet. Call `module.init(batch)` with an example batch, "
                "set `example_input_array`, load a checkpoint, or start `fit`."
            )
        threaded = mutable
        if mutable is None:
            threaded = [c for c in variables if c != "params"] if self.training else False
            if not threaded:
                threaded = False
        policy = self._engine.binding.precision
        if policy.casts:
            args, kwargs = policy.convert_compute((args, kwargs))
            variables = self._in_precision(variables, policy)
        try:
            with linen_layers(policy):
                apply = functools.partial(self._module.apply, variables, *args, rngs=rngs, method=method, **kwargs)
                result = (
                    apply(mutable=threaded) if threaded or mutable is not None else self._unchanged(apply, variables)
                )
        except Exception as error:
            self._explain(error, args)
            raise
        if threaded is False:
            return policy.convert_output(result)
        output, updates = result
        output = policy.convert_output(output)
        self._write(trace, updates, explicit=mutable is not None)
        return (output, updates) if mutable is not None else output

    def _unchanged(self, apply: Callable[..., Any], variables: dict[str, Any]) -> Any:
        """The result of a call in evaluation, which leaves every collection as it is, whatever the layers do."""
        collections = sorted(name for name in variables if name != "params")
        try:
            return apply(mutable=False)
        except Exception as error:
            if type(error).__name__ != "ModifyScopeVariableError" or not collections:
                raise
        output, _ = apply(mutable=collections)
        warn_once(
            f"evaluation-drops:{self._path}",
            f"Network `self.{self._path}` changes its collections {collections} in evaluation mode too (a BatchNorm "
            "with `use_running_average=False`, for example). The result is used, the changes are dropped. To have them "
            f"call `y, updates = self.{self._path}(x, mutable={collections})`.",
        )
        return output

    def _create(self, trace: Trace, args: Any, kwargs: Any, method: Any, rngs: Any, mutable: Any) -> Any:
        """Runs the network while creating what it lacks: parameters of methods called for the first time."""
        if not trace.at_own_level:
            return self._create_outside(trace, args, kwargs, method, rngs, mutable)
        key = jax.random.fold_in(jax.random.key(trace.init_seed), path_hash(self._init_path))
        rngs = {**rngs, "params": key}
        with nn.intercept_methods(_refuse_channels_first(self._path, args)):
            # `init`, not `apply`: only then do layers know that they are being created and leave their statistics
            # alone.
            output, made = self._module.init_with_output(rngs, *args, method=method, **kwargs)
        updates = plain(made)
        params = updates.pop("params", None)
        if params is not None or updates or self._path not in trace.params:
            trace.params[self._path] = merge(params or {}, trace.params.get(self._path, {}))
            # What exists stays as it is; a method called for the first time only adds.
            trace.variables[self._path] = merge(updates, trace.variables.get(self._path, {}))
            trace.created.add(self._path)
        return (output, updates) if mutable is not None else output

    def _create_outside(self, trace: Trace, args: Any, kwargs: Any, method: Any, rngs: Any, mutable: Any) -> Any:
        """Creates variables for a call inside a transform of the user's, where they would die with it.

        Their values follow from the shapes of the inputs, so zeros take the place of the inputs.
        """
        given = jax.tree.map(
            lambda leaf: (leaf.shape, leaf.dtype) if isinstance(leaf, jax.Array) else leaf, (args, kwargs)
        )
        with trace.own_level():
            zeros, named = jax.tree.map(
                lambda leaf: jax.numpy.zeros(*leaf) if _is_shape(leaf) else leaf, given, is_leaf=_is_shape
            )
            own = trace.network_key(self._path)
            self._create(trace, zeros, named, method, {"params": own, "dropout": jax.random.fold_in(own, 1)}, None)
        variables = self._variables_in(trace)
        collections = mutable if mutable is not None else [name for name in variables if name != "params"] or False
        result = self._module.apply(variables, *args, rngs=rngs, method=method, mutable=collections, **kwargs)
        return result if mutable is not None or collections is False else result[0]

    def _variables_in(self, trace: Trace) -> dict[str, Any]:
        variables = dict(trace.variables.get(self._path, {}))
        params = trace.params.get(self._path)
        if params:
            variables["params"] = params
        return variables

    def _write(self, trace: Trace, updates: Any, *, explicit: bool = False) -> None:
        known = trace.variables.get(self._path, {})
        kept = {c: plain(tree) for c, tree in updates.items() if c in known}
        if kept:
            if trace.manual is not None or not trace.at_own_level:
                # As in torch, no gradient goes through statistics. Inside `jax.grad` this also takes their values out
                # of the transform; out of the other ones it does not, and there they would leak.
                kept = jax.tree.map(jax.lax.stop_gradient, kept)
            if not all(trace.owns(leaf) for leaf in jax.tree.leaves(kept)):
                if explicit:
                    return  # the user carries them out of the transform
                trace.require_own_level(
                    f"Network `self.{self._path}` with collections {sorted(kept)} in training mode",
                    f"return the updates from the function: `y, updates = self.{self._path}(x, "
                    f"mutable={sorted(kept)})`, and assign `self.{self._path}.variables = updates` outside it; or call "
                    f"the network outside, or in evaluation mode (`self.{self._path}.eval()`)",
                )
            trace.variables[self._path] = {**known, **kept}

    def _call_outside(self, args: Any, kwargs: Any, method: Any, rngs: Any, mutable: Any) -> Any:
        trace = self._engine.outside_trace()
        if self._path not in trace.params:
            raise RuntimeError(
                f"Network `self.{self._path}` has no variables yet: a linen network gets them from the first step that "
                "calls it. Call `module.init(batch)` with an example batch, set `example_input_array`, load a "
                "checkpoint, or start `fit`."
            )
        before = trace.variables.get(self._path)
        with self._engine.binding.precision.scope(), activate(trace):
            output = self._call_in(trace, args, kwargs, method, rngs, mutable)
        if trace.variables.get(self._path) is not before:
            self._engine.variables = trace.variables
        return output

    def _in_precision(self, variables: dict[str, Any], policy: Precision) -> dict[str, Any]:
        """The variables as the network gets them; Flax layers cast their own parameters."""
        return variables

    def _function(self, method: Any) -> Callable[..., Any]:
        if method is None:
            return type(self._module).__call__
        if isinstance(method, str):
            found = getattr(type(self._module), method, None)
            if found is None:
                raise AttributeError(
                    f"Network `self.{self._path}` ({type(self._module).__name__}) has no method {method!r}."
                )
            return found  # type: ignore[no-any-return]
        return getattr(method, "__func__", method)  # type: ignore[no-any-return]

    def _with_mode(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        signature, words = _mode_arguments(function)
        missing = [word for word in words if word not in kwargs]
        if not missing or signature is None:
            return kwargs
        try:
            given = signature.bind_partial(self._module, *args, **kwargs).arguments
        except TypeError:
            return kwargs  # the call itself raises the better message
        filled = dict(kwargs)
        for word in missing:
            if word not in given:
                filled[word] = _MODE_WORDS[word] is self.training
        return filled

    def _explain(self, error: Exception, args: Any) -> None:
        if type(error).__name__ not in ("ScopeParamShapeError", "TypeError", "ValueError", "ScopeCollectionNotFound"):
            return
        shapes = [tuple(a.shape) for a in args if hasattr(a, "shape")]
        note = (
            f"While calling network `self.{self._path}` ({type(self._module).__name__}) with input shapes {shapes}. "
            "Its "
            "variables were created for another input; a network keeps the shape of its first call."
        )
        images = [shape for shape in shapes if len(shape) == 4 and shape[1] in (1, 3, 4)]
        if images:
            note += _channels_note(images[0])
        error.add_note(note)

    @property
    def params(self) -> Any:
        """The parameters: traced inside a step, a copy outside, None before they exist; assign to replace them."""
        trace = current_trace()
        if trace is None:
            return self._engine.params_of(self._path)
        if trace.creating and self._path not in trace.params:
            self._create_as_copy(trace)
            trace.asked.add(self._path)
        return trace.params.get(self._path)

    @params.setter
    def params(self, value: Any) -> None:
        trace = current_trace()
        if trace is not None:
            trace.write_params(self._path, value)
            return
        self._engine.params = {**self._engine.params, self._path: plain(value)}

    def _create_as_copy(self, trace: Trace) -> None:
        """Gives a copy that was not called yet the variables of the network that it was copied from."""
        for path, other in self._engine.binding.linen.items():
            if other._init_path == self._init_path and path != self._path and path in trace.params:
                trace.params[self._path] = trace.params[path]
                trace.variables[self._path] = trace.variables.get(path, {})
                trace.created.add(self._path)
                return

    @property
    def variables(self) -> Any:
        """Every collection but the parameters (batch statistics ...), as `params`; assign to replace them."""
        trace = current_trace()
        if trace is not None:
            return trace.variables.get(self._path, {})
        return self._engine.variables.get(self._path, {})

    @variables.setter
    def variables(self, value: Any) -> None:
        trace = current_trace()
        if trace is not None:
            self._write(trace, value)
            return
        self._engine.variables = {**self._engine.variables, self._path: plain(value)}

    def parameters(self) -> ParameterSelection:
        """A lazy selection of this network's parameters, for an optimizer."""
        return ParameterSelection((self._path,), self._engine.flat_params)

    def train(self, mode: bool = True) -> LinenNetwork:
        """Sets training mode (or evaluation mode with `mode=False`)."""
        self.training = mode
        self._engine.modes_changed()
        return self

    def eval(self) -> LinenNetwork:
        """Sets evaluation mode."""
        return self.train(False)

    def freeze(self) -> None:
        """Freezes this network's parameters and puts it in evaluation mode."""
        self._engine.module.freeze(self)

    def unfreeze(self) -> None:
        """Lets this network's parameters be trained again, in training mode."""
        self._engine.module.unfreeze(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_module", "_path", "_engine"):
            raise AttributeError(name)
        value = getattr(type(self._module), name, None)
        if inspect.isfunction(value) and name not in ("apply", "init", "init_with_output", "bind", "clone"):
            return functools.partial(self, method=name)
        return getattr(self._module, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._engine.copy_network(self, memo)

    def __repr__(self) -> str:
        return repr(self._module)


def _is_shape(leaf: Any) -> bool:
    return isinstance(leaf, tuple) and len(leaf) == 2 and isinstance(leaf[0], tuple) and hasattr(leaf[1], "itemsize")


def _channels_note(shape: tuple[int, ...]) -> str:
    return (
        f" The input {shape} looks like images with channels first: axis 1 has {shape[1]} channels, while Flax expects "
        "channels on the last axis. Pass `Trainer(channels_last=True)` to have image leaves of the batch turned to "
        "NHWC, "
        "or transpose in the step: `x.transpose(0, 2, 3, 1)`."
    )


def _refuse_channels_first(path: str, args: Any) -> Callable[..., Any]:
    """An interceptor that refuses a network input in NCHW that reaches a convolution unchanged.

    Without it linen would create a kernel for `width` input channels and train on nonsense.
    """
    inputs = [a for a in args if getattr(a, "ndim", 0) == 4]

    def intercept(call: Callable[..., Any], a: Any, k: Any, context: Any) -> Any:
        if isinstance(context.module, nn.Conv) and context.method_name == "__call__" and a:
            shape = tuple(getattr(a[0], "shape", ()))
            if (
                len(shape) == 4
                and any(a[0] is x for x in inputs)
                and shape[1] in (1, 3, 4)
                and shape[2] == shape[3] > 4
            ):
                raise ValueError(
                    f"Network `self.{path}` got an input whose channels do not fit.{_channels_note(shape)}"
                )
        return call(*a, **k)

    return intercept
