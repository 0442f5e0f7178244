"""The context of one run of a user's step on traced (or, with `jit=False`, concrete) variables.

What owns what: `Trace` holds everything that a step reads from and writes to the framework while it runs; the engine
makes it, `JaxLightningModule` and the networks look it up with `current_trace()`, the log connector adds to it.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax

from jaxlightning.compile.log_plan import LogMeta
from jaxlightning.compile.paths import flatten, plain
from jaxlightning.compile.transforms import transform_name
from jaxlightning.compile.user_code import user_line

if TYPE_CHECKING:
    from jaxlightning.compile.attributes import TracedAttributes
    from jaxlightning.compile.facts import EffectFacts
    from jaxlightning.compile.host_attributes import HostAttributes
    from jaxlightning.compile.host_inputs import HostInputs
    from jaxlightning.compile.replay import Replay

__all__ = ["LogEntry", "RetraceError", "Scalars", "Trace", "activate", "current_trace", "note_stage_read"]

_NEXT_RNG_SALT = 0x6E657874
_active = threading.local()


def current_trace() -> Trace | None:
    """The trace that is running in this thread, or None."""
    return getattr(_active, "trace", None)


@contextmanager
def activate(trace: Trace) -> Iterator[Trace]:
    """Makes `trace` the current one."""
    previous = current_trace()
    _active.trace = trace
    try:
        yield trace
    finally:
        _active.trace = previous


class RetraceError(BaseException):
    """Raised while a step is traced: something is state, or follows the host, after all, so it is traced once more.

    Not an `Exception`, because a `try` of the user's step must not catch it.

    Args:
        what: What was learnt, for the message when tracing does not settle, for example `"the array `self.ema`"`.
        learn: Puts what was learnt into the engine's `effect_facts`; called before the step is traced again.
    """

    def __init__(self, what: str, learn: Callable[[EffectFacts], None]) -> None:
        super().__init__(what)
        self.what = what
        self.learn = learn


@contextmanager
def outside_of_traces() -> Iterator[None]:
    """Lets code run as outside of a step, in the middle of one: a hook that an eager step calls."""
    previous = current_trace()
    _active.trace = None
    try:
        yield
    finally:
        _active.trace = previous


@dataclass
class LogEntry:
    """One call of `self.log` inside a step; `weight` None counts as one."""

    meta: LogMeta
    value: Any
    weight: Any = None


@dataclass
class Scalars:
    """Host numbers that a step may read, as 0-d integers of the running trace."""

    batch_idx: Any
    current_epoch: Any
    global_step: Any
    micro_step: Any
    dataloader_idx: int | None = None

    @classmethod
    def of(cls, ints: Sequence[Any], dataloader_idx: int | None = None) -> Scalars:
        """The scalars of a step's integer inputs without the seed: micro-step, batch, epoch, optimizer step."""
        micro_step, batch_idx, current_epoch, global_step = ints
        return cls(batch_idx, current_epoch, global_step, micro_step, dataloader_idx)


@dataclass
class Trace:
    """State of one run of a user's step.

    Attributes:
        kind: `"train"`, `"validate"`, `"test"`, `"sanity_check"` or `"predict"`.
        key: Typed key of this step.
        scalars: Host numbers of this step.
        params: `{network: params}`, read by linen networks.
        variables: `{network: {collection: tree}}`; linen networks write updated collections here.
        creating: Whether missing variables of linen networks are created.
        created: Names of networks whose variables this run made or extended.
        init_seed: Traced seed from which keys of new variables derive.
        logs: Calls of `self.log`, in order.
        unseen_logs: What a silent run has logged, for steps that read it back from the trainer.
        silent: Whether effects are dropped (a second run for gradients, or a run for creation).
        stage_read: Whether the step asked the trainer for its stage.
        manual: What the words of manual optimization act on (a `ManualRun` or an `EagerRun`), None in other steps.
        level: The JAX trace in which the step runs; a write under another one sits inside a user's own transform.
        attributes: Arrays and containers on the module that the step reads and writes; None where they are plain
            attributes (`jit=False`).
        replays: Calls and changes that are repeated on the host after each step, in order.
        numbers: Numbers on the module that the step reads and writes; None where they are plain attributes.
        view: What `self.trainer` is for the user's code; None for the trainer itself.
        host: Guards of this variant; None where nothing is compiled.
        raw: Parameters of the module's own (`register_parameter`) as the step sees them, by path.
        written: `{network: params}` of networks whose parameters the step assigned.
        asked: Networks whose parameters the step asked for while there were none.
        differentiated: Whether the run is differentiated with respect to `params`.
        mask: Which rows of the batch are real, bool of shape [rows]; None when batches are not padded.
        mask_read: Whether the step looked at the mask.
        unmasked: Metric objects that were given something else than rows of the batch.
        step_batch: The batch that the step sees.
    """

    kind: str
    key: jax.Array
    scalars: Scalars
    params: dict[str, Any]
    variables: dict[str, Any]
    creating: bool = False
    created: set[str] = field(default_factory=set)
    init_seed: Any = None
    logs: list[LogEntry] = field(default_factory=list)
    unseen_logs: dict[str, Any] = field(default_factory=dict)
    silent: bool = False
    level: Any = None
    manual: Any = None
    stage_read: bool = False
    mask: Any = None
    mask_read: bool = False
    unmasked: list[str] = field(default_factory=list)
    step_batch: Any = None
    network_calls: dict[str, int] = field(default_factory=dict)
    rng_calls: int = 0
    attributes: TracedAttributes | None = None
    replays: list[Replay] = field(default_factory=list)
    numbers: HostAttributes | None = None
    view: Any = None
    host: HostInputs | None = None
    raw: dict[str, Any] = field(default_factory=dict)
    written: dict[str, Any] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)
    differentiated: bool = False

    def add_log(self, meta: LogMeta, value: Any, weight: Any = None) -> None:
        """Records one call of `self.log`; `value` is a 0-d array or number, `weight` None means one."""
        if not self.silent:
            self.require_own_level(
                f"`self.log({meta.name!r}, ...)`", "return the value from the function and log it outside"
            )
            self.logs.append(LogEntry(meta, value, weight))

    def ask(self, question: str, answer: Callable[[], Any]) -> Any:
        """Answers a Python question about something on the host; the compiled variant holds for this answer only.

        Args:
            question: As source, for messages; equal texts ask the same.
            answer: Gives a hashable value, now and before later steps.
        """
        return answer() if self.host is None else self.host.ask(question, answer)

    def next_key(self) -> jax.Array:
        """A typed key, another one at every call and in every step."""
        self.rng_calls += 1
        return jax.random.fold_in(jax.random.fold_in(self.key, _NEXT_RNG_SALT), self.rng_calls)

    def network_key(self, path: str) -> jax.Array:
        """The key of the next call of a network in this step."""
        count = self.network_calls.get(path, 0)
        self.network_calls[path] = count + 1
        return jax.random.fold_in(jax.random.fold_in(self.key, path_hash(path)), count)

    def write_params(self, network: str, value: Any) -> None:
        """Takes an assignment of a network's parameters (`self.teacher.params = ...`).

        Args:
            network: The network.
            value: Parameters of the same structure and shapes.

        Raises:
            RuntimeError: In an evaluation step, or inside a transform of the user's own.
            ValueError: If structure or shapes differ; the message lists them.
        """
        if self.creating:
            return
        self.require_own_level(f"`self.{network}.params = ...`", "return the parameters from the function")
        if self.kind != "train":
            raise RuntimeError(
                f"The {self.kind} step assigns `self.{network}.params`. Steps of evaluation only read parameters: "
                "assign them in a hook such as `on_validation_epoch_start`, between steps."
            )
        known = self.params.get(network)
        if known is None:
            raise RuntimeError(f"`self.{network}.params` is assigned before the network has parameters.")
        self.written[network] = jax.tree.map(jax.lax.stop_gradient, _fitted(network, known, value))
        self.params[network] = self.written[network]
        if self.differentiated:
            # As in torch, where such an assignment is made without a graph: what is computed from the new value has
            # the gradient with respect to it.
            self.params[network] = jax.tree.map(
                lambda new, old: new + (old - jax.lax.stop_gradient(old)), self.written[network], known
            )
        if self.manual is not None:
            self.manual.absorb()

    @property
    def at_own_level(self) -> bool:
        """Whether no JAX transform of the user's is around the code that runs."""
        return self.level is None or trace_level() is self.level

    @contextmanager
    def own_level(self) -> Iterator[None]:
        """Lets what runs inside a transform of the user's compute outside it, in the step itself."""
        try:
            from jax._src.core import set_current_trace  # no public counterpart
        except ImportError:
            yield
            return
        with set_current_trace(self.level):  # type: ignore[no-untyped-call]
            yield

    def owns(self, value: Any) -> bool:
        """Whether a value belongs to the step itself and not to a transform inside it, which it would outlive."""
        return self.at_own_level or not isinstance(value, jax.core.Tracer) or value._trace is self.level

    def require_own_level(self, what: str, way_out: str) -> None:
        """Refuses an effect inside a user's own JAX transform, where its value would leak.

        Raises:
            RuntimeError: If the innermost JAX trace is not the one of the step.
        """
        if not self.at_own_level:
            name, line = transform_name(), user_line()
            line = "" if line in what else line
            raise RuntimeError(
                f"{what}{f' ({line})' if line else ''} was called inside a JAX transform of your own"
                f"{f', `{name}`,' if name else ''} in the {self.kind} step. Its value exists only inside that "
                f"transform, and the function is traced there once, however often it runs: {way_out}."
            )


def _fitted(network: str, known: Any, value: Any) -> Any:
    """New parameters in the structure, shapes and dtypes of the old ones."""
    have, want = flatten({"": plain(value)}), flatten({"": known})
    problems = [f"missing {path[1:]}" for path in want if path not in have]
    problems += [f"unexpected {path[1:]}" for path in have if path not in want]
    problems += [
        f"{path[1:]}: shape {jax.numpy.shape(have[path])} instead of {jax.numpy.shape(want[path])}"
        for path in want
        if path in have and jax.numpy.shape(have[path]) != jax.numpy.shape(want[path])
    ]
    if problems:
        raise ValueError(f"The new value of `self.{network}.params` does not fit: " + "; ".join(problems[:20]))
    leaves = [jax.numpy.asarray(have[path], want[path].dtype) for path in want]
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(known), leaves)


def note_stage_read() -> None:
    """Called by the trainer when its stage is read: a step that reads it is compiled for each stage by itself."""
    trace = current_trace()
    if trace is not None:
        trace.stage_read = True


def trace_level() -> Any:
    """The innermost JAX trace, comparable by identity; None where this JAX version does not tell."""
    try:
        from jax._src.core import trace_ctx  # no public counterpart; absent means that the check is off
    except ImportError:
        return None
    return trace_ctx.trace


def path_hash(path: str) -> int:
    """A stable 31-bit number for a path (Python's own hash differs between processes)."""
    return zlib.crc32(path.encode()) & 0x7FFFFFFF
