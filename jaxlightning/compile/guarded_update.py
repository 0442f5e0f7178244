"""What an update goes through before it counts: the loss scale's verdict, and `on_nonfinite`'s. All on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from jaxlightning.compile.log_plan import LogMeta
from jaxlightning.compile.precision import finish_update
from jaxlightning.compile.state import TrainState
from jaxlightning.compile.trace import LogEntry
from jaxlightning.optim._nonfinite import guard, init_nonfinite

if TYPE_CHECKING:
    from jaxlightning.compile.binding import Binding

__all__ = ["LOSS_SCALE", "NONFINITE", "device_logs", "guarded_update", "initial_guards"]

LOSS_SCALE = "loss_scale"
"""The key under which the loss scale of "16-mixed" is logged."""

NONFINITE = "nonfinite_updates"
"""The key under which `on_nonfinite` logs how many updates were not finite so far."""


def initial_guards(binding: Binding, state: TrainState) -> TrainState:
    """Gives the state what the binding's policies carry: a loss scale (kept where there is one), fresh counts."""
    scaler = binding.precision.scaler
    if scaler is None:
        scale = None
    else:
        scale = state.scaler if state.scaler is not None else scaler.init()
    return state.replace(scaler=scale, nonfinite=None if binding.on_nonfinite is None else init_nonfinite())


def guarded_update(binding: Binding, before: TrainState, after: TrainState, grads: Any, loss: Any = None) -> TrainState:
    """Decides whether an update that was computed is kept; pure, runs under a trace.

    Args:
        binding: Knows the policies.
        before: The state without the update.
        after: The state with it.
        grads: The gradients of the update, without loss scale, before clipping.
        loss: The loss, None where it is not at hand.

    Returns:
        The state to go on with.
    """
    scaler, mode = binding.precision.scaler, binding.on_nonfinite
    if scaler is None and mode is None:
        return after
    new, old = (after.params, after.opt_state), (before.params, before.opt_state)
    counts = before.nonfinite
    # Infinite gradients of a scaled loss are the scale's business; what is left to judge then is the loss itself.
    checked = [item for item in (None if scaler is not None else grads, loss) if item is not None]
    if mode is not None and checked:
        new, counts, _ = guard(mode, counts, checked, new, old)
    # What the mode leaves out counts as left out by the scale as well, so that each is counted once.
    judged = (grads, loss) if mode in ("skip", "raise") and loss is not None else grads
    new, scale = finish_update(scaler, before.scaler, judged, new, old)
    params, opt_state = new
    return after.replace(params=params, opt_state=opt_state, scaler=scale, nonfinite=counts)


def device_logs(new: TrainState, old: TrainState) -> list[LogEntry]:
    """The log entries of a training step for what the state counts by itself.

    Args:
        new: The state after the batch.
        old: The state before it; its loss scale is the one that the batch was computed with.

    Returns:
        The entries, step values for the loggers only.
    """
    found = []
    if old.scaler is not None:
        found.append((LOSS_SCALE, old.scaler.scale))
    if new.nonfinite is not None:
        found.append((NONFINITE, new.nonfinite.count.astype(jnp.float32)))
    return [
        LogEntry(LogMeta(fx="training_step", name=name, on_step=True, on_epoch=False), value) for name, value in found
    ]
