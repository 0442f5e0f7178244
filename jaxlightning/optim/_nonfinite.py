"""What to do about updates with NaN or infinite gradients, decided inside the compiled step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jaxlightning.utilities.exceptions import MisconfigurationException
from jaxlightning.utilities.rank_zero import rank_zero_warn

T = TypeVar("T")

MODES = (None, "raise", "skip", "warn")
"""None: nothing is checked, as in Lightning. "raise" and "skip" leave parameters and optimizer state as they were,
"warn" lets the update through; all three count."""


class NonfiniteState(NamedTuple):
    """How often an update was not finite; part of the train state.

    Attributes:
        count: Updates that were not finite so far, int32, shape ().
        last: Number of the last such update, -1 if there was none, int32, shape ().
        updates: Updates looked at so far, int32, shape ().
    """

    count: Any
    last: Any
    updates: Any


def check_mode(mode: str | None) -> str | None:
    """Checks an `on_nonfinite` option.

    Args:
        mode: None, `"raise"`, `"skip"` or `"warn"`.

    Returns:
        The mode.

    Raises:
        MisconfigurationException: If it is something else.
    """
    if mode not in MODES:
        raise MisconfigurationException(f"`on_nonfinite` must be one of {list(MODES)}, but got {mode!r}.")
    return mode


def init_nonfinite() -> NonfiniteState:
    """The state before the first update."""
    return NonfiniteState(jnp.zeros([], jnp.int32), jnp.full([], -1, jnp.int32), jnp.zeros([], jnp.int32))


def all_finite(*trees: Any) -> jax.Array:
    """Whether every number in some pytrees is finite.

    Args:
        *trees: Pytrees of arrays; integers count as finite.

    Returns:
        A boolean scalar.
    """
    leaves = [leaf for leaf in jax.tree.leaves(trees) if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)]
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in leaves])) if leaves else jnp.asarray(True)


def select(finite: jax.Array, new: T, old: T) -> T:
    """Takes `new` where `finite` holds and `old` otherwise, leaf by leaf.

    A select, not a product: NaN times zero is NaN.

    Args:
        finite: A boolean scalar.
        new: A pytree.
        old: A pytree of the same structure.

    Returns:
        The chosen pytree.
    """
    out: T = jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)
    return out


def guard(
    mode: str | None, state: NonfiniteState, checked: Sequence[Any], new: T, old: T
) -> tuple[T, NonfiniteState, jax.Array]:
    """Decides about one update; pure, runs under a trace.

    Args:
        mode: None, `"raise"`, `"skip"` or `"warn"`.
        state: The counts.
        checked: What must be finite: gradients, and the loss.
        new: Parameters, optimizer state and accumulated gradients after the update.
        old: The same before it.

    Returns:
        The values to keep, the new counts, and whether the update was finite.
    """
    if check_mode(mode) is None:
        return new, state, jnp.asarray(True)
    finite = all_finite(*checked)
    counts = NonfiniteState(
        count=state.count + jnp.where(finite, 0, 1).astype(jnp.int32),
        last=jnp.where(finite, state.last, state.updates),
        updates=state.updates + 1,
    )
    return (new if mode == "warn" else select(finite, new, old)), counts, finite


def report(mode: str | None, count: int, last: int, before: int = 0) -> None:
    """Speaks on the host about counts that were read, at a log point.

    Args:
        mode: None, `"raise"`, `"skip"` or `"warn"`.
        count: Updates that were not finite so far.
        last: Number of the last one.
        before: What `count` was at the last report.

    Raises:
        FloatingPointError: If the mode is `"raise"` and there is a new one.
    """
    new = count - before
    if mode is None or new <= 0:
        return
    what = f"{new} optimizer update{'s' if new > 1 else ''} had NaN or infinite gradients or loss, lastly number {last}"
    if mode == "raise":
        raise FloatingPointError(
            f'{what} (counted over the run, from 0). `on_nonfinite="raise"`: parameters and optimizer state are those '
            'before it. `on_nonfinite="skip"` goes on without such updates; `detect_anomaly=True` names the array.'
        )
    rank_zero_warn(f"{what}; {'left out' if mode == 'skip' else 'applied as they were'} ({count} in this run).")
