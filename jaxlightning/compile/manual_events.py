"""The events of manual optimization as equations of a traced step.

While a step is traced, each word (`manual_backward`, `opt.step()`, ...) becomes one equation of a primitive of ours
between the equations of the user's own arithmetic. Nothing is differentiated then. `manual_tape` reads the finished
list of equations and gives each event its meaning, so the user's code runs once, whatever the number of its backward
calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.core import Primitive

__all__ = [
    "LEADING_FLOATS",
    "Backward",
    "Clip",
    "Cut",
    "Event",
    "Forget",
    "HostCall",
    "Keep",
    "ManualOptions",
    "ManualPlan",
    "Read",
    "RetraceManualError",
    "ScheduledStep",
    "Update",
    "aval_of",
    "emit",
    "event_p",
]


LEADING_FLOATS = 3
"""Float inputs before the hyper-parameters, as in `core.FLOATS`."""


@dataclass(frozen=True)
class ManualOptions:
    """Static choices of a variant of a manual step.

    Attributes:
        live: Optimizers (by number) that hold gradients of earlier steps when this one begins.
        snapshots: How often hyper-parameters are read anew because a scheduler steps before an optimizer does.
        hooks: Overridden hooks that run on the host between the segments of the step.
        schedulers: Whether schedulers step on the host between segments too, because one of them takes a value of the
            step and what it sets is used in the same step.
    """

    live: frozenset[int] = frozenset()
    snapshots: int = 0
    hooks: frozenset[str] = frozenset()
    schedulers: bool = False


@dataclass(frozen=True)
class ScheduledStep:
    """Something that a step does to learning rates and their like, on the host.

    Attributes:
        apply: Does it; called with the numbers of the host in that step.
        scheduler: Which scheduler steps, None for a value that is set in a parameter group.
        waits: Whether it takes a value of the step, so that nobody can tell beforehand what it will do.
    """

    apply: Callable[[Any], None]
    scheduler: Any = None
    waits: bool = False


@dataclass
class ManualPlan:
    """What tracing a manual step found out.

    Attributes:
        steps: The optimizers that step, by number, in order.
        applied: For each optimizer how many of its steps had a gradient and changed something.
        schedulers: What is done to learning rates on the host, in order.
        live: Optimizers that hold gradients when the step ends.
        dropped: Those whose gradients nobody will read, because every step begins by forgetting them.
        snapshots: How many of the first of them come before a step of an optimizer.
        cut: Whether hooks run on the host in the middle of the step.
    """

    steps: list[int] = field(default_factory=list)
    applied: dict[int, int] = field(default_factory=dict)
    schedulers: list[ScheduledStep] = field(default_factory=list)
    live: frozenset[int] = frozenset()
    dropped: frozenset[int] = frozenset()
    snapshots: int = 0
    cut: bool = False


class RetraceManualError(Exception):
    """A trace found that the state or the inputs lack something: the step is traced again with it.

    Attributes:
        buffers: Optimizers whose gradients have to live across steps.
        snapshots: Sets of hyper-parameters that the step needs beside the first.
        schedulers: Whether schedulers have to step on the host in the middle of the step.
    """

    def __init__(self, *, buffers: frozenset[int] = frozenset(), snapshots: int = 0, schedulers: bool = False) -> None:
        super().__init__("the manual step has to be traced again")
        self.buffers = buffers
        self.snapshots = snapshots
        self.schedulers = schedulers


@dataclass(eq=False)
class Event:
    """One event; compared by identity, because it is a static parameter of an equation.

    Attributes:
        avals: Types of its results.
    """

    avals: list[Any]


@dataclass(eq=False)
class Read(Event):
    """Parameters as networks see them: gradients are taken with respect to these results.

    Attributes:
        leaves: Numbers of the parameters.
    """

    leaves: list[int]


@dataclass(eq=False)
class Forget(Event):
    """`zero_grad`: gradients that are not there."""


@dataclass(eq=False)
class Backward(Event):
    """`manual_backward`: operands are the loss, its cotangent and a loss scale if given, the gradients so far.

    Attributes:
        leaves: Numbers of the parameters whose gradients are operands and results.
        allowed: For each of them whether it takes part (an optimizer that is toggled off does not).
        has_cotangent: Whether the second operand is the loss's cotangent.
        scaled: Whether the operand after that is the loss scale, which multiplies the cotangent.
        where: The user's step, for messages.
        paths: Names of the parameters.
        check: Whether the last result says which of the loss and the gradients are finite, shape [1 + leaves].
    """

    leaves: list[int]
    allowed: list[bool]
    has_cotangent: bool
    scaled: bool
    where: str
    paths: list[str]
    check: bool


@dataclass(eq=False)
class Clip(Event):
    """`clip_gradients`: operands are the limit and the gradients of one optimizer."""

    algorithm: str


@dataclass(eq=False)
class Update(Event):
    """`opt.step()`: operands are whatever `apply` takes, after the gradients.

    Attributes:
        index: Number of the optimizer.
        gradients: How many of the operands are gradients.
        kept: How many of the operands after them are what the results replace.
        apply: `(gradients, kept, further) -> results`.
        plan: Told when the update is applied.
    """

    index: int
    gradients: int
    kept: int
    apply: Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], Sequence[Any]]
    plan: ManualPlan


@dataclass(eq=False)
class Keep(Event):
    """The end of the step: operands are the gradients of every parameter with an owner, then the buffers.

    Attributes:
        owners: For each gradient the number of its optimizer.
        buffers: For each gradient the position of its buffer among the operands after them, or None.
        forgotten: Optimizers whose gradients every step forgets before it reads them.
        plan: Told which optimizers hold gradients now.
    """

    owners: list[int]
    buffers: list[int | None]
    forgotten: frozenset[int]
    plan: ManualPlan


@dataclass(eq=False)
class Cut(Event):
    """A hook that runs on the host: operands and results are the gradients, then the rest of the state.

    Attributes:
        hook: Its name.
        gradients: How many of the operands are gradients.
        index: Number of the optimizer that is about to step, or None.
        has_loss: Whether the last operand (which has no result) is the loss.
        steps: How many steps of optimizers come before it.
        treedef: Structure of the operands after the gradients: parameters, variables, optimizer states.
        paths: Names of the gradients.
        present: Which of the gradients are there.
    """

    hook: str
    gradients: int
    index: int | None
    has_loss: bool
    steps: int
    treedef: Any
    paths: list[str]
    present: list[bool] = field(default_factory=list)


@dataclass(eq=False)
class HostCall(Event):
    """Something that happens on the host in the middle of the step.

    Attributes:
        call: From the concrete operands to the results, numpy arrays.
    """

    call: Callable[[Sequence[Any]], Sequence[Any]]


event_p = Primitive("manual_event")
event_p.multiple_results = True
event_p.def_abstract_eval(lambda *_, event: list(event.avals))  # type: ignore[no-untyped-call]


def emit(event: Event, *operands: Any) -> list[Any]:
    """Adds an event to the step that is being traced.

    Args:
        event: The event.
        *operands: Arrays of the trace.

    Returns:
        Its results.
    """
    results: list[Any] = event_p.bind(*operands, event=event)  # type: ignore[no-untyped-call]
    return results


def aval_of(value: Any) -> Any:
    """The type of an array as an event's result has it."""
    aval: Any = jax.typeof(value)
    return aval.update(weak_type=False) if getattr(aval, "weak_type", False) else aval
