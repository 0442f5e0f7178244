"""Updates of many small leaves done as one: the same bits as one by one, and left alone where that is not certain."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxlightning as pl
from jaxlightning.compile import flat_steps
from jaxlightning.compile.merged_updates import FEWEST_GROUPS, FEWEST_LEAVES, MOST_ELEMENTS, MergedBody
from tests.loops.test_quiet_batches import Loader, Net

WIDTHS = (12, 9, 7, 16, 7, 5)
STEPS = 12

Body = Callable[[Any, Any], Any]


def _network(dtype: Any = jnp.float32) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        f"layer{i}": {
            "kernel": jnp.asarray(rng.standard_normal((a, b)) / 3, dtype),
            "bias": jnp.asarray(rng.standard_normal(b) / 3, dtype),
        }
        for i, (a, b) in enumerate(pairwise(WIDTHS))
    }


def _loss(params: Any, x: jax.Array) -> jax.Array:
    for layer in params.values():
        x = jax.nn.relu(x.astype(layer["bias"].dtype) @ layer["kernel"] + layer["bias"])
    return jnp.mean(jnp.square(x))


def _training(tx: Any, params: Any = None) -> tuple[Body, Any, Any]:
    params = _network() if params is None else params
    inputs = np.random.default_rng(1).standard_normal((STEPS, 8, WIDTHS[0])).astype(np.float32)

    def body(carry: Any, x: Any) -> Any:
        params, state, _ = carry
        loss, grads = jax.value_and_grad(_loss)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss.astype(jnp.float32)

    return body, (params, tx.init(params), jnp.zeros(())), inputs


def _run(body: Body, carry: Any, inputs: Any, fewest: tuple[int, int] | None) -> tuple[Any, tuple[int, int]]:
    """The state after a scan, and how many leaves went into how many vectors; without `fewest` the body as it is."""
    found = [(0, 0)]

    def many(carry: Any, inputs: Any) -> Any:
        if fewest is None:
            return jax.lax.scan(lambda c, x: (body(c, x), None), carry, inputs)[0]
        one = jax.tree.map(lambda each: jax.ShapeDtypeStruct(each.shape[1:], each.dtype), inputs)
        merged = MergedBody(body, carry, one, fewest=fewest)
        found.append(merged.merged)
        return merged.unpack(jax.lax.scan(lambda c, x: (merged(c, x), None), merged.pack(carry), inputs)[0])

    return jax.jit(many)(carry, inputs), found[-1]


def _same(body: Body, carry: Any, inputs: Any, fewest: tuple[int, int] = (2, 1)) -> tuple[int, int]:
    """Asserts equal bits; says how many leaves went into how many vectors."""
    plain, _ = _run(body, carry, inputs, None)
    merged, found = _run(body, carry, inputs, fewest)
    assert jax.tree.structure(plain) == jax.tree.structure(merged)
    for (path, left), right in zip(jax.tree.leaves_with_path(plain), jax.tree.leaves(merged), strict=True):
        assert jax.typeof(left) == jax.typeof(right)
        if jnp.issubdtype(left.dtype, jax.dtypes.prng_key):
            left, right = jax.random.key_data(left), jax.random.key_data(right)
        np.testing.assert_array_equal(left, right, err_msg=jax.tree_util.keystr(path))
    return found


def _kernels(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


OPTIMIZERS: dict[str, tuple[Any, tuple[int, int]]] = {
    "sgd": (optax.sgd(0.1), (10, 1)),
    "momentum": (optax.sgd(0.1, 0.9), (20, 2)),
    "nesterov": (optax.sgd(0.1, 0.9, nesterov=True), (20, 2)),
    "adam": (optax.adam(0.01), (30, 3)),
    "adamw": (optax.adamw(0.01, mask=_kernels), (30, 6)),
    "rmsprop": (optax.rmsprop(0.01), (20, 2)),
    "lion": (optax.lion(0.001), (20, 2)),
    "clip by norm": (optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.01)), (30, 3)),
    "clip by value": (optax.chain(optax.clip(0.05), optax.adam(0.01)), (30, 3)),
    "schedule": (optax.adamw(optax.warmup_cosine_decay_schedule(0, 0.01, 5, 50)), (30, 3)),
    "inject": (optax.inject_hyperparams(optax.adam)(learning_rate=optax.exponential_decay(0.01, 5, 0.9)), (30, 3)),
    "two": (
        optax.partition({True: optax.adam(0.01), False: optax.sgd(0.1, 0.9)}, _kernels),
        (25, 5),
    ),
    "frozen": (optax.partition({True: optax.adam(0.01), False: optax.set_to_zero()}, _kernels), (20, 4)),
    "lamb": (optax.lamb(0.01), (0, 0)),
    "adafactor": (optax.adafactor(0.01), (0, 0)),
    "several": (optax.MultiSteps(optax.adam(0.01), 2), (0, 0)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_gives_the_same_bits(name: str) -> None:
    tx, expected = OPTIMIZERS[name]
    assert _same(*_training(tx)) == expected


def test_bfloat16_parameters() -> None:
    assert _same(*_training(optax.adam(0.01), _network(jnp.bfloat16)))[0] > 0


def test_what_pays_is_merged_and_nothing_else() -> None:
    default = (FEWEST_GROUPS, FEWEST_LEAVES)
    assert _same(*_training(optax.adam(0.01)), default) == (30, 3)
    assert _same(*_training(optax.sgd(0.1, 0.9)), default) == (0, 0)
    few = dict(list(_network().items())[:2])
    assert _same(*_training(optax.adam(0.01), few), default) == (0, 0)


def test_large_leaves_and_those_with_an_axis_of_one_stay() -> None:
    params = [jnp.ones((n,)) for n in (4, 5, 1, MOST_ELEMENTS + 1, MOST_ELEMENTS)]

    def body(carry: Any, x: Any) -> Any:
        return [leaf * 0.9 + x for leaf in carry]

    assert _same(body, params, np.ones(4, np.float32)) == (3, 1)


def test_state_that_is_no_array_of_numbers_is_carried_along() -> None:
    inner, (params, state, loss), inputs = _training(optax.adam(0.01))

    def body(carry: Any, x: Any) -> Any:
        training, key, count, scalar, weak = carry
        key, _ = jax.random.split(key)
        return inner(training, x), key, count + 1, scalar * 0.5, weak

    carry = ((params, state, loss), jax.random.key(0), jnp.arange(3), jnp.ones(()), jnp.asarray(2.0))
    assert _same(body, carry, inputs) == (30, 3)


def test_values_that_something_else_reads_are_left_alone() -> None:
    inner, (params, state, loss), inputs = _training(optax.adam(0.01))

    def body(carry: Any, x: Any) -> Any:
        (params, state, loss), average, _ = carry
        params, state, loss = inner((params, state, loss), x)
        average = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, average, params)
        return (params, state, loss), average, optax.tree.norm(params)

    assert _same(body, ((params, state, loss), params, loss), inputs) == (0, 0)


def test_an_average_of_the_parameters_is_part_of_their_update() -> None:
    inner, (params, state, loss), inputs = _training(optax.adam(0.01))

    def body(carry: Any, x: Any) -> Any:
        training, average = carry
        training = inner(training, x)
        return training, jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, average, training[0])

    assert _same(body, ((params, state, loss), params), inputs) == (40, 4)


def test_old_values_may_be_read_by_anything() -> None:
    inner, (params, state, loss), inputs = _training(optax.adam(0.01))

    def body(carry: Any, x: Any) -> Any:
        training, norms = carry
        return inner(training, x), norms + optax.tree.norm(training[0])

    assert _same(body, ((params, state, loss), loss), inputs) == (30, 3)


def test_products_as_gradients_are_left_alone() -> None:
    # Added to something in the same loop, a product is rounded once less.
    def body(carry: Any, x: Any) -> Any:
        return [leaf * 0.9 + (leaf[::-1] * x).reshape(leaf.shape) for leaf in carry]

    assert _same(body, [jnp.arange(float(n)) for n in (4, 5, 6)], np.ones(4, np.float32)) == (0, 0)


def test_effects_are_not_moved(capfd: pytest.CaptureFixture[str]) -> None:
    inner, carry, inputs = _training(optax.adam(0.01))

    def body(carry: Any, x: Any) -> Any:
        jax.debug.print("step", ordered=True)
        return inner(carry, x)

    assert _same(body, carry, inputs) == (0, 0)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("step") == 2 * STEPS


def test_a_body_that_is_traced_again_by_the_loop() -> None:
    def body(carry: Any, x: Any) -> Any:
        return carry * x  # strongly typed from the second step on

    _same(body, jnp.asarray(2.0), np.ones(3, np.float32))


def test_a_body_that_changes_a_shape_is_the_loops_to_refuse() -> None:
    with pytest.raises(TypeError, match="carry"):
        _run(lambda carry, x: jnp.concatenate([carry, carry]), jnp.ones(3), np.ones(3, np.float32), (2, 1))


def test_the_body_is_traced_once() -> None:
    inner, carry, inputs = _training(optax.adam(0.01))
    traces = []

    def body(carry: Any, x: Any) -> Any:
        traces.append(x)
        return inner(carry, x)

    _run(body, carry, inputs, (2, 1))
    assert len(traces) == 1


def _random_training(seed: int) -> tuple[Body, Any, Any]:
    """Updates by the same random expression for each of some parameters, now and then with something odd about one."""
    rng = np.random.default_rng(seed)
    shapes = [tuple(rng.integers(1 if rng.random() < 0.1 else 2, 8, rng.integers(1, 4))) for _ in range(4)]
    dtype = [jnp.float32, jnp.float32, jnp.bfloat16][rng.integers(3)]
    slots, odd = int(rng.integers(1, 4)), int(rng.integers(5))
    choices = rng.integers(0, 1000, (int(rng.integers(2, 8)), 4)).tolist()
    results = rng.integers(1, 4, slots).tolist()
    unary: list[Any] = [jnp.negative, jnp.abs, jnp.sqrt, jnp.sign, jnp.square, lambda x: jnp.clip(x, -1, 1)]
    binary: list[Any] = [jnp.add, jnp.subtract, jnp.multiply, jnp.divide, jnp.maximum, lambda x, y: 0.3 * x + 0.7 * y]

    def update(values: list[Any], scale: Any) -> list[Any]:
        for kind, first, second, which in choices:
            x, y = values[first % len(values)], values[second % len(values)]
            if kind % 3 == 0:
                made = unary[which % len(unary)](x)
            elif kind % 3 == 1:
                made = binary[which % len(binary)](x, y)
            else:
                made = binary[which % 4](x, scale.astype(x.dtype))
            values = [*values, made]
        return [values[-place] for place in results]

    def body(carry: Any, x: Any) -> Any:
        state, count, log = carry
        scale = 1 - 0.9 ** (count + 1)
        new = []
        for values in state:
            first = values[0]
            rows = x[: first.shape[0] * 3].reshape(3, -1).astype(dtype)
            gradient = jax.grad(lambda p, rows=rows: jnp.sum(jnp.tanh(rows @ p.reshape(p.shape[0], -1))))(first)
            new.append(update([*values, gradient], scale))
        if odd == 0:
            log = sum((jnp.sum(values[0].astype(jnp.float32)) for values in new), log)
        elif odd == 1:
            new[0] = state[0]
        elif odd == 2:
            new[0][0] = new[0][0][::-1]
        elif odd == 3:
            log = log + sum(jnp.sum(jnp.square(values[0].astype(jnp.float32))) for values in state)
        return new, count + 1, log

    state = [[jnp.asarray(rng.standard_normal(shape), dtype) for _ in range(slots)] for shape in shapes]
    return body, (state, jnp.zeros(()), jnp.zeros(())), rng.standard_normal((4, 32)).astype(np.float32)


def test_random_updates_give_the_same_bits() -> None:
    assert sum(_same(*_random_training(seed))[0] > 0 for seed in range(25)) > 5


@pytest.mark.slow
def test_many_random_updates_give_the_same_bits() -> None:
    assert sum(_same(*_random_training(seed))[0] > 0 for seed in range(25, 300)) > 50


class Trained(Net):
    """With an optimizer that keeps something for every parameter."""

    def configure_optimizers(self) -> Any:
        return optax.adam(0.01)


@pytest.mark.parametrize("devices", [1, 2])
def test_fused_steps_merge_on_one_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: int) -> None:
    bodies: list[MergedBody] = []

    class Kept(MergedBody):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options, most=10**6, fewest=(2, 1))
            bodies.append(self)

    def fit(steps: int) -> Any:
        module = Trained()
        trainer = pl.Trainer(
            max_epochs=1, devices=devices, accelerator="cpu", logger=False, enable_progress_bar=False,
            enable_model_summary=False, num_sanity_val_steps=0, enable_checkpointing=False,
            default_root_dir=tmp_path, steps_per_dispatch=steps,
        )  # fmt: skip
        trainer.fit(module, Loader(20), Loader(2))
        return module.state_dict()

    single = fit(1)
    monkeypatch.setattr(flat_steps, "MergedBody", Kept)
    fused = fit(5)
    assert [body.merged[0] > 0 for body in bodies] == [devices == 1] * len(bodies)
    assert bodies
    for name, value in single.items():
        np.testing.assert_array_equal(value, fused[name], err_msg=name)
