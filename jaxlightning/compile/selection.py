"""Lazy choices of parameters: what `self.parameters()` and `net.parameters()` return."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from jaxlightning.compile.freezing import decisions_of, is_frozen, norm_layers

if TYPE_CHECKING:
    import jax

__all__ = ["ParameterSelection", "TrainableSelection"]


class TrainableSelection:
    """The part of a selection that is frozen, or not, at the time when the selection is made.

    Args:
        module: The module whose freezing counts.
        selection: What to choose from.
        trainable: Whether to choose what is not frozen, or what is.
    """

    def __init__(self, module: Any, selection: ParameterSelection, trainable: bool) -> None:
        self._module = module
        self._selection = selection
        self._trainable = trainable
        from jaxlightning.compile.owners import owners_of

        self._decisions = decisions_of(owners_of(module))

    def matches(self, path: str) -> bool:
        """Whether the parameter at `path` belongs to this selection."""
        if not self._selection.matches(path):
            return False
        engine = self._module.__dict__.get("_engine")
        variables = {} if engine is None else engine.variables_live
        return is_frozen(self._decisions, path, norm_layers(variables)) is not self._trainable

    def __repr__(self) -> str:
        return f"TrainableSelection({self._selection!r}, {self._trainable})"


class ParameterSelection:
    """A choice of parameters by network or path pattern, made before the parameters exist.

    Parameters of linen networks are created by the first step that calls them, while `configure_optimizers` runs
    earlier; so a selection stores patterns over paths such as `"encoder/Dense_0/kernel"` and is resolved later.

    Args:
        patterns: `fnmatch` patterns over full paths (network name, then the path inside it, joined by `/`). A
            pattern also selects everything below it.
        resolve: Returns the current parameters as a flat `{path: array}` dictionary, or None before they exist.
    """

    def __init__(
        self, patterns: tuple[str, ...], resolve: Callable[[], dict[str, jax.Array] | None] | None = None
    ) -> None:
        self.patterns = tuple(patterns)
        self._resolve = resolve

    def matches(self, path: str) -> bool:
        """Whether the parameter at `path` belongs to this selection."""
        return any(
            pattern == "*" or path == pattern or path.startswith(pattern + "/") or fnmatch.fnmatchcase(path, pattern)
            for pattern in self.patterns
        )

    def __or__(self, other: ParameterSelection) -> ParameterSelection:
        return ParameterSelection(self.patterns + other.patterns, self._resolve or other._resolve)

    def __add__(self, other: ParameterSelection) -> ParameterSelection:
        return self | other

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ParameterSelection) and set(self.patterns) == set(other.patterns)

    def __hash__(self) -> int:
        return hash(frozenset(self.patterns))

    def __repr__(self) -> str:
        return f"ParameterSelection({', '.join(self.patterns)})"

    def items(self) -> dict[str, Any]:
        """The selected parameters, `{path: array}`.

        Raises:
            RuntimeError: If the parameters do not exist yet.
        """
        current = self._resolve() if self._resolve is not None else None
        if current is None:
            raise RuntimeError(
                f"The parameters of {self!r} do not exist yet: a linen network gets its variables from the first step "
                "that calls it. Call `module.init(batch)` first, or set `example_input_array`."
            )
        return {path: value for path, value in current.items() if self.matches(path)}

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items().values())
