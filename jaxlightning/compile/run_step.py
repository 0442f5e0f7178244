"""One run of the user's step: on which key, with which arguments, and what it may not do."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxlightning.compile.batch_mask import PaddedBatch, refuse_unmasked
from jaxlightning.compile.effects import OwnerTracer, tracing_class
from jaxlightning.compile.explain import explain
from jaxlightning.compile.host_inputs import HostInputs
from jaxlightning.compile.host_python import python_in_a_trace
from jaxlightning.compile.host_random import generator_states, refuse_draws, set_generator_states
from jaxlightning.compile.host_trainer import TrainerView
from jaxlightning.compile.log_plan import LogPlan
from jaxlightning.compile.manual_schedulers import recording_schedulers
from jaxlightning.compile.outputs import OutputTree, is_array
from jaxlightning.compile.reads import ReadRecorder
from jaxlightning.compile.replay import HostEffects
from jaxlightning.compile.trace import RetraceError, Scalars, Trace, activate, trace_level
from jaxlightning.compile.writes import Snapshot, settle_writes
from jaxlightning.optim._observed import listening

if TYPE_CHECKING:
    from jaxlightning.compile.binding import Binding

__all__ = ["OutputTree", "StepInfo", "is_array", "run_user_step", "step_key"]

_FX = {
    "train": "training_step",
    "validate": "validation_step",
    "sanity_check": "validation_step",
    "test": "test_step",
    "predict": "predict_step",
}
_STAGE_SALT = {"train": 0, "validate": 1, "sanity_check": 2, "test": 3, "predict": 4}


@dataclass
class StepInfo:
    """What tracing a variant found out.

    Attributes:
        plan: The keys that it logs.
        skipped: The training step returned None.
        outputs: How to rebuild the user's return value from the arrays that the compiled call returns.
        finite_names: What the entries of the finite flags are.
        stage_read: The step asked the trainer for its stage.
        reads: Attributes of the module that became constants.
        needs_host: Something has to be done on the host before or after each call.
        reshapes: The step changes the shape or structure of something that it carries.
        treedef_after: Structure of the state after the step, None where it stays the same.
        effects: What is done with the arrays that the compiled call returns last, None for nothing.
        host: Numbers of the host that the step uses, None for none (and with `jit=False`).
        manual: What a step with manual optimization does to optimizers and schedulers.
    """

    plan: LogPlan = field(default_factory=LogPlan)
    skipped: bool = False
    outputs: OutputTree | None = None
    finite_names: tuple[str, ...] = ()
    stage_read: bool = False
    reads: ReadRecorder = field(default_factory=ReadRecorder)
    needs_host: bool = False
    effects: HostEffects | None = None
    treedef_after: Any = None
    reshapes: bool = False
    host: HostInputs | None = None
    manual: Any = None


def step_key(seed: Any, micro_step: Any, stage: str) -> jax.Array:
    """The typed key of a step: a function of seed, stage and batch number, so that a resume needs no saved state."""
    key = jax.random.fold_in(jax.random.key(jnp.asarray(seed).astype(jnp.uint32)), micro_step)
    salt = _STAGE_SALT[stage]
    return jax.random.fold_in(key, salt) if salt else key


def arguments(function: Callable[..., Any], batch: Any, scalars: Scalars) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a `*_step`: `batch_idx` may be left out, `dataloader_idx` is passed by name where it exists."""
    parameters = list(inspect.signature(function).parameters.values())
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        extra = [] if scalars.dataloader_idx is None else [scalars.dataloader_idx]
        return [batch, scalars.batch_idx, *extra], {}
    names = [p.name for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]
    args, kwargs = [batch], {}
    others = [name for name in names if name != "dataloader_idx"]
    if len(others) > 1:
        args.append(scalars.batch_idx)
    if "dataloader_idx" in names and scalars.dataloader_idx is not None:
        kwargs["dataloader_idx"] = scalars.dataloader_idx
    return args, kwargs


def _unheard(_owner: Any, _name: str, value: Any, read: Any) -> Any:
    """Lets a silent run read learning rates and set none: that is done by the run that counts."""
    return value if read is not None else True


def run_user_step(
    binding: Binding, trace: Trace, batch: Any, info: StepInfo | None, *, strict: bool, forward: bool = False
) -> Any:
    """Runs the user's step in a trace.

    Args:
        binding: The module and its networks.
        trace: Receives what the step does.
        batch: What the step sees.
        info: Where reads of attributes are recorded, or None.
        strict: Whether writes to the module and draws from host generators are refused (a compiled step).
        forward: Whether to call `forward` with the batch (a tuple as arguments, a dict by name) and not a step.

    Returns:
        The step's return value.

    Raises:
        RuntimeError: If a strict step wrote to `self` or drew host random numbers.
    """
    module = binding.module
    fx = "forward" if forward else _FX[trace.kind]
    if type(batch) is PaddedBatch:
        batch, trace.mask = batch.batch, batch.mask
    trace.step_batch = batch
    owners = binding.owners
    snapshots = [Snapshot(owner, prefix) for prefix, owner in owners.items()] if strict or trace.silent else []
    generators = generator_states() if strict or trace.silent else None
    trace.host = None if info is None or trace.silent else info.host
    cls = type(module)
    classes = [(owner, type(owner)) for owner in owners.values()]
    trace.level = trace_level()
    names = [(owner.__dict__, owner.__dict__.get("_current_fx_name")) for owner in owners.values()]
    tracers: list[OwnerTracer | None] = [None for _ in owners]
    if info is not None:
        tracers = [OwnerTracer(owner, prefix, trace, info.reads) for prefix, owner in owners.items()]
    numbers, trainer = trace.numbers, module.__dict__.get("_trainer")
    if numbers is not None and trainer is not None and info is not None:
        trace.view = TrainerView(trainer, module, numbers, info.reads)
    hearing: AbstractContextManager[None] = nullcontext()
    if numbers is not None:
        hearing = listening(numbers.hear)
    elif trace.silent or trace.creating:
        hearing = listening(_unheard)
    standing = nullcontext() if trace.attributes is None else trace.attributes.standing(owners, take=not trace.silent)
    schedulers = recording_schedulers(binding, trace)
    python: AbstractContextManager[None] = nullcontext()
    if binding.jit:
        mute = trace.silent or (info is not None and info.host is not None and info.host.room.attempts > 1)
        python = python_in_a_trace(trace, binding.engine.effect_facts.host.hints, mute=mute)
    try:
        with activate(trace), binding.bound(trace), schedulers, hearing, standing, python:
            if info is not None:
                for (owner, kind), tracer in zip(classes, tracers, strict=True):
                    owner.__dict__["_tracer"] = tracer
                    object.__setattr__(owner, "__class__", tracing_class(kind))
            for instance, _ in names:
                instance["_current_fx_name"] = fx
            try:
                function = getattr(module, fx)
                if info is not None:
                    info.reads.record_code(function)
                if forward:
                    args = [] if isinstance(batch, dict) else list(batch) if isinstance(batch, tuple) else [batch]
                    kwargs = batch if isinstance(batch, dict) else {}
                else:
                    args, kwargs = arguments(function, batch, trace.scalars)
                result = function(*args, **kwargs)
                if strict and generators is not None:
                    refuse_draws(generators, f"{cls.__name__}.{fx}", lambda: function(*args, **kwargs))
            except BaseException as error:
                retrace = None if trace.numbers is None else trace.numbers.inputs.settle(error)
                explain(error, f"{cls.__name__}.{fx}", jit=binding.jit)
                if generators is not None and (retrace is not None or isinstance(error, RetraceError)):
                    set_generator_states(generators)
                if retrace is not None:
                    raise retrace from None
                raise
            finally:
                if info is not None:
                    for owner, kind in classes:
                        object.__setattr__(owner, "__class__", kind)
                        owner.__dict__.pop("_tracer", None)
                if trace.silent and generators is not None:
                    set_generator_states(generators)
                for instance, before in names:
                    instance["_current_fx_name"] = before
        if strict and not trace.silent:
            for snapshot, tracer in zip(snapshots, tracers, strict=True):
                if tracer is not None:
                    settle_writes(snapshot, tracer, trace, f"{cls.__name__}.{fx}")
    finally:
        for snapshot in snapshots:
            snapshot.restore()
    if trace.attributes is not None and not trace.silent:
        if info is not None:
            binding.engine.effect_facts.constants.update(info.reads.reads)
        trace.attributes.conclude()
    if trace.mask is not None and not trace.mask_read:
        skipped = trace.kind == "train" and result is None and module.automatic_optimization
        if not skipped:
            refuse_unmasked(trace, f"{cls.__name__}.{fx}")
    if strict and info is not None and not trace.silent:
        info.reads.refuse_changes(f"{cls.__name__}.{fx}")
    return result
