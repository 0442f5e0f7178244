"""Learning rates in manual steps as people write them, beside PyTorch Lightning: plateaus, warm-ups, L-BFGS."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest
from support.verbatim import Beside, Outcome, compare_with_lightning, equal, run

import jaxlightning as pl

pytestmark = [pytest.mark.slow, pytest.mark.lightning]

RNG = np.random.RandomState(0)
DATA = (RNG.randn(32, 6), RNG.randn(32, 2))
LAYERS = {"net.Dense_0": "net.0", "net.Dense_1": "net.2"}


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = jnp.tanh(nn.Dense(5)(x))
        return nn.Dense(2)(x)


def both(step: Any, configure: Any, *, steps: int = 20, batch_size: int = 4) -> Outcome:
    """The same step and `configure_optimizers` in our module and in Lightning's; `configure` gets torch's names."""

    class Ours(pl.LightningModule):
        training_step = step

        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.net = MLP()

        def configure_optimizers(self) -> Any:
            return configure(self, pl.optim)

    def theirs() -> Any:
        import lightning.pytorch as lightning
        import torch

        class Theirs(lightning.LightningModule):
            training_step = step

            def __init__(self) -> None:
                super().__init__()
                self.automatic_optimization = False
                self.net = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))

            def configure_optimizers(self) -> Any:
                return configure(self, torch.optim)

        return Theirs()

    options = {"steps": steps, "batch_size": batch_size}
    compiled = run(Ours, DATA, **options)
    equal(compiled, run(Ours, DATA, jit=False, **options), 1e-8)
    compare_with_lightning(Ours, DATA, Beside(theirs, LAYERS), **options)
    return compiled


def update(self: Any, loss: Any) -> None:
    opt = self.optimizers()
    opt.zero_grad()
    self.manual_backward(loss)
    opt.step()
    self.log("loss", loss)


def loss_of(self: Any, batch: Any) -> Any:
    x, y = batch
    return ((self.net(x) - y) ** 2).mean()


def plateau(self: Any, optim: Any) -> Any:
    sgd = optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
    return [sgd], [optim.lr_scheduler.ReduceLROnPlateau(sgd, factor=0.5, patience=1)]


def exponential(self: Any, optim: Any) -> Any:
    sgd = optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
    return [sgd], [optim.lr_scheduler.ExponentialLR(sgd, 0.8)]


def test_a_plateau_stepped_with_the_loss_after_the_update() -> None:
    def step(self: Any, batch: Any, batch_idx: Any) -> None:
        loss = loss_of(self, batch)
        update(self, loss)
        self.lr_schedulers().step(loss)

    out = both(step, plateau)
    assert out.trainer.optimizers[0].param_groups[0]["lr"] < 0.01


def test_a_plateau_stepped_with_the_loss_before_the_update() -> None:
    def step(self: Any, batch: Any, batch_idx: Any) -> None:
        loss = loss_of(self, batch)
        self.lr_schedulers().step(loss)
        self.log("lr", self.optimizers().param_groups[0]["lr"])
        update(self, loss)

    out = both(step, plateau)
    assert len({row["lr"] for row in out.logged}) > 3


def test_a_learning_rate_that_is_read_after_the_scheduler_stepped() -> None:
    def step(self: Any, batch: Any, batch_idx: Any) -> None:
        update(self, loss_of(self, batch))
        self.log("before", self.optimizers().param_groups[0]["lr"])
        if (batch_idx + 1) % 2 == 0:
            self.lr_schedulers().step()
        self.log("after", self.lr_schedulers().get_last_lr()[0])

    out = both(step, exponential)
    assert any(row["before"] != row["after"] for row in out.logged)


def test_a_warm_up_written_by_hand_in_the_step() -> None:
    def step(self: Any, batch: Any, batch_idx: Any) -> None:
        if self.trainer.global_step < 7:
            for group in self.optimizers().param_groups:
                group["lr"] = 0.1 * min(1.0, (self.trainer.global_step + 1) / 7)
        self.log("lr", self.optimizers().param_groups[0]["lr"])
        update(self, loss_of(self, batch))

    out = both(step, lambda self, optim: optim.SGD(self.parameters(), lr=0.1, momentum=0.9))
    assert [round(row["lr"], 6) for row in out.logged[:8]] == [round(0.1 * min(1, n / 7), 6) for n in range(1, 9)]
    assert out.module._engine.trace_counts["train"] <= 4


def test_lbfgs_with_a_closure() -> None:
    """One batch: on batches that change, the method's own history makes rounding grow tenfold in every step."""

    def step(self: Any, batch: Any, batch_idx: Any) -> Any:
        opt = self.optimizers()
        first: list[Any] = []

        def closure() -> Any:
            opt.zero_grad()
            loss = loss_of(self, batch)
            self.manual_backward(loss)
            if not first:  # torch runs it several times, a compiled step once
                self.log("loss", loss)
            first.append(loss)
            return loss

        return opt.step(closure)

    def lbfgs(self: Any, optim: Any) -> Any:
        return optim.LBFGS(self.parameters(), lr=0.5, max_iter=5)

    out = both(step, lbfgs, steps=6, batch_size=32)
    assert out.logged[-1]["loss"] < 0.2 * out.logged[0]["loss"]
    assert out.trainer.global_step == 6
