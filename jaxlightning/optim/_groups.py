"""Which parameters an optimizer owns: selections, parameter groups, ownership checks."""

from __future__ import annotations

import fnmatch
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax

from jaxlightning.optim._observed import listener


@runtime_checkable
class Selection(Protocol):
    """Anything that says of a parameter path such as `"encoder/Dense_0/kernel"` whether it is meant."""

    def matches(self, path: str) -> bool:
        """Whether the parameter at `path` belongs to the selection."""
        ...


@dataclass(frozen=True)
class PatternSelection:
    """Parameters chosen by `fnmatch` patterns over their full paths.

    Attributes:
        patterns: A pattern also selects everything below it: `"encoder"` means `"encoder/*"` as well.
    """

    patterns: tuple[str, ...]

    def matches(self, path: str) -> bool:
        """Whether the parameter at `path` belongs to the selection."""
        return any(
            path == pattern or path.startswith(pattern + "/") or fnmatch.fnmatchcase(path, pattern)
            for pattern in self.patterns
        )


@dataclass(frozen=True)
class _AnyOf:
    """The union of several selections."""

    parts: tuple[Selection, ...]

    def matches(self, path: str) -> bool:
        return any(part.matches(path) for part in self.parts)


@dataclass(frozen=True)
class _Predicate:
    """Parameters chosen by a function of the path."""

    fn: Callable[[str], bool]

    def matches(self, path: str) -> bool:
        return bool(self.fn(path))


_HOW_TO_SELECT = (
    "Pass `self.parameters()`, `self.net.parameters()`, a path pattern such as 'net/Dense_0/*', a function of the "
    "path, or a list of these or of dictionaries {'params': ..., 'lr': ...}."
)


_network_paths: dict[int, tuple[weakref.ref[Any], str]] = {}


def remember_network(network: Any, path: str) -> None:
    """Lets a network that has no words of ours (an NNX module) be named itself as what an optimizer owns.

    Args:
        network: The user's object.
        path: Where it stands on the module.
    """
    key = id(network)
    _network_paths[key] = (weakref.ref(network, lambda _: _network_paths.pop(key, None)), path)


def as_selection(params: Any) -> Selection:
    """Turns what a user passes as `params` into a selection.

    Args:
        params: A selection, a path pattern, a function `path -> bool`, an object with `.parameters()`, a
            `(name, parameter)` pair, or an iterable of these.

    Returns:
        An object with `matches(path)`.

    Raises:
        TypeError: If `params` holds arrays or anything else that does not name parameters.
        ValueError: If `params` is empty.
    """
    if isinstance(params, str):
        return PatternSelection((params,))
    if isinstance(params, Selection):
        return params
    known = _network_paths.get(id(params))
    if known is not None and known[0]() is params:
        return PatternSelection((known[1],))
    # Before `path`, which raises on an unbound linen module.
    parameters = getattr(params, "parameters", None)
    if callable(parameters):
        return as_selection(parameters())
    path = getattr(params, "path", None)
    if isinstance(path, str):
        return PatternSelection((path,))
    if hasattr(params, "shape") and hasattr(params, "dtype"):
        raise TypeError(
            f"An optimizer got an array (shape {tuple(params.shape)}, dtype {params.dtype}) as a parameter. Arrays "
            f"have no identity in JAX, so an optimizer is told which parameters it owns. {_HOW_TO_SELECT}"
        )
    if isinstance(params, tuple) and len(params) == 2 and isinstance(params[0], str) and not isinstance(params[1], str):
        return as_selection(params[1])  # one entry of named_parameters()
    if isinstance(params, Iterable) and not isinstance(params, Mapping):
        parts = tuple(as_selection(item) for item in params)
        if not parts:
            raise ValueError(f"An optimizer got an empty parameter list. {_HOW_TO_SELECT}")
        if all(isinstance(part, PatternSelection) for part in parts):
            return PatternSelection(
                tuple(p for part in parts if isinstance(part, PatternSelection) for p in part.patterns)
            )
        return parts[0] if len(parts) == 1 else _AnyOf(parts)
    if inspect.isroutine(params) or isinstance(params, functools.partial):
        return _Predicate(params)
    raise TypeError(f"An optimizer cannot read its parameters from {type(params).__name__}. {_HOW_TO_SELECT}")


class ParamGroup(dict[str, Any]):
    """One parameter group: a plain dictionary whose owner hears of every change.

    Writing `group["lr"] = 0.01` is how schedulers, callbacks and users set a value; the owner then refreshes the
    vector of hyper-parameters that the compiled step takes, so nothing is compiled again.
    """

    def __init__(self, values: Mapping[str, Any], on_change: Callable[[ParamGroup, str, Any], Any]) -> None:
        super().__init__(values)
        self._on_change = on_change

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        listen = listener()
        return value if listen is None else listen(self, key, value, lambda: dict.__getitem__(self, key))

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `key`, `default` without one."""
        value = super().get(key, default)
        listen = listener() if key in self else None
        return value if listen is None else listen(self, key, value, lambda: dict.__getitem__(self, key))

    def __setitem__(self, key: str, value: Any) -> None:
        listen = listener()
        if listen is not None and listen(self, key, value, None):
            return  # it is set when the step has run
        super().__setitem__(key, self._on_change(self, key, value))

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Sets several values, each like `group[key] = value`."""
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Returns the value of `key`, after setting it to `default` if it was missing."""
        if key not in self:
            self[key] = default
        return self[key]

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return dict(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return (dict, (dict(self),))


def path_text(path: Sequence[Any]) -> str:
    """The text form `"net/layer/kernel"` of a pytree key path."""
    return "/".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)


def leaf_paths(tree: Any) -> list[str]:
    """The text paths of the leaves of a pytree, in flattening order."""
    return [path_text(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


def assign_groups(selections: Sequence[Selection], paths: Sequence[str], owner: str) -> list[int]:
    """Finds the group of every parameter.

    Args:
        selections: The selection of each group.
        paths: Parameter paths.
        owner: Name of the optimizer, for messages.

    Returns:
        For each path the index of its group.

    Raises:
        ValueError: If a parameter is in no group, or in more than one.
    """
    out: list[int] = []
    lost: list[str] = []
    double: list[str] = []
    for path in paths:
        found = [index for index, selection in enumerate(selections) if selection.matches(path)]
        if not found:
            lost.append(path)
        elif len(found) > 1:
            double.append(f"{path} (groups {', '.join(map(str, found))})")
        out.append(found[0] if found else -1)
    if double:
        raise ValueError(
            f"{owner}: some parameters appear in more than one parameter group: {_listing(double)}. Make the patterns "
            "of the groups exclude each other."
        )
    if lost:
        raise ValueError(f"{owner}: these parameters are in none of its parameter groups: {_listing(lost)}.")
    return out


@dataclass(frozen=True, kw_only=True)
class Ownership:
    """Who owns which parameter.

    Attributes:
        owners: For each path the indices of the optimizers that own it.
        unowned: Paths that no optimizer owns (they stay as they are).
        shared: Paths that more than one optimizer owns.
        idle: Indices of optimizers that own no parameter at all.
    """

    owners: dict[str, tuple[int, ...]]
    unowned: tuple[str, ...]
    shared: tuple[str, ...]
    idle: tuple[int, ...]


class _Owner(Protocol):
    owns: Selection | None
    name: str


def find_ownership(handles: Sequence[_Owner], paths: Iterable[str]) -> Ownership:
    """Says which optimizer owns which parameter.

    Args:
        handles: The optimizers; `owns=None` means every parameter.
        paths: All parameter paths of the module.

    Returns:
        The owners of each path, and what is unowned, shared or idle.
    """
    owners: dict[str, tuple[int, ...]] = {}
    for path in paths:
        owners[path] = tuple(i for i, h in enumerate(handles) if h.owns is None or h.owns.matches(path))
    used = {index for found in owners.values() for index in found}
    return Ownership(
        owners=owners,
        unowned=tuple(path for path, found in owners.items() if not found),
        shared=tuple(path for path, found in owners.items() if len(found) > 1),
        idle=tuple(index for index in range(len(handles)) if index not in used),
    )


def check_ownership(handles: Sequence[_Owner], paths: Iterable[str]) -> Ownership:
    """`find_ownership`, refusing an optimizer that owns nothing.

    Args:
        handles: The optimizers.
        paths: All parameter paths of the module.

    Returns:
        The ownership.

    Raises:
        ValueError: If an optimizer's selection matches no parameter.
    """
    found = find_ownership(handles, paths)
    if found.idle:
        names = ", ".join(f"{handles[i].name} (number {i}, {handles[i].owns!r})" for i in found.idle)
        raise ValueError(
            f"An optimizer got an empty parameter list: {names} matches no parameter. The module's parameters are "
            f"{_listing(list(found.owners)) or 'none'}."
        )
    return found


def _listing(items: Sequence[str], limit: int = 8) -> str:
    text = ", ".join(items[:limit])
    return text if len(items) <= limit else f"{text} and {len(items) - limit} more"
