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
import jax.numpy as jnp
import numpy as np

from jaxlightning.compile import batch as batches
from jaxlightning.compile import core
from jaxlightning.compile.checks import checked, raising
from jaxlightning.compile.compile_report import CompileReports
from jaxlightning.compile.core import EvalOptions, TrainOptions
from jaxlightning.compile.effects import is_simple
from jaxlightning.compile.explain import explained
from jaxlightning.compile.guarded_update import guarded_update
from jaxlightning.compile.guards import DecisionHistory, VariantGroup
from jaxlightning.compile.host_inputs import HostInputs, Room
from jaxlightning.compile.host_proxy import weak
from jaxlightning.compile.host_values import HostEnvironment
from jaxlightning.compile.manual_hooks import SegmentedStep
from jaxlightning.compile.manual_tape import resolve
from jaxlightning.compile.packing import SlotTable
from jaxlightning.compile.persistent_cache import healing
from jaxlightning.compile.run_step import StepInfo
from jaxlightning.compile.shape_report import ShapeReport
from jaxlightning.compile.state import TrainState
from jaxlightning.compile.trace import RetraceError, Scalars
from jaxlightning.compile.writes import Snapshot
from jaxlightning.utilities.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from jaxlightning.compile.engine import Engine

__all__ = ["CompiledStep", "Variants", "weak_integers"]

_log = logging.getLogger("jaxlightning")

_MANY_CHANGES = 4
"""So many changes of one constant are worth a warning."""

_MAX_RETRACES = 100
"""Traces of one variant that end in a discovery; each settles at least one attribute for good."""


class CompiledStep:
    """One compiled variant of a step.

    Attributes:
        kind: `"train"`, `"validate"`, ...
        info: What its trace found (logged keys, outputs, attributes read).
        call: The compiled function on flat leaves.
        seconds: How long tracing and compiling took.
        group: The variants of the same step for other numbers of the host.
    """

    def __init__(
        self,
        kind: str,
        call: Callable[..., Any],
        info: StepInfo,
        treedef: Any,
        positions: Any,
        seconds: float,
        stages: Any,
    ) -> None:
        self.kind = kind
        self.call = call
        self.info = info
        self.treedef = treedef
        self.positions = positions
        self.seconds = seconds
        self.group: VariantGroup[CompiledStep] | None = None
        self._traced, self._lowered, self._compiled = stages

    @property
    def plain(self) -> bool:
        """Whether a batch needs nothing on the host but the call itself."""
        # Host leaves have to be taken out of every batch, so such a variant stays on the long way too.
        return self.positions is None and not self.info.needs_host

    @property
    def repeatable(self) -> bool:
        """Whether all that the host does for a batch is to compute with numbers of its own."""
        info = self.info
        if self._compiled is None:
            return False  # an eager step may look at anything of the trainer's, so that has to be up to date
        alone = self.positions is None and info.effects is None and not info.skipped and not info.plan.states
        alone = alone and not info.reshapes
        return alone and (not info.needs_host or (info.host is not None and not info.host.looks_back))

    def _have(self, stage: Any) -> Any:
        if stage is None:
            raise RuntimeError("`Trainer(jit=False)` runs the step eagerly: there is no jaxpr and no compiled text.")
        return stage

    @property
    def plan(self) -> Any:
        """The keys that this variant logs."""
        return self.info.plan

    @property
    def jaxpr(self) -> Any:
        """The closed jaxpr of the step."""
        return self._have(self._traced).jaxpr

    def lower(self) -> Any:
        """The `jax.stages.Lowered` of the step."""
        return self._have(self._lowered)

    def as_text(self) -> str:
        """The optimised HLO of the step."""
        return str(self._have(self._compiled).as_text())

    @property
    def memory(self) -> Any:
        """XLA's memory analysis of the step, None where the backend has none."""
        return self._have(self._compiled).memory_analysis()

    def cost_analysis(self) -> Any:
        """XLA's cost analysis of the step (floating-point operations and the like)."""
        return self._have(self._compiled).cost_analysis()


def weak_integers(ints: Any) -> list[Any]:
    """The integers of a vector as weakly typed scalars: arithmetic with them keeps the other operand's dtype."""
    if isinstance(ints, np.ndarray):
        return [int(i) for i in ints]
    return [weak(ints[i]) for i in range(ints.shape[0])]


def _train_function(
    engine: Engine, options: TrainOptions, table: SlotTable, join: Callable[[Any], Any], info: StepInfo
) -> Callable[..., Any]:
    """One training step on flat leaves."""
    state_treedef = engine.state_treedef

    def step(leaves: Any, arrays: Any, ints: Any, floats: Any, *host: Any) -> Any:
        state: TrainState = jax.tree_util.tree_unflatten(state_treedef, leaves)
        seed, scalars = _inputs(info, ints, host)
        state, values, states, outputs, finite, effects = core.train_step(
            engine.binding, table, info, options, state, join(arrays), scalars, seed, floats
        )
        after = _flat(state, state_treedef, info)
        info.reshapes = info.treedef_after is not None or _shapes(after) != _shapes(leaves)
        info.needs_host = info.needs_host or info.reshapes
        return after, values, states, outputs, finite, effects

    return step if options.manual is None or not engine.jit else resolve(step)


def _inputs(info: StepInfo, ints: Any, host: Any) -> tuple[Any, Scalars]:
    """The seed and the host numbers of a step from its integer inputs."""
    seed, micro_step, *base = weak_integers(ints)
    if info.host is None:
        return seed, Scalars.of((micro_step, *base))
    info.host.bind(base, host)
    return seed, info.host.scalars(micro_step)


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

    def drop_changed(self, engine: Engine) -> bool:
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

    # --- the three kinds ----------------------------------------------------------------------------------------

    def train(
        self, engine: Engine, options: TrainOptions, table: SlotTable, batch: Any, arrays: Any, treedef: Any,
        positions: Any, ints: Any, env: HostEnvironment,
    ) -> CompiledStep:  # fmt: skip
        """The variant for one training batch."""
        self.shape_report.note("train", batch)

        def key() -> Any:
            shapes = (engine.state_treedef, treedef, positions, _shapes(engine.leaves), _shapes(arrays))
            return ("train", options, engine.binding.mode_key(), engine.binding.freezing_key, *shapes)

        def build(info: StepInfo) -> Callable[..., Any]:
            return _train_function(engine, options, table, _joiner(batch, treedef, positions), info)

        def args() -> tuple[Any, ...]:
            return engine.leaves, arrays, ints, engine.floats

        return self._get(
            key, "train", build, args, engine, table, env, donate=(0,), batch=1, treedef=treedef, positions=positions
        )

    def fused(
        self, engine: Engine, options: TrainOptions, table: SlotTable, treedef: Any, stacked: Any, ints: Any,
        unroll: int,
    ) -> CompiledStep:  # fmt: skip
        """Several training batches in one call; arrays and integers are stacked along a new first axis."""
        steps = len(ints)

        def key() -> Any:
            shapes = (engine.state_treedef, treedef, _shapes(engine.leaves), _shapes(stacked))
            return ("fused", steps, unroll, options, engine.binding.mode_key(), *shapes)

        def build(info: StepInfo) -> Callable[..., Any]:
            step = _train_function(engine, options, table, _joiner(None, treedef, None), info)

            def many(leaves: Any, stacked: Any, ints: Any, floats: Any) -> Any:
                def body(carry: Any, inputs: Any) -> Any:
                    leaves, values, *_ = step(carry[0], *inputs, floats)
                    return (leaves, values), None

                first = jnp.zeros((table.capacity,), engine.tree.acc.dtype)
                (leaves, values), _ = jax.lax.scan(body, (leaves, first), (stacked, ints), unroll=unroll)
                return leaves, values, (), (), None, ()

            return many

        def args() -> tuple[Any, ...]:
            return engine.leaves, stacked, ints, engine.floats

        return self._get(
            key, "train_fused", build, args, engine, table, None, donate=(0,), batch=1, treedef=treedef, positions=None
        )

    def evaluate(
        self, engine: Engine, options: EvalOptions, table: SlotTable, batch: Any, arrays: Any, treedef: Any,
        positions: Any, ints: Any, env: HostEnvironment,
    ) -> CompiledStep:  # fmt: skip
        """The variant for one evaluation or prediction batch."""
        asked = options
        self.shape_report.note(options.stage, batch)
        if options.stage == "sanity_check" and not self._stage_sensitive:
            options = dataclasses.replace(options, stage="validate")  # the same step: compiled once for both

        def shape() -> tuple[Any, ...]:
            shapes = (treedef, positions, _shapes(engine.evaluation_leaves()), _shapes(arrays))
            return (engine.binding.mode_key(), engine.evaluation_treedef, *shapes)

        def key() -> Any:
            return ("eval", options, *shape())

        def build(info: StepInfo) -> Callable[..., Any]:
            join = _joiner(batch, treedef, positions)
            state_treedef = engine.evaluation_treedef

            def step(leaves: Any, acc: Any, arrays: Any, ints: Any, *host: Any) -> Any:
                params, variables, attributes = jax.tree_util.tree_unflatten(state_treedef, leaves)
                seed, scalars = _inputs(info, ints, host)
                return core.eval_step(
                    engine.binding,
                    table,
                    info,
                    options,
                    params,
                    variables,
                    attributes,
                    acc,
                    join(arrays),
                    scalars,
                    seed,
                )

            return step

        def args() -> tuple[Any, ...]:
            return engine.evaluation_leaves(), engine.evaluation_accumulators(asked.stage), arrays, ints

        variant = self._get(
            key, options.stage, build, args, engine, table, env, donate=(1,), batch=2, treedef=treedef,
            positions=positions,
        )  # fmt: skip
        if variant.info.stage_read and not self._stage_sensitive and options.stage == "validate":
            # It asked for the stage, so what it found holds for this stage only.
            self._stage_sensitive = True
            self._cache[("eval", asked, *shape())] = self._cache.pop(key())
        return variant

    def update(self, engine: Engine) -> CompiledStep:
        """The update half of a split step."""

        def build(info: StepInfo) -> Callable[..., Any]:
            state_treedef = engine.state_treedef

            def step(leaves: Any, floats: Any) -> Any:
                state: TrainState = jax.tree_util.tree_unflatten(state_treedef, leaves)
                grads = jax.tree.map(lambda g: g * floats[1].astype(g.dtype), state.grads)
                new = core.update(engine.binding, state, grads, core.hyper_of(engine.binding, floats))
                return _flat(guarded_update(engine.binding, state, new, grads), state_treedef, info)

            return step

        def args() -> tuple[Any, ...]:
            return engine.leaves, engine.floats

        return self._get(
            lambda: ("update", engine.binding.freezing_key), "update", build, args, engine, None, None, donate=(0,),
            batch=None, treedef=None, positions=None,
        )  # fmt: skip

    # --- compilation --------------------------------------------------------------------------------------------

    def _get(
        self, make_key: Callable[[], Any], kind: str, build: Callable[[StepInfo], Callable[..., Any]],
        args: Callable[[], tuple[Any, ...]], engine: Engine, table: SlotTable | None, env: HostEnvironment | None, *,
        donate: tuple[int, ...], batch: int | None, treedef: Any, positions: Any,
    ) -> CompiledStep:  # fmt: skip
        learnt: list[str] = []
        while True:
            # Computed anew after each try: what a trace learns may change the state.
            key = make_key()
            group = self._cache.get(key)
            found = None if group is None else group.find(env)
            if found is not None:
                return found
            try:
                return self._make(
                    key, kind, build, args, engine, table, env, donate=donate, batch=batch, treedef=treedef,
                    positions=positions,
                )  # fmt: skip
            except RetraceError as error:
                learnt.append(error.what)
                if len(learnt) > _MAX_RETRACES:
                    raise RuntimeError(
                        f"The {kind} step of {self.owner} was traced {len(learnt)} times and every trace found "
                        f"something new: {'; '.join(learnt[-4:])}. A step may meet many attributes, but not new ones "
                        "whenever it is traced."
                    ) from None
                error.learn(engine.effect_facts)
                if self.drop_readers(engine.effect_facts.host.fresh):
                    engine.modes_changed()

    def _make(
        self, key: Any, kind: str, build: Callable[[StepInfo], Callable[..., Any]], args: Callable[[], tuple[Any, ...]],
        engine: Engine, table: SlotTable | None, env: HostEnvironment | None, *, donate: tuple[int, ...],
        batch: int | None, treedef: Any, positions: Any,
    ) -> CompiledStep:  # fmt: skip
        start = time.perf_counter()
        info = self._info(key, engine, env)
        function = build(info)
        if not self.jit:
            variant = CompiledStep(
                kind, functools.partial(_eager, function), info, treedef, positions, 0.0, (None,) * 3
            )
            if table is not None:
                variant.call = _growing(variant, engine, kind, table)
            self._keep(key, variant, engine)
            return variant
        example = (*args(), *_host_example(info))
        if self.checks:
            function, donate = checked(function, self.checks), ()
        traced = self.strategy.jit(function, example, donate=donate, batch=batch).trace(*example)
        if table is not None and table.needed > table.capacity:
            # More keys than the accumulators have room for: grow them and trace once more.
            engine.grow_accumulators(table)
            info = self._info(key, engine, env)
            function = build(info) if not self.checks else checked(build(info), self.checks)
            example = (*args(), *_host_example(info))
            traced = self.strategy.jit(function, example, donate=donate, batch=batch).trace(*example)
        if info.host is not None:
            info.host.release()
            info.host = info.host if info.host.needed else None
            info.needs_host = info.needs_host or info.host is not None
        if info.manual is not None and info.manual.cut:
            if self.checks:
                raise NotImplementedError(
                    "`Trainer(checkify=...)` does not work with hooks inside a manually optimized step "
                    "(on_before_backward, on_after_backward, on_before_optimizer_step). Take one of them out."
                )
            lowered, compiled = None, SegmentedStep(traced, engine, example, batch)
        else:
            with warnings.catch_warnings():
                if info.reshapes:  # its old buffer is of no use then, and a warning about it of no use either
                    warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
                lowered = explained(traced.lower, self.owner)()
                with healing():
                    compiled = lowered.compile()
        seconds = time.perf_counter() - start
        call = raising(compiled, f"{self.owner} {kind}") if self.checks else compiled
        variant = CompiledStep(kind, call, info, treedef, positions, seconds, (traced, lowered, compiled))
        self.counts[kind] = self.counts.get(kind, 0) + 1
        self._keep(key, variant, engine)
        if self.reports is not None:
            self.reports.report(variant, key, self.counts[kind])
        return variant

    def _info(self, key: Any, engine: Engine, env: HostEnvironment | None) -> StepInfo:
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

    def _keep(self, key: Any, variant: CompiledStep, engine: Engine) -> None:
        group = self._cache.get(key)
        if group is None:
            group = self._cache[key] = VariantGroup(self._history(variant.kind, key))
        host = variant.info.host
        self.hidden_reads = self.hidden_reads or variant.info.reads.hidden
        variant.group = group
        self.latest[variant.kind] = variant
        group.add(() if host is None else tuple(host.guards.values()), variant, self.moment)


def _host_example(info: StepInfo) -> tuple[Any, ...]:
    return () if info.host is None else info.host.example()


def _growing(variant: CompiledStep, engine: Engine, kind: str, table: SlotTable) -> Callable[..., Any]:
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


def _eager(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a step on concrete JAX arrays; integers stay numpy, so that host numbers are Python numbers in the step."""
    converted = [
        a
        if isinstance(a, np.ndarray) and a.dtype == np.int32 and a.ndim == 1 and a.shape[0] == 5
        else jax.tree.map(jax.numpy.array, a)
        for a in args
    ]
    return function(*converted)


def _flat(state: TrainState, treedef: Any, info: StepInfo) -> tuple[Any, ...]:
    leaves, got = jax.tree_util.tree_flatten(state)
    if got != treedef:
        before = jax.tree_util.tree_unflatten(treedef, list(range(treedef.num_leaves))).replace(attributes={})
        rest: Any = jax.tree_util.tree_structure(before)
        if rest == jax.tree_util.tree_structure(state.replace(attributes={})):
            # A container of arrays on the module has other contents after this step.
            info.treedef_after, info.needs_host = got, True
            return tuple(leaves)
        raise RuntimeError(
            f"The step changed the structure of the training state.\nBefore: {treedef}\nAfter: {got}\nA network or "
            "optimizer "
            "must keep the names and nesting of its variables."
        )
    return tuple(leaves)


def _shapes(arrays: Any) -> tuple[Any, ...]:
    return tuple((tuple(a.shape), a.dtype) for a in arrays)


def _joiner(batch: Any, treedef: Any, positions: Any) -> Callable[[Any], Any]:
    if positions is None:
        return functools.partial(jax.tree_util.tree_unflatten, treedef)
    paths = batches.leaf_paths(batch)
    kinds = [type(leaf).__name__ for leaf in jax.tree_util.tree_leaves(batch)]
    return lambda arrays: batches.join(treedef, arrays, positions, paths, kinds)
