"""Networks that are not Flax's, through the two functions that all of them have: `init` and `apply`.

Recognised on a module are dm-haiku's transformed functions, Equinox modules, and `PureNetwork` around any other pair of
functions. Each gets an adapter with the words of a linen module, so that everything else (creation by the first step,
optimizers, checkpoints, summaries) knows no difference. None of these libraries is imported here.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxlightning.compile.networks import LinenNetwork
from jaxlightning.compile.paths import plain
from jaxlightning.compile.precision import Precision
from jaxlightning.compile.trace import current_trace

__all__ = ["ForeignNetwork", "PureNetwork", "adapt", "is_foreign"]

_STATE = "state"
"""The collection that holds what is not trained."""
_MODE_WORDS = {"is_training": True, "train": True, "training": True, "deterministic": False}
_KEY_WORDS = ("key", "rng")


class PureNetwork:
    """A network made of two functions, to put on a module like any other.

    Args:
        init: `(key, *inputs) -> params`, or `-> (params, state)` with `has_state`.
        apply: `(params, *inputs) -> output`, or `(params, state, *inputs) -> (output, state)` with `has_state`. When it
            has an argument called `key` or `rng`, a new key is passed at every call; `train`, `training`,
            `is_training` and `deterministic` are passed as for other networks.
        has_state: Whether there are values that are not trained but change, such as running statistics.
        by_shape: Whether `init` wants the shapes of the inputs in their place and returns `(output_shape, params)`, as
            in `jax.example_libraries.stax`.

    Example:
        ```python
        init, apply = stax.serial(stax.Dense(64), stax.Relu, stax.Dense(10))
        self.net = jaxlightning.PureNetwork(init, apply, by_shape=True)
        ```
    """

    type_name = "PureNetwork"

    def __init__(
        self,
        init: Callable[..., Any],
        apply: Callable[..., Any],
        *,
        has_state: bool = False,
        by_shape: bool = False,
    ) -> None:
        if not callable(init) or not callable(apply):
            raise TypeError(f"`PureNetwork` wants two functions, got {type(init).__name__} and {type(apply).__name__}.")
        self._init = init
        self._apply = apply
        self._has_state = has_state
        self._by_shape = by_shape
        self.signature_of = apply
        self._key_word = next((word for word in _KEY_WORDS if word in _parameters(apply)), None)

    def init_with_output(self, rngs: Any, *args: Any, method: Any = None, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Makes the variables and applies the network once."""
        given = [jnp.shape(arg) for arg in args] if self._by_shape else args
        words = _parameters(self._init)
        made = self._init(rngs["params"], *given, **{k: v for k, v in kwargs.items() if k in words})
        if self._by_shape:
            made = made[1]
        params, state = made if self._has_state else (made, {})
        variables = {"params": _to_tree(params), **({_STATE: _to_tree(state)} if self._has_state else {})}
        self._params_like, self._state_like = _shapes(params), _shapes(state)
        return self.apply(variables, *args, rngs=rngs, mutable=False, **kwargs), variables

    def apply(
        self, variables: Any, *args: Any, rngs: Any, mutable: Any = False, method: Any = None, **kwargs: Any
    ) -> Any:
        """Applies the network; with `mutable` the result is `(output, updated collections)`."""
        self._know_structure(rngs, args, kwargs)
        if self._key_word is not None:
            kwargs.setdefault(self._key_word, rngs["dropout"])
        params = _from_tree(self._params_like, variables.get("params", {}))
        if not self._has_state:
            out = self._apply(params, *args, **kwargs)
            return out if mutable is False else (out, {})
        out, state = self._apply(params, _from_tree(self._state_like, variables[_STATE]), *args, **kwargs)
        return out if mutable is False else (out, {_STATE: _to_tree(state)})

    def _know_structure(self, rngs: Any, args: Any, kwargs: Any) -> None:
        """Variables that came from a checkpoint are plain dictionaries; `init` tells what they stand for."""
        if hasattr(self, "_params_like"):
            return
        given = [jnp.shape(arg) for arg in args] if self._by_shape else args
        words = _parameters(self._init)
        options = {k: v for k, v in kwargs.items() if k in words}
        made = jax.eval_shape(
            lambda key, *arrays: _arrays_only(
                self._init(key, *(given if self._by_shape else arrays), **options), self._by_shape
            ),
            rngs["params"],
            *(() if self._by_shape else args),
        )
        self._params_like, self._state_like = made if self._has_state else (made, {})

    def __repr__(self) -> str:
        return f"PureNetwork({getattr(self._apply, '__qualname__', self._apply)})"


def _arrays_only(made: Any, by_shape: bool) -> Any:
    return made[1] if by_shape else made


class HaikuNetwork:
    """dm-haiku's `transform`ed function, with or without state.

    Args:
        transformed: `hk.Transformed` or `hk.TransformedWithState`.
    """

    type_name = "haiku"

    def __init__(self, transformed: Any) -> None:
        self.transformed = transformed
        self._has_state = type(transformed).__name__ == "TransformedWithState"
        self.signature_of: Any = _haiku_function(transformed)

    def init_with_output(self, rngs: Any, *args: Any, method: Any = None, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Makes the variables and applies the network once."""
        # Haiku's moving averages are made in training mode only, also when an evaluation comes first.
        training = {word: _MODE_WORDS[word] for word in kwargs if word in _MODE_WORDS}
        made = self.transformed.init(rngs["params"], *args, **{**kwargs, **training})
        params, state = made if self._has_state else (made, {})
        variables = {"params": _nested_by_slash(params)}
        if self._has_state:
            variables[_STATE] = _nested_by_slash(state)
        return self.apply(variables, *args, rngs=rngs, mutable=False, **kwargs), variables

    def apply(
        self, variables: Any, *args: Any, rngs: Any, mutable: Any = False, method: Any = None, **kwargs: Any
    ) -> Any:
        """Applies the function; with `mutable` the result is `(output, updated collections)`."""
        params, key = _flat_by_slash(variables.get("params", {})), rngs["dropout"]
        if not self._has_state:
            out = self.transformed.apply(params, key, *args, **kwargs)
            return out if mutable is False else (out, {})
        out, state = self.transformed.apply(params, _flat_by_slash(variables[_STATE]), key, *args, **kwargs)
        return out if mutable is False else (out, {_STATE: _nested_by_slash(state)})

    def __repr__(self) -> str:
        return f"haiku.{type(self.transformed).__name__}"


class EquinoxNetwork:
    """An Equinox module: its floating-point arrays are parameters, other arrays stay as they are.

    Args:
        module: The `equinox.Module`, complete; its arrays are the start values.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self.type_name = type(module).__name__
        self.signature_of: Any = None
        leaves, self._treedef = jax.tree_util.tree_flatten_with_path(module)
        self._leaves = [leaf for _, leaf in leaves]
        self._paths = [
            tuple(jax.tree_util.keystr((entry,), simple=True) for entry in path) if _is_parameter(leaf) else None
            for path, leaf in leaves
        ]

    def init_with_output(self, rngs: Any, *args: Any, method: Any = None, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """The arrays that the module was made with, and its output."""
        tree: dict[str, Any] = {}
        for path, leaf in zip(self._paths, self._leaves, strict=True):
            if path is not None:
                node = tree
                for word in path[:-1]:
                    node = node.setdefault(word, {})
                node[path[-1]] = jnp.asarray(leaf)
        variables = {"params": tree}
        return self.apply(variables, *args, rngs=rngs, method=method, **kwargs), variables

    def bound(self, params: Any, *, training: bool = True) -> Any:
        """The module on these parameters, in the mode that Equinox's layers read from `inference`."""
        import equinox

        leaves = [
            leaf if path is None else functools.reduce(lambda node, word: node[word], path, params)
            for path, leaf in zip(self._paths, self._leaves, strict=True)
        ]
        module = jax.tree_util.tree_unflatten(self._treedef, leaves)
        return equinox.nn.inference_mode(module, value=not training)

    def apply(
        self,
        variables: Any,
        *args: Any,
        rngs: Any = None,
        mutable: Any = False,
        method: Any = None,
        training: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Calls the module or one of its methods; with `mutable` the result is `(output, {})`."""
        module = self.bound(variables.get("params", {}), training=training)
        out = (module if method is None else getattr(module, method))(*args, **kwargs)
        return out if mutable is False else (out, {})

    def __repr__(self) -> str:
        return repr(self.module)


class ForeignNetwork(LinenNetwork):
    """A network of another library bound to the variables that the engine holds; used like the library's own object."""

    def _function(self, method: Any) -> Callable[..., Any]:
        if method is not None and not isinstance(self._module, EquinoxNetwork):
            raise AttributeError(
                f"Network `self.{self._path}` ({self._module!r}) is one function: it has no method {method!r}."
            )
        function: Callable[..., Any] = type(self._module).apply
        return function

    def _in_precision(self, variables: dict[str, Any], policy: Precision) -> dict[str, Any]:
        return {**variables, "params": policy.convert_compute(variables.get("params", {}))}

    def _with_mode(self, function: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        if isinstance(self._module, EquinoxNetwork):
            return {"training": self.training, **kwargs}
        known = _parameters(self._module.signature_of)
        positional = list(known)[: len(args) + self._offset()]
        words = {
            word: training is self.training
            for word, training in _MODE_WORDS.items()
            if word in known and word not in kwargs and word not in positional
        }
        return {**kwargs, **words}

    def _offset(self) -> int:
        """How many arguments of the network's function are not inputs."""
        if isinstance(self._module, PureNetwork):
            return 2 if self._module._has_state else 1
        return 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_module", "_path", "_engine"):
            raise AttributeError(name)
        module = self._module
        if not isinstance(module, EquinoxNetwork):
            return getattr(getattr(module, "transformed", module), name)
        if inspect.isfunction(getattr(type(module.module), name, None)):
            return functools.partial(self, method=name)
        trace = current_trace()
        params = self._engine.params_of(self._path) if trace is None else trace.params.get(self._path)
        if params is None:
            return getattr(module.module, name)  # nothing was trained yet: as it was made
        return getattr(module.bound(params, training=self.training), name)


def is_foreign(value: Any) -> bool:
    """Whether the object is a network of another library; by names, because none of them is imported."""
    kind = type(value)
    if kind is PureNetwork:
        return True
    if kind.__module__.startswith("haiku."):
        return kind.__name__ in ("Transformed", "TransformedWithState", "MultiTransformed", "MultiTransformedWithState")
    return any(c.__module__.startswith("equinox.") and c.__name__ == "Module" for c in kind.__mro__)


def adapt(value: Any) -> Any:
    """The adapter of a network of another library.

    Raises:
        TypeError: For a kind that has no single `apply`.
    """
    kind = type(value)
    if kind is PureNetwork:
        return value
    if kind.__module__.startswith("haiku."):
        if kind.__name__.startswith("Multi"):
            raise TypeError(
                "A network made by `hk.multi_transform` has several functions. Make one with `hk.transform` for each "
                "of them, or put it into a `jaxlightning.PureNetwork(init, apply)` with an `apply` that chooses."
            )
        return HaikuNetwork(value)
    return EquinoxNetwork(value)


def _parameters(function: Any) -> dict[str, Any]:
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return {}


def _haiku_function(transformed: Any) -> Any:
    """The user's function inside haiku's closures, for the names of its arguments; None where it cannot be found."""
    seen: set[int] = set()
    waiting = [transformed.apply]
    while waiting:
        function = waiting.pop(0)
        if id(function) in seen or not inspect.isfunction(function):
            continue
        seen.add(id(function))
        if not function.__module__.startswith("haiku."):
            return function
        waiting += [cell.cell_contents for cell in function.__closure__ or () if _filled(cell)]
    return None


def _filled(cell: Any) -> bool:
    try:
        return callable(cell.cell_contents)
    except ValueError:
        return False


def _is_parameter(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _shapes(tree: Any) -> Any:
    return jax.eval_shape(lambda: jax.tree.map(jnp.asarray, tree))


def _words(path: Any) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((entry,), simple=True) for entry in path) or ("value",)


def _to_tree(value: Any) -> dict[str, Any]:
    """Any pytree as nested dictionaries with text keys."""
    tree: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(value)[0]:
        node = tree
        *parents, last = _words(path)
        for word in parents:
            node = node.setdefault(word, {})
        node[last] = leaf
    return tree


def _from_tree(like: Any, tree: Mapping[str, Any]) -> Any:
    """The inverse of `_to_tree`."""
    paths, treedef = jax.tree_util.tree_flatten_with_path(like)
    leaves = [functools.reduce(lambda node, word: node[word], _words(path), tree) for path, _ in paths]
    return jax.tree_util.tree_unflatten(treedef, leaves)


def _nested_by_slash(flat: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Haiku's two levels, `{"a/b": {"w": array}}`, as nested dictionaries."""
    tree: dict[str, Any] = {}
    for name, entries in flat.items():
        node = tree
        for word in name.split("/"):
            node = node.setdefault(word, {})
        node.update(plain(dict(entries)))
    return tree


def _flat_by_slash(tree: Mapping[str, Any], prefix: str = "") -> dict[str, dict[str, Any]]:
    """The inverse of `_nested_by_slash`."""
    flat: dict[str, dict[str, Any]] = {}
    own = {key: value for key, value in tree.items() if not isinstance(value, Mapping)}
    if own:
        flat[prefix] = own
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat.update(_flat_by_slash(value, f"{prefix}/{key}" if prefix else key))
    return flat
