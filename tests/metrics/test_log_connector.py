"""The log connector's own parts: its dictionaries, versions of metrics, its state in pickles and checkpoints."""

from __future__ import annotations

import json
import pickle
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest


def test_a_host_array_is_reduced_on_the_device_with_every_reduction(fake: Any) -> None:
    class Module(fake.Module):  # type: ignore[name-defined,misc]
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            value = [5.0, 1.0, 3.0][batch_idx]
            for fx in ("mean", "sum", "min", "max"):
                self.log(fx, jnp.float32(value), on_step=False, on_epoch=True, reduce_fx=fx)
                mixed = value if batch_idx == 1 else jnp.array([value], jnp.bfloat16)
                self.log(f"mixed_{fx}", mixed, on_step=False, on_epoch=True, reduce_fx=fx)

    trainer = fake.Trainer(Module())
    trainer.fit(fake.batches(2, 2, 1))
    expected = {"mean": 3.0, "sum": 9.0, "min": 1.0, "max": 5.0}
    assert fake.rounded(trainer.callback_metrics) == expected | {f"mixed_{k}": v for k, v in expected.items()}


def test_callbacks_may_write_into_callback_metrics(fake: Any) -> None:
    class Module(fake.Module):  # type: ignore[name-defined,misc]
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.log("x", float(batch_idx))

        def on_train_batch_start(self, *_: Any) -> None:
            self._trainer.callback_metrics.update(mine=7.0)
            self._trainer.connector.update_callback_metrics({"lr": 0.1})

    trainer = fake.Trainer(Module())
    trainer.fit(fake.batches(2))
    assert trainer.callback_metrics == {"mine": 7.0, "lr": 0.1, "x": 0.0}


def test_log_metrics_takes_arrays_and_the_step_key(fake: Any) -> None:
    logger = fake.Logger()
    trainer = fake.Trainer(fake.Module(), loggers=(logger,))
    trainer.connector.log_metrics({"a": jnp.array([1.5]), "step": 4})
    trainer.connector.log_metrics({"a": np.float32(2.5)}, step=9)
    trainer.connector.log_metrics({"a": 3.5})
    trainer.connector.log_metrics({})
    assert logger.calls == [
        {"step": 4, "metrics": {"a": 1.5}},
        {"step": 9, "metrics": {"a": 2.5}},
        {"step": 0, "metrics": {"a": 3.5, "epoch": 0}},
    ]
    assert fake.rounded(trainer.logged_metrics) == {"a": 3.5, "step": 4}


def test_the_version_of_a_metric_tells_new_measurements_from_old(fake: Any) -> None:
    seen: list[Any] = []

    class Module(fake.Module):  # type: ignore[name-defined,misc]
        def training_step(self, batch: Any, batch_idx: int) -> None:
            if batch_idx != 1:
                self.log("x", 1.0)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("v", 1.0)

        def on_train_batch_end(self, *_: Any) -> None:
            connector = self._trainer.connector
            seen.append((connector.metric_version("x"), connector.metric_version("v")))

    trainer = fake.Trainer(Module(), max_epochs=2)
    trainer.fit(fake.batches(2, 2, 2), [fake.batches(2)])
    x, v = zip(*seen, strict=True)
    assert x[0] == x[1] != x[2] != x[3]
    assert v[3] == v[4] == v[5]
    trainer.connector.update_callback_metrics({"lr": 1.0})
    assert trainer.connector.metric_version("lr") != trainer.connector.metric_version("lr")


def test_values_survive_pickling(fake: Any) -> None:
    class Module(fake.Module):  # type: ignore[name-defined,misc]
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.log("x", jnp.float32(batch_idx), prog_bar=True)

    trainer = fake.Trainer(Module())
    trainer.fit(fake.batches(2, 2))
    connector = trainer.connector
    connector._trainer = SimpleNamespace(state=SimpleNamespace(stage=None), loggers=[], lightning_module=None)
    again = pickle.loads(pickle.dumps(connector))
    assert again.callback_metrics == {"x": 1.0}
    again.begin_run("fit")
    assert again.callback_metrics == {}


@pytest.mark.parametrize("where", ["training_step", "on_train_batch_end"])
def test_an_epoch_goes_on_from_a_checkpoint(fake: Any, where: str) -> None:
    """Stopped after two of three batches, the sums and the last step values are those of an unbroken epoch."""

    class Module(fake.Module):  # type: ignore[name-defined,misc]
        pass

    def call(self: Any, *args: Any) -> None:
        value = jnp.float32(args[-1] + 1)
        for fx in ("mean", "sum", "min", "max"):
            self.log(fx, value, on_step=True, on_epoch=True, reduce_fx=fx)
        if args[-1] == 1:
            self.log("once", value, on_step=True, on_epoch=True)

    setattr(Module, where, call)
    logger, train = fake.Logger(), fake.batches(2, 1, 3)
    whole = fake.Trainer(Module(), loggers=(logger,), log_every_n_steps=1)
    whole.fit(train)

    broken = fake.Trainer(Module())
    saved: list[Any] = []
    inner = broken.connector.update_train_step_metrics
    broken.connector.update_train_step_metrics = lambda: (inner(), saved.append(broken.connector.state_dict()))
    broken.fit(train)
    state = json.loads(json.dumps(saved[1]))

    later = fake.Logger()
    resumed = fake.Trainer(Module(), loggers=(later,), log_every_n_steps=1)
    connector = resumed.connector
    begin = connector.on_epoch_start

    def on_epoch_start(stage: str) -> None:
        begin(stage)
        connector.load_state_dict(state)

    connector.on_epoch_start = on_epoch_start
    resumed.fit_loop.epoch_loop._batches_that_stepped = 2
    _last_batch_only(resumed, train)
    assert later.calls == logger.calls[2:]


def _last_batch_only(trainer: Any, train: list[Any]) -> None:
    """Runs the third batch under its own index."""
    step, hook = trainer.step, trainer.hook

    def shifted(args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*args[:-1], args[-1] + 2) if args else args

    trainer.step = lambda stage, name, *args: step(stage, name, *shifted(args))
    trainer.hook = lambda name, *args: hook(name, *(shifted(args) if "batch" in name else args))
    trainer.fit(train[2:])
