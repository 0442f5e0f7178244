"""Learning rates inside manual steps: plateaus, values set by hand, what is read afterwards, L-BFGS with a closure."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.verbatim import QUIET

import jaxlightning as pl
from jaxlightning.utilities.exceptions import MisconfigurationException

X = np.random.RandomState(0).randn(24, 3).astype(np.float32)


class Line(pl.LightningModule):
    """A line fitted by hand; `step` is the test's."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.Dense(1)

    def loss(self, batch: Any) -> Any:
        return ((self.net(batch) - batch.sum(axis=1, keepdims=True)) ** 2).mean()

    def update(self, batch: Any) -> Any:
        opt = self.optimizers()
        loss = self.loss(batch)
        opt.zero_grad()
        self.manual_backward(loss)
        opt.step()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        sgd = pl.optim.SGD(self.parameters(), lr=0.1)
        plateau = pl.optim.lr_scheduler.ReduceLROnPlateau(sgd, factor=0.5, patience=0, threshold=0.9)
        return [sgd], [plateau]


def fit(module: Any, *, jit: bool = True, size: int = 4, **flags: Any) -> Any:
    """Six batches of four rows, or of another size."""
    trainer = pl.Trainer(**{**QUIET, "max_epochs": 1, "jit": jit, **flags})
    trainer.fit(module, pl.ArrayLoader(X, batch_size=size))
    return trainer


def rates(make: Any, jit: bool) -> tuple[list[float], Any]:
    """The learning rate after each batch, and the weights at the end."""
    found: list[float] = []

    class Noting(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            found.append(trainer.optimizers[0].param_groups[0]["lr"])

    module = make()
    fit(module, jit=jit, callbacks=[Noting()])
    return found, module


def test_a_plateau_that_steps_last_acts_on_the_next_batch() -> None:
    class Plateau(Line):
        def training_step(self, batch: Any, batch_idx: Any) -> None:
            self.lr_schedulers().step(self.update(batch))

    compiled, module = rates(Plateau, True)
    eager, _ = rates(Plateau, False)
    assert compiled == eager
    assert len(set(compiled)) > 2
    assert not module._engine.compiled["train"].info.manual.cut  # one compiled call and a read of the loss
    assert module._engine.trace_counts["train"] == 1


def test_a_plateau_that_steps_first_acts_on_the_same_batch() -> None:
    class Plateau(Line):
        def training_step(self, batch: Any, batch_idx: Any) -> None:
            self.lr_schedulers().step(self.loss(batch))
            self.log("rate", self.optimizers().param_groups[0]["lr"])
            self.update(batch)
            seen.append(batch_idx)

        def on_train_batch_end(self, *_: Any) -> None:
            logged.append(float(self.trainer.callback_metrics["rate"]))

    seen: list[Any] = []
    logged: list[float] = []
    compiled, module = rates(Plateau, True)
    assert logged == [pytest.approx(rate, rel=1e-7) for rate in compiled]
    eager, other = rates(Plateau, False)
    assert compiled == eager
    assert module._engine.compiled["train"].info.manual.cut
    np.testing.assert_allclose(
        module.state_dict()["net.kernel"], other.state_dict()["net.kernel"], rtol=1e-5, atol=1e-6
    )


def test_a_plateau_fed_with_the_metrics_of_the_trainer_needs_no_cut() -> None:
    class Plateau(Line):
        def training_step(self, batch: Any, batch_idx: Any) -> None:
            if batch_idx > 0:
                self.lr_schedulers().step(self.trainer.callback_metrics["loss"])
            self.update(batch)

    compiled, module = rates(Plateau, True)
    eager, _ = rates(Plateau, False)
    assert compiled == eager
    assert len(set(compiled)) > 1
    assert not module._engine.compiled["train"].info.manual.cut


def test_a_warm_up_written_by_hand() -> None:
    class Warm(Line):
        def training_step(self, batch: Any, batch_idx: Any) -> None:
            if self.global_step < 4:
                for group in self.optimizers().param_groups:
                    group["lr"] = min(1.0, (self.global_step + 1) / 4) * 0.1
            self.log("rate", self.optimizers().param_groups[0]["lr"])
            self.update(batch)

        def on_train_batch_end(self, *_: Any) -> None:
            logged.append(round(float(self.trainer.callback_metrics["rate"]), 6))

        def configure_optimizers(self) -> Any:
            return pl.optim.SGD(self.parameters(), lr=0.1)

    logged: list[float] = []
    compiled, module = rates(Warm, True)
    assert logged == [round(rate, 6) for rate in compiled] == [0.025, 0.05, 0.075, 0.1, 0.1, 0.1]
    eager, other = rates(Warm, False)
    assert compiled == eager
    np.testing.assert_allclose(module.state_dict()["net.kernel"], other.state_dict()["net.kernel"], rtol=1e-5)
    assert module._engine.trace_counts["train"] <= 4  # the first, those below 4, `min` of 1.0, and above


def test_a_learning_rate_is_not_set_to_a_value_of_the_device() -> None:
    class Traced(Line):
        def training_step(self, batch: Any, batch_idx: Any) -> None:
            self.optimizers().param_groups[0]["lr"] = self.loss(batch)

    with pytest.raises(RuntimeError, match="on_train_batch_start"):
        fit(Traced())


class Quasi(Line):
    def training_step(self, batch: Any, batch_idx: Any) -> None:
        opt = self.optimizers()

        def closure() -> Any:
            opt.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            self.seen.append(loss)
            return loss

        self.log("loss", opt.step(closure))

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def configure_optimizers(self) -> Any:
        return pl.optim.LBFGS(self.parameters(), lr=0.5, max_iter=4)


@pytest.mark.slow
def test_lbfgs_evaluates_its_closure_and_effects_happen_once() -> None:
    compiled, eager = Quasi(), Quasi()
    fit(compiled, size=24, max_epochs=6)
    fit(eager, jit=False, size=24, max_epochs=6)
    assert len(compiled.seen) == len(eager.seen) == 6
    np.testing.assert_allclose(compiled.seen, eager.seen, rtol=1e-4, atol=1e-6)
    assert float(compiled.seen[-1]) < 1e-2 * float(compiled.seen[0])


def test_lbfgs_needs_a_closure_with_a_backward_call() -> None:
    class Without(Quasi):
        def training_step(self, batch: Any, batch_idx: Any) -> None:
            self.manual_backward(self.loss(batch))
            self.optimizers().step()

    with pytest.raises(MisconfigurationException, match=r"call `opt.step\(closure\)`"):
        fit(Without())

    class Silent(Quasi):
        def training_step(self, batch: Any, batch_idx: Any) -> None:
            self.manual_backward(self.loss(batch))
            self.optimizers().step(lambda: self.loss(batch))

    with pytest.raises(MisconfigurationException, match="calls no `manual_backward`"):
        fit(Silent())


def test_optax_s_own_lbfgs_works_with_a_closure() -> None:
    class Optax(Quasi):
        def configure_optimizers(self) -> Any:
            return optax.lbfgs(memory_size=5)

    module = Optax()
    fit(module, size=24, max_epochs=6)
    assert float(module.seen[-1]) < 1e-2 * float(module.seen[0])


def test_a_parameter_on_the_module_is_the_new_one_after_a_step() -> None:
    class Scaled(Line):
        def __init__(self) -> None:
            super().__init__()
            self.register_parameter("scale", jnp.ones(()))

        def training_step(self, batch: Any, batch_idx: Any) -> None:
            opt = self.optimizers()
            for number in range(2):
                loss = self.loss(batch) * self.scale**2
                opt.zero_grad()
                self.manual_backward(loss)
                opt.step()
                self.log(f"loss{number}", loss)
                self.log(f"scale{number}", self.scale)

        def on_train_batch_end(self, *_: Any) -> None:
            rows.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})

        def configure_optimizers(self) -> Any:
            return pl.optim.SGD(self.parameters(), lr=0.01)

    rows: list[dict[str, float]] = []
    for jit in (True, False):
        fit(Scaled(), jit=jit)
    compiled, eager = rows[:6], rows[6:]
    for left, right in zip(compiled, eager, strict=True):
        assert left == pytest.approx(right, rel=1e-5)
        assert left["scale0"] != left["scale1"]
