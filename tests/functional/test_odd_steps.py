"""Steps and states as people write them: unusual arguments, results and classes; what cannot be carried is refused."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import train_state

import jaxlightning
from jaxlightning import TrainState
from jaxlightning.loggers import CSVLogger
from jaxlightning.utilities.exceptions import MisconfigurationException

QUIET = {"enable_progress_bar": False, "enable_model_summary": False}
TX = optax.sgd(0.1)
BATCHES = [(x, x.sum(1)) for x in np.random.default_rng(0).normal(size=(4, 6, 3)).astype(np.float32)]


def params() -> Any:
    return {"w": jnp.ones(3)}


def state(cls: Any = TrainState, **fields: Any) -> Any:
    return cls.create(apply_fn=None, params=params(), tx=TX, **fields)


def loss_of(params: Any, batch: Any) -> jax.Array:
    return jnp.square(batch[0] @ params["w"] - 2 * batch[1]).mean()


def advance(state: Any, batch: Any) -> Any:
    loss, grads = jax.value_and_grad(loss_of)(state.params, batch)
    return state.apply_gradients(grads=grads), {"loss": loss}


def moved(params: Any, batch: Any) -> Any:
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss_of)(params, batch))


@pytest.fixture(scope="module")
def expected() -> Any:
    want = params()
    for batch in BATCHES:
        want = moved(want, batch)
    return want["w"]


def fit(given: Any, root: Path, **options: Any) -> Any:
    options = {"num_epochs": 1, "logger": False, "enable_checkpointing": False, **QUIET, **options}
    return jaxlightning.fit(given, options.pop("train_ds", BATCHES), default_root_dir=root, **options)


class Metrics(jaxlightning.Callback):
    def on_train_end(self, trainer, module) -> None:
        self.last = {name: float(value) for name, value in trainer.callback_metrics.items()}


# --- arguments ---


def only_by_name(*, state: Any, batch: Any) -> Any:
    return advance(state, batch)


def key_by_name(state: Any, batch: Any, *, key: Any) -> Any:
    jax.random.uniform(key)
    return advance(state, batch)


def in_the_middle(state: Any, settings: Any, batch: Any) -> Any:
    return advance(state, batch)


def with_a_default(state: Any, batch: Any, scale: float = 1.0, *, verbose: bool = False, **more: Any) -> Any:
    return advance(state, batch)


def wrapped(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)

    return inner


@functools.partial(jax.jit, static_argnums=0)
def static_first(number: int, state: Any, batch: Any) -> Any:
    assert isinstance(number, int)
    return advance(state, batch)


@functools.partial(jax.jit, static_argnames="train")
def static_default(state: Any, batch: Any, train: bool = True) -> Any:
    assert train is True
    return advance(state, batch)


class Holder:
    def plain(self, state: Any, batch: Any) -> Any:
        return advance(state, batch)

    @functools.partial(jax.jit, static_argnums=0)
    def jitted(self, state: Any, batch: Any) -> Any:
        return advance(state, batch)

    def __call__(self, state: Any, batch: Any) -> Any:
        return advance(state, batch)


STEPS: dict[str, Callable[..., Any]] = {
    "only by name": only_by_name,
    "a key by name": key_by_name,
    "a key by name, jitted": jax.jit(key_by_name),
    "defaults": with_a_default,
    "partial in front": functools.partial(static_first, 3),
    "partial in the middle": functools.partial(in_the_middle, settings={"a": 1}),
    "static by default": static_default,
    "a bound method": Holder().plain,
    "a jitted method": Holder().jitted,
    "an object": Holder(),
    "wrapped": wrapped(advance),
    "jitted twice": jax.jit(jax.jit(advance)),
    "checkpointed": jax.checkpoint(advance),
    "a lambda": lambda s, b: advance(s, b),
    "a list": lambda s, b: list(advance(s, b)),
    "donated": jax.jit(advance, donate_argnums=0),
}


@pytest.mark.parametrize("name", list(STEPS))
def test_a_step_may_take_its_arguments_in_any_way(name: str, expected: Any, tmp_path: Path) -> None:
    given = state()
    got = fit(given, tmp_path, train_step=STEPS[name])
    np.testing.assert_allclose(got.params["w"], expected, rtol=1e-6)
    np.testing.assert_array_equal(given.params["w"], np.ones(3))  # the state that was given stays valid


@pytest.mark.parametrize(
    "step",
    [
        lambda state, batch, *, scale: None,
        lambda state, *batch: None,
        lambda state: None,
        lambda a, b, c, d, e, f: None,
        lambda state, images, labels: None,
    ],
)
def test_other_arguments_are_refused_with_the_list(step: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"not clear what to pass[\s\S]*train_step\(state, batch, opt_state\)"):
        fit(state(), tmp_path, train_step=step)


def test_pmap_is_refused_with_what_stands_for_it(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"`train_step` is made by `jax.pmap`.*`devices=N`"):
        fit(state(), tmp_path, train_step=functools.partial(jax.pmap(in_the_middle, axis_name="batch"), settings=None))
    with pytest.raises(TypeError, match=r"`eval_step` is made by"):
        fit(state(), tmp_path, train_step=advance, test_ds=BATCHES, eval_step=jax.pmap(advance))


def test_a_key_that_was_bound_already_is_left_alone(expected: Any, tmp_path: Path) -> None:
    seen = []

    def step(state: Any, batch: Any, key: Any = None) -> Any:
        seen.append(key)
        return advance(state, batch)

    fit(state(), tmp_path, train_step=functools.partial(step, key="mine"), jit=False)
    assert seen == ["mine"] * 4


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda p, b: (loss_of(p, b), None),
        lambda params, batch, *, key: loss_of(params, batch),
        lambda params, state, batch: (loss_of(state.replace(params=params).params, batch), Struct(1.0, 2.0)),
        functools.partial(lambda params, batch, scale: scale * loss_of(params, batch), scale=1.0),
    ],
)
def test_a_loss_function_may_take_its_arguments_in_any_way(loss_fn: Any, expected: Any, tmp_path: Path) -> None:
    got = fit(state(), tmp_path, loss_fn=loss_fn)
    np.testing.assert_allclose(got.params["w"], expected, rtol=1e-6)


# --- results ---


Named = collections.namedtuple("Named", "loss accuracy")


@flax.struct.dataclass
class Struct:
    loss: Any
    accuracy: Any


class OwnDict(dict[str, Any]):
    """JAX does not know this class."""


@pytest.mark.parametrize("make", [Named, Struct, OwnDict, dict])
def test_losses_may_come_in_a_container_with_names(make: Any, tmp_path: Path) -> None:
    metrics = Metrics()
    fit(
        state(), tmp_path, callbacks=metrics, test_ds=BATCHES,
        train_step=lambda state, batch: (advance(state, batch)[0], make(loss=jnp.ones(()), accuracy=0.5)),
        eval_step=lambda state, batch: make(loss=jnp.full((1,), 2.0), accuracy=jnp.bfloat16(0.25)),
    )  # fmt: skip
    assert metrics.last == {
        "loss": 1.0, "accuracy": 0.5, "val_loss": 2.0, "val_accuracy": 0.25, "learning_rate": pytest.approx(0.1),
    }  # fmt: skip


def test_losses_of_every_type_are_logged_and_a_nested_one_by_its_path(tmp_path: Path) -> None:
    metrics = Metrics()
    losses = {"a": jnp.bfloat16(2), "b": True, "c": 3, "d": {"e": jnp.int32(4), "f": np.float64(0.1)}, "none": None}
    fit(state(), tmp_path, callbacks=metrics, train_step=lambda state, batch: (advance(state, batch)[0], losses))
    metrics.last.pop("learning_rate")
    assert metrics.last == {"a": 2.0, "b": 1.0, "c": 3.0, "d/e": 4.0, "d/f": pytest.approx(0.1)}


def test_an_evaluation_that_does_not_say_what_is_what_is_refused(tmp_path: Path) -> None:
    for given, match in (
        (lambda state, batch: (jnp.ones(()), jnp.zeros(())), "tuple of 2, which does not say"),
        (lambda state, batch: None, "nothing to log"),
        (lambda state, batch: jnp.ones(6), r"'accuracy' with shape \(6,\)"),
    ):
        with pytest.raises((TypeError, ValueError), match=match):
            fit(state(), tmp_path, train_step=advance, test_ds=BATCHES, eval_step=given)


def test_losses_that_change_their_names_are_refused(tmp_path: Path) -> None:
    calls = []

    def step(state: Any, batch: Any) -> Any:
        calls.append(batch)
        return advance(state, batch)[0], {"loss": 1.0, **({"late": 2.0} if len(calls) > 2 else {})}

    with pytest.raises(ValueError, match=r"\['late', 'loss'\], and in its first batch \['loss'\]"):
        fit(state(), tmp_path, train_step=step, jit=False, logger=CSVLogger(tmp_path), log_every_n_steps=1)


@pytest.mark.parametrize("jit", [False, True])
def test_an_error_in_a_step_shows_its_own_line(jit: bool, tmp_path: Path) -> None:
    def broken(state: Any, batch: Any) -> Any:
        return advance(state, batch[0] @ jnp.ones(99))  # the line

    for options in ({"train_step": broken}, {"train_step": advance, "test_ds": BATCHES, "eval_step": broken}):
        with pytest.raises(TypeError, match="99") as caught:
            fit(state(), tmp_path, jit=jit, **options)
        assert "# the line" in "".join(traceback.format_exception(caught.value))


# --- states ---


@flax.struct.dataclass
class Bare:
    """Has no `tx`: the step knows its optimizer."""

    step: int
    params: Any
    opt_state: Any


class Named3(collections.namedtuple("Named3", "params opt_state step")):
    def replace(self, **fields: Any) -> Any:
        return self._replace(**fields)


ADAM = optax.adam(0.1)


def bare_step(state: Any, batch: Any) -> Any:
    grads = jax.grad(loss_of)(state.params, batch)
    updates, opt_state = ADAM.update(grads, state.opt_state, state.params)
    return state.replace(params=optax.apply_updates(state.params, updates), opt_state=opt_state, step=state.step + 1), {
        "loss": loss_of(state.params, batch)
    }


@pytest.mark.parametrize("cls", [Bare, Named3])
def test_a_state_class_of_ones_own_trains_and_resumes(cls: Any, tmp_path: Path) -> None:
    def new() -> Any:
        return cls(params=params(), opt_state=ADAM.init(params()), step=0)

    def run(epochs: int, name: str, **options: Any) -> Any:
        return jaxlightning.fit(
            new(), BATCHES, BATCHES, train_step=bare_step, num_epochs=epochs, log_name=name, default_root_dir=tmp_path,
            eval_step=lambda state, batch: -loss_of(state.params, batch), log_every_n_steps=2, **QUIET, **options,
        )  # fmt: skip

    whole = run(3, "a")
    run(2, "b")
    resumed = run(3, "b", ckpt_path="last")
    assert int(resumed.step) == int(whole.step) == 12
    jax.tree.map(np.testing.assert_array_equal, resumed, whole)


def test_a_subclass_of_the_state_keeps_its_fields(expected: Any, tmp_path: Path) -> None:
    class Averaged(TrainState):
        average: Any = None
        name: str = flax.struct.field(pytree_node=False, default="x")
        count: int = 0

    def step(state: Any, batch: Any) -> Any:
        state, losses = advance(state, batch)
        average = jax.tree.map(lambda a, b: 0.5 * a + 0.5 * b, state.average, state.params)
        return state.replace(average=average, count=state.count + 1), losses

    got = fit(state(Averaged, average=params()), tmp_path, train_step=step)
    assert (int(got.count), got.name) == (4, "x")
    np.testing.assert_allclose(got.params["w"], expected, rtol=1e-6)
    assert not np.array_equal(got.average["w"], got.params["w"])
    assert int(fit(state(train_state.TrainState), tmp_path, train_step=advance).step) == 4


def test_what_jax_sees_no_arrays_in_is_refused_and_not_silently_left_as_it_was(tmp_path: Path) -> None:
    class Thing:
        def __init__(self, params: Any) -> None:
            self.params = params

    with pytest.raises(TypeError, match="Thing in which JAX sees no arrays"):
        fit(Thing(params()), tmp_path, train_step=lambda state, batch: (state, 0.0))

    def step(state: Any, batch: Any) -> Any:
        return {"p": moved(state["p"], batch), "thing": Thing(state["thing"].params)}, 0.0

    with pytest.raises(TypeError, match=r"another object for \['thing'\] \(Thing\)"):
        fit({"p": params(), "thing": Thing(jnp.ones(3))}, tmp_path, train_step=step)

    def keeping(state: Any, batch: Any) -> Any:
        return {"p": moved(state["p"], batch), "name": state["name"]}, 0.0

    assert fit({"p": params(), "name": "x"}, tmp_path, train_step=keeping)["name"] == "x"


# --- what stands around the step ---


@dataclasses.dataclass
class Settings:
    lr: float = 0.1


@pytest.mark.parametrize("hparams", [{"lr": 0.1}, argparse.Namespace(lr=0.1), Settings()])
def test_hyper_parameters_come_as_a_dict_a_namespace_or_a_dataclass(hparams: Any, tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    fit(state(), tmp_path, train_step=advance, hparams=hparams, logger=logger, log_every_n_steps=2)
    assert (Path(logger.log_dir) / "hparams.yaml").read_text() == "lr: 0.1\n"
    with pytest.raises(TypeError, match="not int"):
        fit(state(), tmp_path, train_step=advance, hparams=3)


@pytest.mark.parametrize(
    ("kind", "log_name"),
    [("tensorboard", "a/b"), ("tensorboard", "ünï"), ("csv", "a/b"), ("csv", ""), ("none", "a/b"), ("none", "")],
)
def test_the_last_checkpoint_is_found_wherever_the_logs_are(kind: str, log_name: str, tmp_path: Path) -> None:
    def run(epochs: int, **options: Any) -> Any:
        logger = {"tensorboard": True, "csv": CSVLogger(tmp_path, name=log_name or None), "none": False}[kind]
        return jaxlightning.fit(
            state(), BATCHES, train_step=advance, num_epochs=epochs, log_name=log_name, default_root_dir=tmp_path,
            logger=logger, log_every_n_steps=2, **QUIET, **options,
        )  # fmt: skip

    assert int(run(1).step) == 4
    assert int(run(2, ckpt_path="last").step) == 8
    assert int(run(2, ckpt_path="last").step) == 8  # it was done already
    assert list((tmp_path / log_name).rglob("last.ckpt"))


def test_no_epoch_trains_nothing(tmp_path: Path) -> None:
    got = fit(
        state(), tmp_path, train_step=advance, test_ds=BATCHES, eval_step=lambda state, batch: 1.0, num_epochs=0,
        hparams={"lr": 0.1}, logger=True, enable_checkpointing=True, log_every_n_steps=2,
    )  # fmt: skip
    assert int(got.step) == 0
    np.testing.assert_array_equal(got.params["w"], np.ones(3))


def test_a_run_for_raw_speed_has_no_logger(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    got = jaxlightning.fit(state(), BATCHES, train_step=advance, barebones=True, num_epochs=1)
    assert int(got.step) == 4


def test_counts_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"num_epochs=1\.5"):
        fit(state(), tmp_path, train_step=advance, num_epochs=1.5)
    with pytest.raises(ValueError, match="eval_freq=0"):
        fit(state(), tmp_path, train_step=advance, eval_freq=0)


def test_nothing_that_a_trainer_of_ones_own_decides_is_accepted_beside_it(tmp_path: Path) -> None:
    trainer = jaxlightning.Trainer(max_epochs=1, logger=False, enable_checkpointing=False, **QUIET)
    for name, value in {
        "num_epochs": 3, "eval_freq": 2, "log_name": "x", "monitor": "loss", "mode": "min", "callbacks": [],
        "logger": False, "default_root_dir": tmp_path,
    }.items():  # fmt: skip
        with pytest.raises(MisconfigurationException, match=rf"\['{name}'\]: say these to the Trainer"):
            jaxlightning.fit(state(), BATCHES, train_step=advance, trainer=trainer, **{name: value})
