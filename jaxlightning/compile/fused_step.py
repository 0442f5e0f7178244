"""Several training batches in one compiled call: for models so small that the call costs more than the step.

The batches are stacked on the host and a `lax.scan` runs the same step over them. Between them nothing happens on the
host, so only batches between which nothing is due may be fused (`loops.quiet_batches` knows which).
"""

from __future__ import annotations

import math
import operator
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxlightning.compile.repeated_step import RepeatedStep
from jaxlightning.compile.resident import ResidentBatch
from jaxlightning.utilities.exceptions import MisconfigurationException

if TYPE_CHECKING:
    from jaxlightning.compile.compiled_step import CompiledStep
    from jaxlightning.compile.engine import Engine
    from jaxlightning.compile.host_values import HostEnvironment

__all__ = ["MOST_AHEAD", "MOST_BYTES", "MOST_STEPS", "Fusion", "auto_steps", "check_steps_per_dispatch", "make_fusion"]

MOST_STEPS = 50
"""The most steps in one call with `"auto"`: more of them gain nothing, and hold back stops and signals."""

MOST_BYTES = 64 << 20
"""The most that the batches of one call take together with `"auto"`: they are copied side by side for it."""

MOST_AHEAD = 4
"""So many calls wait for the device at most: each holds its batches until it has run."""

_FEWEST = 8
_CUTS = 4
"""After so many calls in a row that a decision of Python's cut, the batches of a step run one by one."""

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


def auto_steps(log_every: int) -> int:
    """How many steps `"auto"` tries in one call: so many that few are left over before a log point, then the most.

    Args:
        log_every: Steps from one log point to the next, 0 for no log points.
    """
    if 0 < log_every < _FEWEST:
        return log_every
    return min(range(_FEWEST, MOST_STEPS + 1), key=lambda steps: (log_every % steps, -steps))


def make_fusion(steps: int | str, engine: Engine, log_every: int) -> Fusion | None:
    """What fuses the steps of a run; None where they run one by one.

    Args:
        steps: The checked flag.
        engine: The engine of the run.
        log_every: Steps from one log point to the next, 0 for no log points.
    """
    auto = steps == "auto"
    count = auto_steps(log_every) if auto else int(steps)
    return Fusion(engine, count, auto=auto) if count > 1 and engine.jit else None


class Fusion:
    """Runs stretches of batches in calls of several, and with `"auto"` finds out whether that is faster.

    Args:
        engine: The engine whose state it carries on.
        steps: Batches in one call.
        auto: Whether to find out whether that is faster than one by one.
    """

    def __init__(self, engine: Engine, steps: int, *, auto: bool = False) -> None:
        self.engine = engine
        self.auto = auto
        self.steps = steps
        # A CPU counts the steps of a loop at no cost; an accelerator would have to ask the host before each of them.
        self._counts = engine.strategy.root_device.platform == "cpu"
        self._cuts = 0
        self._sized = not auto
        self._singles: list[float] = []
        self._fused: list[float] = []
        # By the variant for one batch, which is kept so that its identity stays its own.
        self._variants: dict[int, tuple[CompiledStep, CompiledStep]] = {}
        self._written_out: dict[int, tuple[CompiledStep, bool]] = {}
        self._ahead: deque[Any] = deque()

    def stack(self, batches: list[Any], treedef: Any) -> list[Any] | None:
        """The leaves of like batches, stacked along a new first axis; None when they are not alike.

        Args:
            batches: Up to `steps` batches; the last stands for those that are missing.
            treedef: Structure of each.
        """
        batches = batches + batches[-1:] * (self.steps - len(batches))
        first = batches[0]
        if type(first) is ResidentBatch:
            return _stacked_rows(first, batches)
        columns = []
        for batch in batches:
            leaves, found = jax.tree_util.tree_flatten(batch)
            if found != treedef:
                return None
            columns.append(leaves)
        stacked = []
        for column in zip(*columns, strict=True):
            one = column[0]
            if set(map(type, column)) != {np.ndarray}:
                return None
            if len(set(map(_SHAPE, column))) != 1 or len(set(map(_DTYPE, column))) != 1:
                return None
            # `concatenate` is several times as fast as `stack`.
            joined = np.concatenate(column) if one.ndim else np.array(column)
            stacked.append(joined.reshape(len(column), *one.shape))
        return stacked

    def fewest(self, single: RepeatedStep) -> int:
        """The fewest batches that one call takes: 2 where it counts them, else `steps`, which is the most.

        Args:
            single: The step for one batch.
        """
        return 2 if self._counts and self._unroll(single.variant) == 1 else self.steps

    def _unroll(self, base: CompiledStep) -> int:
        """How many steps of the loop are written out.

        XLA runs convolutions inside a loop on a CPU many times slower than outside, so there all of them are.
        """
        found = self._written_out.get(id(base))
        if found is None:
            found = base, self._counts and "conv_general_dilated" in str(base.jaxpr)
            self._written_out[id(base)] = found
        return self.steps if found[1] else 1

    def takes(self, single: RepeatedStep) -> bool:
        """Whether batches are to be collected for one call of this step.

        Args:
            single: The step for one batch.
        """
        return self.steps > 1 and (self._cuts < _CUTS or not single.uses_host_numbers)

    def run(self, single: RepeatedStep, batches: list[Any], integers: Any) -> int:
        """Runs batches in one call, or one by one where a decision of Python's changes between them.

        Args:
            single: The step for one batch.
            batches: As many batches as one call takes: from `fewest` to `steps`.
            integers: Their rows of `RepeatedStep.integers`.

        Returns:
            How many of them ran; nothing has happened for the others.
        """
        batches = single.prepared(batches)
        if not self._sized and self._shrinks(batches[0]):
            return _one_by_one(single, batches, integers)
        environments = None
        if single.uses_host_numbers:
            environments = single.look_ahead(integers)
            if environments is None:
                self._cuts += 1
                return _one_by_one(single, batches, integers)
            self._cuts = 0
        if self.auto and not self._decided():
            return self._try(single, batches, integers, environments)
        stacked = self.stack(batches, single.variant.treedef)
        if stacked is None:
            return 0
        return self._call(single, stacked, integers, environments)

    def _call(
        self, single: RepeatedStep, stacked: list[Any], integers: Any, environments: list[HostEnvironment] | None
    ) -> int:
        count = len(integers)
        counted = self.fewest(single) < self.steps
        rows = _counted(integers, self.steps) if counted else integers
        variant = self._compiled(single, stacked, rows, counted, environments)
        host = variant.info.host
        vectors: tuple[Any, ...] = ()
        if host is not None and environments is not None:
            inputs = list(map(host.inputs, environments))
            inputs += inputs[-1:] * (self.steps - count)
            vectors = tuple(map(np.stack, zip(*inputs, strict=True)))
        if len(self._ahead) == MOST_AHEAD:
            self._ahead.popleft().block_until_ready()
        try:
            result = variant.call(self.engine._leaves, stacked, rows, self.engine.floats, *vectors)
        except TypeError:  # other shapes than those that it was compiled for
            self._variants.clear()
            return 0
        single.take(result)
        self._ahead.append(result[1])
        if host is not None and environments is not None:
            host.finish(environments[-1])
        return count

    def _compiled(
        self,
        single: RepeatedStep,
        stacked: list[Any],
        rows: Any,
        counted: bool,
        environments: list[HostEnvironment] | None,
    ) -> CompiledStep:
        base = single.variant
        found = self._variants.get(id(base))
        if found is None:
            env = None if environments is None else environments[0]
            variant = self.engine.fused_variant(base, stacked, rows, self._unroll(base), counted, env)
            found = self._variants[id(base)] = (base, variant)
        return found[1]

    # --- "auto" ---------------------------------------------------------------------------------------------------

    def _shrinks(self, batch: Any) -> bool:
        """Takes fewer steps together when batches are large; whether it does."""
        self._sized = True
        size = 0 if type(batch) is ResidentBatch else sum(map(_bytes, jax.tree_util.tree_leaves(batch)))
        if size * self.steps <= MOST_BYTES:
            return False
        self.steps = max(1, MOST_BYTES // size)
        return True

    def _decided(self) -> bool:
        if len(self._fused) < _TRIALS:
            return False
        if self.steps > 1 and min(self._fused) > _GAIN * min(self._singles):
            self.steps = 1  # one by one from now on
        return True

    def _try(
        self, single: RepeatedStep, batches: list[Any], integers: Any, environments: list[HostEnvironment] | None
    ) -> int:
        """Times the two ways in turn; both do the work that is due, so no batch is lost."""
        count = len(batches)
        if 2 * count < self.steps:  # too few to tell
            return _one_by_one(single, batches, integers)
        stacked = self.stack(batches, single.variant.treedef)
        if stacked is None:
            return 0
        engine = self.engine
        if len(self._singles) <= len(self._fused):
            engine.block_until_ready()
            start = time.perf_counter()
            ran = _one_by_one(single, batches, integers)
            if ran < count:
                return ran
            engine.block_until_ready()
            self._singles.append((time.perf_counter() - start) / count)
            return ran
        engine.block_until_ready()
        start = time.perf_counter()
        ran = self._call(single, stacked, integers, environments)
        if ran:
            engine.block_until_ready()
            # The first call has warming up to do.
            self._fused.append((time.perf_counter() - start) / count if self._fused else math.inf)
        return ran


def _one_by_one(single: RepeatedStep, batches: list[Any], integers: Any) -> int:
    """Runs batches in calls of their own, up to the first that is not like the others; says how many ran."""
    for count, (batch, row) in enumerate(zip(batches, integers, strict=True)):
        if not single(batch, row):
            return count
    return len(batches)


def _stacked_rows(first: ResidentBatch, batches: list[Any]) -> list[Any] | None:
    """The leaves of batches whose data is on the device: what differs between them are the rows."""
    columns, count, rows = first.columns, len(first.rows), []
    for batch in batches:
        if type(batch) is not ResidentBatch or batch.columns is not columns or len(batch.rows) != count:
            return None
        rows.append(batch.rows)
    return [np.concatenate(rows).reshape(len(rows), count), *columns]


def _counted(integers: Any, steps: int) -> Any:
    """Integers of up to `steps` steps for a call that counts, int32 `[steps + 1, 5]`; the last row has their number."""
    rows = np.zeros((steps + 1, integers.shape[1]), np.int32)
    rows[: len(integers)] = integers
    rows[-1, 0] = len(integers)
    return rows


def _bytes(leaf: Any) -> int:
    return int(getattr(leaf, "nbytes", 0))
