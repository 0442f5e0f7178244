"""What a trace starts from and what it leaves: carried attributes, numbers of the host, effects to repeat there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxlightning.compile.attributes import TracedAttributes
from jaxlightning.compile.host_attributes import HostAttributes
from jaxlightning.compile.replay import HostEffects
from jaxlightning.compile.run_step import StepInfo
from jaxlightning.compile.trace import Trace

if TYPE_CHECKING:
    from jaxlightning.compile.binding import Binding

__all__ = ["attribute_values", "take_effects", "traced_attributes", "traced_numbers"]


def traced_attributes(binding: Binding, attributes: dict[str, Any]) -> TracedAttributes | None:
    """Carried attributes as a trace reads and writes them; an eager step finds them on the module."""
    return TracedAttributes(attributes, binding.engine) if binding.jit else None


def traced_numbers(info: StepInfo, silent: bool) -> HostAttributes | None:
    """Numbers of the host as a trace reads and writes them, None for a step that has none."""
    return None if info.host is None else HostAttributes(info.host, silent=silent)


def attribute_values(trace: Trace) -> dict[str, Any]:
    """Carried attributes as the step left them."""
    return {} if trace.attributes is None else trace.attributes.values


def take_effects(info: StepInfo, trace: Trace) -> tuple[Any, ...]:
    """The arrays of what a step wants done on the host; what that is goes to `info`."""
    if trace.silent:
        return ()
    effects = HostEffects(trace.replays)
    info.effects = effects if effects else None
    info.needs_host = info.needs_host or info.effects is not None
    return effects.detach()
