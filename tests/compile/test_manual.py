"""Manual optimization in a compiled step: what it counts, who owns what, what is refused, hooks in the middle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxlightning as pl
from jaxlightning.utilities.exceptions import MisconfigurationException

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_epochs": 1,
}


REAL = np.random.RandomState(0).randn(16, 5).astype(np.float32)


class Pair(pl.LightningModule):
    """Two single layers with an optimizer each."""

    def __init__(self, **owns: Any) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first = nn.Dense(3)
        self.second = nn.Dense(1)
        self.owns = owns or {"first": "first", "second": "second"}

    def loss(self, batch: Any) -> Any:
        return (self.second(self.first(batch)) ** 2).mean()

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        for opt in self.optimizers():
            opt.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        for opt in self.optimizers():
            opt.step()
        return loss

    def configure_optimizers(self) -> Any:
        return [{"optimizer": optax.sgd(0.1), "params": patterns} for patterns in self.owns.values()]


def fit(module: Any, **flags: Any) -> Any:
    trainer = pl.Trainer(**{**QUIET, **flags})
    trainer.fit(module, pl.ArrayLoader(REAL, batch_size=4))
    return trainer


def step_of(body: Callable[[Any, Any, Any], Any], base: type = Pair) -> Any:
    return type("Body", (base,), {"training_step": body})()


# --- what it counts -------------------------------------------------------------------------------------------------


def test_every_step_of_an_optimizer_counts_and_nothing_compiles_twice() -> None:
    module = Pair()
    trainer = fit(module, max_epochs=2)
    assert trainer.global_step == 2 * 8
    assert module._engine.trace_counts["train"] == 1
    assert [handle.updates for handle in trainer.optimizers] == [8, 8]


def test_max_steps_is_looked_at_between_batches() -> None:
    assert fit(Pair(), max_epochs=-1, max_steps=5).global_step == 6


def test_global_step_grows_inside_the_step() -> None:
    def body(self: Any, batch: Any, batch_idx: Any) -> None:
        opt, _ = self.optimizers()
        before = self.global_step
        self.manual_backward(self.loss(batch))
        opt.step()
        opt.step()
        self.log("grown", jnp.asarray(self.global_step - before, jnp.float32))

    assert float(fit(step_of(body)).callback_metrics["grown"]) == 2.0


def test_gradients_that_are_not_forgotten_add_up_and_live_across_steps() -> None:
    def body(self: Any, batch: Any, batch_idx: Any) -> None:
        first, second = self.optimizers()
        second.zero_grad()
        self.manual_backward(self.loss(batch))
        first.step()

    module = step_of(body)
    fit(module)
    held = module._engine.state_dict()["gradients"]
    assert set(held) == {"first"}, "those of the second are forgotten at the start of every step"
    assert module._engine.trace_counts["train"] == 2  # nothing held before the first step, something later
    assert np.abs(held["first"]["kernel"]).max() > 0


def test_buffers_are_not_kept_for_gradients_that_every_step_forgets_first() -> None:
    module = Pair()
    fit(module)
    assert module._engine.state_dict()["gradients"] is None
    assert module._engine.tree.grads is None


def test_a_step_without_any_gradient_changes_nothing_but_counts() -> None:
    def body(self: Any, batch: Any, batch_idx: Any) -> None:
        first, _ = self.optimizers()
        first.zero_grad()
        self.manual_backward(self.loss(batch))
        first.zero_grad()
        first.step()

    module = step_of(body)
    module.init(REAL[:4])
    before = module.state_dict()["first.kernel"]
    trainer = fit(module)
    np.testing.assert_array_equal(before, module.state_dict()["first.kernel"])
    assert trainer.global_step == 4
    assert trainer.optimizers[0].updates == 0


def test_an_optimizer_may_step_in_a_hook_on_what_is_left() -> None:
    class Flush(Pair):
        def training_step(self, batch: Any, batch_idx: Any) -> None:
            self.manual_backward(self.loss(batch))

        def on_train_epoch_end(self) -> None:
            opt, _ = self.optimizers()
            opt.step()
            opt.zero_grad()

    module = Flush()
    module.init(REAL[:4])
    before = module.state_dict()
    trainer = fit(module)
    assert trainer.global_step == 1
    assert np.abs(module.state_dict()["first.kernel"] - before["first.kernel"]).max() > 0
    np.testing.assert_array_equal(module.state_dict()["second.kernel"], before["second.kernel"])


# --- who owns what ----------------------------------------------------------------------------------------------------


def test_parameters_without_an_owner_are_named() -> None:
    def body(self: Any, batch: Any, batch_idx: Any) -> None:
        self.manual_backward(self.loss(batch))
        self.optimizers().step()

    module = step_of(body)
    module.owns = {"only": "first"}
    with pytest.raises(MisconfigurationException, match=r"no optimizer owns(.|\n)*second/kernel"):
        fit(module)


def test_parameters_with_two_owners_are_named() -> None:
    with pytest.raises(MisconfigurationException, match=r"more than one optimizer(.|\n)*first/bias \(sgd \(number 0\)"):
        fit(Pair(all="*", first="first"))


@pytest.mark.filterwarnings("ignore:Found 1 module")
def test_frozen_parameters_need_no_owner() -> None:
    class Frozen(Pair):
        def __init__(self) -> None:
            super().__init__(first="first")
            self.freeze("second")

        def training_step(self, batch: Any, batch_idx: Any) -> None:
            opt = self.optimizers()
            opt.zero_grad()
            self.manual_backward(self.loss(batch))
            opt.step()

    module = Frozen()
    module.init(REAL[:4])
    before = module.state_dict()
    fit(module)
    np.testing.assert_array_equal(module.state_dict()["second.kernel"], before["second.kernel"])
    assert np.abs(module.state_dict()["first.kernel"] - before["first.kernel"]).max() > 0


@pytest.mark.parametrize("kind", ["network", "list", "pattern"])
def test_an_owner_is_named_by_network_list_or_pattern(kind: str) -> None:
    class Named(Pair):
        def configure_optimizers(self) -> Any:
            first = {"network": self.first, "list": [self.first], "pattern": "first/*"}[kind]
            return [
                {"optimizer": optax.sgd(0.1), "params": first},
                {"optimizer": optax.sgd(0.1), "params": self.second},
            ]

    assert fit(Named()).global_step == 8


def test_nnx_networks_are_owned_and_updated_within_the_step() -> None:
    from flax import nnx

    class Both(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.first = nnx.Linear(5, 3, rngs=nnx.Rngs(0))
            self.second = nnx.Linear(3, 1, rngs=nnx.Rngs(1))

        def training_step(self, batch: Any, batch_idx: Any) -> None:
            first, second = self.optimizers()
            loss = (self.second(self.first(batch)) ** 2).mean()
            first.zero_grad()
            self.manual_backward(loss)
            first.step()
            again = (self.second(self.first(batch)) ** 2).mean()
            second.zero_grad()
            self.manual_backward(again)
            second.step()
            self.log_dict({"before": loss, "after": again})

        def configure_optimizers(self) -> Any:
            return [
                {"optimizer": optax.sgd(0.05), "params": self.first},
                {"optimizer": optax.sgd(0.05), "params": [self.second]},
            ]

    metrics = fit(Both()).callback_metrics
    assert float(metrics["after"]) < float(metrics["before"]), "the second loss sees the updated parameters"


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_loss_that_depends_on_no_parameter_is_refused() -> None:
    def body(self: Any, batch: Any, batch_idx: Any) -> None:
        self.manual_backward(jax.lax.stop_gradient(self.loss(batch)))

    with pytest.raises(RuntimeError, match=r"number 1 in `Body\.training_step` does not depend on any parameter"):
        fit(step_of(body))


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda loss: float("nan"), "wants the loss, a scalar array"),
        (lambda loss: jnp.stack([loss, loss]), r"loss of shape \(2,\)"),
        (lambda loss: (loss > 0).astype(jnp.int32), "loss of dtype int32"),
    ],
    ids=["number", "vector", "integer"],
)
def test_what_is_no_loss_is_refused(loss: Any, words: str) -> None:
    def body(self: Any, batch: Any, batch_idx: Any) -> None:
        self.manual_backward(loss(self.loss(batch)))

    with pytest.raises((RuntimeError, TypeError), match=words):
        fit(step_of(body))


def test_a_vector_with_its_cotangent_is_a_loss() -> None:
    def body(self: Any, batch: Any, batch_idx: Any) -> None:
        first, _ = self.optimizers()
        first.zero_grad()
        outputs = self.second(self.first(batch))
        self.manual_backward(outputs, gradient=jnp.ones_like(outputs))
        first.step()

    assert fit(step_of(body)).global_step == 4


def test_backward_belongs_into_the_training_step() -> None:
    class Wrong(Pair):
        def on_train_start(self) -> None:
            self.manual_backward(jnp.zeros(()))

    with pytest.raises(MisconfigurationException, match="outside of `training_step`"):
        fit(Wrong())

    class Late(Pair):
        def validation_step(self, batch: Any, batch_idx: Any) -> None:
            self.manual_backward(self.loss(batch))

    module = Late()
    trainer = pl.Trainer(**QUIET, num_sanity_val_steps=0)
    with pytest.raises(MisconfigurationException, match="`manual_backward` was called in the validate step"):
        trainer.validate(module, pl.ArrayLoader(REAL, batch_size=4), verbose=False)


def test_backward_inside_a_transform_is_refused() -> None:
    def body(self: Any, batch: Any, batch_idx: Any) -> None:
        def inner(x: Any) -> Any:
            self.manual_backward(self.loss(x))
            return x.sum()

        jax.grad(inner)(batch)

    with pytest.raises(RuntimeError, match=r"`manual_backward` .* was called inside a JAX transform"):
        fit(step_of(body))


# --- other things -----------------------------------------------------------------------------------------------------


def test_several_devices_give_the_numbers_of_one() -> None:
    one, eight = Pair(), Pair()
    fit(one)
    trainer = pl.Trainer(**{**QUIET, "devices": 2, "strategy": "ddp"})
    trainer.fit(eight, pl.ArrayLoader(REAL, batch_size=2))
    for name, value in one.state_dict().items():
        np.testing.assert_allclose(value, eight.state_dict()[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_detect_anomaly_names_the_gradient_and_keeps_the_parameters() -> None:
    def body(self: Any, batch: Any, batch_idx: Any) -> None:
        first, _ = self.optimizers()
        first.zero_grad()
        self.manual_backward(jnp.log(self.loss(batch) * 0.0))
        first.step()

    module = step_of(body)
    module.init(REAL[:4])
    before = module.state_dict()
    with pytest.raises(RuntimeError, match="the loss of `manual_backward` number 1 is not finite in training batch 0"):
        fit(module, detect_anomaly=True)
    np.testing.assert_array_equal(before["first.kernel"], module.state_dict()["first.kernel"])


def test_a_resumed_run_holds_the_gradients_of_the_interrupted_one(tmp_path: Any) -> None:
    def body(self: Any, batch: Any, batch_idx: Any) -> None:
        first, second = self.optimizers()
        self.manual_backward(self.loss(batch) / 2)
        if (batch_idx + 1) % 2 == 0:
            for opt in (first, second):
                opt.step()
                opt.zero_grad()

    whole = step_of(body)
    fit(whole)
    part, rest = step_of(body), step_of(body)

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                trainer.save_checkpoint(tmp_path / "mid.ckpt")

    trainer = pl.Trainer(**{**QUIET, "callbacks": [Save()]})
    trainer.fit(part, pl.ArrayLoader(REAL, batch_size=4))
    trainer = pl.Trainer(**QUIET)
    trainer.fit(rest, pl.ArrayLoader(REAL, batch_size=4), ckpt_path=tmp_path / "mid.ckpt")
    assert trainer.global_step == 4
    for name, value in whole.state_dict().items():
        np.testing.assert_array_equal(value, rest.state_dict()[name], err_msg=name)


# --- hooks in the middle of a step ------------------------------------------------------------------------------------


def hooked(seen: list[Any], change: bool = False) -> Any:
    class Hooked(Pair):
        def on_before_backward(self, loss: Any) -> None:
            seen.append(("loss", float(loss)))

        def on_after_backward(self) -> None:
            seen.append(("gradient", float(jnp.abs(self._engine.grads["first"]["kernel"]).sum())))

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            seen.append(("step", self.global_step, self.optimizers().index(optimizer)))
            if change:
                self._engine.grads = jax.tree.map(jnp.zeros_like, self._engine.grads)
            self.log("hooked", 1.0)

    return Hooked()


@pytest.mark.parametrize("jit", [True, False], ids=["compiled", "eager"])
def test_hooks_in_a_step_get_real_numbers_and_change_nothing(jit: bool) -> None:
    seen: list[Any] = []
    plain, module = Pair(), hooked(seen)
    fit(plain)
    trainer = fit(module, jit=jit)
    assert [event[0] for event in seen[:4]] == ["loss", "gradient", "step", "step"]
    assert [event[1:] for event in seen if event[0] == "step"] == [(i, i % 2) for i in range(8)]
    assert all(event[1] > 0 for event in seen if event[0] == "gradient")
    assert float(trainer.callback_metrics["hooked"]) == 1.0
    for name, value in plain.state_dict().items():
        np.testing.assert_allclose(value, module.state_dict()[name], rtol=1e-6, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("jit", [True, False], ids=["compiled", "eager"])
def test_hooks_in_a_step_may_replace_gradients(jit: bool) -> None:
    module = hooked([], change=True)
    module.init(REAL[:4])
    before = module.state_dict()
    fit(module, jit=jit)
    for name, value in module.state_dict().items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)


def test_hooks_in_a_step_work_on_several_devices() -> None:
    seen: list[Any] = []
    plain, module = Pair(), hooked(seen)
    fit(plain)
    trainer = pl.Trainer(**{**QUIET, "devices": 2, "strategy": "ddp"})
    trainer.fit(module, pl.ArrayLoader(REAL, batch_size=2))
    assert len(seen) == 4 * 4
    for name, value in plain.state_dict().items():
        np.testing.assert_allclose(value, module.state_dict()[name], rtol=1e-5, atol=1e-6, err_msg=name)
