"""Numbers of the host in a compiled step: arithmetic compiles once, decisions choose a variant, nothing is stale."""

from __future__ import annotations

import dataclasses
import logging
import math
import random
import time
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.models import make_engine

from jaxlightning import LightningModule
from jaxlightning.compile.guards import MAX_VARIANTS, DecisionHistory, Guard, VariantGroup
from jaxlightning.compile.host_inputs import HostFacts, HostInputs, Room
from jaxlightning.compile.host_proxy import HostNumber, weak
from jaxlightning.compile.host_values import Expression, HostEnvironment
from jaxlightning.compile.trace import RetraceError

# --- what a host number may be used for ----------------------------------------------------------------------------

X = np.arange(12.0, dtype=np.float32).reshape(4, 3)


class Known:
    """The same numbers as plain ones."""

    batch_idx, current_epoch, global_step = 3, 2, 7


def traced(function: Callable[..., Any], room: Room, numbers: Any = Known) -> tuple[Any, HostInputs]:
    """The result of a compiled function of host numbers, and what its trace found."""
    facts = HostFacts()
    env = HostEnvironment(
        facts.sources,
        batch_idx=numbers.batch_idx,
        current_epoch=numbers.current_epoch,
        global_step=numbers.global_step,
    )
    while True:
        inputs = HostInputs(facts, env, room)

        def step(ints: Any, x: Any, *host: Any, inputs: HostInputs = inputs) -> Any:
            inputs.bind([weak(ints[i]) for i in range(3)], host)
            try:
                return function(inputs.scalars(0), x)
            except Exception as error:
                again = inputs.settle(error)
                if again is None:
                    raise
                raise again from None

        ints = np.array([env["batch_idx"], env["current_epoch"], env["global_step"]], np.int32)
        try:
            compiled = jax.jit(step).trace(ints, X, *inputs.example()).lower().compile()
        except RetraceError as error:
            error.learn(None)  # type: ignore[arg-type]
            continue
        return compiled(ints, X, *inputs.inputs(env)), inputs


ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "times an array": lambda s, x: x * s.batch_idx + s.batch_idx * x,
    "Python's operators": lambda s, x: x * ((s.global_step * 2 + 1) % 5 // 2 - s.batch_idx**2 / 4 + -s.current_epoch),
    "a power of a fraction": lambda s, x: x * 0.99**s.global_step,
    "beyond 32 bits": lambda s, x: x * ((s.global_step * 1103515245 + 12345) % 100),
    "round and divmod": lambda s, x: x * round(s.global_step / 3, 1) + divmod(s.global_step, 4)[1],
    "functions of math": lambda s, x: x * math.floor(s.global_step / 3),
    "functions of NumPy": lambda s, x: x * np.cos(np.pi * s.global_step / 10) * np.clip(s.global_step / 10, 0, 0.5),
    "NumPy scalars": lambda s, x: x * (np.float32(2) * s.batch_idx),
    "NumPy arrays": lambda s, x: np.arange(3) * s.batch_idx + s.batch_idx * np.arange(3.0),
    "jax.numpy": lambda s, x: jnp.minimum(s.batch_idx, 2.5) * jnp.sin(s.global_step) + jnp.where(s.batch_idx > 2, x, 0),
    "an index": lambda s, x: x[s.batch_idx] + x[-s.batch_idx - 1] + x.at[s.batch_idx].set(0).sum(),
    "take, roll, one_hot": lambda s, x: (
        jnp.take(x, s.batch_idx, axis=0).sum() + jnp.roll(x, s.batch_idx) * jax.nn.one_hot(s.current_epoch, 3)
    ),
    "dynamic_slice": lambda s, x: jax.lax.dynamic_slice(x, (s.batch_idx, 0), (1, 3)),
    "cond": lambda s, x: jax.lax.cond(s.batch_idx > 2, lambda a: a + 1, lambda a: a - 1, x),
    "switch": lambda s, x: jax.lax.switch(s.batch_idx % 2, [lambda a: a, lambda a: a * 2], x),
    "fori_loop": lambda s, x: jax.lax.fori_loop(0, s.batch_idx, lambda i, a: a + i, x),
    "scan": lambda s, x: jax.lax.scan(lambda c, r: (c + s.batch_idx / 7, r * s.global_step), 0.0, x)[1],
    "vmap": lambda s, x: jax.vmap(lambda r, b: r * b * s.global_step, in_axes=(0, None))(x, s.batch_idx),
    "grad": lambda s, x: jax.grad(lambda y, b: (y * b * s.batch_idx / 3).sum())(x, s.batch_idx / 2),
    "checkpoint and jit": lambda s, x: jax.checkpoint(lambda y: y * s.batch_idx)(jax.jit(jnp.add)(x, s.batch_idx)),
    "fold_in": lambda s, x: jax.random.uniform(jax.random.fold_in(jax.random.key(0), s.batch_idx), (2,)),
    "full and linspace": lambda s, x: jnp.full((2,), s.batch_idx) + jnp.linspace(0, s.batch_idx, 2),
    "stack and array": lambda s, x: jnp.stack([s.batch_idx, s.global_step]) + jnp.array([s.batch_idx, 1.5]),
    "a truth value": lambda s, x: x * (s.batch_idx > 2) + (s.batch_idx & 1),
    "an optax schedule": lambda s, x: x * optax.cosine_decay_schedule(1.0, 10)(s.global_step),
}
DECISIONS: dict[str, Callable[[Any, Any], Any]] = {
    "if": lambda s, x: x if s.batch_idx % 5 == 0 else x * 2,
    "a chain": lambda s, x: x if 0 < s.batch_idx < 5 and s.current_epoch and not s.global_step > 9 else x * 2,
    "min and max": lambda s, x: x * min(1.0, s.current_epoch / 10) * max(s.batch_idx, s.global_step),
    "f-strings": lambda s, x: {f"a{s.current_epoch:03d}_{s.global_step / 2:.1f}": x, str(s.batch_idx): x},
    "%-formatting": lambda s, x: {"%d" % s.batch_idx: x},  # noqa: UP031
    "range": lambda s, x: sum(x[0, 0] * i for i in range(s.batch_idx)),
    "while": lambda s, x: [x := x + 1 for _ in iter(lambda c=[0]: c.append(0) or len(c) > s.batch_idx, True)][-1],
    "a list": lambda s, x: x * [1, 2, 3, 4][s.batch_idx] * (5, 6, 7)[s.current_epoch],
    "a dictionary": lambda s, x: x * {1: 2, 3: 9}[s.batch_idx] * {1: 2}.get(s.current_epoch, 5),
    "membership": lambda s, x: x * 2 if s.batch_idx in (1, 3) and s.batch_idx in {1, 3} else x,
    "int and float": lambda s, x: x * int(s.batch_idx / 2) * float(s.batch_idx),
    "a repeated list": lambda s, x: jnp.concatenate([x] * s.batch_idx),
    "other types": lambda s, x: x if s.batch_idx == None or s.batch_idx == "a" else x * 3,  # noqa: E711
}
SIZES: dict[str, Callable[[Any, Any], Any]] = {
    "a shape": lambda s, x: jnp.zeros((s.batch_idx, 2)) + jnp.ones(s.current_epoch),
    "a slice": lambda s, x: x[: s.batch_idx, : s.current_epoch],
    "a set slice": lambda s, x: x.at[: s.batch_idx].set(1),
    "reshape": lambda s, x: x.reshape(s.batch_idx, -1),
    "arange and eye": lambda s, x: jnp.arange(s.batch_idx) + jnp.eye(s.batch_idx),
    "an axis": lambda s, x: x.sum(axis=s.batch_idx % 2),
    "repeat, tile, split": lambda s, x: (
        jnp.repeat(x, s.batch_idx, axis=0).sum() + jnp.tile(x, s.batch_idx).sum() + jnp.split(x, s.current_epoch)[0]
    ),
    "the length of a scan": lambda s, x: jax.lax.scan(lambda c, _: (c + 1, c), x, None, length=s.batch_idx)[0],
    "top_k": lambda s, x: jax.lax.top_k(x, s.current_epoch),
    "a rate of dropout": lambda s, x: nn.Dropout(s.current_epoch / 4, deterministic=False).apply(
        {}, x, rngs={"dropout": jax.random.key(0)}
    ),
}


def _same(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == jnp.asarray(b).dtype
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_arithmetic_with_a_host_number_needs_no_decision() -> None:
    got, inputs = traced(lambda s, x: {name: function(s, x) for name, function in ARITHMETIC.items()}, Room())
    for name, function in ARITHMETIC.items():
        _same({name: got[name]}, {name: function(Known, jnp.asarray(X))})
    assert not [guard for guard in inputs.guards.values() if guard.decides]


@pytest.mark.parametrize("name", DECISIONS)
def test_a_python_decision_is_a_guard(name: str) -> None:
    got, inputs = traced(DECISIONS[name], Room())
    _same(got, DECISIONS[name](Known, jnp.asarray(X)))
    assert bool(inputs.guards) == (name != "other types")


@pytest.mark.parametrize("name", ["a slice", "a rate of dropout"])
def test_a_library_that_needs_a_plain_number_gets_one(name: str) -> None:
    room = Room()
    got, inputs = traced(SIZES[name], room)
    _same(got, SIZES[name](Known, jnp.asarray(X)))
    assert room.valued
    assert inputs.guards


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_every_library_function_that_needs_a_plain_number_gets_one(name: str) -> None:
    test_a_library_that_needs_a_plain_number_gets_one(name)


def test_types_of_host_numbers_are_those_of_python_s_numbers() -> None:
    def body(s: Any, x: Any) -> Any:
        half = x.astype(jnp.bfloat16)
        return (
            half * s.batch_idx,
            half * (s.batch_idx / 2),
            jnp.arange(3, dtype=jnp.int8) + s.batch_idx,
            s.batch_idx > 1,
        )

    got, _ = traced(body, Room())
    assert [a.dtype for a in got] == [jnp.bfloat16, jnp.bfloat16, jnp.int8, jnp.bool_]
    with jax.enable_x64(True):
        got, _ = traced(lambda s, x: (s.batch_idx / 3, s.batch_idx + 0), Room())
        assert [a.dtype for a in got] == [jnp.float64, jnp.int64]
        assert float(got[0]) == 1.0


def test_python_s_own_errors_are_raised_at_the_trace() -> None:
    with pytest.raises(ZeroDivisionError):
        traced(lambda s, x: x / (1 // (s.batch_idx - 3)), Room())
    with pytest.raises(IndexError):
        traced(lambda s, x: x * [1, 2][s.batch_idx], Room())


def test_an_integer_that_does_not_fit_is_an_error_that_names_it() -> None:
    with pytest.raises(OverflowError, match=r"\(global_step \* 1000000000\)"):
        traced(lambda s, x: x * (s.global_step * 10**9), Room())


def test_a_host_number_is_an_array_of_jax() -> None:
    def body(s: Any, x: Any) -> Any:
        assert isinstance(s.batch_idx, HostNumber)
        assert isinstance(s.batch_idx, jax.Array)
        assert (s.batch_idx.shape, s.batch_idx.ndim, s.batch_idx.size) == ((), 0, 1)
        assert jnp.shape(s.batch_idx + 1) == ()
        assert jax.tree.leaves((s.batch_idx, [s.global_step])) == [s.batch_idx, s.global_step]
        return x

    traced(body, Room())


# --- choosing a variant ---------------------------------------------------------------------------------------------


def _guard(text: str, outcome: Any) -> Guard:
    return Guard(Expression(text, lambda env: env[text]), outcome)


def _env(**numbers: Any) -> HostEnvironment:
    return HostEnvironment({}, **numbers)


def test_a_group_finds_the_variant_for_each_outcome() -> None:
    group: VariantGroup[str] = VariantGroup()
    assert group.find(_env(a=1)) is None
    group.add([_guard("a", 1), _guard("b", True)], "one, true")
    group.add([_guard("a", 1), _guard("b", False)], "one, false")
    group.add([_guard("a", 2)], "two")
    assert group.find(_env(a=1, b=True)) == "one, true"
    assert group.find(_env(a=1, b=False)) == "one, false"
    assert group.find(_env(a=2)) == "two"
    assert group.find(_env(a=3)) is None
    assert group.find(_env(c=3)) is None  # the question itself fails: the step is traced and says why
    assert group.remove(lambda variant: variant == "two") == ["two"]
    assert group.find(_env(a=2)) is None
    assert group.find(_env(a=1, b=True)) == "one, true"


def test_a_variant_without_decisions_fits_always() -> None:
    group: VariantGroup[str] = VariantGroup()
    group.add([], "only")
    assert group.find(_env()) == "only"
    assert group.find(None) == "only"


def test_too_many_variants_are_a_warning_then_an_error() -> None:
    group: VariantGroup[int] = VariantGroup(DecisionHistory("Net's train step"))

    def fill(start: int, stop: int) -> None:
        for i in range(start, stop):
            group.add([_guard("str(global_step)", str(i))], i, moment=i)

    with pytest.warns(UserWarning, match="Net's train step.*compiled 9 times"):
        fill(0, 9)
    with pytest.raises(RuntimeError, match=r"served for a few batches only(.|\n)*str\(global_step\): 33 outcomes"):
        fill(9, 40)


@pytest.mark.filterwarnings("ignore:.*was compiled")
def test_variants_that_serve_for_long_replace_the_oldest() -> None:
    group: VariantGroup[int] = VariantGroup()
    for i in range(MAX_VARIANTS + 5):
        group.add([_guard("str(current_epoch)", str(i))], i, moment=1000 * i)
    assert len(group.variants()) == MAX_VARIANTS
    assert group.find(_env(**{"str(current_epoch)": "0"})) is None
    assert group.find(_env(**{"str(current_epoch)": str(MAX_VARIANTS + 4)})) == MAX_VARIANTS + 4


# --- steps ------------------------------------------------------------------------------------------------------------


class Plain(LightningModule):
    """A step whose loss is what `body(self, batch, batch_idx)` gives, plus a term with a parameter."""

    def __init__(self, body: Callable[..., Any], **attributes: Any) -> None:
        super().__init__()
        self.net = nn.Dense(1, use_bias=False)
        self.body = body
        for name, value in attributes.items():
            setattr(self, name, value)

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        result = self.body(self, batch, batch_idx)
        return None if result is None else 0 * self.net(batch).mean() + result

    def configure_optimizers(self) -> Any:
        return optax.sgd(0.1)


BATCH = np.ones((2, 3), np.float32)


def losses(module: Any, steps: int, *, jit: bool = True, between: Callable[[int], None] | None = None) -> list[float]:
    """The losses of some steps, 5 batches an epoch."""
    engine = module.__dict__.get("_engine") or make_engine(module, jit=jit)
    found = []
    for i in range(steps):
        out = engine.train_step(
            BATCH, batch_idx=i % 5, current_epoch=i // 5, global_step=i, micro_step=i, want_outputs=True
        )
        found.append(float(out.outputs["loss"]) if not out.skipped else -1.0)
        if between is not None:
            between(i)
            engine.host_code_ran()
    return found


def both(body: Callable[..., Any], compiles: int, steps: int = 20, between: Any = None, **attributes: Any) -> Any:
    """Runs a step compiled and eagerly, compares, counts the compilations; returns the compiled module."""
    module, eager = Plain(body, **attributes), Plain(body, **attributes)
    got = losses(module, steps, between=None if between is None else lambda i: between(module, i))
    want = losses(eager, steps, jit=False, between=None if between is None else lambda i: between(eager, i))
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert module._engine.trace_counts == {"train": compiles}
    return module


def test_a_counter_on_self_is_exact_at_every_step() -> None:
    def body(self: Any, batch: Any, batch_idx: Any) -> Any:
        self.count += 1
        return jnp.float32(10.0) if self.count % 5 == 0 else jnp.float32(1.0) * self.count

    module = both(body, 2, count=0)
    assert type(module.count) is int
    assert module.count == 20


def test_a_number_that_is_only_written_is_written_at_every_step() -> None:
    def body(self: Any, batch: Any, batch_idx: Any) -> Any:
        self.last, self.half = batch_idx, self.global_step / 2
        return jnp.float32(1.0)

    module = both(body, 1, steps=8, last=-1, half=None)
    assert (module.last, module.half) == (2, 3.5)


def test_a_number_that_decays_is_a_float_of_python() -> None:
    def body(self: Any, batch: Any, batch_idx: Any) -> Any:
        self.rate *= 0.9
        return jnp.float32(1.0) * self.rate

    module = both(body, 1, rate=1.0)
    assert module.rate == pytest.approx(0.9**20, rel=1e-12)


def test_an_attribute_first_made_in_the_step_is_seen_by_the_next() -> None:
    def body(self: Any, batch: Any, batch_idx: Any) -> Any:
        if not hasattr(self, "seen"):
            self.seen = 0
        self.seen += 2
        return jnp.float32(1.0) * self.seen + getattr(self, "other", 100)

    module = both(body, 3, between=lambda module, i: setattr(module, "other", 5) if i == 9 else None)
    assert module.seen == 40


def test_a_hook_may_change_a_number_that_the_step_counts() -> None:
    def body(self: Any, batch: Any, batch_idx: Any) -> Any:
        self.count += 1
        return jnp.float32(1.0) * self.count

    both(body, 1, count=0, between=lambda module, i: setattr(module, "count", 100) if i == 9 else None)


def test_a_coefficient_that_a_hook_changes_compiles_once_more() -> None:
    def between(module: Any, i: int) -> None:
        module.beta = 1.0 / (i + 2)

    both(lambda self, batch, batch_idx: jnp.float32(3.0) * self.beta, 2, beta=1.0, between=between)


def test_a_flag_that_a_hook_toggles_compiles_each_value_once(caplog: pytest.LogCaptureFixture) -> None:
    def between(module: Any, i: int) -> None:
        module.warm = i % 2 == 0

    with caplog.at_level(logging.INFO, "jaxlightning"):
        both(lambda self, batch, batch_idx: jnp.float32(3.0 if self.warm else 4.0), 3, warm=False, between=between)
    assert sum("self.warm changed" in record.message for record in caplog.records) == 1


def test_an_integer_that_becomes_a_float_keeps_its_type() -> None:
    def between(module: Any, i: int) -> None:
        module.beta = [1, 0.5, 2, 0.25][i % 4]

    both(lambda self, batch, batch_idx: jnp.float32(3.0) * self.beta, 3, beta=1, between=between)


def test_a_size_that_a_hook_changes_is_a_size() -> None:
    def between(module: Any, i: int) -> None:
        module.length = 1 + (i // 5) % 3

    both(lambda self, batch, batch_idx: batch[:, : self.length].sum(), 4, length=1, between=between)


@pytest.mark.parametrize("value", [False, "warm", None])
def test_a_flag_that_the_step_reads_and_changes_is_refused_with_its_line(value: Any) -> None:
    def body(self: Any, batch: Any, batch_idx: Any) -> Any:
        if not self.started:
            self.started = 1
        return jnp.float32(1.0)

    if value == "warm":
        value = ""
    with pytest.raises(RuntimeError, match=r"self\.started.*test_host_numbers\.py:\d+.*number.*hook"):
        losses(Plain(body, started=value), 1)


def test_a_constant_that_changes_often_is_advised_to_be_an_array() -> None:
    def between(module: Any, i: int) -> None:
        module.weights = [1.0 + i]

    with pytest.warns(UserWarning, match=r"`self\.weights` of Plain changed 4 times(.|\n)*array"):
        both(lambda self, batch, batch_idx: jnp.float32(self.weights[0]), 6, 6, weights=[0.5], between=between)


def test_the_report_names_the_decisions_of_a_variant(caplog: pytest.LogCaptureFixture) -> None:
    body = lambda self, batch, batch_idx: jnp.float32(2.0 if batch_idx % 4 == 0 else 1.0)  # noqa: E731
    module = Plain(body)
    make_engine(module, log_compiles=True)
    with caplog.at_level(logging.INFO, "jaxlightning"):
        losses(module, 2)
    report = [record.message for record in caplog.records if "this variant" in record.message]
    assert len(report) == 2
    assert "bool(((batch_idx % 4) == 0)) is True (test_host_numbers.py:" in report[0]


@pytest.mark.slow
def test_a_key_made_from_a_step_number_ends_with_advice() -> None:
    def body(self: Any, batch: Any, batch_idx: Any) -> Any:
        self.log(f"loss_{self.global_step}", jnp.float32(1.0))
        return jnp.float32(1.0)

    with (
        pytest.warns(UserWarning, match="compiled 9 times"),
        pytest.raises(RuntimeError, match=r"str\(global_step\) at test_host_numbers\.py:\d+: 33 outcomes"),
    ):
        losses(Plain(body), 40)


def test_returning_none_by_a_host_number_skips_the_update() -> None:
    both(lambda self, batch, batch_idx: None if batch_idx == 2 else jnp.float32(1.0) * batch_idx, 2)


def test_functions_of_math_and_numpy_compile_once() -> None:
    def body(self: Any, batch: Any, batch_idx: Any) -> Any:
        epsilon = 5 / (5 + math.exp(self.global_step / 5))
        angle = 0.5 * (1 + math.cos(math.pi * self.global_step / 20)) * np.sqrt(1 + self.global_step)
        return jnp.float32(epsilon) + angle * math.log1p(batch_idx)

    both(body, 1)


def test_functions_of_math_are_python_s_own_outside_a_trace() -> None:
    before = (math.exp, time.time, print)
    both(lambda self, batch, batch_idx: jnp.float32(math.exp(1.0)), 1, 2)
    assert (math.exp, time.time, print) == before


# --- traps ------------------------------------------------------------------------------------------------------------


def _in_place(self: Any, batch: Any, batch_idx: Any) -> Any:
    batch[0] = 1.0
    return batch.sum()


TRAPS: dict[str, tuple[Callable[..., Any], type[Exception], str]] = {
    "item": (lambda self, batch, i: batch.mean().item(), Exception, "self.log"),
    "float": (lambda self, batch, i: jnp.float32(float(batch.mean())), TypeError, "Keep it as an array"),
    "numpy": (lambda self, batch, i: jnp.asarray(np.asarray(batch)).mean(), Exception, "np.asarray"),
    "if": (lambda self, batch, i: batch.mean() if batch.mean() > 0 else 0 * batch.mean(), Exception, "jnp.where"),
    "mask": (lambda self, batch, i: batch[batch > 0].mean(), IndexError, "jnp.where(mask"),
    "in place": (_in_place, TypeError, "x.at[i].set(v)"),
    "detach": (lambda self, batch, i: batch.detach().mean(), AttributeError, "stop_gradient"),
}


@pytest.mark.parametrize("name", TRAPS)
def test_a_trap_of_jax_is_explained_with_the_user_s_line(name: str) -> None:
    body, kind, advice = TRAPS[name]
    with pytest.raises(kind) as caught:
        losses(Plain(body), 1)
    notes = "\n".join(caught.value.__notes__)
    assert advice in notes
    assert "Plain.training_step` at test_host_numbers.py:" in notes


def test_an_exception_of_the_user_s_keeps_its_line() -> None:
    def body(self: Any, batch: Any, batch_idx: Any) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        losses(Plain(body), 1)
    lines = [entry.name for entry in caught.traceback]
    assert lines[-1] == "body"


DRAWS: dict[str, Callable[..., Any]] = {
    "random": lambda self, batch, i: batch.mean() * random.random(),
    "numpy": lambda self, batch, i: batch.mean() * np.random.beta(0.2, 0.2),
}


@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_of_the_host_are_refused_with_the_line(name: str) -> None:
    with pytest.raises(RuntimeError, match=r"drew random numbers from .* at test_host_numbers\.py:\d+.*next_rng"):
        losses(Plain(DRAWS[name]), 1)


def test_a_generator_on_the_module_is_refused_too() -> None:
    module = Plain(lambda self, batch, i: batch.mean() * self.rng.random())
    module.rng = np.random.default_rng(0)
    with pytest.raises(RuntimeError, match=r"drew random numbers from `self\.rng`.*next_rng"):
        losses(module, 1)


def test_eager_steps_draw_as_often_as_they_are_written() -> None:
    body = lambda self, batch, i: batch.mean() * np.random.random()  # noqa: E731
    np.random.seed(3)
    got = losses(Plain(body), 5, jit=False)
    np.random.seed(3)
    np.testing.assert_allclose(got, [np.float32(np.random.random()) for _ in range(5)], rtol=1e-6)


def test_a_clock_and_a_traced_print_are_hinted_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    def body(self: Any, batch: Any, batch_idx: Any) -> Any:
        time.time()
        time.time()
        print("loss", batch.mean())
        print("loss", batch.mean())
        return batch.mean()

    with pytest.warns(UserWarning, match="in a compiled step|shows a traced") as caught:
        losses(Plain(body), 3)
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == 2
    assert "time.time()" in texts[0]
    assert "self.print" in texts[1]
    assert capsys.readouterr().out.count("loss") == 2  # once while traced, not again in the run for creation


# --- constants elsewhere ----------------------------------------------------------------------------------------------

ALPHA = 1.0
SETTINGS: dict[str, list[float]] = {"w": [1.0, 2.0]}


def _scaled(x: Any) -> Any:
    return x * ALPHA + SETTINGS["w"][0]


@dataclasses.dataclass
class Config:
    a: float = 1.0
    sub: dict[str, float] = dataclasses.field(default_factory=lambda: {"b": 2.0})


class Weighted:
    def __init__(self) -> None:
        self.weight = 1.0

    def __call__(self, x: Any) -> Any:
        return x * self.weight


def _closure(k: float) -> tuple[Callable[[Any], Any], Callable[[float], None]]:
    def add(x: Any) -> Any:
        return x + k

    def change(value: float) -> None:
        nonlocal k
        k = value

    return add, change


class Elsewhere(Plain):
    gamma = 1.0

    def __init__(self) -> None:
        super().__init__(self.loss, config=Config(), weigh=Weighted(), numbers=[1, 2, 3], table=np.ones(3))
        self.save_hyperparameters({"beta": 1.0})
        self.add, self.change = _closure(0.5)

    @staticmethod
    def loss(self: Any, batch: Any, batch_idx: Any) -> Any:
        x = self.weigh(batch.mean() * self.gamma * self.config.a * self.config.sub["b"])
        return self.add(_scaled(x * sum(self.numbers) * self.table.sum() * self.hparams.beta))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "an object": lambda module: setattr(module.config, "a", 2.0),
    "a dictionary in an object": lambda module: module.config.sub.update(b=3.0),
    "a callable": lambda module: setattr(module.weigh, "weight", 0.5),
    "a list": lambda module: module.numbers.append(4),
    "a NumPy array": lambda module: module.table.__setitem__(0, 5.0),
    "hparams": lambda module: module.hparams.update(beta=2.0),
    "a class attribute": lambda module: setattr(Elsewhere, "gamma", 0.25),
    "a global": lambda module: globals().update(ALPHA=3.0),
    "a list in a global": lambda module: SETTINGS["w"].__setitem__(0, 7.0),
    "a closure": lambda module: module.change(9.0),
}


def _run_elsewhere(jit: bool) -> Elsewhere:
    module, changes = Elsewhere(), list(CHANGES.values())
    module.found = losses(
        module, len(changes) + 1, jit=jit, between=lambda i: changes[i](module) if i < len(changes) else None
    )
    return module


@pytest.mark.slow
def test_a_constant_outside_the_module_is_never_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for jit in (True, False):
        monkeypatch.setitem(globals(), "ALPHA", 1.0)
        monkeypatch.setitem(SETTINGS, "w", [1.0, 2.0])
        monkeypatch.setattr(Elsewhere, "gamma", 1.0)
        found.append(_run_elsewhere(jit))
    np.testing.assert_allclose(found[0].found, found[1].found, rtol=1e-5)
    assert found[0]._engine is not None
    assert found[0]._engine.trace_counts == {"train": len(CHANGES) + 1}


def test_a_change_of_a_global_or_closure_by_the_step_is_said_once_and_compiles_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(SETTINGS, "w", [1.0, 2.0])

    def body(self: Any, batch: Any, batch_idx: Any) -> Any:
        SETTINGS["w"].append(3.0)
        traces.append(batch_idx)
        return batch.mean()

    traces: list[Any] = []
    module = Plain(body)
    losses(module, 3)
    assert len(traces) <= 2  # when the variables are created, and when the step is compiled
    assert module._engine is not None
    assert module._engine.trace_counts == {"train": 1}
    said = [record.getMessage() for record in caplog.records if "while it is traced" in record.getMessage()]
    assert len(said) == 1
    assert "`the global SETTINGS`" in said[0]
    assert "`traces in the closure of body`" in said[0]
