"""Optimizers and schedulers in a whole run: nothing compiles again, and every optax kind trains."""

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
from jaxlightning import optim
from jaxlightning.optim import lr_scheduler
from jaxlightning.utilities.exceptions import MisconfigurationException

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 3)).astype(np.float32)
Y = X @ np.array([[1.0], [-2.0], [0.5]], np.float32)


class Line(pl.LightningModule):
    def __init__(self, configure: Callable[[Any], Any]) -> None:
        super().__init__()
        self.net = nn.Dense(1)
        self.configure = configure
        self.rates: list[float] = []

    def _loss(self, batch: Any) -> jax.Array:
        x, y = batch
        return jnp.mean((self.net(x) - y) ** 2)

    def training_step(self, batch: Any, batch_idx: Any) -> jax.Array:
        loss = self._loss(batch)
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=4)
        return loss

    def validation_step(self, batch: Any, batch_idx: Any) -> None:
        self.log("val_loss", self._loss(batch), batch_size=4)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.rates += [group["lr"] for o in self.trainer.optimizers for group in o.param_groups]

    def configure_optimizers(self) -> Any:
        return self.configure(self)


def fit(module: Line, size: int = 4, **options: Any) -> Any:
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = pl.Trainer(**{"max_epochs": 5, **off, **options})
    trainer.fit(module, pl.ArrayLoader(X, Y, batch_size=size), pl.ArrayLoader(X, Y, batch_size=size))
    return trainer


class SetRate(pl.Callback):
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.optimizers[0].param_groups[0]["lr"] = 0.01 * (trainer.current_epoch + 1)


def test_one_trace_through_schedules_a_plateau_and_a_callback() -> None:
    def configure(module: Any) -> Any:
        optimizer = optim.Adam(module.parameters(), lr=0.1, weight_decay=0.01)
        cycle = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=60)
        plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
        return [optimizer], [
            {"scheduler": cycle, "interval": "step"},
            {"scheduler": plateau, "monitor": "val_loss"},
        ]

    module = Line(configure)
    trainer = fit(module, callbacks=[SetRate()])
    assert len(set(module.rates)) == 50
    assert trainer._engine.trace_counts["train"] == 1


def test_what_is_applied_is_the_rate_of_the_group() -> None:
    """The weight moves by exactly lr with a gradient of one."""

    class Ones(Line):
        def training_step(self, batch: Any, batch_idx: Any) -> jax.Array:
            return jnp.sum(self.net(jnp.ones((1, 3)))) + 0.0 * self._loss(batch)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.rates.append(float(self.state_dict()["net.bias"][0]))

    def configure(module: Any) -> Any:
        optimizer = optim.SGD(module.parameters(), lr=0.5)
        return [optimizer], [{"scheduler": lr_scheduler.ExponentialLR(optimizer, 0.5), "interval": "step"}]

    module = Ones(configure)
    fit(module, max_steps=4, limit_val_batches=0)
    np.testing.assert_allclose(np.diff([0.0, *module.rates]), [-0.5, -0.25, -0.125, -0.0625], rtol=1e-6)


def test_groups_by_path_pattern() -> None:
    def configure(module: Any) -> Any:
        return optim.SGD([{"params": "net/kernel"}, {"params": "net/bias", "lr": 0.0}], lr=0.1)

    module = Line(configure)
    fit(module)
    weights = module.state_dict()
    np.testing.assert_array_equal(weights["net.bias"], 0.0)
    np.testing.assert_allclose(weights["net.kernel"].ravel(), [1.0, -2.0, 0.5], atol=1e-2)


OPTAX: dict[str, Callable[[], Any]] = {
    "adam": lambda: optax.adam(0.1),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1, weight_decay=0.0)),
    "inject": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
    "lbfgs": lambda: optax.lbfgs(),
    "plateau": lambda: optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau(patience=20)),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(0.1, weight_decay=0.0),
    "lookahead": lambda: optax.lookahead(optax.adam(0.1), 5, 0.5),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(0.2), 2),
    "own_lbfgs": lambda: optim.LBFGS("*", max_iter=4),
}


@pytest.mark.catalogue("OP12", adaptation="value, gradient and the loss as a function are given to the update")
@pytest.mark.parametrize("name", OPTAX)
def test_every_kind_of_optax_trains_in_one_trace(name: str) -> None:
    module = Line(lambda m: OPTAX[name]())
    # a quasi-Newton method compares gradients of one step with the next: only full batches make sense
    trainer = fit(module, max_epochs=8, size=len(X) if "lbfgs" in name else 4)
    assert float(trainer.callback_metrics["val_loss"]) < 0.05
    assert trainer._engine.trace_counts["train"] == 1


def test_validation_sees_the_averaged_parameters() -> None:
    module = Line(lambda m: optax.lookahead(optax.sgd(0.05), 1000, 0.5))
    trainer = fit(module, max_epochs=1, num_sanity_val_steps=0)
    # before the first synchronisation the slow parameters are those of the start
    start = Line(lambda m: optax.sgd(0.0))
    reference = fit(start, max_epochs=1, num_sanity_val_steps=0)
    assert float(trainer.callback_metrics["val_loss"]) == pytest.approx(float(reference.callback_metrics["val_loss"]))
    assert float(trainer.callback_metrics["loss"]) < float(reference.callback_metrics["loss"])


def test_a_scheduler_of_ours_drives_injected_optax() -> None:
    def configure(module: Any) -> Any:
        tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
        return {"optimizer": tx, "lr_scheduler": lr_scheduler.ExponentialLR(tx, 0.5)}

    module = Line(configure)
    trainer = fit(module, max_epochs=3)
    assert module.rates[::10] == [0.1, 0.05, 0.025]
    assert trainer._engine.trace_counts["train"] == 1


def test_setting_the_rate_of_plain_optax_raises_naming_the_way_out() -> None:
    with pytest.raises(MisconfigurationException, match=r"optax\.inject_hyperparams"):
        fit(Line(lambda m: optax.adam(0.1)), callbacks=[SetRate()])


def test_an_optimizer_over_no_parameters_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"empty parameter list.*nothing"):
        fit(Line(lambda m: optim.SGD("nothing", lr=0.1)))
