"""Precision policies in whole runs and in the compiled step: what is cast, what stays float32, what is restored."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support.golden import read
from support.models import Classifier, LinenNet, Loader, batches, make_engine, train

import jaxlightning as pl
from jaxlightning.compile.precision import make_precision
from jaxlightning.plugins import DoublePrecision, GradScaler, HalfPrecision, MixedPrecision, Precision
from jaxlightning.utilities.exceptions import MisconfigurationException

QUIET: dict[str, Any] = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)


HALF = {"bf16": jnp.bfloat16, "16": jnp.float16}


class Convolutional(nn.Module):
    """A convolution, BatchNorm, a raw parameter, an attention, a dense layer."""

    inner: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        x = nn.Conv(8, (3, 3))(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        x = nn.relu(x).mean((1, 2))
        x = x @ self.param("raw", nn.initializers.normal(0.3), (8, 8))
        return nn.Dense(4)(x)


class NnxConvolutional(nnx.Module):
    """The same with NNX."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(1, 8, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.9, rngs=rngs)
        self.raw = nnx.Param(jax.random.normal(rngs.params(), (8, 8)) * 0.3)
        self.out = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.norm(self.conv(x))).mean((1, 2))
        return self.out(x @ self.raw[...])


class Recorder(Classifier):
    """Gives out what the step sees, and keeps the dtypes of the last batch."""

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        x, y = batch
        logits = self.net(x)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "x": x, "logits": logits}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen = {name: str(value.dtype) for name, value in outputs.items()}


class Descent(Classifier):
    """Plain gradient descent."""

    def configure_optimizers(self) -> Any:
        return optax.sgd(0.1)


def images(n: int = 4, size: int = 8) -> list[tuple[Any, Any]]:
    rng = np.random.default_rng(0)
    return [
        (rng.standard_normal((size, 6, 6, 1)).astype(np.float32), rng.integers(0, 4, size).astype(np.int32))
        for _ in range(n)
    ]


def network(kind: str) -> Any:
    return Convolutional() if kind == "linen" else NnxConvolutional(nnx.Rngs(0))


def dtypes(tree: Any) -> set[str]:
    return {str(leaf.dtype) for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)}


def operands(text: str, name: str) -> set[str]:
    """The element types of the operands of an operation in a lowered text."""
    found = set()
    for line in text.splitlines():
        if name in line and "->" in line:
            signature = line.rpartition(" : ")[2].partition("->")[0]
            found |= set(re.findall(r"x(bf16|f16|f32|f64|i32)>", signature))
    return found


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("bf16-mixed", "linen"),
        ("16-mixed", "nnx"),
        ("bf16-true", "nnx"),
        ("16-true", "linen"),
        pytest.param("bf16-mixed", "nnx", marks=pytest.mark.slow),
        pytest.param("16-mixed", "linen", marks=pytest.mark.slow),
        pytest.param("bf16-true", "linen", marks=pytest.mark.slow),
        pytest.param("16-true", "nnx", marks=pytest.mark.slow),
    ],
)
def test_dots_and_convolutions_take_the_half_dtype_and_the_rest_stays_float32(kind: str, name: str) -> None:
    module = Recorder(network(kind))
    engine = make_engine(module, precision=make_precision(name))
    train(engine, images(), 2)
    half = name.partition("-")[0]
    wanted = {"bf16": "bf16", "16": "f16"}[half]
    text = engine.compiled["train"].lower().as_text()
    assert operands(text, "stablehlo.dot_general") == {wanted}
    assert operands(text, "stablehlo.convolution") == {wanted}
    true = name.endswith("true")
    long = str(jnp.dtype(HALF[half]))
    assert dtypes(engine.params) == {long if true else "float32"}
    assert dtypes(engine.variables) == {"float32"}
    assert dtypes(engine.tree.opt_state) == {long if true else "float32"}
    outputs = engine.train_step(images()[0], batch_idx=2, micro_step=2, want_outputs=True).outputs
    seen = {name: str(value.dtype) for name, value in outputs.items()}
    assert seen == {"x": long if true else "float32", "logits": "float32", "loss": "float32"}
    assert engine.trace_counts["train"] == 1


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_the_users_own_network_is_left_as_it_was(kind: str) -> None:
    net = network(kind)
    engine = make_engine(Recorder(net), precision=make_precision("bf16-mixed"))
    train(engine, images(), 1)
    if kind == "nnx":
        assert net.conv.dtype is None
        assert type(net) is NnxConvolutional
        assert net.raw[...].dtype == jnp.float32


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_a_dtype_that_a_layer_was_given_wins(kind: str) -> None:
    class Mixed(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.Dense(4, dtype=jnp.float32)(nn.Dense(16)(x))

    class NnxMixed(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.a = nnx.Linear(6, 16, rngs=rngs)
            self.b = nnx.Linear(16, 4, dtype=jnp.float32, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.b(self.a(x))

    engine = make_engine(
        Classifier(Mixed() if kind == "linen" else NnxMixed(nnx.Rngs(0))), precision=make_precision("bf16-mixed")
    )
    train(engine, batches(), 1)
    assert operands(engine.compiled["train"].lower().as_text(), "stablehlo.dot_general") == {"bf16", "f32"}


@functools.cache
def losses_in_float32(kind: type[Classifier]) -> list[float]:
    return train(make_engine(kind(LinenNet())), batches(), 40)


@pytest.mark.parametrize(
    "name",
    [
        "bf16-mixed",
        pytest.param("16-mixed", marks=pytest.mark.slow),
        pytest.param("bf16-true", marks=pytest.mark.slow),
        "16-true",
    ],
)
def test_the_loss_goes_down_as_in_float32(name: str) -> None:
    # Adam's eps of 1e-8 is zero in float16, in torch as well.
    kind = Descent if name == "16-true" else Classifier
    losses = train(make_engine(kind(LinenNet()), precision=make_precision(name)), batches(), 40)
    full = losses_in_float32(kind)
    assert np.mean(losses[-4:]) < 0.75 * np.mean(losses[:4])
    # Eight bits of a mantissa and 40 steps; measured differences are below a fifth of this.
    assert losses == pytest.approx(full, abs=0.1)


def test_single_precision_is_the_step_without_a_policy() -> None:
    plain = make_engine(Classifier(LinenNet()))
    policy = make_engine(Classifier(LinenNet()), precision=make_precision("32-true"))
    assert train(plain, batches(), 3) == train(policy, batches(), 3)
    assert str(plain.compiled["train"].jaxpr) == str(policy.compiled["train"].jaxpr)


@pytest.mark.catalogue("PN01", adaptation="x64 mode is on for the time of a run; arrays keep float64 afterwards")
@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_double_precision_is_scoped_to_the_run(kind: str) -> None:
    module = Recorder(network(kind))
    data = Loader(images(4))
    trainer = pl.Trainer(max_epochs=2, precision="64-true", **QUIET)
    trainer.fit(module, data, data)
    assert not jax.config.jax_enable_x64
    assert jnp.ones(2).dtype == jnp.float32
    assert set(module.seen.values()) == {"float64"}
    assert dtypes(module._engine.params) == dtypes(module._engine.variables) == {"float64"}
    assert dtypes(trainer.state.opt_state) == {"float64"}
    assert trainer.callback_metrics["loss_epoch"].dtype == np.float64
    assert module.net(images(1)[0][0]).dtype == jnp.float64 if kind == "linen" else True
    before = jax.device_get(module._engine.params)
    trainer.validate(module, data, verbose=False)
    after = jax.device_get(module._engine.params)
    assert jax.tree.all(jax.tree.map(np.array_equal, before, after))


def test_double_precision_survives_a_checkpoint(tmp_path: Path) -> None:
    data = Loader(images(4))
    options = {**QUIET, "precision": "64-true", "default_root_dir": tmp_path}
    straight = Recorder(network("linen"))
    pl.Trainer(max_epochs=2, **options).fit(straight, data, data)
    first = pl.Trainer(max_epochs=1, **options)
    first.fit(Recorder(network("linen")), data, data)
    first.save_checkpoint(tmp_path / "a.ckpt")
    second = Recorder(network("linen"))
    pl.Trainer(max_epochs=2, **options).fit(second, data, data, ckpt_path=tmp_path / "a.ckpt")
    same = jax.tree.map(np.array_equal, jax.device_get(straight._engine.params), jax.device_get(second._engine.params))
    assert jax.tree.all(same)


def test_x64_is_restored_when_a_run_fails() -> None:
    class Fails(Recorder):
        def on_train_epoch_end(self) -> None:
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        pl.Trainer(max_epochs=1, precision=64, **QUIET).fit(
            Fails(network("linen")), Loader(images(2)), Loader(images(1))
        )
    assert not jax.config.jax_enable_x64


# --- flags --------------------------------------------------------------------------------------------------------


@pytest.mark.catalogue("TF38", adaptation="a policy of dtypes in the compiled step; 16-mixed keeps float16 on a CPU")
@pytest.mark.parametrize(
    ("value", "name", "kind"),
    [
        (None, "32-true", Precision),
        (32, "32-true", Precision),
        ("32", "32-true", Precision),
        ("32-true", "32-true", Precision),
        (64, "64-true", DoublePrecision),
        ("64-true", "64-true", DoublePrecision),
        ("bf16-mixed", "bf16-mixed", MixedPrecision),
        ("16-mixed", "16-mixed", MixedPrecision),
        ("bf16-true", "bf16-true", HalfPrecision),
        ("16-true", "16-true", HalfPrecision),
    ],
)
def test_precision_flags(value: Any, name: str, kind: type) -> None:
    trainer = pl.Trainer(precision=value, **QUIET)
    assert trainer.precision == read("errors")["precision_values"]["result"].get(str(value), name) == name
    assert type(trainer.precision_plugin) is kind


@pytest.mark.parametrize(("value", "name"), [(16, "16-mixed"), ("16", "16-mixed"), ("bf16", "bf16-mixed")])
def test_old_names_warn(value: Any, name: str) -> None:
    with pytest.warns(UserWarning, match=f"precision={value}` is supported for historical reasons"):
        assert pl.Trainer(precision=value, **QUIET).precision == name


def test_own_policies_and_their_errors() -> None:
    own = Precision(compute_dtype=jnp.bfloat16, output_dtype=jnp.float32, name="mine")
    assert pl.Trainer(plugins=own, **QUIET).precision == "mine"
    assert pl.Trainer(plugins=[own], **QUIET).precision_plugin is own
    with pytest.raises(ValueError, match="Received both `precision=16-mixed` and `plugins="):
        pl.Trainer(precision="16-mixed", plugins=own, **QUIET)
    with pytest.raises(MisconfigurationException, match="multiple values for Precision"):
        pl.Trainer(plugins=[own, own], **QUIET)
    with pytest.raises(NotImplementedError, match="Transformer Engine"):
        pl.Trainer(precision="transformer-engine", **QUIET)
    with pytest.raises(ValueError, match="floating-point dtype"):
        Precision(compute_dtype=jnp.int8)
    with pytest.raises(ValueError, match="Precision must be '16-mixed' or 'bf16-mixed'"):
        MixedPrecision("16-true")
    with pytest.raises(ValueError, match="Precision must be '16-true' or 'bf16-true'"):
        HalfPrecision("16-mixed")
    with pytest.raises(MisconfigurationException, match="does not use a scaler"):
        MixedPrecision("bf16-mixed", scaler=GradScaler())
    with pytest.raises(TypeError, match="GradScaler"):
        Precision(scaler=1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="growth_factor"):
        GradScaler(growth_factor=1.0)


def test_an_own_policy_is_applied() -> None:
    own = Precision(param_dtype=jnp.float16, compute_dtype=jnp.bfloat16, output_dtype=jnp.float32)
    engine = make_engine(Classifier(LinenNet()), precision=own)
    train(engine, batches(), 2)
    assert dtypes(engine.params) == {"float16"}
    assert operands(engine.compiled["train"].lower().as_text(), "stablehlo.dot_general") == {"bf16"}


# --- elsewhere than in a compiled training step on one device --------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bf16-mixed", "16-mixed"])
def test_eager_steps_follow_the_policy(name: str) -> None:
    eager = train(make_engine(Classifier(LinenNet()), precision=make_precision(name), jit=False), batches(), 3)
    compiled = train(make_engine(Classifier(LinenNet()), precision=make_precision(name)), batches(), 3)
    # XLA keeps some intermediate results in float32 where eager operations round to 16 bits.
    assert eager == pytest.approx(compiled, abs=0.02)


def test_evaluation_prediction_and_calls_outside_follow_the_policy() -> None:
    class Predicts(Classifier):
        def predict_step(self, batch: Any, batch_idx: Any) -> Any:
            return self.net(batch[0])

    module = Predicts(LinenNet())
    trainer = pl.Trainer(max_epochs=1, precision="bf16-mixed", **QUIET)
    data = Loader(batches())
    trainer.fit(module, data, data)
    text = trainer._engine.compiled["validate"].lower().as_text()
    assert operands(text, "stablehlo.dot_general") == {"bf16"}
    first = trainer.predict(module, data)[0]
    assert first.dtype == np.float32
    module.eval()
    outside = module(batches()[0][0])
    assert outside.dtype == jnp.float32
    np.testing.assert_allclose(outside, first, atol=0.05)


@pytest.mark.parametrize("name", ["16-mixed", pytest.param("bf16-true", marks=pytest.mark.slow)])
def test_several_devices(name: str) -> None:
    module = Classifier(LinenNet())
    trainer = pl.Trainer(max_epochs=1, precision=name, devices=2, limit_val_batches=0, **QUIET)
    trainer.fit(module, Loader(batches()), Loader(batches()))
    assert trainer.global_step == 2
    assert dtypes(trainer.state.params) == {"float32" if name == "16-mixed" else "bfloat16"}
    assert trainer._engine.trace_counts["train"] == 1


def test_functional_steps_follow_the_policy() -> None:
    data = batches()
    functional = pl.functionalize(Classifier(LinenNet()), data[0], precision="16-mixed")
    state, step = functional.state, jax.jit(functional.train_step)
    losses = []
    for batch in data[:3]:
        state, logs = step(state, batch)
        losses.append(float(logs["loss"]))
    engine = make_engine(Classifier(LinenNet()), precision=make_precision("16-mixed"))
    # other fusions round elsewhere: a last bit of float16 here and there
    assert losses == pytest.approx(train(engine, data, 3), abs=5e-3)
    assert float(state.scaler.scale) == float(engine.tree.scaler.scale)
    with pytest.raises(MisconfigurationException, match="x64 mode only"):
        pl.functionalize(Classifier(LinenNet()), data[0], precision="64-true")


def test_parameters_of_the_module_itself_follow_the_policy() -> None:
    class Raw(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.register_parameter("w", np.full((6, 4), 0.1, np.float32))

        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            x, y = batch
            logits = x.astype(self.w.dtype) @ self.w
            loss = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), y).mean()
            return {"loss": loss, "w": self.w}

        def configure_optimizers(self) -> Any:
            return optax.adam(1e-2)

    engine = make_engine(Raw(), precision=make_precision("bf16-mixed"))
    train(engine, batches(), 2)
    out = engine.train_step(batches()[0], batch_idx=2, micro_step=2, want_outputs=True).outputs
    assert out["w"].dtype == jnp.bfloat16
    assert dtypes(engine.params) == {"float32"}
    assert operands(engine.compiled["train"].lower().as_text(), "stablehlo.dot_general") == {"bf16"}
