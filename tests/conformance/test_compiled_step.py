"""The catalogue's area JX: what a compiled step makes different, and how each of it is met."""

from __future__ import annotations

import itertools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.verbatim import QUIET

import jaxlightning as pl

X = np.random.RandomState(0).randn(24, 3).astype(np.float32)


class Net(nn.Module):
    """Dense, BatchNorm, dropout, dense."""

    @nn.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(nn.Dense(8)(x))
        return nn.Dense(1)(nn.Dropout(0.5, deterministic=not train)(x))


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Any) -> Any:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        loss = (self(batch) ** 2).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return optax.sgd(0.1)


def fit(module: Any, *, epochs: int = 1, validate: bool = False, **flags: Any) -> pl.Trainer:
    """Six batches of four rows in each epoch."""
    trainer = pl.Trainer(**{**QUIET, "max_epochs": epochs, "num_sanity_val_steps": 0, **flags})
    loader = pl.ArrayLoader(X, batch_size=4)
    trainer.fit(module, loader, loader if validate else None)
    return trainer


@pytest.mark.catalogue(
    "JX01", adaptation="appends, counters, arrays and prints of a step happen at every step; what cannot is refused"
)
def test_what_a_step_does_to_self_happens_at_every_step(capsys: pytest.CaptureFixture[str]) -> None:
    class Effects(Module):
        def __init__(self) -> None:
            super().__init__()
            self.outputs: list[Any] = []
            self.count = 0
            self.total = jnp.zeros(())

        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.outputs.append(loss)
            self.count += 1
            self.total = self.total + loss
            self.print(f"batch {batch_idx % 2}", loss)
            return loss

    module = Effects()
    fit(module)
    assert module.count == len(module.outputs) == 6
    np.testing.assert_allclose(float(module.total), sum(float(each) for each in module.outputs), rtol=1e-6)
    assert len(set(map(float, module.outputs))) == 6
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("batch")] == list(
        "010101"
    )

    class Flag(Module):
        mode = "warm"

        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            if self.mode == "warm":
                self.mode = "hot"
            return super().training_step(batch, batch_idx)

    with pytest.raises(RuntimeError, match=r"self\.mode"):
        fit(Flag())


@pytest.mark.catalogue("JX02", adaptation="a constant that a hook changes compiles once more, a number not even that")
def test_an_attribute_that_a_hook_changes_is_never_stale() -> None:
    class Changing(Module):
        def __init__(self) -> None:
            super().__init__()
            self.beta = 1.0
            self.names = ["a"]

        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("beta", jnp.zeros(()) + self.beta)
            self.log("names", jnp.zeros(()) + len(self.names[-1]))
            return loss * self.beta

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append((float(self.trainer.callback_metrics["beta"]), float(self.trainer.callback_metrics["names"])))
            self.beta += 1.0
            if batch_idx == 3:
                self.names[-1] = "abc"

    seen: list[Any] = []
    module = Changing()
    fit(module)
    assert seen == [(1, 1), (2, 1), (3, 1), (4, 1), (5, 3), (6, 3)]
    assert module._engine.trace_counts["train"] <= 3  # at first, when beta was seen to change, and for the list


@pytest.mark.catalogue(
    "JX03", adaptation="networks on self are bound to the traced parameters for the length of a step"
)
def test_calling_self_in_a_step_uses_the_parameters_of_that_step() -> None:
    class Watching(Module):
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("now", self.net.params["Dense_1"]["kernel"].sum())
            return loss

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx:
                before.append(float(self.net.params["Dense_1"]["kernel"].sum()))

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx:
                inside.append(float(self.trainer.callback_metrics["now"]))

    before: list[float] = []
    inside: list[float] = []
    module = Watching()
    fit(module)
    assert before == inside
    assert len(set(before)) == 5
    assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(vars(module), is_leaf=lambda _: False))
    assert module.eval()(X).shape == (24, 1)  # and outside a step, on the trained ones


@pytest.mark.catalogue("JX04", adaptation="collections, random keys and metric states are threaded through the step")
def test_statistics_masks_and_metric_states_go_from_step_to_step() -> None:
    class Threaded(Module):
        def __init__(self) -> None:
            super().__init__()
            self.metric = pl.metrics.MeanMetric()

        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            noise = jax.random.uniform(self.next_rng())
            self.metric(noise)
            self.log("noise", noise)
            self.log("mean", self.metric, on_step=False, on_epoch=True)
            return (self(batch) ** 2).mean()

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            noises.append(float(self.trainer.callback_metrics["noise"]))
            means.append(np.asarray(self.state_dict()["net.batch_stats.BatchNorm_0.mean"]))

    noises: list[float] = []
    means: list[Any] = []
    module = Threaded()
    trainer = fit(module)
    assert len(set(noises)) == 6
    assert all(np.abs(a - b).max() > 0 for a, b in itertools.pairwise(means))
    assert float(trainer.callback_metrics["mean"]) == pytest.approx(np.mean(noises), rel=1e-6)
    assert module._engine.trace_counts["train"] == 1


@pytest.mark.catalogue("JX05", adaptation="the engine counts compilations: one for each kind of step")
def test_constant_shapes_compile_once_for_each_kind_of_step() -> None:
    class Validated(Module):
        def validation_step(self, batch: Any, batch_idx: Any) -> None:
            self.log("val", self(batch).mean())

    module: Any = Validated()
    fit(module, epochs=3, validate=True)
    assert module._engine.trace_counts == {"train": 1, "validate": 1}
    module = Module()
    fit(module, epochs=3, accumulate_grad_batches=3)
    # The first of a window, one in between, and the last, which applies the optimizer.
    assert module._engine.trace_counts == {"train": 3}


@pytest.mark.catalogue(
    "JX06", adaptation="what is read from the module is a copy; the step donates its own arrays only"
)
def test_arrays_taken_from_the_module_outlive_the_next_step() -> None:
    class Keeping(Module):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            kept.append((self.net.params["Dense_0"]["kernel"], self.trainer.callback_metrics["loss"]))

    kept: list[Any] = []
    fit(Keeping())
    values = [np.asarray(kernel) for kernel, _ in kept]  # a donated array would raise here
    assert all(np.abs(a - b).max() > 0 for a, b in itertools.pairwise(values))
    assert all(math.isfinite(float(loss)) for _, loss in kept)


@pytest.mark.catalogue(
    "JX07",
    adaptation="a metric that is read is that of its own step, and detect_anomaly names the step that went wrong",
)
def test_what_is_not_finite_is_seen_at_its_own_step() -> None:
    class Breaks(Module):
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            loss = super().training_step(batch, batch_idx) * jnp.where(batch_idx == 3, jnp.nan, 1.0)
            self.log("broken", loss)
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            finite.append(bool(np.isfinite(float(self.trainer.callback_metrics["broken"]))))

    finite: list[bool] = []
    fit(Breaks())
    assert finite == [True, True, True, False, False, False]  # the parameters are not finite from then on
    finite.clear()
    with pytest.raises(RuntimeError, match=r"the loss is not finite in training batch 3"):
        fit(Breaks(), detect_anomaly=True)
    assert finite == [True, True, True]
