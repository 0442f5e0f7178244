"""`Trainer(checkify=...)`: JAX's run-time checks around every compiled step, raised on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["checked", "parse_checks", "raising"]

KINDS = {"nan": "nan_checks", "div": "div_checks", "oob": "index_checks", "user": "user_checks"}
"""Words of the flag, and the sets of checks in `jax.experimental.checkify` that they stand for."""


def parse_checks(flag: str | bool | Iterable[str] | None) -> tuple[str, ...]:
    """Reads the flag.

    Args:
        flag: None or False for none, True for all, or words separated by commas: `"nan"`, `"div"` (a division by
            zero), `"oob"` (an index out of bounds), `"user"` (`checkify.check` in the step).

    Returns:
        The words, each once.

    Raises:
        ValueError: For an unknown word.
    """
    if flag is None or flag is False:
        return ()
    if flag is True:
        return tuple(KINDS)
    words = [word.strip() for word in (flag.split(",") if isinstance(flag, str) else flag)]
    unknown = [word for word in words if word not in KINDS]
    if unknown or not words:
        raise ValueError(
            f"`Trainer(checkify={flag!r})`: {unknown} is unknown. Give one or more of {', '.join(map(repr, KINDS))}, "
            "separated by commas, or True for all."
        )
    return tuple(word for word in KINDS if word in words)


def checked(function: Callable[..., Any], words: Iterable[str]) -> Callable[..., Any]:
    """A function that gives an error value beside its result.

    Args:
        function: A pure function.
        words: From `parse_checks`.

    Returns:
        A function that returns `(error, result)`.
    """
    from jax.experimental import checkify

    errors: Any = frozenset().union(*(getattr(checkify, KINDS[word]) for word in words))
    wrapped: Callable[..., Any] = checkify.checkify(function, errors=errors)
    return wrapped


def raising(call: Callable[..., Any], what: str) -> Callable[..., Any]:
    """Calls a compiled checked function, and raises what it found; one device read per call.

    Args:
        call: The compiled function, which returns `(error, result)`.
        what: Which step it is, for the message.

    Returns:
        A function that returns the result.
    """

    def run(*args: Any) -> Any:
        error, result = call(*args)
        try:
            error.throw()
        except Exception as found:
            found.add_note(
                f"Found by `Trainer(checkify=...)` in the {what} step. The state is the one before this step."
            )
            raise
        return result

    return run


def eager_refused(jit: bool, words: tuple[str, ...]) -> None:
    """Refuses the flag without compilation.

    Raises:
        MisconfigurationException: If steps are not compiled.
    """
    if words and not jit:
        from jaxlightning.utilities.exceptions import MisconfigurationException

        raise MisconfigurationException(
            "`Trainer(checkify=...)` adds checks to compiled steps, and `jit=False` compiles none. There a "
            "`checkify.check` raises by itself, and `jax.config.update('jax_debug_nans', True)` finds the first NaN."
        )
