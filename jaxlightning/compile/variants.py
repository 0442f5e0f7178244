"""Compiled variants of a module's steps: looked up by shapes and static choices, compiled ahead of time when new."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxlightning.compile.checks import checked, raising
from jaxlightning.compile.compile_report import CompileReports
from jaxlightning.compile.compiled_step import CompiledStep
from jaxlightning.compile.core import EvalOptions, TrainOptions
from jaxlightning.compile.effects import is_simple
from jaxlightning.compile.explain import explained
from jaxlightning.compile.flat_steps import (
    evaluation_function,
    fused_function,
    joiner,
    run_eagerly,
    shapes_of,
    train_function,
    update_function,
)
from jaxlightning.compile.guards import DecisionHistory, VariantGroup
from jaxlightning.compile.host_inputs import HostInputs, Room
from jaxlightning.compile.host_values import HostEnvironment
from jaxlightning.compile.manual_hooks import SegmentedStep
from jaxlightning.compile.packing import SlotTable
from jaxlightning.compile.persistent_cache import healing
from jaxlightning.compile.run_step import StepInfo
from jaxlightning.compile.shape_report import ShapeReport
from jaxlightning.compile.trace import RetraceError
from jaxlightning.compile.writes import Snapshot
from jaxlightning.utilities.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from jaxlightning.compile.engine_steps import EngineSteps

__all__ = ["CompiledStep", "Variants"]

_log = logging.getLogger("jaxlightning")

_MANY_CHANGES = 4
"""So many changes of one constant are worth a warning."""

_MAX_RETRACES = 100
"""Traces of one variant that end in a discovery; each settles at least one attribute for good."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Recipe:
    """How a variant is looked up, and made when it is new.

    Attributes:
        kind: `"train"`, `"validate"`, ...
        key: Gives its place among the variants, anew after every trace: what a trace learns may change the state.
        build: Makes the function on flat leaves; what tracing it finds goes to the `StepInfo`.
        args: Gives the arguments to trace with.
        table: Slots of the logged keys, None for a step that logs nothing.
        env: Numbers of the host, None for a step that has none.
        donate: Positions of the arguments that are donated.
        batch: Position of the arrays of the batch, None where there is no batch.
        treedef: Structure of the batch.
        positions: Which of its leaves are arrays, None when all are.
        axis: Axis of the arrays along which the batch lies.
        steps: Steps in one call, along the first axis of everything that differs between them; 0 for a single one.
    """

    kind: str
    key: Callable[[], tuple[Any, ...]]
    build: Callable[[StepInfo], Callable[..., Any]]
    args: Callable[[], tuple[Any, ...]]
    table: SlotTable | None = None
    env: HostEnvironment | None = None
    donate: tuple[int, ...] = (0,)
    batch: int | None = 1
    treedef: Any = None
    positions: Any = None
    axis: int = 0
    steps: int = 0


class Variants:
    """All compiled steps of one engine.

    Args:
        strategy: Makes the jit call.
        jit: Whether to compile at all.
        log_compiles: Whether to report each compilation at INFO.
        owner: Class name of the module, for messages.
        checks: Kinds of run-time checks, see `checks`; with any of them nothing is donated.
    """

    def __init__(
        self, strategy: Any, *, jit: bool, log_compiles: bool, owner: str, checks: tuple[str, ...] = ()
    ) -> None:
        self.strategy = strategy
        self.jit = jit
        self.reports = CompileReports(owner) if log_compiles else None
        self.owner = owner
        self.checks = checks
        self.counts: dict[str, int] = {}
        self.latest: dict[str, CompiledStep] = {}
        self.shape_report = ShapeReport(owner)
        self.moment = 0
        self._histories: dict[Any, DecisionHistory] = {}
        self.changes: dict[str, int] = {}
        self.hidden_reads = False
        self._cache: dict[Any, VariantGroup[CompiledStep]] = {}
        self._rooms: dict[Any, Room] = {}
        self._stage_sensitive = False

    def clear(self, keep_evaluation: bool = False) -> None:
        """Drops variants because the structure of the state changed; evaluation needs a part of it only."""
        self._cache = {key: v for key, v in self._cache.items() if keep_evaluation and key[0] == "eval"}
        self._rooms = {key: room for key, room in self._rooms.items() if key in self._cache}

    def drop_changed(self, engine: EngineSteps) -> bool:
        """Drops variants that read an attribute which has another value now; says which.

        Returns:
            Whether any was dropped.
        """
        dropped: dict[str, dict[str, None]] = {}
        prefixes = {id(owner): prefix for prefix, owner in engine.binding.owners.items()}
        facts = engine.effect_facts.host
        for group in self._cache.values():
            for variant in group.variants():
                changed = variant.info.reads.changed()
                for read in changed:
                    key = (
                        f"self.{prefixes.get(id(read.holder), '')}{read.name.replace('_hparams', 'hparams')}"
                        if read.key is None
                        else read.key
                    )
                    dropped.setdefault(variant.kind, {})[key] = None
                    if is_simple(read.kept) and is_simple(read.now):
                        # From now on it is looked at before each step; another change compiles nothing, or once for
                        # each value where Python decides by it.
                        facts.numbers.setdefault(key, "changed")
                if changed:
                    group.remove(lambda other, gone=variant: other is gone)  # type: ignore[misc]
        for kind, names in dropped.items():
            _log.info("%s: %s changed, so the %s step is compiled again.", self.owner, ", ".join(names), kind)
            if self.reports is not None:
                self.reports.attributes_changed(kind, names)
        for key in {key: None for names in dropped.values() for key in names}:
            self.changes[key] = self.changes.get(key, 0) + 1
            if self.changes[key] == _MANY_CHANGES:
                rank_zero_warn(
                    f"`{key}` of {self.owner} changed {_MANY_CHANGES} times, and each time the step was compiled "
                    "again. Make it an array (`jnp.asarray(...)`), or a plain number on the module: both are inputs of "
                    "the compiled step."
                )
        return bool(dropped)

    def drop_readers(self, fresh: list[tuple[Any, str]]) -> bool:
        """Drops variants that took attributes for constants which follow the host after all.

        Args:
            fresh: Module and attribute; emptied.

        Returns:
            Whether there was anything to look at.
        """
        keys = {(id(owner), name) for owner, name in fresh}
        fresh.clear()
        for group in self._cache.values():
            group.remove(lambda variant: not keys.isdisjoint(variant.info.reads.reads))
        return bool(keys)

    # --- the kinds of steps -------------------------------------------------------------------------------------

    def train(
        self,
        engine: EngineSteps,
        options: TrainOptions,
        table: SlotTable,
        batch: Any,
        arrays: Any,
        treedef: Any,
        positions: Any,
        ints: Any,
        env: HostEnvironment,
    ) -> CompiledStep:
        """The variant for one training batch."""
        self.shape_report.note("train", batch)

        def key() -> tuple[Any, ...]:
            shapes = (engine.state_treedef, treedef, positions, shapes_of(engine.leaves), shapes_of(arrays))
            return ("train", options, engine.binding.mode_key(), engine.binding.freezing_key, *shapes)

        recipe = _Recipe(
            kind="train",
            key=key,
            build=lambda info: train_function(engine, options, table, joiner(engine, batch, treedef, positions), info),
            args=lambda: (engine.leaves, arrays, ints, engine.floats),
            table=table,
            env=env,
            treedef=treedef,
            positions=positions,
        )
        return self._get(engine, recipe)

    def fused(
        self,
        engine: EngineSteps,
        options: TrainOptions,
        table: SlotTable,
        treedef: Any,
        stacked: Any,
        ints: Any,
        unroll: int,
        counted: bool,
        env: HostEnvironment | None,
    ) -> CompiledStep:
        """The variant for several training batches in one call; see `fused_function`.

        Arrays that are on the device are the same for all batches (`resident`).
        """
        steps = len(ints) - counted
        shared = tuple(isinstance(leaf, jax.Array) for leaf in stacked)

        def key() -> tuple[Any, ...]:
            shapes = (engine.state_treedef, treedef, shapes_of(engine.leaves), shapes_of(stacked))
            return (
                "fused", steps, unroll, options, engine.binding.mode_key(), engine.binding.freezing_key, *shapes
            )  # fmt: skip

        recipe = _Recipe(
            kind="train_fused",
            key=key,
            build=lambda info: fused_function(
                engine, options, table, joiner(engine, None, treedef, None), unroll, shared, counted, info
            ),
            args=lambda: (engine.leaves, stacked, ints, engine.floats),
            table=table,
            env=env,
            treedef=treedef,
            axis=1,
            steps=steps,
        )
        return self._get(engine, recipe)

    def evaluate(
        self,
        engine: EngineSteps,
        options: EvalOptions,
        table: SlotTable,
        batch: Any,
        arrays: Any,
        treedef: Any,
        positions: Any,
        ints: Any,
        env: HostEnvironment,
    ) -> CompiledStep:
        """The variant for one evaluation or prediction batch."""
        asked = options
        self.shape_report.note(options.stage, batch)
        if options.stage == "sanity_check" and not self._stage_sensitive:
            options = dataclasses.replace(options, stage="validate")  # the same step: compiled once for both

        def shape() -> tuple[Any, ...]:
            shapes = (treedef, positions, shapes_of(engine.evaluation_leaves()), shapes_of(arrays))
            return (engine.binding.mode_key(), engine.evaluation_treedef, *shapes)

        recipe = _Recipe(
            kind=options.stage,
            key=lambda: ("eval", options, *shape()),
            build=lambda info: evaluation_function(
                engine, options, table, joiner(engine, batch, treedef, positions), info
            ),
            args=lambda: (engine.evaluation_leaves(), engine.evaluation_accumulators(asked.stage), arrays, ints),
            table=table,
            env=env,
            donate=(1,),
            batch=2,
            treedef=treedef,
            positions=positions,
        )
        variant = self._get(engine, recipe)
        if variant.info.stage_read and not self._stage_sensitive and options.stage == "validate":
            # It asked for the stage, so what it found holds for this stage only.
            self._stage_sensitive = True
            self._cache[("eval", asked, *shape())] = self._cache.pop(recipe.key())
        return variant

    def update(self, engine: EngineSteps) -> CompiledStep:
        """The update half of a split step."""
        recipe = _Recipe(
            kind="update",
            key=lambda: ("update", engine.binding.freezing_key),
            build=lambda info: update_function(engine, info),
            args=lambda: (engine.leaves, engine.floats),
            batch=None,
        )
        return self._get(engine, recipe)

    # --- compilation --------------------------------------------------------------------------------------------

    def _get(self, engine: EngineSteps, recipe: _Recipe) -> CompiledStep:
        learnt: list[str] = []
        while True:
            key = recipe.key()
            group = self._cache.get(key)
            found = None if group is None else group.find(recipe.env)
            if found is not None:
                return found
            try:
                return self._make(key, engine, recipe)
            except RetraceError as error:
                learnt.append(error.what)
                if len(learnt) > _MAX_RETRACES:
                    raise RuntimeError(
                        f"The {recipe.kind} step of {self.owner} was traced {len(learnt)} times and every trace found "
                        f"something new: {'; '.join(learnt[-4:])}. A step may meet many attributes, but not new ones "
                        "whenever it is traced."
                    ) from None
                error.learn(engine.effect_facts)
                if self.drop_readers(engine.effect_facts.host.fresh):
                    engine.modes_changed()

    def _make(self, key: Any, engine: EngineSteps, recipe: _Recipe) -> CompiledStep:
        start = time.perf_counter()
        kind, table = recipe.kind, recipe.table
        if not self.jit:
            return self._make_eager(key, engine, recipe)
        info, traced, example = self._trace(key, engine, recipe)
        if table is not None and table.needed > table.capacity:
            # More keys than the accumulators have room for: grow them and trace once more.
            engine.grow_accumulators(table)
            info, traced, example = self._trace(key, engine, recipe)
        if info.host is not None:
            info.host.release()
            info.host = info.host if info.host.needed else None
            info.needs_host = info.needs_host or info.host is not None
        if info.manual is not None and info.manual.cut:
            if self.checks:
                raise NotImplementedError(
                    "`Trainer(checkify=...)` does not work with hooks inside a manually optimized step "
                    "(on_before_backward, on_after_backward, on_before_optimizer_step), nor with a scheduler that "
                    "takes a value of the step. Take one of them out."
                )
            lowered, compiled = None, SegmentedStep(traced, engine, example, recipe.batch)
        else:
            with warnings.catch_warnings():
                if info.reshapes:  # its old buffer is of no use then, and a warning about it of no use either
                    warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
                lowered = explained(traced.lower, self.owner)()
                with healing():
                    compiled = lowered.compile()
        seconds = time.perf_counter() - start
        call = raising(compiled, f"{self.owner} {kind}") if self.checks else compiled
        stages = (traced, lowered, compiled)
        variant = CompiledStep(kind, call, info, recipe.treedef, recipe.positions, seconds, stages)
        self.counts[kind] = self.counts.get(kind, 0) + 1
        self._keep(key, variant, engine)
        if self.reports is not None:
            self.reports.report(variant, key, self.counts[kind])
        return variant

    def _make_eager(self, key: Any, engine: EngineSteps, recipe: _Recipe) -> CompiledStep:
        info = self._info(key, engine, recipe.env)
        call = functools.partial(run_eagerly, recipe.build(info))
        variant = CompiledStep(recipe.kind, call, info, recipe.treedef, recipe.positions, 0.0, (None,) * 3)
        if recipe.table is not None:
            variant.call = _growing(variant, engine, recipe.kind, recipe.table)
        self._keep(key, variant, engine)
        return variant

    def _trace(self, key: Any, engine: EngineSteps, recipe: _Recipe) -> tuple[StepInfo, Any, tuple[Any, ...]]:
        info = self._info(key, engine, recipe.env)
        function, donate = recipe.build(info), recipe.donate
        example = (*recipe.args(), *_host_example(info, recipe.steps))
        if self.checks:
            function, donate = checked(function, self.checks), ()
        jitted = self.strategy.jit(function, example, donate=donate, batch=recipe.batch, axis=recipe.axis)
        return info, jitted.trace(*example), example

    def _info(self, key: Any, engine: EngineSteps, env: HostEnvironment | None) -> StepInfo:
        info = StepInfo()
        if self.jit and env is not None:
            info.host = HostInputs(engine.effect_facts.host, env, self._rooms.setdefault(key, Room()))
        return info

    def _history(self, kind: str, key: Any) -> DecisionHistory:
        """Judges the variants of a step over all shapes of its batches."""
        found = self._histories.get(key[:2])
        if found is None:
            found = self._histories[key[:2]] = DecisionHistory(f"{self.owner}'s {kind} step")
        return found

    def _keep(self, key: Any, variant: CompiledStep, engine: EngineSteps) -> None:
        group = self._cache.get(key)
        if group is None:
            group = self._cache[key] = VariantGroup(self._history(variant.kind, key))
        host = variant.info.host
        self.hidden_reads = self.hidden_reads or variant.info.reads.hidden
        variant.group = group
        self.latest[variant.kind] = variant
        group.add(() if host is None else tuple(host.guards.values()), variant, self.moment)


def _host_example(info: StepInfo, steps: int) -> tuple[Any, ...]:
    vectors = () if info.host is None else info.host.example()
    return tuple(np.stack([vector] * steps) for vector in vectors) if steps else vectors


def _growing(variant: CompiledStep, engine: EngineSteps, kind: str, table: SlotTable) -> Callable[..., Any]:
    """An eager step learns its keys only by running; when they outgrow the accumulators it is run once more."""
    plain = variant.call

    def call(*args: Any) -> Any:
        owners = engine.binding.owners
        before = [Snapshot(owner, prefix) for prefix, owner in owners.items()]
        result = plain(*args)
        if table.needed <= table.capacity:
            return result
        for snapshot in before:
            snapshot.restore()  # the second run does it all again
        stage = next(s for s, acc in engine.evaluation_stages() if acc is args[1]) if kind != "train" else kind
        engine.grow_accumulators(table)
        if kind == "train":
            return plain(engine.leaves, *args[1:])
        return plain(args[0], engine.evaluation_accumulators(stage), *args[2:])

    return call
