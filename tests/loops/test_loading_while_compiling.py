"""Input goes on while a step is traced and compiled, where reading ahead was asked for; and nowhere else."""

from __future__ import annotations

import threading

import flax.linen as nn
import numpy as np
import optax

import jaxlightning as jl


class Batches:
    """Says when it is asked for its third batch."""

    def __init__(self):
        self.third = threading.Event()

    def __len__(self):
        return 4

    def __iter__(self):
        for i in range(4):
            if i == 2:
                self.third.set()
            yield np.ones((2, 3), np.float32)


def fit(prefetch: int, seconds: float, expected: bool) -> None:
    """Trains a step whose trace waits for the third batch to be asked for."""
    loader = Batches()

    class Net(jl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Dense(1)

        def training_step(self, batch, batch_idx):
            assert loader.third.wait(seconds) is expected
            return self.net(batch).mean()

        def configure_optimizers(self):
            return optax.sgd(0.1)

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    jl.Trainer(max_epochs=1, prefetch_batches=prefetch, **quiet).fit(Net(), loader)


def test_batches_are_read_while_the_step_is_traced() -> None:
    fit(prefetch=4, seconds=20.0, expected=True)


def test_a_loader_is_not_read_ahead_by_itself() -> None:
    fit(prefetch=0, seconds=0.2, expected=False)
