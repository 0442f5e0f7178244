"""`Trainer(log_compiles=True)`: one line per compilation, with the reason; and nothing is compiled twice."""

from __future__ import annotations

import logging
import re

import flax.linen as nn
import numpy as np
import optax
import pytest

import jaxlightning as jl


class Net(jl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Dense(4)
        self.table = [1.0, 2.0]

    def training_step(self, batch, batch_idx):
        return (self.net(batch["x"]) ** 2).mean() * self.table[0]

    def validation_step(self, batch, batch_idx):
        self.log("loss", (self.net(batch["x"]) ** 2).mean())

    test_step = validation_step

    def configure_optimizers(self):
        return optax.sgd(0.1)


class Batches:
    def __init__(self, *rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __iter__(self):
        return iter([{"x": np.ones((n, 3), np.float32)} for n in self.rows])


def trainer(**flags):
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return jl.Trainer(**{"max_epochs": 1, "num_sanity_val_steps": 0, "log_compiles": True, **quiet, **flags})


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, logger="jaxlightning")
    return lambda kind: [
        record.getMessage() for record in caplog.records if f"compiled the {kind} step (" in record.getMessage()
    ]


def test_a_line_says_how_long_how_many_operations_and_how_much_memory(lines) -> None:
    trainer(limit_val_batches=0).fit(Net(), Batches(8), Batches(8))
    (line,) = lines("train")
    assert line.startswith("Net: compiled the train step (number 1 of its kind) in ")
    assert "because it is the first" in line
    assert re.search(r"One call: [0-9.e+]+ floating-point operations; arguments [0-9.]+ (B|KiB), results", line)
    assert "in place" in line
    assert "temporary" in line


def test_nothing_is_reported_without_the_flag(lines) -> None:
    trainer(limit_val_batches=0, log_compiles=False).fit(Net(), Batches(8), Batches(8))
    assert not lines("train")


def test_another_shape_is_named_with_its_leaf(lines) -> None:
    trainer(limit_val_batches=0).fit(Net(), Batches(8, 8, 5), Batches(8))
    _, second = lines("train")
    assert "because batch['x'] is float32[5,3] instead of float32[8,3]." in second
    assert "number 2" in second


def test_a_changed_attribute_is_named(lines) -> None:
    class Changing(Net):
        def on_train_epoch_start(self):
            self.table = [float(self.current_epoch + 1), 2.0]

    trainer(limit_val_batches=0, max_epochs=2).fit(Changing(), Batches(8), Batches(8))
    assert "self.table" in lines("train")[1]
    assert "changed, which it had read as a constant" in lines("train")[1]


def test_a_decision_of_python_is_named(lines) -> None:
    class Deciding(Net):
        def training_step(self, batch, batch_idx):
            loss = (self.net(batch["x"]) ** 2).mean()
            return loss * 2 if batch_idx % 2 == 0 else loss

    trainer(limit_val_batches=0).fit(Deciding(), Batches(8, 8, 8, 8), Batches(8))
    assert len(lines("train")) == 2
    assert "Python decided differently in it: " in lines("train")[1]
    assert "batch_idx % 2" in lines("train")[1]


def test_another_structure_of_the_batch_is_named(lines) -> None:
    class Mixed(Batches):
        def __iter__(self):
            x = np.ones((8, 3), np.float32)
            return iter([{"x": x}, {"x": x, "more": x}])

    trainer(limit_val_batches=0).fit(Net(), Mixed(8, 8), Batches(8))
    assert "the batch has another structure (with batch['more'])" in lines("train")[1]


def test_another_use_of_the_outputs_is_named(lines) -> None:
    class Reads(jl.Callback):
        def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
            assert outputs is None

    model, run = Net(), trainer()
    run.validate(model, Batches(8), verbose=False)
    run.callbacks.append(Reads())
    run.validate(model, Batches(8), verbose=False)
    assert "because outputs is True instead of False" in lines("validate")[1]


def test_fused_steps_are_reported(lines) -> None:
    trainer(limit_val_batches=0, steps_per_dispatch=4).fit(Net(), Batches(*[8] * 12), Batches(8))
    assert len(lines("train_fused")) == 1


def test_fit_validate_and_test_compile_each_step_once(lines) -> None:
    model, run = Net(), trainer(max_epochs=2, num_sanity_val_steps=1)
    run.fit(model, Batches(8, 8), Batches(8))
    run.validate(model, Batches(8), verbose=False)
    run.test(model, Batches(8), verbose=False)
    run.validate(model, Batches(8), verbose=False)
    assert model._engine.trace_counts == {"train": 1, "validate": 1, "test": 1}
    assert [len(lines(kind)) for kind in ("train", "validate", "test")] == [1, 1, 1]


def test_a_second_fit_compiles_only_the_update_of_its_new_optimizer_again(lines) -> None:
    model, run = Net(), trainer()
    run.fit(model, Batches(8), Batches(8))
    run.fit_loop.max_epochs = 2
    run.fit(model, Batches(8), Batches(8))
    assert model._engine.trace_counts == {"train": 2, "validate": 1}
    assert "because the run has new optimizers" in lines("train")[1]
