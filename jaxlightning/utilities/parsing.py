"""Read what was passed to ``__init__``: the machinery behind ``save_hyperparameters``."""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from typing import Any

import jax
import numpy as np

from jaxlightning.utilities.rank_zero import rank_zero_warn

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
# Frames of a class body have these among their locals; they are no arguments.
_NEVER_ARGUMENTS = frozenset({"__class__", "frame", "frame_args"})
# Base classes that mark an object as a network, by full name, since none of these libraries may be imported for it.
_NETWORK_BASES = frozenset(
    {
        "flax.linen.module.Module",
        "flax.nnx.module.Module",
        "flax.nnx.pytreelib.Pytree",
        "equinox._module._module.Module",
        "equinox._module.Module",
        "haiku._src.module.Module",
        "torch.nn.modules.module.Module",
    }
)


class AttributeDict(dict[str, Any]):
    """A dict whose entries can be read and written as attributes too.

    Example:
        ```python
        hparams = AttributeDict(lr=0.1)
        hparams.lr = 0.2
        hparams["lr"]  # 0.2
        ```
    """

    def __getattr__(self, key: str) -> Any:
        try:
            return self[key]
        except KeyError:
            raise AttributeError(f"Missing attribute {key!r}. Available: {sorted(map(str, self))}") from None

    def __setattr__(self, key: str, value: Any) -> None:
        self[key] = value

    def __delattr__(self, key: str) -> None:
        if key not in self:
            raise AttributeError(f"Missing attribute {key!r}. Available: {sorted(map(str, self))}")
        del self[key]

    def __repr__(self) -> str:
        if not self:
            return ""
        width = max(len(str(key)) for key in self)
        return "\n".join(f'"{key}":{" " * (width - len(str(key)) + 1)}{value}' for key, value in self.items())

    def __deepcopy__(self, memo: dict[int, Any]) -> AttributeDict:
        return type(self)({key: copy.deepcopy(value, memo) for key, value in self.items()})


def is_network(value: Any) -> bool:
    """Say whether an object is a Flax, Equinox, Haiku or torch module, without importing any of these."""
    return any(f"{base.__module__}.{base.__qualname__}" in _NETWORK_BASES for base in type(value).__mro__)


def holds_arrays(value: Any, *, at_least: int = 1) -> bool:
    """Say whether a value is, or contains, arrays of together ``at_least`` elements (Python numbers do not count)."""
    try:
        leaves = jax.tree_util.tree_leaves(value)
    except (TypeError, ValueError):  # e.g. dict keys that cannot be sorted
        return False
    return sum(leaf.size for leaf in leaves if isinstance(leaf, np.ndarray | jax.Array)) >= at_least


def parse_class_init_keys(cls: type) -> tuple[str, str | None, str | None]:
    """Return the names that ``cls.__init__`` gives to self, ``*args`` and ``**kwargs`` (None where it has none)."""
    parameters = list(inspect.signature(cls.__init__).parameters.values())  # type: ignore[misc]
    by_kind = {p.kind: p.name for p in parameters if p.kind in _VARIADIC}
    return (
        parameters[0].name,
        by_kind.get(inspect.Parameter.VAR_POSITIONAL),
        by_kind.get(inspect.Parameter.VAR_KEYWORD),
    )


# Set while a loader builds an object from known arguments (a command line, for instance): these count, no frame does.
_given_arguments: ContextVar[dict[str, Any] | None] = ContextVar("_given_arguments", default=None)


@contextmanager
def given_hyperparameters(arguments: Mapping[str, Any]) -> Iterator[None]:
    """Make `save_hyperparameters` inside the block use ``arguments`` instead of what the frames show."""
    token = _given_arguments.set(dict(arguments))
    try:
        yield
    finally:
        _given_arguments.reset(token)


def _init_frame(frame: types.FrameType) -> tuple[type, Any] | None:
    """Return the class and the object that an ``__init__`` frame works on, or None for any other frame."""
    code = frame.f_code
    if code.co_name != "__init__" or not code.co_argcount:
        return None
    local = frame.f_locals
    target = local.get(code.co_varnames[0])
    cls = local.get("__class__")  # there when the method uses super()
    if isinstance(cls, type):
        return cls, target
    for base in type(target).__mro__:
        method = inspect.unwrap(base.__dict__["__init__"]) if "__init__" in base.__dict__ else None
        if getattr(method, "__code__", None) is code:
            return base, target
    return None


def _arguments_of(frame: types.FrameType, cls: type) -> dict[str, Any]:
    """Return the arguments of one ``__init__`` frame: their values now, ``**kwargs`` merged, ``*args`` dropped."""
    local = frame.f_locals
    self_name, args_name, kwargs_name = parse_class_init_keys(cls)
    dropped = {self_name, args_name, kwargs_name} | _NEVER_ARGUMENTS
    names = inspect.signature(cls.__init__).parameters  # type: ignore[misc]
    arguments = {name: local[name] for name in names if name in local and name not in dropped}
    if kwargs_name is not None:
        arguments.update({k: v for k, v in local.get(kwargs_name, {}).items() if k not in dropped})
    return arguments


def collect_init_args(frame: types.FrameType, owner: type) -> dict[str, Any]:
    """Collect the arguments of one object's constructor through its class hierarchy.

    The stack is walked outwards from ``frame``. Frames in between that belong to no constructor of ``owner`` (a
    decorator, a factory) are skipped before the first one and end the walk after it, so that an object built inside
    another object's constructor takes nothing from the outer one.

    Args:
        frame: The frame that called ``save_hyperparameters``.
        owner: Only constructors of objects of this class count.

    Returns:
        Argument names to values; where a base and a derived class share a name, the derived class's value.
    """
    collected: list[dict[str, Any]] = []
    target: Any = None
    current: types.FrameType | None = frame
    while current is not None:
        found = _init_frame(current)
        if found is not None and isinstance(found[1], owner) and (target is None or found[1] is target):
            target = found[1]
            collected.append(_arguments_of(current, found[0]))
        elif collected:
            break
        current = current.f_back
    merged: dict[str, Any] = {}
    for arguments in collected:  # innermost (base class) first: the most derived class wins
        merged.update(arguments)
    return merged


def _same(left: Any, right: Any) -> bool:
    """Compare two values where ``==`` may return an array or raise."""
    if left is right:
        return True
    try:
        return bool(left == right)
    except Exception:
        return False


def save_hyperparameters(
    obj: Any,
    *args: Any,
    ignore: Sequence[str] | str | None = None,
    frame: types.FrameType | None = None,
    owner: type | None = None,
) -> None:
    """Store constructor arguments on ``obj`` (see `HyperparametersMixin.save_hyperparameters`).

    Args:
        obj: The object whose hyper-parameters are to be kept.
        *args: Names of arguments, or one mapping or namespace; nothing means all arguments.
        ignore: Names to leave out.
        frame: The constructor's frame; the caller's by default.
        owner: Which objects' constructors count; the class of ``obj`` by default.

    Raises:
        AttributeError: The interpreter gives no frame.
        KeyError: A name that the constructor does not have.
    """
    if len(args) == 1 and not isinstance(args[0], str) and not args[0]:
        return  # an empty container holds nothing to save
    given = _given_arguments.get()
    if given is not None:
        init_args = dict(given)
    elif is_dataclass(obj):
        init_args = {f.name: getattr(obj, f.name) for f in fields(obj) if f.init}
    else:
        if frame is None:
            here = inspect.currentframe()
            frame = here.f_back if here is not None else None
        if not isinstance(frame, types.FrameType):
            raise AttributeError("save_hyperparameters() needs a stack frame, and this interpreter offers none.")
        init_args = collect_init_args(frame, type(obj) if owner is None else owner)

    ignored = [ignore] if isinstance(ignore, str) else [name for name in ignore or () if isinstance(name, str)]
    init_args = {name: value for name, value in init_args.items() if name not in ignored}

    chosen: Any
    objects = [arg for arg in args if not isinstance(arg, str)]
    if not args:
        chosen = init_args
        obj._hparams_name = "kwargs" if chosen else None
    elif len(objects) == 1:
        chosen = objects[0]
        obj._hparams_name = next((name for name, value in init_args.items() if _same(value, chosen)), None)
    else:
        unknown = [name for name in args if isinstance(name, str) and name not in init_args]
        if unknown:
            raise KeyError(
                f"save_hyperparameters() was asked for {unknown}, which {type(obj).__name__}.__init__ does not have. "
                f"Its arguments are {sorted(init_args)}."
            )
        chosen = {name: init_args[name] for name in args if isinstance(name, str)}
        obj._hparams_name = "kwargs"

    obj._set_hparams(chosen)
    obj.remove_ignored_hparams(ignored)
    _warn_about_networks(obj.hparams)
    # A copy: what the module changes at run time must not look like what it was built with.
    obj._hparams_initial = _deep_copy(obj.hparams)


def _deep_copy(hparams: MutableMapping[str, Any]) -> Any:
    """Copy hyper-parameters entry by entry; what cannot be copied (an open file, a generator) stays shared."""
    if not isinstance(hparams, dict):
        return copy.deepcopy(hparams)
    copied = type(hparams)()
    for key, value in hparams.items():
        try:
            copied[key] = copy.deepcopy(value)
        except Exception:
            copied[key] = value
    return copied


def _warn_about_networks(hparams: Mapping[str, Any]) -> None:
    for key, value in hparams.items():
        if is_network(value):
            rank_zero_warn(
                f"Attribute {key!r} is a network ({type(value).__name__}), whose parameters are saved in the "
                f"checkpoint anyway. Leave it out with `self.save_hyperparameters(ignore=[{key!r}])`."
            )
        elif holds_arrays(value, at_least=1024):
            rank_zero_warn(
                f"Attribute {key!r} holds large arrays, which do not belong among the hyper-parameters. "
                f"Leave it out with `self.save_hyperparameters(ignore=[{key!r}])`."
            )
