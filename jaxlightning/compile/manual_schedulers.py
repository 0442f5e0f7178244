"""Learning rates inside a manual step: schedulers that it steps, values that it sets, and what it reads afterwards.

Schedulers and parameter groups live on the host. What a step does to them is recorded while it is traced and done on
the host every time it runs. An optimizer that steps after a scheduler in the same step needs what the scheduler sets:
it is asked beforehand what it will do. One that takes a value of the step (a plateau) cannot be asked; then the step is
cut there, and the scheduler steps between two compiled segments.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from jaxlightning.compile.containers import map_items
from jaxlightning.compile.host_proxy import HostNumber
from jaxlightning.compile.host_values import Expression
from jaxlightning.compile.manual_events import (
    LEADING_FLOATS,
    HostCall,
    RetraceManualError,
    ScheduledStep,
    aval_of,
    emit,
)
from jaxlightning.compile.outputs import OutputTree
from jaxlightning.compile.replay import Replay
from jaxlightning.compile.trace import Trace
from jaxlightning.compile.user_code import user_line
from jaxlightning.optim.lr_scheduler import LRScheduler
from jaxlightning.utilities.exceptions import MisconfigurationException

if TYPE_CHECKING:
    from jaxlightning.compile.binding import Binding
    from jaxlightning.compile.host_attributes import HostAttributes
    from jaxlightning.compile.manual import ManualRun

__all__ = ["Rates", "foreseen", "recording_schedulers"]

_ABSENT = object()


@contextmanager
def recording_schedulers(binding: Binding, trace: Trace) -> Iterator[None]:
    """Lets `scheduler.step()` inside a step be an event and not something that happens once, at the trace."""
    schedulers = _schedulers(binding)
    if not schedulers:
        yield
        return

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

    before = [scheduler.__dict__.get("step", _ABSENT) for scheduler in schedulers]
    for scheduler in schedulers:
        scheduler.__dict__["step"] = recorder(scheduler)
    try:
        yield
    finally:
        for scheduler, recorded in zip(schedulers, before, strict=True):
            if recorded is _ABSENT:
                scheduler.__dict__.pop("step", None)
            else:
                scheduler.__dict__["step"] = recorded


def _schedulers(binding: Binding) -> list[Any]:
    """The trainer's schedulers and those that a module keeps itself, each once."""
    trainer = binding.module.__dict__.get("_trainer")
    found = {id(c.scheduler): c.scheduler for c in getattr(trainer, "lr_scheduler_configs", None) or []}
    for owner in binding.owners.values():
        for value in owner.__dict__.values():
            items = value.values() if type(value) is dict else value if type(value) in (list, tuple) else (value,)
            found.update((id(item), item) for item in items if isinstance(item, LRScheduler))
    return list(found.values())


@contextmanager
def foreseen(handles: Sequence[Any], steps: Sequence[ScheduledStep], numbers: Any) -> Iterator[Iterator[None]]:
    """Does what a step will do to learning rates, one after the other; everything is as before when the block ends.

    Args:
        handles: All optimizers.
        steps: What will be done; none of it waits for a value of the step.
        numbers: The numbers of the host in the step.

    Yields:
        An iterator that does one more at each turn.
    """
    schedulers = [step.scheduler for step in steps if step.scheduler is not None]
    states = [(each, copy.deepcopy(each.state_dict())) for each in {id(s): s for s in schedulers}.values()]
    groups = [(group, dict(group)) for handle in handles for group in handle.param_groups]
    try:
        yield _in_turn(steps, numbers)
    finally:
        for scheduler, state in states:
            scheduler.load_state_dict(state)
        for group, before in groups:
            for key, value in before.items():
                if key != "params" and dict.__getitem__(group, key) != value:
                    group[key] = value


def _in_turn(steps: Sequence[ScheduledStep], numbers: Any) -> Iterator[None]:
    for step in steps:
        step.apply(numbers)
        yield


class Rates:
    """Learning rates and their like in one trace of a manual step.

    Args:
        run: The trace's run.
        floats: Float inputs of the step: leading ones, then the hyper-parameters of all optimizers, once more for each
            snapshot.
    """

    def __init__(self, run: ManualRun, floats: Any) -> None:
        self._run = run
        self._floats = floats
        self._waiting: set[int] = set()
        self._now: Any = None  # all hyper-parameters, once a scheduler has stepped between segments
        self._widths = [len(handle.host_hyper()) for handle in run.binding.optimizers]

    # --- what the step does ---------------------------------------------------------------------------------------

    def step(self, scheduler: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """`scheduler.step(...)`."""
        run, name = self._run, f"`{type(scheduler).__name__}.step(...)`"
        run.trace.require_own_level(name, "call it in the step itself")
        given = OutputTree((tuple(args), dict(kwargs)))
        if run.options.schedulers:
            arrays = [jnp.asarray(value) for value in given.detach()]

            def now(values: Sequence[Any]) -> None:
                positional, named = given.rebuild(values)
                type(scheduler).step(scheduler, *positional, **named)

            self._between(arrays, now)
            return
        if not given.arrays:
            self._add(ScheduledStep(lambda _: type(scheduler).step(scheduler, *args, **kwargs), scheduler))
            return
        call = (tuple(args), dict(kwargs))
        delivered: list[Any] = []
        run.trace.replays.append(Replay(f"{name} ({user_line()})", call, delivered.append, state=True))
        waits = not all(isinstance(value, HostNumber) for value in given.arrays)

        def step(env: Any) -> None:
            # Foreseen with the numbers of the step; done for good with what was found when the step ended.
            positional, named = delivered.pop() if env is None else map_items(call, lambda item: _known(item, env))
            type(scheduler).step(scheduler, *positional, **named)

        self._add(ScheduledStep(step, scheduler, waits=waits))
        if not waits:
            return
        handles, owner = run.binding.optimizers, getattr(scheduler, "optimizer", None)
        touched = {index for index, handle in enumerate(handles) if owner in (handle, handle.optimizer)}
        self._waiting |= touched or set(range(len(handles)))

    def assign(self, group: Any, key: str, value: Any, numbers: HostAttributes) -> None:
        """`optimizer.param_groups[i]["lr"] = value`, a number of the host."""
        run, text = self._run, f"param_groups[...][{key!r}]"
        run.trace.require_own_level(f"The assignment of `{text}`", "assign it in the step itself")
        if run.options.schedulers:
            if isinstance(value, HostNumber):
                raise RuntimeError(
                    f"The step sets `{text}` to a number that changes from step to step at {user_line()}, and steps a "
                    "scheduler with a value of the step as well, before an optimizer steps. Set it in "
                    "`on_train_batch_start`."
                )
            self._between([], lambda _: group.__setitem__(key, value))
            return
        if not isinstance(value, HostNumber):
            self._add(ScheduledStep(lambda _: group.__setitem__(key, value)))
            return
        delivered: list[Any] = []
        numbers.assign(f"{text} ({len(run.plan.schedulers)})", value, delivered.append)
        evaluate = value._expression.evaluate
        # Foreseen with the numbers of the step; done for good with what was found when the step ended.
        self._add(ScheduledStep(lambda env: group.__setitem__(key, delivered.pop() if env is None else evaluate(env))))

    def _add(self, step: ScheduledStep) -> None:
        self._run.plan.schedulers.append(step)

    def _between(self, arrays: list[Any], call: Callable[[Sequence[Any]], None]) -> None:
        """Lets the host do something here; all hyper-parameters are what it leaves."""
        handles, dtype = self._run.binding.optimizers, self._floats.dtype

        def and_look(values: Sequence[Any]) -> list[Any]:
            call(values)
            return [np.array([number for handle in handles for number in handle.host_hyper()], dtype)]

        self._run.plan.cut = True
        aval = aval_of(jnp.zeros((sum(self._widths),), dtype))
        (self._now,) = emit(HostCall([aval], and_look), *arrays)

    # --- what it sees of it ---------------------------------------------------------------------------------------

    def hyper(self, index: int) -> Any:
        """The hyper-parameters of an optimizer as they are here."""
        before, width = sum(self._widths[:index]), self._widths[index]
        if self._now is not None:
            return self._now[before : before + width]
        if index in self._waiting:
            raise RetraceManualError(schedulers=True)
        plan = self._run.plan
        number = sum(not step.waits for step in plan.schedulers)
        if number > self._run.options.snapshots:
            raise RetraceManualError(snapshots=number)
        plan.snapshots = max(plan.snapshots, number)
        start = LEADING_FLOATS + number * sum(self._widths) + before
        return self._floats[start : start + width]

    def seen(self, key: str, value: Any, read: Callable[[], Any], numbers: HostAttributes) -> Any:
        """What the user's code sees of a number that schedulers may have changed within the step; None: nothing new.

        Args:
            key: How the user reaches it.
            value: A number, or a list of them.
            read: Reads it on the host.
            numbers: The numbers of this run of the step.
        """
        steps = list(self._run.plan.schedulers)
        if self._now is None and not steps:
            return None
        if any(step.waits for step in steps):
            raise RetraceManualError(schedulers=True)
        listed = isinstance(value, list | tuple)
        if self._now is not None:
            self._run.trace.require_own_level(f"`{key}`", "read it in the step itself")
            count, dtype = len(value) if listed else 1, self._floats.dtype
            aval = aval_of(jnp.zeros((count,), dtype))
            (found,) = emit(HostCall([aval], lambda _: [np.asarray(read(), dtype).reshape(count)]))
            return [found[i] for i in range(count)] if listed else found[0]
        handles = self._run.binding.optimizers

        def after(env: Any) -> Any:
            with foreseen(handles, steps, env) as doing:
                for _ in doing:
                    pass
                return copy.copy(read())

        now = after(numbers.inputs.env)
        where = f"{key} after {len(steps)}"
        if listed:
            return [
                numbers.inputs._given(Expression(f"{where}[{i}]", lambda env, i=i: after(env)[i]), item)  # type: ignore[misc]
                for i, item in enumerate(now)
            ]
        return numbers.inputs._given(Expression(where, after), now)


def _known(item: Any, env: Any) -> Any:
    return item._expression.evaluate(env) if isinstance(item, HostNumber) else item
