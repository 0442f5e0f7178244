"""Say things once, on the process with global rank 0."""

from __future__ import annotations

import functools
import logging
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

P = ParamSpec("P")
T = TypeVar("T")
D = TypeVar("D")

#: The package's logger. No handler and no level is set here: that is the application's business.
log = logging.getLogger("jaxlightning")

# In the order in which a launcher would override another: ours, torchrun's, SLURM's, MPI's.
_RANK_VARIABLES = ("RANK", "JAX_PROCESS_INDEX", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


def _backend_is_up() -> bool:
    """Say whether this process already has a JAX backend, without making one."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    if bridge is None:
        return False
    try:
        return bool(bridge.backends_are_initialized())
    except AttributeError:  # the private function moved: behave as before a backend exists
        return False


def process_rank() -> int:
    """Return the global rank of this process, starting no backend.

    Returns:
        `jax.process_index()` when a backend exists, otherwise what the launcher's variables say, otherwise 0.
    """
    if _backend_is_up():
        import jax

        return int(jax.process_index())
    for name in _RANK_VARIABLES:
        value = os.environ.get(name)
        if value is not None:
            try:
                return int(value)
            except ValueError:
                continue
    return 0


@overload
def rank_zero_only(fn: Callable[P, T]) -> Callable[P, T | None]: ...


@overload
def rank_zero_only(fn: Callable[P, T], default: D) -> Callable[P, T | D]: ...


def rank_zero_only(fn: Callable[P, T], default: Any = None) -> Callable[P, Any]:
    """Wrap a function so that it runs on global rank 0 only.

    Args:
        fn: The function.
        default: What the other ranks return.

    Returns:
        The wrapped function.
    """

    @functools.wraps(fn)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> Any:
        if process_rank() == 0:
            return fn(*args, **kwargs)
        return default

    return wrapped


def rank_zero_warn(message: str | Warning, category: type[Warning] = UserWarning, *, stacklevel: int = 4) -> None:
    """Give a warning on rank 0.

    Args:
        message: The text.
        category: The warning class.
        stacklevel: As in `warnings.warn`, counted from inside this function.
    """
    if process_rank() != 0:
        return
    # Looked up here and not at import: `warnings` imports this module.
    from jaxlightning.utilities.warnings import PossibleUserWarning, possible_user_warnings_silenced

    if issubclass(category, PossibleUserWarning) and possible_user_warnings_silenced():
        return
    warnings.warn(message, category=category, stacklevel=stacklevel)


def rank_zero_deprecation(message: str, *, stacklevel: int = 5) -> None:
    """Give a DeprecationWarning on rank 0."""
    rank_zero_warn(message, category=DeprecationWarning, stacklevel=stacklevel)


def rank_zero_info(message: str, *args: Any) -> None:
    """Write an INFO record on rank 0."""
    if process_rank() == 0:
        log.info(message, *args, stacklevel=3)


def rank_zero_debug(message: str, *args: Any) -> None:
    """Write a DEBUG record on rank 0."""
    if process_rank() == 0:
        log.debug(message, *args, stacklevel=3)
