"""The user's own optax transformations: learning rates, setting them, extra arguments, evaluation parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlightning.optim import OptaxOptimizer, lr_schedule
from jaxlightning.optim import lr_scheduler as lrs
from jaxlightning.utilities.exceptions import MisconfigurationException

SCHEDULE = optax.cosine_decay_schedule(0.1, 10)


def _params() -> dict[str, Any]:
    return {"net": {"a": jnp.ones(3), "b": jnp.full(2, 2.0, jnp.float32)}}


def _loss(p: Any) -> jax.Array:
    return jnp.sum((p["net"]["a"] - 2) ** 2) + jnp.sum(p["net"]["b"] ** 2)


def _run(handle: OptaxOptimizer, steps: int, params: Any = None, state: Any = None) -> tuple[Any, Any, int]:
    params = _params() if params is None else params
    state = jax.jit(handle.init)(params) if state is None else state
    traces = 0

    def step(p: Any, s: Any, hyper: Any) -> Any:
        nonlocal traces
        traces += 1
        value, grads = jax.value_and_grad(_loss)(p)
        updates, s = handle.update(grads, s, p, hyper, value=value, grad=grads, value_fn=_loss)
        return optax.apply_updates(p, updates), s

    compiled = jax.jit(step, donate_argnums=(0, 1))
    params, state = jax.tree.map(jnp.array, (params, state))
    for _ in range(steps):
        params, state = compiled(params, state, np.asarray(handle.host_hyper(), np.float32))
        handle.record_update()
    return params, state, traces


def _by_hand(tx: Any, steps: int) -> Any:
    @jax.jit
    def step(params: Any, state: Any) -> Any:
        value, grads = jax.value_and_grad(_loss)(params)
        updates, state = optax.with_extra_args_support(tx).update(
            grads, state, params, value=value, grad=grads, value_fn=_loss
        )
        return optax.apply_updates(params, updates), state

    params = _params()
    state = tx.init(params)
    for _ in range(steps):
        params, state = step(params, state)
    return params


TRANSFORMATIONS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw": lambda: optax.adamw(SCHEDULE),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1)),
    "inject": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=0.1),
    "inject_schedule": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=SCHEDULE),
    "lbfgs": lambda: optax.lbfgs(),
    "polyak": lambda: optax.polyak_sgd(),
    "plateau": lambda: optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=2)),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(0.1),
    "masked": lambda: optax.masked(optax.adam(0.1), {"net": {"a": True, "b": False}}),
    "partition": lambda: optax.partition({"x": optax.sgd(0.1), "y": optax.adam(0.1)}, {"net": {"a": "x", "b": "y"}}),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_updates_are_optaxs_own_and_compile_once(name: str) -> None:
    params, state, traces = _run(OptaxOptimizer(TRANSFORMATIONS[name]()), 8)
    expected = _by_hand(TRANSFORMATIONS[name](), 8)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), params, expected)
    assert traces == 1
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(state))


def test_multi_steps_accumulates_as_the_user_built_it() -> None:
    handle = OptaxOptimizer(optax.MultiSteps(optax.sgd(0.1), 4), lr=SCHEDULE)
    params, state, _ = _run(handle, 3)
    np.testing.assert_allclose(params["net"]["a"], 1.0)
    params, state, _ = _run(handle, 1, params, state)
    assert np.all(np.asarray(params["net"]["a"]) > 1.0)
    # its schedules count emitted updates, not calls
    assert handle.read_lr(state) == [pytest.approx(float(SCHEDULE(1)))]


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("sgd", (False, False)),
        ("chain", (False, False)),
        ("plateau", (True, False)),
        ("polyak", (True, False)),
        ("lbfgs", (True, True)),
    ],
)
def test_what_an_update_needs_is_found_out(name: str, needs: tuple[bool, bool]) -> None:
    handle = OptaxOptimizer(TRANSFORMATIONS[name]())
    state = handle.init(_params())
    assert (handle.needs_value, handle.needs_value_fn) == needs
    if needs[0]:
        with pytest.raises(MisconfigurationException, match="needs value"):
            handle.update(_params(), state, _params(), [])


def test_states_with_shared_buffers_get_their_own() -> None:
    leaves = jax.tree.leaves(jax.jit(OptaxOptimizer(optax.lbfgs()).init)(_params()))
    pointers = [leaf.unsafe_buffer_pointer() for leaf in leaves]
    assert len(pointers) == len(set(pointers))


# --- learning rates ----------------------------------------------------------------------------------------------


KNOWN: list[tuple[Any, list[float | None]]] = [
    (optax.sgd(0.1), [0.1]),
    (optax.sgd(0.1, momentum=0.9), [0.1]),
    (optax.adam(1e-3), [1e-3]),
    (optax.adam(SCHEDULE), [float(SCHEDULE(3))]),
    (optax.adamw(0.02, weight_decay=0.1), [0.02]),
    (optax.lion(0.01), [0.01]),
    (optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.02)), [0.02]),
    (optax.chain(optax.scale_by_adam(), optax.scale(-0.3)), [0.3]),
    (optax.chain(optax.scale_by_adam(), optax.scale_by_learning_rate(SCHEDULE)), [float(SCHEDULE(3))]),
    (optax.inject_hyperparams(optax.adam)(learning_rate=0.1), [0.1]),
    (optax.inject_hyperparams(optax.adam)(learning_rate=SCHEDULE), [float(SCHEDULE(3))]),
    # not certain: None, and never a wrong number
    (optax.chain(optax.adam(0.1), optax.clip(1.0)), [None]),
    (optax.chain(optax.scale(0.5), optax.sgd(0.1)), [None]),
    (optax.chain(optax.scale_by_adam(), optax.scale_by_schedule(SCHEDULE), optax.scale(-1.0)), [None]),
    (optax.chain(optax.scale_by_adam(), optax.scale_by_schedule(lambda n: -SCHEDULE(n))), [None]),
    (optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau()), [None]),
    (optax.adafactor(0.1), [None]),
    (optax.lbfgs(0.1), [None]),
    (optax.masked(optax.sgd(0.1), True), [None]),
    (optax.GradientTransformation(lambda p: (), lambda g, s, p=None: (g, s)), [None]),
]


@pytest.mark.parametrize(("tx", "expected"), KNOWN, ids=[str(i) for i in range(len(KNOWN))])
def test_a_learning_rate_is_read_only_when_it_is_certain(tx: Any, expected: list[float | None]) -> None:
    handle = OptaxOptimizer(tx)
    handle.record_update(3)
    assert handle.read_lr() == expected
    assert [group["lr"] for group in handle.param_groups] == expected
    assert [dict(group)["lr"] for group in handle.param_groups] == expected


def test_a_given_schedule_is_computed_on_the_host_from_the_update_count() -> None:
    schedule = lr_schedule(0.1, 4, 5, 1)
    handle = OptaxOptimizer(optax.adam(schedule), lr=schedule)
    _run(handle, 6)
    assert handle.read_lr() == [float(schedule(6))]
    assert OptaxOptimizer(optax.lbfgs(), lr=0.7).read_lr() == [0.7]


def test_a_schedule_that_returns_nan_is_an_error() -> None:
    handle = OptaxOptimizer(optax.lbfgs(), lr=lambda n: float("nan") if n else 0.1)
    assert handle.read_lr() == [0.1]
    handle.record_update()
    with pytest.raises(MisconfigurationException, match=r"schedule of lbfgs returned nan for update 1"):
        handle.read_lr()


@pytest.mark.parametrize(
    "tx", [optax.adam(0.1), optax.adam(SCHEDULE), optax.lbfgs()], ids=["number", "schedule", "lbfgs"]
)
def test_setting_it_on_plain_optax_names_inject_hyperparams(tx: Any) -> None:
    handle = OptaxOptimizer(tx)
    with pytest.raises(MisconfigurationException, match=r"optax.inject_hyperparams\(optax\.\w+\)"):
        handle.param_groups[0]["lr"] = 0.2
    with pytest.raises(MisconfigurationException, match=r"optax.inject_hyperparams\(optax\.\w+\)"):
        lrs.StepLR(tx, 1)


def test_a_scheduler_drives_injected_numbers_without_compiling_again() -> None:
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)
    scheduler = lrs.ExponentialLR(tx, 0.5)
    handle = scheduler.optimizer
    assert isinstance(handle, OptaxOptimizer)
    assert scheduler.base_lrs == [0.5]
    params = {"net": {"a": jnp.zeros(2), "b": jnp.zeros(1)}}
    state = handle.init(params)
    ones = jax.tree.map(jnp.ones_like, params)
    update = jax.jit(lambda s, h: handle.update(ones, s, params, h))
    steps = []
    for _ in range(4):
        updates, state = update(state, np.asarray(handle.host_hyper(), np.float32))
        steps.append(-float(updates["net"]["b"][0]))
        scheduler.step()
    assert steps == [0.5, 0.25, 0.125, 0.0625]
    assert update._cache_size() == 1
    assert float(state.hyperparams["learning_rate"]) == 0.0625


def test_a_number_that_the_host_never_set_is_the_states_own() -> None:
    """`opt_state.hyperparams[...] = x` between two steps is optax's documented way, and works."""
    handle = OptaxOptimizer(optax.inject_hyperparams(optax.sgd)(learning_rate=0.5))
    params = _params()
    state = handle.init(params)
    assert all(math.isnan(value) for value in handle.host_hyper())
    state = state._replace(hyperparams={**state.hyperparams, "learning_rate": jnp.asarray(0.25)})
    updates, state = handle.update(params, state, params, jnp.asarray(handle.host_hyper()))
    np.testing.assert_allclose(updates["net"]["a"], -0.25)
    assert handle.read_lr(state) == [0.25]
    handle.param_groups[0]["lr"] = 0.125
    handle.state_replaced()
    assert handle.read_lr(state) == [0.25]


def test_every_injected_number_is_an_entry_of_the_group() -> None:
    tx = optax.chain(optax.clip(1.0), optax.inject_hyperparams(optax.adamw)(learning_rate=0.1, weight_decay=0.2))
    handle = OptaxOptimizer(tx)
    group = handle.param_groups[0]
    assert handle.name == "adamw"
    assert (group["lr"], group["weight_decay"], group["betas"]) == (0.1, 0.2, (0.9, 0.999))
    group["betas"] = (0.5, 0.6)
    group["weight_decay"] = 0.0
    named = dict(zip(handle.hyper_names, handle.host_hyper(), strict=True))
    assert (named["0.b1"], named["0.b2"], named["0.weight_decay"]) == (0.5, 0.6, 0.0)
    assert math.isnan(named["0.learning_rate"])
    lrs.OneCycleLR(handle, 0.1, total_steps=10)
    assert group["betas"][0] == 0.95


def test_partitions_with_a_label_function_become_groups() -> None:
    def labels(params: Any) -> Any:
        return jax.tree.map_with_path(lambda path, _: "x" if path[-1].key in ("a", "w") else "y", params)

    inject = optax.inject_hyperparams
    tx = optax.partition({"x": inject(optax.sgd)(0.1), "y": inject(optax.adam)(0.2)}, labels)
    handle = OptaxOptimizer(tx)
    assert [(group["name"], group["lr"]) for group in handle.param_groups] == [("x", 0.1), ("y", 0.2)]
    scheduler = lrs.StepLR(handle, 1, gamma=0.5)
    scheduler.step()
    assert handle.read_lr() == [0.05, 0.1]


def test_a_label_tree_hides_injected_numbers_and_says_so() -> None:
    inject = optax.inject_hyperparams
    tx = optax.partition({"x": inject(optax.sgd)(0.1), "y": inject(optax.adam)(0.2)}, {"net": {"a": "x", "b": "y"}})
    with pytest.raises(MisconfigurationException, match="label function instead of a tree"):
        lrs.StepLR(tx, 1)
    # a single one has only one possible place
    masked = optax.masked(inject(optax.sgd)(0.1), {"net": {"a": True, "b": False}})
    assert lrs.StepLR(masked, 1).base_lrs == [0.1]


def test_a_scheduled_injected_number_cannot_be_set() -> None:
    handle = OptaxOptimizer(optax.inject_hyperparams(optax.sgd)(learning_rate=SCHEDULE))
    with pytest.raises(MisconfigurationException, match="follows a schedule"):
        handle.param_groups[0]["lr"] = 0.1


def test_state_dict_restores_set_numbers() -> None:
    tx = optax.inject_hyperparams(optax.adam)(learning_rate=0.1)
    handle = OptaxOptimizer(tx)
    handle.param_groups[0]["lr"] = 0.03
    handle.record_update(5)
    other = OptaxOptimizer(tx)
    other.load_state_dict(handle.state_dict())
    assert other.read_lr() == [0.03]
    assert other.updates == 5
    plain = OptaxOptimizer(optax.adam(0.1))
    plain.load_state_dict(plain.state_dict())


# --- names and parameters ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tx", "name"),
    [
        (optax.sgd(0.1), "sgd"),
        (optax.adam(0.1), "adam"),
        (optax.adamw(0.1), "adamw"),
        (optax.lbfgs(), "lbfgs"),
        (optax.chain(optax.clip(1.0), optax.lion(0.1)), "lion"),
        (optax.inject_hyperparams(optax.adamw)(0.1), "adamw"),
        (optax.GradientTransformation(lambda p: (), lambda g, s, p=None: (g, s)), "optax"),
    ],
)
def test_names_are_those_of_the_factories(tx: Any, name: str) -> None:
    assert OptaxOptimizer(tx).name == name
    assert OptaxOptimizer(tx, name="mine").name == "mine"


def test_parameters_may_be_named() -> None:
    handle = OptaxOptimizer(optax.sgd(0.1), "net/a")
    assert handle.owns is not None
    assert handle.owns.matches("net/a")
    assert not handle.owns.matches("net/b")
    with pytest.raises(ValueError, match="empty parameter list"):
        handle.init({})


def test_what_is_no_transformation_is_refused() -> None:
    with pytest.raises(TypeError, match="got int"):
        OptaxOptimizer(3)
    with pytest.raises(TypeError, match="wants an optimizer"):
        lrs.StepLR("SGD", 1)


# --- evaluation parameters ---------------------------------------------------------------------------------------


def test_schedule_free_gives_its_averaged_parameters() -> None:
    tx = optax.contrib.schedule_free_sgd(0.1)
    handle = OptaxOptimizer(optax.chain(optax.clip_by_global_norm(10.0), tx))
    assert handle.has_eval_params
    params, state, _ = _run(handle, 5)
    expected = optax.contrib.schedule_free_eval_params(state[1], params)
    got = jax.jit(handle.eval_params)(state, params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, expected)
    assert not np.allclose(got["net"]["a"], params["net"]["a"])


def test_lookahead_keeps_its_slow_parameters_in_the_state() -> None:
    tx = optax.lookahead(optax.sgd(0.1), sync_period=3, slow_step_size=0.5)
    handle = OptaxOptimizer(tx)
    params, state, traces = _run(handle, 7)
    both = optax.LookaheadParams.init_synced(_params())
    theirs = tx.init(both)
    for _ in range(7):
        updates, theirs = tx.update(jax.grad(_loss)(both.fast), theirs, both)
        both = optax.apply_updates(both, updates)
    np.testing.assert_allclose(params["net"]["a"], both.fast["net"]["a"], rtol=1e-6)
    np.testing.assert_allclose(handle.eval_params(state, params)["net"]["a"], both.slow["net"]["a"], rtol=1e-6)
    assert handle.has_eval_params
    assert traces == 1


def test_other_transformations_evaluate_what_they_train() -> None:
    handle = OptaxOptimizer(optax.adam(0.1))
    params = _params()
    assert not handle.has_eval_params
    assert handle.eval_params(handle.init(params), params) is params
