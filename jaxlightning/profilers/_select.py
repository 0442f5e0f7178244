"""From `Trainer(profiler=...)` to a profiler."""

from __future__ import annotations

from typing import Any

from jaxlightning.profilers.advanced import AdvancedProfiler
from jaxlightning.profilers.base import PassThroughProfiler
from jaxlightning.profilers.jax_profiler import JaxProfiler
from jaxlightning.profilers.profiler import Profiler
from jaxlightning.profilers.simple import SimpleProfiler
from jaxlightning.utilities.exceptions import MisconfigurationException

# "pytorch" and "xla" are Lightning's names for a trace of the device; JAX has one for all devices
PROFILERS: dict[str, type[Profiler]] = {
    "simple": SimpleProfiler,
    "advanced": AdvancedProfiler,
    "jax": JaxProfiler,
    "pytorch": JaxProfiler,
    "xla": JaxProfiler,
}


def select_profiler(profiler: Any) -> Profiler:
    """Return the profiler that a Trainer was asked for.

    Args:
        profiler: None, a name, or a profiler.

    Returns:
        The profiler; one that records nothing for None.

    Raises:
        MisconfigurationException: Another name.
        TypeError: Neither a name nor a profiler.
    """
    if profiler is None:
        return PassThroughProfiler()
    if isinstance(profiler, str):
        chosen = PROFILERS.get(profiler.lower())
        if chosen is None:
            raise MisconfigurationException(
                "When passing string value for the `profiler` parameter of `Trainer`, it can only be one of "
                f"{list(PROFILERS)}. Received: {profiler!r}"
            )
        return chosen()
    if isinstance(profiler, Profiler) or all(callable(getattr(profiler, n, None)) for n in ("profile", "describe")):
        selected: Profiler = profiler
        return selected
    raise TypeError(
        f"`Trainer(profiler=...)` takes one of {list(PROFILERS)} or a `jaxlightning.profilers.Profiler`, "
        f"got {type(profiler).__qualname__}: {profiler!r}"
    )
