"""Numbers of the host in steps as people write them: warm-ups, schedules, counters, decisions by the step number."""

from __future__ import annotations

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.verbatim import QUIET, Beside, Outcome, check, run

import jaxlightning as pl
from jaxlightning.optim import SGD
from jaxlightning.optim.lr_scheduler import StepLR

pytestmark = [pytest.mark.slow]

RNG = np.random.RandomState(0)
DATA = (RNG.randn(32, 6), RNG.randn(32, 2))
LAYERS = {"net.Dense_0": "net.0", "net.Dense_1": "net.2"}


class MLP(nn.Module):
    features: int = 2

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = jnp.tanh(nn.Dense(5)(x))
        return nn.Dense(self.features)(x)


class Regression(pl.LightningModule):
    """Mean squared error; `weigh` is what the tests are about."""

    def __init__(self) -> None:
        super().__init__()
        self.net = MLP()

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        x, y = batch
        loss = ((self.net(x) - y) ** 2).mean()
        self.log("loss", loss)
        return self.weigh(loss, batch_idx)

    def weigh(self, loss: Any, batch_idx: Any) -> Any:
        return loss

    def configure_optimizers(self) -> Any:
        return optax.sgd(0.1)


def torch_regression(weigh: Any, prepare: Any = None) -> Any:
    """The same for PyTorch Lightning, with the same `weigh`."""
    lightning = pytest.importorskip("lightning.pytorch")
    import torch

    class Torch(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
            if prepare is not None:
                prepare(self)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            loss = ((self.net(x) - y) ** 2).mean()
            self.log("loss", loss.detach())
            return weigh(self, loss, batch_idx)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Torch()


def compare(weigh: Any, *, compiles: int, prepare: Any = None, steps: int = 20, **options: Any) -> Outcome:
    """Runs the body compiled, eagerly and beside Lightning; counts the compilations of the float64 run."""

    def make() -> Any:
        module = type("Body", (Regression,), {"weigh": weigh})()
        if prepare is not None:
            prepare(module)
        return module

    outcome = check(make, DATA, steps=steps, beside=Beside(lambda: torch_regression(weigh, prepare), LAYERS), **options)
    assert outcome.trainer._engine.trace_counts["train"] == compiles
    return outcome


# 32 rows in batches of 4: 8 batches an epoch, so 20 steps reach into the third epoch.


@pytest.mark.lightning
@pytest.mark.torch
def test_a_warm_up_by_the_epoch() -> None:
    """`min` decides once more when the warm-up is over."""
    compare(lambda self, loss, batch_idx: loss * min(1.0, (self.current_epoch + 1) / 2), compiles=2)


@pytest.mark.lightning
@pytest.mark.torch
def test_a_schedule_by_the_step_with_functions_of_math() -> None:
    """Inverse sigmoid decay, as in scheduled sampling, and a cosine."""

    def weigh(self: Any, loss: Any, batch_idx: Any) -> Any:
        epsilon = 5 / (5 + math.exp(self.global_step / 5))
        return loss * epsilon + loss * 0.5 * (1 + math.cos(math.pi * self.trainer.global_step / 20))

    compare(weigh, compiles=1)


@pytest.mark.lightning
@pytest.mark.torch
def test_something_every_n_batches() -> None:
    def weigh(self: Any, loss: Any, batch_idx: Any) -> Any:
        if batch_idx % 3 == 0:
            loss = loss * 2
        if 10 < self.global_step < 15 and self.current_epoch:
            loss = loss + 0 * loss
        return loss

    compare(weigh, compiles=6)


@pytest.mark.lightning
@pytest.mark.torch
def test_keys_made_from_host_numbers() -> None:
    def weigh(self: Any, loss: Any, batch_idx: Any) -> Any:
        self.log(f"epoch {self.current_epoch}", self.current_epoch * 1.0)
        self.log("progress", batch_idx / self.trainer.num_training_batches)
        return loss

    compare(weigh, compiles=3)


@pytest.mark.lightning
@pytest.mark.torch
def test_lists_dictionaries_and_loops_by_host_numbers() -> None:
    def weigh(self: Any, loss: Any, batch_idx: Any) -> Any:
        loss = loss * [1.0, 0.5, 0.25][self.current_epoch] * {0: 1.0, 1: 2.0}[batch_idx % 2]
        for i in range(self.current_epoch):
            loss = loss + i
        return loss

    compare(weigh, compiles=6)


@pytest.mark.lightning
@pytest.mark.torch
def test_a_counter_that_decides() -> None:
    def prepare(self: Any) -> None:
        self.count, self.rate = 0, 1.0

    def weigh(self: Any, loss: Any, batch_idx: Any) -> Any:
        self.count += 1
        self.rate *= 0.95
        if self.count % 5 == 0:
            return loss * 3 * self.rate
        return loss * self.rate

    outcome = compare(weigh, compiles=2, prepare=prepare)
    assert outcome.module.count == 24  # the run ends with its third epoch
    assert outcome.module.rate == pytest.approx(0.95**24, rel=1e-12)


@pytest.mark.lightning
@pytest.mark.torch
def test_the_last_batch_of_an_epoch() -> None:
    compare(lambda self, loss, batch_idx: loss * 2 if self.trainer.is_last_batch else loss, compiles=2)


@pytest.mark.lightning
@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:.*returned `None`")
def test_skipping_batches_by_their_number() -> None:
    def weigh(self: Any, loss: Any, batch_idx: Any) -> Any:
        return None if batch_idx == 2 else loss

    compare(weigh, compiles=2)


@pytest.mark.lightning
@pytest.mark.torch
def test_stopping_by_the_step_number() -> None:
    def weigh(self: Any, loss: Any, batch_idx: Any) -> Any:
        if self.global_step == 11:
            self.trainer.should_stop = True
        return loss

    outcome = compare(weigh, compiles=2)
    assert outcome.trainer.global_step == 12


def test_stopping_by_a_traced_value_names_the_hook() -> None:
    def decide(self: Any, loss: Any, batch_idx: Any) -> Any:
        if loss < 100:
            self.trainer.should_stop = True
        return loss

    def assign(self: Any, loss: Any, batch_idx: Any) -> Any:
        self.trainer.should_stop = loss < 100
        return loss

    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        run(type("Body", (Regression,), {"weigh": decide}), DATA, steps=2)
    assert "on_train_batch_end" in "".join(caught.value.__notes__)
    with pytest.raises(RuntimeError, match=r"self\.trainer\.should_stop.*test_host_numbers\.py.*on_train_batch_end"):
        run(type("Body", (Regression,), {"weigh": assign}), DATA, steps=2)


# --- what people read from the trainer --------------------------------------------------------------------------------


class Scheduled(Regression):
    def weigh(self, loss: Any, batch_idx: Any) -> Any:
        lr = self.optimizers().param_groups[0]["lr"]
        return loss * (1 + lr) + self.lr_schedulers().get_last_lr()[0]

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.1)
        return [optimizer], [StepLR(optimizer, 1, 0.5)]


def test_the_learning_rate_is_an_input_of_the_step() -> None:
    outcome = check(Scheduled, DATA)
    assert outcome.trainer._engine.trace_counts == {"train": 1}
    first, second = outcome.logged[7], outcome.logged[8]
    assert first["returned loss"] == pytest.approx(1.1 * first["loss"] + 0.1, rel=1e-9)
    assert second["returned loss"] == pytest.approx(1.05 * second["loss"] + 0.05, rel=1e-9)


def test_setting_the_learning_rate_in_a_step_names_the_hook() -> None:
    def weigh(self: Any, loss: Any, batch_idx: Any) -> Any:
        self.optimizers().param_groups[0]["lr"] = 0.01
        return loss

    body = type("Body", (Scheduled,), {"weigh": weigh})
    with pytest.raises(RuntimeError, match=r"param_groups.*test_host_numbers\.py.*on_train_batch_start"):
        run(body, DATA, steps=2)


class Validated(Regression):
    def validation_step(self, batch: Any, batch_idx: Any) -> None:
        x, y = batch
        self.log("val", ((self.net(x) - y) ** 2).mean())

    def weigh(self, loss: Any, batch_idx: Any) -> Any:
        if "val" in self.trainer.callback_metrics:
            return loss + self.trainer.callback_metrics["val"]
        return loss


def test_metrics_of_the_trainer_are_inputs_of_the_step() -> None:
    outcome = check(Validated, DATA, val_data=DATA, num_sanity_val_steps=0)
    assert outcome.trainer._engine.trace_counts == {"train": 2, "validate": 1}
    row = outcome.logged[12]
    assert row["returned loss"] == pytest.approx(row["loss"] + row["val"], rel=1e-9)


def test_a_metric_that_is_not_there_is_the_user_s_error() -> None:
    def weigh(self: Any, loss: Any, batch_idx: Any) -> Any:
        return loss * self.trainer.callback_metrics["absent"]

    with pytest.raises(KeyError, match="absent"):
        run(type("Body", (Regression,), {"weigh": weigh}), DATA, steps=2)


class Loaders(pl.LightningDataModule):
    """Data and settings; `scale` changes between the epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.classes, self.words = 1.0, 2, ["a", "b"]

    def train_dataloader(self) -> Any:
        return pl.ArrayLoader(tuple(np.asarray(a, np.float32) for a in DATA), batch_size=4)


class UsesDatamodule(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def weigh(self, loss: Any, batch_idx: Any) -> Any:
        datamodule = self.trainer.datamodule
        return loss * datamodule.scale + jnp.ones(datamodule.classes).sum() * len(datamodule.words)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_train_epoch_end(self) -> None:
        self.trainer.datamodule.scale *= 0.5
        if self.current_epoch == 1:
            self.trainer.datamodule.words.append("c")


def test_attributes_of_the_datamodule_are_watched_constants() -> None:
    found = []
    for jit in (True, False):
        module = UsesDatamodule()
        trainer = pl.Trainer(**QUIET, max_epochs=3, jit=jit)
        trainer.fit(module, datamodule=Loaders())
        found.append(module.losses)
        if jit:
            assert trainer._engine.trace_counts == {"train": 3}
    np.testing.assert_allclose(*found, rtol=1e-5)


def test_calling_the_trainer_in_a_step_names_the_hook() -> None:
    def weigh(self: Any, loss: Any, batch_idx: Any) -> Any:
        self.trainer.save_checkpoint("x.ckpt")
        return loss

    with pytest.raises(RuntimeError, match=r"self\.trainer\.save_checkpoint.*test_host_numbers\.py.*hook"):
        run(type("Body", (Regression,), {"weigh": weigh}), DATA, steps=2)


# --- everywhere else ------------------------------------------------------------------------------------------------


class Everywhere(Regression):
    """Host numbers in every kind of step."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.seen = 0

    def weigh(self, loss: Any, batch_idx: Any) -> Any:
        self.count += 1
        return loss * (2 if self.count % 3 == 0 else 1)

    def validation_step(self, batch: Any, batch_idx: Any, dataloader_idx: int = 0) -> None:
        x, y = batch
        self.seen += 1
        error = ((self.net(x) - y) ** 2).mean() * (1 + self.seen)
        self.log(f"val_{dataloader_idx}", error if batch_idx % 2 else -error, add_dataloader_idx=False)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: Any) -> Any:
        return self.net(batch[0]) * (batch_idx + 1)


def _loader(size: int = 8) -> Any:
    return pl.ArrayLoader(tuple(np.asarray(a, np.float32) for a in DATA), batch_size=size)


@pytest.mark.parametrize("flags", [{}, {"accumulate_grad_batches": 3}, {"devices": 8, "strategy": "ddp"}])
def test_host_numbers_in_every_kind_of_step(flags: dict[str, Any]) -> None:
    """Eight devices get one row each, so that a batch has as many rows as on one."""
    size = 8 // flags.get("devices", 1)
    found = []
    for jit in (True, False):
        module = Everywhere()
        trainer = pl.Trainer(**{**QUIET, **flags}, max_epochs=3, jit=jit, num_sanity_val_steps=0)
        trainer.fit(module, _loader(size), [_loader(size), _loader(size)])
        values = dict(trainer.callback_metrics)
        values |= trainer.test(module, [_loader(size)], verbose=False)[0]
        predictions = trainer.predict(module, _loader(size))
        state = {name: np.asarray(value) for name, value in module.state_dict().items()}
        found.append((module.count, module.seen, values, state, np.concatenate([np.asarray(p) for p in predictions])))
        if jit and not flags:
            assert trainer._engine.trace_counts == {"train": 2, "validate": 4, "test": 2, "predict": 1}
    compiled, eager = found
    assert compiled[:2] == eager[:2]
    assert compiled[2].keys() == eager[2].keys()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5), compiled[2:], eager[2:])


class Counting(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    weigh = Everywhere.weigh


def test_a_counter_goes_on_after_a_resume(tmp_path: Any) -> None:
    whole, first, second = Counting(), Counting(), Counting()
    pl.Trainer(**QUIET, max_epochs=4).fit(whole, _loader())
    trainer = pl.Trainer(**QUIET, max_epochs=2)
    trainer.fit(first, _loader())
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    assert first.count == 8
    pl.Trainer(**QUIET, max_epochs=4).fit(second, _loader(), ckpt_path=tmp_path / "half.ckpt")
    assert second.count == whole.count == 16
    for name, value in whole.state_dict().items():
        np.testing.assert_array_equal(second.state_dict()[name], value)


class LooksBack(Regression):
    """Reads what the step before has logged, without any hook that would let the trainer stop in between."""

    def weigh(self, loss: Any, batch_idx: Any) -> Any:
        if self.trainer.is_last_batch:
            loss = loss * 2
        return loss + self.trainer.callback_metrics.get("loss", 0.5) * loss


def test_what_the_step_before_has_logged_is_never_stale() -> None:
    states = []
    for jit in (True, False):
        module = LooksBack()
        data = tuple(np.asarray(a, np.float32) for a in DATA)
        pl.Trainer(**QUIET, max_epochs=4, jit=jit).fit(module, pl.ArrayLoader(data, batch_size=2))
        states.append({name: np.asarray(value) for name, value in module.state_dict().items()})
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7), *states)


class HookChanges(Regression):
    """A coefficient, a flag and a list that hooks change."""

    def __init__(self) -> None:
        super().__init__()
        self.beta, self.warm, self.weights = 0.1, True, [1.0, 2.0]
        self.save_hyperparameters({"scale": 1.0})

    def weigh(self, loss: Any, batch_idx: Any) -> Any:
        weight = self.weights[0] if self.warm else self.weights[1]
        return loss * self.beta * weight * self.hparams.scale

    def on_train_epoch_start(self) -> None:
        self.beta = 0.1 * (self.current_epoch + 1)
        self.warm = self.current_epoch < 2
        if self.current_epoch == 3:
            self.weights[1] = 5.0
            self.hparams.scale = 2.0


def test_what_hooks_change_is_never_stale() -> None:
    """One compilation, one for the coefficient, one for the flag, one for the list and the hparams."""
    outcome = check(HookChanges, DATA, steps=40)
    assert outcome.trainer._engine.trace_counts == {"train": 4}


class Mixup(Regression):
    """Mixup with our keys: a new coefficient at every step."""

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        x, y = batch
        mix = jax.random.beta(self.next_rng(), 0.4, 0.4)
        order = jax.random.permutation(self.next_rng(), x.shape[0])
        x, y = mix * x + (1 - mix) * x[order], mix * y + (1 - mix) * y[order]
        loss = ((self.net(x) - y) ** 2).mean()
        self.log("mix", mix)
        return loss


def test_mixup_draws_anew_at_every_step() -> None:
    outcome = check(Mixup, DATA)
    assert outcome.trainer._engine.trace_counts == {"train": 1}
    assert len({row["mix"] for row in outcome.logged}) == 20


def test_mixup_with_numpy_names_next_rng() -> None:
    def weigh(self: Any, loss: Any, batch_idx: Any) -> Any:
        return loss * np.random.beta(0.4, 0.4)

    with pytest.raises(
        RuntimeError, match=r"drew random numbers from numpy\.random at test_host_numbers\.py.*next_rng"
    ):
        run(type("Body", (Regression,), {"weigh": weigh}), DATA, steps=2)
