"""The pure functions for a loop of one's own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from support.models import Classifier, LinenNet, batches, make_engine, train

from jaxlightning import functionalize


def _equal(a: Any, b: Any) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def test_a_loop_over_the_pure_step_equals_the_engine_bit_for_bit() -> None:
    data = batches()
    state, train_step, _, _ = functionalize(Classifier(LinenNet(dropout=0.2)), data[0], seed=5)
    step = jax.jit(train_step, donate_argnums=0)
    losses = []
    for i in range(20):
        state, logs = step(state, data[i % 4])
        losses.append(float(logs["loss"]))
    engine = make_engine(Classifier(LinenNet(dropout=0.2)), seed=5)
    assert train(engine, data, 20) == losses
    assert _equal(engine.params, state.params)
    assert _equal(engine.variables, state.variables)


def test_the_pure_step_scans() -> None:
    data = batches()
    state, train_step, _, _ = functionalize(Classifier(), data[0])
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *data)
    scanned, logs = jax.jit(lambda s, b: jax.lax.scan(train_step, s, b))(state, stacked)
    assert logs["loss"].shape == (4,)
    for batch in data:
        state, _ = jax.jit(train_step)(state, batch)
    for a, b in zip(jax.tree.leaves(scanned.variables), jax.tree.leaves(state.variables), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_an_ensemble_over_seeds_by_vmap() -> None:
    data = batches()
    parts = [functionalize(Classifier(LinenNet(dropout=0.2)), data[0], seed=seed) for seed in (0, 1, 2)]
    states = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(part.state for part in parts))
    many = jax.jit(jax.vmap(parts[0].train_step, in_axes=(0, None)))
    step = jax.jit(parts[2].train_step)  # the steps are the same function, seeds are in the states
    singles = [part.state for part in parts]
    for i in range(5):
        states, logs = many(states, data[i % 4])
        losses = []
        for j in range(3):
            singles[j], single = step(singles[j], data[i % 4])
            losses.append(float(single["loss"]))
        np.testing.assert_allclose(logs["loss"], losses, rtol=1e-4)  # float32; vmap turns products into batched ones
    assert len(set(losses)) == 3


def test_evaluation_and_prediction_leave_the_state_alone() -> None:
    data = batches()
    state, train_step, eval_step, predict_step = functionalize(Classifier(), data[0])
    state, _ = jax.jit(train_step)(state, data[0])
    logs = jax.jit(eval_step)(state, data[1])
    assert set(logs) == {"accuracy"}
    predictions = jax.jit(predict_step)(state, data[1][0])
    expected = LinenNet().apply({"params": state.params["net"], **state.variables["net"]}, data[1][0], train=False)
    np.testing.assert_allclose(predictions, expected, rtol=1e-6)


def test_the_learning_rate_is_part_of_the_state() -> None:
    import jaxlightning

    class WithOurs(Classifier):
        def configure_optimizers(self) -> Any:
            return jaxlightning.optim.SGD(self.parameters(), lr=0.1)

    data = batches()
    state, train_step, _, _ = functionalize(WithOurs(), data[0])
    frozen, _ = jax.jit(train_step)(state.replace(hyper=state.hyper * 0), data[0])
    assert _equal(frozen.params, state.params)
