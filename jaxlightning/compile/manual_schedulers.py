"""Schedulers that a step calls: recorded while it is traced, stepped on the host every time it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from jaxlightning.compile.trace import Trace
from jaxlightning.utilities.exceptions import MisconfigurationException

if TYPE_CHECKING:
    from jaxlightning.compile.binding import Binding

__all__ = ["recording_schedulers"]


@contextmanager
def recording_schedulers(binding: Binding, trace: Trace) -> Iterator[None]:
    """Lets `scheduler.step()` inside a step be an event and not something that happens once, at the trace."""
    trainer = binding.module.__dict__.get("_trainer")
    configs = getattr(trainer, "lr_scheduler_configs", None) or []
    if not configs:
        yield
        return
    schedulers = [config.scheduler for config in configs]

    def recorder(scheduler: Any) -> Callable[..., None]:
        def step(*args: Any, **kwargs: Any) -> None:
            if trace.manual is not None:
                trace.manual.scheduler_step(scheduler, args, kwargs)
            elif not trace.silent and binding.jit:
                raise MisconfigurationException(
                    f"`{type(scheduler).__name__}.step()` was called inside a compiled step: it would happen once. In "
                    "automatic optimization the Trainer steps the schedulers."
                )

        return step

    for scheduler in schedulers:
        scheduler.__dict__["step"] = recorder(scheduler)
    try:
        yield
    finally:
        for scheduler in schedulers:
            scheduler.__dict__.pop("step", None)
