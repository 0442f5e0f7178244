"""Step forms: told apart by their signature, equal in what they compute, refused where unclear."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxlightning
from jaxlightning import TrainState

STEPS, EPOCHS = 6, 2
QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "enable_checkpointing": False}
TX = optax.sgd(0.1, momentum=0.9)


@pytest.fixture(scope="module")
def batches() -> list[Any]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(STEPS, 16, 5)).astype(np.float32)
    y = (x @ rng.normal(size=5) > 0).astype(np.int64)
    return [(x[i], y[i]) for i in range(STEPS)]


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.tanh(nn.Dense(8)(x))
        return nn.Dense(2)(x)


NET = Net()


def params() -> Any:
    return NET.init(jax.random.key(0), jnp.ones((1, 5)))["params"]


def loss_of(params: Any, batch: Any) -> jax.Array:
    x, y = batch
    logits = NET.apply({"params": params}, x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def loss_fn(params: Any, batch: Any) -> Any:
    loss = loss_of(params, batch)
    return loss, {"half": loss / 2}


def state() -> Any:
    return TrainState.create(apply_fn=NET.apply, params=params(), tx=TX)


def step_state_opt(state: Any, batch: Any, opt_state: Any) -> Any:
    loss, grads = jax.value_and_grad(loss_of)(state.params, batch)
    updates, opt_state = state.tx.update(grads, opt_state, state.params)
    return state.replace(params=optax.apply_updates(state.params, updates)), {"loss": loss}, opt_state


def step_state(state: Any, batch: Any) -> Any:
    loss, grads = jax.value_and_grad(loss_of)(state.params, batch)
    return state.apply_gradients(grads=grads), {"loss": loss}


def step_params_momentum(carry: Any, batch: Any) -> Any:
    """The `(params, batch) -> (params, loss)` form; what it calls parameters holds the momentum too."""
    params, velocity = carry
    loss, grads = jax.value_and_grad(loss_of)(params, batch)
    velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, grads)
    return (jax.tree.map(lambda p, v: p - 0.1 * v, params, velocity), velocity), loss


def create_train_step(model: Any, tx: Any) -> Any:
    def train_step(params: Any, opt_state: Any, batch: Any, key: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss, loss / 2, jax.random.uniform(key)

    return train_step


@pytest.fixture(scope="module")
def expected(batches: list[Any]) -> Any:
    """What a plain loop gives."""
    p = params()
    opt = TX.init(p)
    for _ in range(EPOCHS):
        for batch in batches:
            grads = jax.grad(loss_of)(p, batch)
            updates, opt = TX.update(grads, opt, p)
            p = optax.apply_updates(p, updates)
    return p


def assert_close(got: Any, want: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), got, want)


@pytest.mark.parametrize("jit", [False, True], ids=["plain", "jitted"])
@pytest.mark.parametrize("form", ["state_opt", "state", "params", "closure", "loss_fn", "loss_fn_state"])
def test_every_form_gives_the_same_parameters(form: str, jit: bool, batches: list[Any], expected: Any) -> None:
    wrap = jax.jit if jit else (lambda f: f)
    options: dict[str, Any] = {"num_epochs": EPOCHS, **QUIET}
    if form == "state_opt":
        got = jaxlightning.fit(state(), batches, train_step=wrap(step_state_opt), **options).params
    elif form == "state":
        got = jaxlightning.fit(state(), batches, train_step=wrap(step_state), **options).params
    elif form == "params":
        p = params()
        carry = (p, jax.tree.map(jnp.zeros_like, p))
        got = jaxlightning.fit(carry, batches, train_step=wrap(step_params_momentum), **options)[0]
    elif form == "closure":
        step = wrap(create_train_step(NET, TX))
        got, opt = jaxlightning.fit(params(), batches, train_step=step, opt_state=TX.init(params()), **options)
        assert jax.tree.structure(opt) == jax.tree.structure(TX.init(params()))
    elif form == "loss_fn":
        got = jaxlightning.fit(params(), batches, loss_fn=wrap(loss_fn), optimizer=TX, **options)
    else:
        got = jaxlightning.fit(state(), batches, loss_fn=wrap(loss_fn), **options).params
    assert_close(got, expected)


@pytest.mark.parametrize("jit", [False, True], ids=["plain", "jitted"])
def test_the_nnx_form_gives_the_same_parameters(jit: bool, batches: list[Any], expected: Any) -> None:
    from flax import nnx

    class Nnx(nnx.Module):
        def __init__(self) -> None:
            start = params()
            self.a = nnx.Linear(5, 8, rngs=nnx.Rngs(0))
            self.b = nnx.Linear(8, 2, rngs=nnx.Rngs(0))
            for layer, name in ((self.a, "Dense_0"), (self.b, "Dense_1")):
                layer.kernel[...], layer.bias[...] = start[name]["kernel"], start[name]["bias"]

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.b(nnx.tanh(self.a(x)))

    def train_step(model: Any, optimizer: Any, batch: Any) -> Any:
        def loss_fn(model: Any) -> Any:
            x, y = batch
            return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return {"loss": loss}

    model = Nnx()
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    step = nnx.jit(train_step) if jit else train_step
    got = jaxlightning.fit(
        model,
        batches,
        batches,
        train_step=step,
        optimizer=optimizer,
        eval_step=lambda model, batch: jnp.mean(model(batch[0]).argmax(-1) == batch[1]),
        num_epochs=EPOCHS,
        **QUIET,
    )
    assert got is model
    assert int(optimizer.step[...]) == STEPS * EPOCHS
    for layer, name in ((model.a, "Dense_0"), (model.b, "Dense_1")):
        assert_close({"kernel": layer.kernel[...], "bias": layer.bias[...]}, expected[name])


def test_keys_are_split_as_a_hand_written_loop_splits_them(batches: list[Any]) -> None:
    seen: list[Any] = []

    class Watch(jaxlightning.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
            seen.append(float(outputs["draw"]))

    step = jax.jit(create_train_step(NET, TX))
    p, opt, key = params(), TX.init(params()), jax.random.PRNGKey(7)
    want = []
    for batch in batches:
        key, subkey = jax.random.split(key)
        p, opt, _, _, draw = step(p, opt, batch, subkey)
        want.append(float(draw))
    for variant in (step, create_train_step(NET, TX)):
        seen.clear()
        got = jaxlightning.fit(
            params(), batches, train_step=variant, optimizer=TX, key=jax.random.PRNGKey(7), num_epochs=1,
            callbacks=Watch(), loss_names=("half", "draw"), **QUIET,
        )  # fmt: skip
        assert seen == want
        jax.tree.map(np.testing.assert_array_equal, got, p)


def test_the_state_that_was_passed_stays_valid(batches: list[Any]) -> None:
    before = state()
    after = jaxlightning.fit(before, batches, train_step=step_state, num_epochs=1, **QUIET)
    jax.tree.map(np.testing.assert_array_equal, before.params, params())
    assert int(after.step) == STEPS
    assert int(before.step) == 0


def test_a_jitted_step_that_donates_its_state_works(batches: list[Any], expected: Any, tmp_path: Path) -> None:
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1, momentum=0.9)
    start = TrainState.create(apply_fn=NET.apply, params=params(), tx=tx)
    rates: list[float] = []

    class Watch(jaxlightning.Callback):
        def on_train_epoch_end(self, trainer, module) -> None:
            rates.append(float(trainer.callback_metrics["learning_rate"]))

    step = jax.jit(step_state, donate_argnums=0)
    got = jaxlightning.fit(start, batches, train_step=step, num_epochs=EPOCHS, callbacks=Watch(), **QUIET)
    assert_close(got.params, expected)
    np.testing.assert_allclose(rates, 0.1, rtol=1e-6)


def test_batch_statistics_are_returned_as_the_auxiliary_value_of_a_loss_function(batches: list[Any]) -> None:
    class Normed(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
            return nn.Dense(2)(nn.BatchNorm(use_running_average=not train)(x))

    net = Normed()
    variables = net.init(jax.random.key(0), jnp.ones((1, 5)))
    start = TrainState.create(apply_fn=net.apply, tx=TX, **variables)

    def loss_fn(params: Any, batch_stats: Any, batch: Any) -> Any:
        x, y = batch
        logits, updates = net.apply(
            {"params": params, "batch_stats": batch_stats}, x, train=True, mutable=["batch_stats"]
        )
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
        return loss, ({"loss": loss}, updates)

    @jax.jit
    def by_hand(state: Any, batch: Any) -> Any:
        (_, (logs, updates)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params, state.batch_stats, batch)
        return state.apply_gradients(grads=grads, batch_stats=updates["batch_stats"]), logs

    got = jaxlightning.fit(start, batches, loss_fn=loss_fn, num_epochs=1, **QUIET)
    want = start
    for batch in batches:
        want, _ = by_hand(want, batch)
    assert_close(got.params, want.params)
    assert_close(got.batch_stats, want.batch_stats)


def test_the_state_is_donated_to_a_plain_step_even_when_it_comes_back_twice(batches: list[Any], expected: Any) -> None:
    def step(state: Any, batch: Any, opt_state: Any) -> Any:
        state, logs = step_state(state, batch)
        return state, logs, state.opt_state

    assert_close(jaxlightning.fit(state(), batches, train_step=step, num_epochs=EPOCHS, **QUIET).params, expected)


# --- what is refused ---


def refuse(step: Any, match: str, batches: list[Any], **options: Any) -> str:
    with pytest.raises(TypeError, match=match) as caught:
        jaxlightning.fit(state(), batches, train_step=step, num_epochs=1, **QUIET, **options)
    return str(caught.value)


def test_an_unclear_signature_is_refused_with_the_list_of_forms(batches: list[Any]) -> None:
    text = refuse(lambda a, b, c: None, "not clear", batches)
    assert "train_step(state, batch, opt_state) -> (state, loss_dict, opt_state)" in text
    assert "loss_fn(params, batch)" in text
    refuse(lambda state, images, labels: None, "images, labels", batches)
    refuse(lambda *args: None, "not clear", batches)
    refuse(lambda: None, "not clear", batches)
    refuse(3, "must be a function", batches)


def test_what_a_step_returns_must_fit_its_form(batches: list[Any]) -> None:
    refuse(lambda state, batch: state, "must have the structure", batches)
    refuse(lambda state, batch: ({"loss": 0.0}, state), "returned", batches)
    refuse(lambda state, batch, opt_state: (state, {"loss": jnp.zeros(())}), "must return it too", batches)
    refuse(lambda params, batch: (jnp.zeros(()), {}), "loss function", batches)


def test_a_loss_that_is_no_scalar_is_refused_by_name(batches: list[Any]) -> None:
    with pytest.raises(ValueError, match="'logits' with shape"):
        jaxlightning.fit(
            state(), batches, train_step=lambda state, batch: (state, {"logits": jnp.ones((3,))}), num_epochs=1, **QUIET
        )


def test_a_changed_shape_in_the_state_is_named(batches: list[Any]) -> None:
    def step(state: Any, batch: Any) -> Any:
        return {"w": jnp.concatenate([state["w"], state["w"]])}, jnp.zeros(())

    with pytest.raises(TypeError, match=r"w'?\]: \(2,\) became \(4,\)"):
        jaxlightning.fit({"w": jnp.ones(2)}, batches, train_step=step, num_epochs=1, **QUIET)


def test_flags_that_cannot_be_done_around_a_step_say_what_to_do_instead(batches: list[Any]) -> None:
    for flag, way_out in (
        ({"accumulate_grad_batches": 2}, "MultiSteps"),
        ({"gradient_clip_val": 1.0}, "clip_by_global_norm"),
        ({"precision": "bf16-mixed"}, "dtype"),
        ({"on_nonfinite": "skip"}, "apply_if_finite"),
        ({"steps_per_dispatch": 4}, "scan"),
    ):
        with pytest.raises(jaxlightning.utilities.exceptions.MisconfigurationException, match=way_out):
            jaxlightning.fit(state(), batches, train_step=step_state, **flag)
    with pytest.raises(TypeError, match="either `train_step` or `loss_fn`"):
        jaxlightning.fit(state(), batches)
    with pytest.raises(TypeError, match="optimizer"):
        jaxlightning.fit(params(), batches, loss_fn=loss_fn)
    with pytest.raises(TypeError, match="opt_state"):
        jaxlightning.fit(params(), batches, train_step=create_train_step(NET, TX))


def test_a_callback_between_gradient_and_update_is_refused(batches: list[Any]) -> None:
    class Between(jaxlightning.Callback):
        def on_after_backward(self, trainer, module) -> None:
            pass

    with pytest.raises(
        jaxlightning.utilities.exceptions.MisconfigurationException, match="between gradient and update"
    ):
        jaxlightning.fit(state(), batches, train_step=step_state, num_epochs=1, callbacks=Between(), **QUIET)
