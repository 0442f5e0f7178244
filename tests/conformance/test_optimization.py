"""Optimizers and schedulers as the trainer treats them: rows OP and SC of the catalogue that no other test carries."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.tracing import TinyModule, loader

import jaxlightning as pl
from jaxlightning import optim
from jaxlightning.optim import lr_scheduler
from jaxlightning.utilities.exceptions import MisconfigurationException

QUIET: dict[str, Any] = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)


class Model(TinyModule):
    """Its optimizers are what a function says; it notes the learning rate after each batch."""

    def __init__(self, configure: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        self.configure = configure
        self.rates: list[float] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.rates += [group["lr"] for optimizer in self.trainer.optimizers[:1] for group in optimizer.param_groups]

    def configure_optimizers(self) -> Any:
        return optim.SGD(self.parameters(), lr=0.1) if self.configure is None else self.configure(self)


def fit(module: Any, n: int = 4, **options: Any) -> Any:
    trainer = pl.Trainer(**{"max_epochs": 1, "limit_val_batches": 0, **QUIET, **options})
    trainer.fit(module, loader(2 * n), loader(4))
    return trainer


def weights(module: Any) -> dict[str, Any]:
    return {name: np.asarray(value) for name, value in module.state_dict().items()}


def test_without_an_optimizer_steps_count_and_weights_stay() -> None:
    module = Model(lambda m: None)
    module.init(next(iter(loader(2))))
    before = weights(module)
    with pytest.warns(UserWarning, match="will run with no optimizer"):
        trainer = fit(module)
    assert trainer.global_step == 4
    assert all(np.array_equal(before[name], value) for name, value in weights(module).items())


@pytest.mark.catalogue("OP05", adaptation="an optimizer is the handle over its optax chain")
def test_optimizers_exist_in_fit_only_and_unpack_as_one_or_a_list() -> None:
    seen: dict[str, Any] = {}

    class Watch(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            seen["fit"] = trainer.optimizers
            seen["one"], seen["raw"] = pl_module.optimizers(), pl_module.optimizers(use_pl_optimizer=False)

        def on_test_start(self, trainer: Any, pl_module: Any) -> None:
            seen["test"] = list(trainer.optimizers)

    tx = optax.adam(0.1)
    module = Model(lambda m: tx)
    trainer = fit(module, callbacks=Watch())
    assert [seen["one"]] == seen["fit"]
    assert seen["raw"] is tx
    assert seen["one"].state[0].count.shape == ()
    assert seen["one"].param_groups[0]["lr"] == 0.1
    trainer.test(module, loader(2), verbose=False)
    assert seen["test"] == []


@pytest.mark.catalogue("OP06", adaptation="the type of the return value is known when the step is traced")
@pytest.mark.parametrize(
    ("returned", "error"),
    [
        (lambda loss: loss, None),
        (lambda loss: {"loss": loss, "more": loss * 2}, None),
        (lambda loss: None, None),
        (lambda loss: {"less": loss}, MisconfigurationException),
        (lambda loss: "loss", MisconfigurationException),
        (lambda loss: 1.5, MisconfigurationException),
    ],
)
def test_what_a_training_step_may_return(returned: Any, error: type[Exception] | None) -> None:
    class Returns(Model):
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            return returned(super().training_step(batch, batch_idx))

    if error is not None:
        with pytest.raises(error):
            fit(Returns())
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert fit(Returns()).global_step == 4


@pytest.mark.catalogue("OP13", adaptation="a handle carries name, groups and state; there are no hooks on an optimizer")
def test_a_step_wants_a_function() -> None:
    class Steps(Model):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            optimizer.step("closure")

    with pytest.raises(MisconfigurationException, match="wants a function, but got str"):
        fit(Steps())


@pytest.mark.catalogue("OP14", adaptation="decides whether the gradient buffer is emptied")
@pytest.mark.catalogue("OP15", adaptation="an override makes the step run in two compiled halves")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_overridden_steps_run_once_per_update(accumulate: int) -> None:
    calls: list[str] = []

    class Hooked(Model):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            calls.append(f"step {batch_idx}")
            optimizer.step(closure=optimizer_closure)

        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            calls.append(f"zero {batch_idx}")
            optimizer.zero_grad()

    fit(Hooked(), accumulate_grad_batches=accumulate)
    stepping = [index for index in range(4) if (index + 1) % accumulate == 0]
    assert [call for call in calls if call.startswith("step")] == [f"step {index}" for index in stepping]
    assert [call for call in calls if call.startswith("zero")] == [f"zero {i - accumulate + 1}" for i in stepping]


def test_zero_grad_that_keeps_gradients_adds_them_up() -> None:
    class Keeps(Model):
        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            pass

    kept, plain = Keeps(), Model()
    fit(kept)
    fit(plain)
    assert any(not np.allclose(weights(kept)[name], value) for name, value in weights(plain).items())


def test_a_checkpoint_holds_the_scheduler_as_it_is_after_its_step(tmp_path: Path) -> None:
    saved: list[int] = []

    class Saves(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            saved.append(trainer._checkpoint_connector.dump_checkpoint()["lr_schedulers"][0]["last_epoch"])

    def configure(module: Any) -> Any:
        optimizer = optim.SGD(module.parameters(), lr=0.1)
        return [optimizer], [lr_scheduler.StepLR(optimizer, 1)]

    fit(Model(configure), max_epochs=3, callbacks=Saves())
    assert saved == [1, 2, 3]


@pytest.mark.parametrize("plateau", [False, True])
def test_an_overridden_scheduler_step_gets_the_metric_or_none(plateau: bool) -> None:
    metrics: list[Any] = []

    class Steps(Model):
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("watched", jnp.float32(2.0), on_epoch=True, on_step=False)
            return loss

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            metrics.append(metric if metric is None else float(metric))
            scheduler.step() if metric is None else scheduler.step(metric)

    def configure(module: Any) -> Any:
        optimizer = optim.SGD(module.parameters(), lr=0.1)
        if plateau:
            scheduler = lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "watched"}
        return [optimizer], [lr_scheduler.StepLR(optimizer, 1)]

    fit(Steps(configure), max_epochs=2)
    assert metrics == ([2.0, 2.0] if plateau else [None, None])


def test_an_epoch_that_is_skipped_still_steps_its_schedulers() -> None:
    class Skips(Model):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 1 else None

    def configure(module: Any) -> Any:
        optimizer = optim.SGD(module.parameters(), lr=0.1)
        return [optimizer], [lr_scheduler.ExponentialLR(optimizer, 0.5)]

    module = Skips(configure)
    trainer = fit(module, max_epochs=3)
    assert module.rates == [0.1, 0.05, 0.025]
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.0125


@pytest.mark.parametrize("count", [0, 1, 2])
def test_schedulers_of_a_module(count: int) -> None:
    found: list[Any] = []

    class Asks(Model):
        def on_train_start(self) -> None:
            found.append(self.lr_schedulers())

    def configure(module: Any) -> Any:
        optimizer = optim.SGD(module.parameters(), lr=0.1)
        return [optimizer], [lr_scheduler.StepLR(optimizer, 1) for _ in range(count)]

    trainer = fit(Asks(configure))
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    assert found == [None if count == 0 else schedulers[0] if count == 1 else schedulers]


@pytest.mark.catalogue("SC14", adaptation="counts updates; no scheduler object exists")
def test_a_schedule_inside_optax_follows_the_updates_and_is_logged() -> None:
    schedule = optax.linear_schedule(0.1, 0.0, 10)
    module = Model(lambda m: {"optimizer": optax.sgd(schedule), "lr": schedule})
    trainer = fit(module, n=6, accumulate_grad_batches=2)
    # After each batch: the rate that the next update will use.
    np.testing.assert_allclose(module.rates, [float(schedule(count)) for count in (0, 1, 1, 2, 2, 3)])
    assert trainer.lr_scheduler_configs == []


def test_an_accumulation_factor_that_changes_by_epoch_compiles_at_most_once_more() -> None:
    class Counts(pl.Callback):
        seen: list[int] = []

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            self.seen.append(trainer._engine.trace_counts["train"])

    counts = Counts()
    schedule = pl.callbacks.GradientAccumulationScheduler({0: 2, 1: 3, 2: 4})
    fit(Model(), n=12, max_epochs=4, callbacks=[schedule, counts])
    # A window has a first, a middle and a last batch; with two batches there is no middle one yet.
    assert counts.seen[1] - counts.seen[0] <= 1
    assert counts.seen[1:] == [counts.seen[1]] * 3


def test_an_integer_parameter_is_refused_by_name() -> None:
    import flax.linen as nn

    class Table(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            table = self.param("table", lambda key: jnp.arange(3))
            return nn.Dense(2)(x) * table[0]

    class Holds(Model):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Table()

    for precision in ("32-true", "bf16-mixed"):
        with pytest.raises(TypeError, match=r"`layer/table` has dtype int32"):
            fit(Holds(), precision=precision)


def test_lbfgs_and_a_loss_scale_do_not_go_together() -> None:
    with pytest.raises(MisconfigurationException, match="LBFGS"):
        fit(Model(lambda m: optim.LBFGS(m.parameters())), precision="16-mixed")
