"""The same compiled training step again and again, for runs of batches between which nothing can change.

What `Engine.train_batch` looks at before every call (hyper-parameters, attributes, modes) is looked at once here, so
that a call costs little more than the compiled step itself. Numbers of the host that the step computes with, decides by
or writes follow at every step all the same.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np

if TYPE_CHECKING:
    from jaxlightning.compile.engine import Engine, StepOutput
    from jaxlightning.compile.host_values import HostEnvironment
    from jaxlightning.compile.variants import CompiledStep

__all__ = ["RepeatedStep", "StateCarrier"]


@functools.lru_cache(maxsize=64)
def _counting(count: int) -> Any:
    """What is added to the first step's integers: batch, micro-step and optimizer step count on, int32 `[count, 5]`."""
    return np.arange(count, dtype=np.int32)[:, None] * np.array((0, 1, 1, 0, 1), np.int32)


_STEADY = frozenset(
    f"self.trainer.{name}"
    for name in (
        "accumulate_grad_batches", "estimated_stepping_batches", "gradient_clip_val", "limit_train_batches",
        "log_every_n_steps", "max_epochs", "max_steps", "min_epochs", "min_steps", "num_training_batches",
    )
)  # fmt: skip


def _moves(key: str) -> bool:
    """Whether a number is the trainer's and may change while steps run: it is known only when they are booked."""
    return key.startswith("self.trainer.") and key not in _STEADY


def _inner(call: Any) -> Any:
    """What JAX made at the first call of a compiled step: the method around it, in Python, costs a microsecond."""
    return getattr(call, "_call", None) or call


class StateCarrier(Protocol):
    """What has the state that a repeated step carries on. A loop reads both at every batch: they are plain attributes.

    Attributes:
        _dirty: Whether somebody has changed what the step was compiled for.
        _leaves: The arrays of the state, for a loop that makes the compiled call itself.
    """

    _dirty: bool
    _leaves: tuple[Any, ...]


class RepeatedStep:
    """Runs one variant on batch after batch.

    Attributes:
        engine: The engine whose state it carries on.
        variant: The variant that ran last. The host has nothing to do for it but to compute with its own numbers.
    """

    def __init__(self, engine: Engine, variant: CompiledStep) -> None:
        self.engine = engine
        self.variant = variant
        self._call = _inner(variant.call)
        self._floats = engine.floats
        self._treedef = variant.treedef
        # A tuple or list of arrays, the commonest batch, needs no general flattening.
        self._flat: type | None = None
        for kind in (tuple, list):
            if variant.treedef == jax.tree_util.tree_structure(kind([0] * variant.treedef.num_leaves)):
                self._flat = kind
        self._host = variant.info.host
        self._last: tuple[Any, ...] = ()

    @property
    def still_valid(self) -> bool:
        """Whether nothing was changed on the module since."""
        return not self.engine._dirty

    def fits(self, floats: Any) -> bool:
        """Whether it runs with these float inputs."""
        return self._floats is floats

    @property
    def bare(self) -> tuple[StateCarrier, Any, Any, type | None]:
        """What a loop needs to make the compiled call itself: the carrier of the state, the call and its floats.

        The last item is the kind of batch with which the call is all there is to a step, since such a batch is the
        list of the arrays that it takes; None when there is no such kind.
        """
        return self.engine, self._call, self._floats, list if self._flat is list and self._host is None else None

    @property
    def uses_host_numbers(self) -> bool:
        """Whether the host has something to compute for every step."""
        return self._host is not None

    def integers(self, batch_idx: int, current_epoch: int, global_step: int, micro_step: int, count: int) -> Any:
        """The integer inputs of `count` steps, int32 `[count, 5]`."""
        first = np.array((self.engine.seed32, micro_step, batch_idx, current_epoch, global_step), np.int32)
        return _counting(count) + first

    def __call__(self, batch: Any, integers: Any) -> bool:
        """Runs a batch.

        Args:
            batch: What the loader gave.
            integers: A row of `integers`.

        Returns:
            False when the batch is not like the others; nothing has happened then.
        """
        if type(batch) is self._flat:
            leaves: list[Any] = list(batch)  # type: ignore[call-overload]
        else:
            leaves, treedef = jax.tree_util.tree_flatten(batch)
            if treedef != self._treedef:
                return False
        engine = self.engine
        if self._host is not None:
            return self._with_host(leaves, integers)
        try:
            result = self._call(engine._leaves, leaves, integers, self._floats)
        except TypeError:  # another shape or kind of leaf; the compiled call checks before it consumes anything
            return False
        engine._leaves = result[0]
        self._last = result
        return True

    def _with_host(self, leaves: list[Any], integers: Any) -> bool:
        engine = self.engine
        env = engine.environment(*integers[2:].tolist())
        group = self.variant.group
        variant = None if group is None else group.find(env)
        if variant is None or not self._follow(variant):
            return False
        host = self._host
        inputs = () if host is None else host.inputs(env)
        try:
            result = self._call(engine._leaves, leaves, integers, self._floats, *inputs)
        except TypeError:
            return False
        engine._leaves = result[0]
        self._last = result
        if host is not None:
            host.finish(env)
        return True

    def look_ahead(self, integers: Any) -> list[HostEnvironment] | None:
        """The numbers of the host in the coming steps, if one variant serves all of them; nothing is written yet.

        Args:
            integers: The rows of the steps.

        Returns:
            One environment for each step; None when a Python decision changes in between, or when a number cannot be
            told before the steps in front of it are booked.
        """
        engine, group = self.engine, self.variant.group
        if group is None or any(map(_moves, engine.effect_facts.host.sources)):
            return None
        chosen: CompiledStep | None = None
        written: dict[str, Any] = {}
        environments = []
        try:
            for row in integers[:, 2:].tolist():
                env = engine.environment(*row)
                env.update(written)
                variant = group.find(env)
                if variant is None or not (chosen is None or variant is chosen):
                    return None
                chosen, host = variant, variant.info.host
                if host is not None:
                    values = {key: expression.evaluate(env) for key, (_, expression) in host.writes.items()}
                    written |= values | {f"hasattr({key})": True for key in values}
                environments.append(env)
        except Exception:  # the user's own error: it comes when that step runs
            return None
        if chosen is None or not self._follow(chosen) or any(map(_moves, written)):
            return None
        return environments

    def _follow(self, variant: CompiledStep) -> bool:
        """Goes on with a variant for other decisions; False when that has to be left to the ordinary loop."""
        if not variant.repeatable or variant.treedef != self._treedef:
            return False
        if variant is not self.variant:
            if self._last and variant.info.plan is not self.variant.info.plan:
                return False  # other values are logged: those of the steps before have to be taken first
            self.variant, self._call, self._host = variant, _inner(variant.call), variant.info.host
        return True

    def prepared(self, batches: list[Any]) -> list[Any]:
        """Batches as the variant takes them; those of the loader, unless somebody pads them."""
        return batches

    def take(self, result: tuple[Any, ...]) -> None:
        """Carries on from what a call gave that did the work of several."""
        self.engine._leaves = result[0]
        self._last = result

    def finish(self, count: int) -> StepOutput:
        """Books `count` steps and gives the output of the last."""
        engine = self.engine
        engine._nnx_stale = True
        for handle in engine.binding.optimizers:
            handle.updates += count
        _, values, states, outputs, *_ = self._last
        self._last = ()
        return engine.output_of(self.variant, values, states, outputs)
