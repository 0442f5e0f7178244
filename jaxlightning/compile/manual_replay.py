"""Runs of a manual step beside the one that counts: silently, from its start, on other parameters.

With `jit=False` each `manual_backward` needs one, because a concrete array does not remember how it was computed. An
optimizer that evaluates its closure several times per step (L-BFGS) needs one whether the step is compiled or not.
Updates that happened before the call in question are known numbers in such a run.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jaxlightning.compile.attributes import TracedAttributes
from jaxlightning.compile.host_attributes import HostAttributes
from jaxlightning.compile.manual_base import ManualBase, check_loss
from jaxlightning.compile.run_step import StepInfo, run_user_step
from jaxlightning.compile.state import TrainState
from jaxlightning.compile.trace import Scalars, Trace
from jaxlightning.compile.writes import Snapshot, as_it_was
from jaxlightning.utilities.exceptions import MisconfigurationException

if TYPE_CHECKING:
    from jaxlightning.compile.binding import Binding
    from jaxlightning.compile.host_inputs import HostInputs

__all__ = ["ClosureValue", "ReplayRun", "Replayer", "closure_value", "replayer", "set_aside"]

Replayer = Callable[["ReplayRun"], Any]
"""Runs the step once more with another run in place of the one that counts; gives the loss at which that one ends."""


class _ReachedError(BaseException):
    """Ends a replay at the backward call that it is for; no `except Exception` of the user catches it."""

    def __init__(self, loss: Any) -> None:
        super().__init__("reached")
        self.loss = loss


class ReplayRun(ManualBase):
    """A silent run of the step up to one backward call, on parameters with a small change.

    Args:
        original: The run to follow.
        changes: What is added to each parameter, by number.
        stop: The number of the backward call that ends it, from 1; 0 for none.
    """

    def __init__(self, original: ManualBase, changes: dict[int, Any], stop: int) -> None:
        super().__init__(original.binding, original.state, original.options, False, original.where)
        self.changes = changes
        self.stop = stop
        self._history: Iterator[list[Any]] = iter(list(original.history))
        self._original = original
        self._backwards = 0
        self._show(self.owned)

    def _show(self, leaves: Sequence[int]) -> None:
        tracked = set(self._tracked(leaves))
        for leaf in leaves:
            changed = leaf in tracked and leaf in self.changes
            self.views[leaf] = self.raw[leaf] + self.changes[leaf] if changed else self.raw[leaf]

    def _assigned(self, changed: list[int], current: list[Any]) -> None:
        self._follow()

    def _follow(self) -> None:
        """The parameters after the next thing that changed them in the original run."""
        self.raw = list(next(self._history, self._original.raw))

    def backward(self, loss: Any, gradient: Any = None) -> None:
        """Ends the replay at its call; earlier ones have done their work already."""
        self._enter("`manual_backward`")
        self._cut("on_before_backward")
        self._cut("backward")
        self._backwards += 1
        if self._backwards == self.stop:
            raise _ReachedError(loss)
        self._cut("on_after_backward")

    def step(self, handle: Any, closure: Callable[[], Any] | None, **kwargs: Any) -> Any:
        """Takes the parameters from the original run."""
        self.entered += 1
        result = None if closure is None else closure()
        self._enter(f"`{handle.name}.step()`")
        self._cut("on_before_optimizer_step")
        self._stepped(self._index(handle))
        self._follow()
        self._show(list(range(len(self.raw))))
        self._publish()
        return result

    def _cut(self, hook: str) -> None:
        if hook in self.options.hooks:
            self._follow()
            self._show(list(range(len(self.raw))))
            self._publish()

    def zero_grad(self, handle: Any) -> None:
        """Changes no parameter."""
        self._enter(f"`{handle.name}.zero_grad()`")

    def clip(self, handle: Any, value: Any, algorithm: str) -> None:
        """Changes no parameter."""
        self._enter("`self.clip_gradients(...)`")

    def scheduler_step(self, scheduler: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Happened in the original run."""


class _ClosureRun(ReplayRun):
    """A silent run of the step up to the backward call of one closure, which sees other parameters.

    Args:
        original: The run to follow.
        number: Which call of `opt.step(closure)` it is, from 1.
        leaves: Numbers of the parameters that the optimizer owns.
        values: What the closure sees of them.
    """

    def __init__(self, original: ManualBase, number: int, leaves: Sequence[int], values: Sequence[Any]) -> None:
        super().__init__(original, {}, 0)
        self._number = number
        self._values = dict(zip(leaves, values, strict=True))
        self._inside = False

    def _assigned(self, changed: list[int], current: list[Any]) -> None:
        if self._inside:
            ManualBase._assigned(self, changed, current)
        else:
            self._follow()

    def step(self, handle: Any, closure: Callable[[], Any] | None, **kwargs: Any) -> Any:
        """Runs the closure in question on the other parameters; steps before it are as in the original run."""
        if self.entered + 1 != self._number or closure is None:
            return super().step(handle, closure, **kwargs)
        self._enter(f"`{handle.name}.step()`")
        for leaf, value in self._values.items():
            self.raw[leaf] = value
        self._show(list(self._values))
        self._publish()
        self._inside = True
        closure()
        raise MisconfigurationException(
            f"The closure of `{handle.name}.step(closure)` in `{self.where}` calls no `manual_backward`, but "
            f"{handle.name} evaluates loss and gradient several times per step through it."
        )

    def backward(self, loss: Any, gradient: Any = None) -> None:
        """Ends the replay when it is the closure's."""
        if not self._inside:
            super().backward(loss, gradient)
            return
        self._enter("`manual_backward`")
        raise _ReachedError(loss)

    def _cut(self, hook: str) -> None:
        if not self._inside:
            super()._cut(hook)


class ClosureValue:
    """The loss of a closure as a function of the parameters that its optimizer owns.

    Args:
        function: From leaves of the parameters to the loss, a scalar.
        leaves: The parameters as they are now.

    Attributes:
        consts: Arrays of the step that the loss depends on beside the parameters.
    """

    def __init__(self, function: Callable[..., Any], leaves: Sequence[Any]) -> None:
        closed = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in leaves))  # type: ignore[no-untyped-call]
        self._jaxpr = closed.jaxpr
        self.consts = tuple(closed.consts)

    def with_consts(self, consts: Sequence[Any]) -> Callable[[Any], Any]:
        """The function of a tree of parameters, with its constants as they are in the compiled step."""
        function = jaxpr_as_fun(ClosedJaxpr(self._jaxpr, list(consts)))

        def value(tree: Any) -> Any:
            return function(*jax.tree_util.tree_leaves(tree))[0]

        return value


def closure_value(run: Any, index: int, number: int, closure: Callable[[], Any] | None) -> ClosureValue | None:
    """What an optimizer that evaluates its closure several times per step needs; None for the others.

    Args:
        run: The run in which `opt.step(closure)` was called.
        index: Number of the optimizer.
        number: Which call of `opt.step` of this batch it is, from 1.
        closure: The closure; it has run once.

    Raises:
        MisconfigurationException: If the optimizer cannot be served.
    """
    handle = run.binding.optimizers[index]
    leaves = run.leaves_of(index)
    if not handle.needs_value_fn or not leaves:
        return None
    if closure is None:
        raise MisconfigurationException(
            f"{handle.name} evaluates the loss several times per step: in `{run.where}` call `opt.step(closure)` with "
            "a function that calls `opt.zero_grad()`, computes the loss, calls `self.manual_backward(loss)` and "
            "returns the loss."
        )
    if run.guards[0] is not None:
        raise MisconfigurationException(
            f"AMP and the LBFGS optimizer are not compatible: {handle.name} evaluates the loss several times per "
            'update, which a loss scale does not follow. Use precision="bf16-mixed".'
        )

    def value(*values: Any) -> Any:
        loss = run.replay(_ClosureRun(run, number, leaves, values))
        return run.binding.precision.convert_output(check_loss(loss, False, run.where))

    return ClosureValue(value, [run.raw[leaf] for leaf in leaves])


@contextlib.contextmanager
def set_aside(binding: Binding) -> Iterator[None]:
    """The modules without what records the reads and writes of the run that counts."""
    worn = [(owner, type(owner), owner.__dict__.pop("_tracer", None)) for owner in binding.owners.values()]
    for owner, kind, tracer in worn:
        if tracer is not None:
            object.__setattr__(owner, "__class__", kind.__mro__[1])
    try:
        yield
    finally:
        for owner, kind, tracer in worn:
            if tracer is not None:
                object.__setattr__(owner, "__class__", kind)
                owner.__dict__["_tracer"] = tracer


@contextlib.contextmanager
def _unseen(binding: Binding, start: list[Snapshot]) -> Iterator[None]:
    """The module as it was at the start of the step, and afterwards as it is now; nothing is printed meanwhile."""
    names = [(owner, name) for owner in binding.owners.values() for name in owner.__dict__.get("_nnx_attributes", ())]
    bound = [(owner, name, owner.__dict__.get(name)) for owner, name in names]
    nnx = None if binding.nnx is None else (binding.nnx._merged, getattr(binding.nnx, "_bound_graphdef", None))
    breakpoint_hook = sys.breakpointhook
    sys.breakpointhook = lambda *_, **__: None
    try:
        with set_aside(binding), as_it_was(start), contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        sys.breakpointhook = breakpoint_hook
        for owner, name, value in bound:
            if value is not None:
                owner.__dict__[name] = value
        if binding.nnx is not None and nnx is not None:
            binding.nnx._merged, binding.nnx._bound_graphdef = nnx


def replayer(
    binding: Binding,
    state: TrainState,
    batch: Any,
    scalars: Scalars,
    key: Any,
    where: str,
    attributes: TracedAttributes | None = None,
    host: HostInputs | None = None,
) -> Replayer:
    """Prepares for running a step once more. To be called before the step runs.

    Args:
        binding: The module, its networks and optimizers.
        state: The training state at the start of the step.
        batch: What the step sees.
        scalars: Its numbers.
        key: Its key.
        where: The user's step, for messages.
        attributes: Attributes that are carried, None with `jit=False`.
        host: Numbers of the host in this trace, None with `jit=False`.
    """
    base = (scalars.micro_step, scalars.batch_idx, scalars.current_epoch, scalars.global_step)
    start = [Snapshot(owner, prefix) for prefix, owner in binding.owners.items()]

    def replay(run: ReplayRun) -> Any:
        trace = Trace(
            kind="train", key=key, scalars=Scalars.of(base), params={}, variables=dict(state.variables),
            silent=True, manual=run,
            attributes=None if attributes is None else TracedAttributes(attributes.start, binding.engine),
            numbers=None if host is None else HostAttributes(host, silent=True),
        )  # fmt: skip
        run.start(trace)
        with _unseen(binding, start):
            try:
                # What it reads was read by the run that counts; here it only has to mean the same.
                run_user_step(binding, trace, batch, None if host is None else StepInfo(), strict=False)
            except _ReachedError as reached:
                return reached.loss
        raise RuntimeError(
            f"`{where}` did not come to the same `manual_backward` when it was run again for the gradient. Such a step "
            "must do the same thing twice: it may not depend on a generator of the host or on state outside the module "
            "that it changes."
        )

    return replay
