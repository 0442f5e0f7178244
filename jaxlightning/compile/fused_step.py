"""Several training batches in one compiled call: for models so small that the call costs more than the step.

The batches are stacked on the host and a `lax.scan` runs the same step over them. Between them nothing happens on the
host, so only batches between which nothing is due may be fused (`loops.quiet_batches` knows which).
"""

from __future__ import annotations

import math
import operator
import time
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxlightning.compile.repeated_step import RepeatedStep
from jaxlightning.utilities.exceptions import MisconfigurationException

if TYPE_CHECKING:
    from jaxlightning.compile.compiled_step import CompiledStep
    from jaxlightning.compile.engine import Engine

__all__ = ["AUTO_STEPS", "Fusion", "check_steps_per_dispatch", "make_fusion"]

AUTO_STEPS = 16
"""Steps in one call with `"auto"`: with the default `log_every_n_steps=50` three such calls fit between log points."""

_SHAPE, _DTYPE = operator.attrgetter("shape"), operator.attrgetter("dtype")
_TRIALS = 3
_GAIN = 0.9
"""With `"auto"` a fused step must take at most this part of the time of a single one."""


def check_steps_per_dispatch(value: Any) -> int | str:
    """The flag `Trainer(steps_per_dispatch=...)`, checked.

    Raises:
        MisconfigurationException: If it is neither "auto" nor a positive integer.
    """
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value  # type: ignore[no-any-return]
    raise MisconfigurationException(
        f"`Trainer(steps_per_dispatch={value!r})` must be a number of batches from 1 or 'auto'."
    )


def make_fusion(steps: int | str, engine: Engine) -> Fusion | None:
    """What fuses the steps of a run; None where they run one by one.

    Args:
        steps: The checked flag.
        engine: The engine of the run.

    Raises:
        MisconfigurationException: If several steps are asked for on several devices.
    """
    if steps == 1 or not engine.jit:
        return None
    if len(engine.strategy.devices) > 1:
        if steps == "auto":
            return None
        raise MisconfigurationException(
            f"`Trainer(steps_per_dispatch={steps})` is built for one device, and this run has "
            f"{len(engine.strategy.devices)}. Leave it at 1, or use `devices=1`."
        )
    return Fusion(engine, steps)


class Fusion:
    """Runs stretches of batches in calls of several, and with `"auto"` finds out whether that is faster.

    Args:
        engine: The engine whose state it carries on.
        steps: Batches in one call, or `"auto"`.
    """

    def __init__(self, engine: Engine, steps: int | str) -> None:
        self.engine = engine
        self.auto = steps == "auto"
        self.steps = AUTO_STEPS if self.auto else int(steps)
        self._singles: list[float] = []
        self._fused: list[float] = []
        self._base: CompiledStep | None = None
        self._variant: CompiledStep | None = None

    @property
    def active(self) -> bool:
        """Whether batches are to be collected for one call."""
        return self.steps > 1

    def stack(self, batches: list[Any], treedef: Any) -> list[Any] | None:
        """The leaves of like batches, stacked along a new first axis; None when they are not alike."""
        columns = []
        for batch in batches:
            leaves, found = jax.tree_util.tree_flatten(batch)
            if found != treedef:
                return None
            columns.append(leaves)
        stacked = []
        for column in zip(*columns, strict=True):
            first = column[0]
            if set(map(type, column)) != {np.ndarray}:
                return None
            if len(set(map(_SHAPE, column))) != 1 or len(set(map(_DTYPE, column))) != 1:
                return None
            # `concatenate` is several times as fast as `stack`.
            joined = np.concatenate(column) if first.ndim else np.array(column)
            stacked.append(joined.reshape(len(column), *first.shape))
        return stacked

    def run(self, single: RepeatedStep, batches: list[Any], integers: Any) -> bool:
        """Runs batches in one call.

        Args:
            single: The step for one batch.
            batches: As many batches as one call takes.
            integers: Their rows of `RepeatedStep.integers`.

        Returns:
            False when they have to run one by one; nothing has happened then.
        """
        batches = single.prepared(batches)
        if self.auto and not self._decided():
            return self._try(single, batches, integers)
        stacked = self.stack(batches, single.variant.treedef)
        if stacked is None:
            return False
        return self._call(single, stacked, integers)

    def _call(self, single: RepeatedStep, stacked: list[Any], integers: Any) -> bool:
        call = self._compiled(single, stacked, integers).call
        try:
            single.take(call(self.engine._leaves, stacked, integers, self.engine.floats))
        except TypeError:  # other shapes than those that it was compiled for
            self._variant = None
            return False
        return True

    def _compiled(self, single: RepeatedStep, stacked: list[Any], integers: Any) -> CompiledStep:
        if self._variant is None or self._base is not single.variant:
            self._variant = self.engine.fused_variant(single.variant, stacked, integers, _unroll(single, len(integers)))
            self._base = single.variant
        return self._variant

    # --- "auto" ---------------------------------------------------------------------------------------------------

    def _decided(self) -> bool:
        if len(self._fused) < _TRIALS:
            return False
        if self.steps > 1 and min(self._fused) > _GAIN * min(self._singles):
            self.steps = 1  # one by one from now on
        return True

    def _try(self, single: RepeatedStep, batches: list[Any], integers: Any) -> bool:
        """Times the two ways in turn; both do the work that is due, so no batch is lost."""
        stacked = self.stack(batches, single.variant.treedef)
        if stacked is None:
            return False
        engine = self.engine
        if len(self._singles) <= len(self._fused):
            engine.block_until_ready()
            start = time.perf_counter()
            for batch, row in zip(batches, integers, strict=True):
                if not single(batch, row):
                    # They are alike, so it is the first of them: of another shape than the batches before.
                    return False
            engine.block_until_ready()
            self._singles.append(time.perf_counter() - start)
            return True
        self._compiled(single, stacked, integers)
        engine.block_until_ready()
        start = time.perf_counter()
        if not self._call(single, stacked, integers):
            return False
        engine.block_until_ready()
        # The first call has warming up to do.
        self._fused.append(time.perf_counter() - start if self._fused else math.inf)
        return True


def _unroll(single: RepeatedStep, steps: int) -> int:
    """How many steps of the loop are written out.

    XLA runs convolutions inside a loop on a CPU many times slower than outside, so there all of them are.
    """
    on_cpu = single.engine.strategy.root_device.platform == "cpu"
    return steps if on_cpu and "conv_general_dilated" in str(single.variant.jaxpr) else 1
