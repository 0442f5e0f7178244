"""What a run keeps alive on the device: the training state once, and no outputs of steps that are over."""

from __future__ import annotations

import gc
import weakref

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest

import jaxlightning as jl

WIDTH, ROWS = 137, 6  # shapes that nothing else here has
PARAMETERS, OUTPUTS = (WIDTH, WIDTH), (ROWS, WIDTH)

pytestmark = pytest.mark.slow


class Net(jl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Dense(WIDTH)

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        self.log("loss", (out**2).mean(), on_epoch=True)
        return {"loss": (out**2).mean(), "out": out}

    def validation_step(self, batch, batch_idx):
        out = self.net(batch[0])
        self.log("val_loss", (out**2).mean())
        return out

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])

    def configure_optimizers(self):
        return optax.adam(1e-3)


def loader(batches: int = 4) -> jl.ArrayLoader:
    x = np.random.default_rng(0).normal(size=(batches * ROWS, WIDTH)).astype(np.float32)
    return jl.ArrayLoader((x,), batch_size=ROWS)


def trainer(*callbacks: jl.Callback, **flags) -> jl.Trainer:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return jl.Trainer(**{"max_epochs": 2, "callbacks": list(callbacks), "log_every_n_steps": 1, **quiet, **flags})


def alive(shape: tuple[int, ...]) -> int:
    gc.collect()
    return sum(array.shape == shape and not array.is_deleted() for array in jax.live_arrays())


class Count(jl.Callback):
    """Counts at the end of every epoch and pass."""

    def __init__(self, *shapes):
        self.shapes = shapes
        self.found: list[tuple[str, list[int]]] = []

    def count(self, where, trainer):
        trainer._engine.block_until_ready()
        self.found.append((where, [alive(shape) for shape in self.shapes]))

    def on_train_epoch_end(self, trainer, pl_module):
        self.count("train", trainer)

    def on_validation_epoch_end(self, trainer, pl_module):
        self.count("validate", trainer)

    def on_test_epoch_end(self, trainer, pl_module):
        self.count("test", trainer)


def test_parameters_and_the_two_moments_of_adam_are_there_once() -> None:
    count = Count(PARAMETERS)
    run, model = trainer(count), Net()
    run.fit(model, loader(), loader())
    run.validate(model, loader(), verbose=False)
    run.test(model, loader(), verbose=False)
    assert {tuple(found) for _, found in count.found[1:]} == {(3,)}
    assert {where for where, _ in count.found} == {"train", "validate", "test"}
    assert alive(PARAMETERS) == 3


def test_views_of_the_state_are_gone_when_nobody_holds_them() -> None:
    run, model = trainer(), Net()
    run.fit(model, loader(), loader())
    view = run.state.params
    assert alive(PARAMETERS) == 4
    del view
    assert alive(PARAMETERS) == 3


def test_the_state_is_gone_with_the_trainer_and_the_module() -> None:
    run, model = trainer(), Net()
    run.fit(model, loader(), loader())
    gone = weakref.ref(model)
    del run, model
    assert alive(PARAMETERS) == 0
    assert gone() is None


def test_outputs_that_no_hook_reads_are_not_kept() -> None:
    count = Count(OUTPUTS)
    run, model = trainer(count), Net()
    run.fit(model, loader(), loader())
    run.test(model, loader(), verbose=False)
    assert {tuple(found) for _, found in count.found} == {(0,)}


class Watch(jl.Callback):
    """Reads the outputs of every batch, and looks whether those of the batch before are gone."""

    def __init__(self):
        self.last: list[weakref.ref] = []
        self.kept: list[int] = []

    def see(self, array):
        gc.collect()
        self.kept.append(sum(ref() is not None for ref in self.last[:-1]))
        self.last.append(weakref.ref(array))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.see(outputs["out"])

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        self.see(outputs)

    on_test_batch_end = on_validation_batch_end


def test_outputs_that_a_hook_reads_live_until_the_next_batch() -> None:
    watch = Watch()
    run, model = trainer(watch, num_sanity_val_steps=0), Net()
    run.fit(model, loader(), loader())
    run.test(model, loader(), verbose=False)
    assert len(watch.kept) == 4 * 2 + 4 * 2 + 4
    assert watch.kept == [0] * 20
    gc.collect()
    assert all(ref() is None for ref in watch.last)


def test_predictions_that_are_not_wanted_are_not_kept() -> None:
    run, model = trainer(), Net()
    run.fit(model, loader(), loader())
    assert run.predict(model, loader(), return_predictions=False) is None
    assert alive(OUTPUTS) == 0
