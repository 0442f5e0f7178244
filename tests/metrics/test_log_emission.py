"""When logged values are read from the device and sent: at log points, late when nobody could notice."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest


class CountReads:
    """Counts what brings an array to the host."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        inner = jax.device_get

        def device_get(tree: Any) -> Any:
            self.count += 1
            return inner(tree)

        monkeypatch.setattr(jax, "device_get", device_get)


def test_nothing_is_read_between_log_points(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Module(fake.Module):  # type: ignore[name-defined,misc]
        def training_step(self, batch: Any, batch_idx: int) -> None:
            for i in range(10):
                self.log(f"v{i}", jnp.float32(batch_idx), on_step=True, on_epoch=True, prog_bar=True)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.log("host", jnp.float32(batch_idx) * 2, on_step=True, on_epoch=True)

    reads = CountReads(monkeypatch)
    counts: list[int] = []

    class Logger(fake.Logger):  # type: ignore[name-defined,misc]
        def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
            counts.append(reads.count)
            super().log_metrics(metrics, step)

    trainer = fake.Trainer(Module(), loggers=(Logger(),), log_every_n_steps=5, progress_bar_callback=object())
    trainer.fit(fake.batches(*[2] * 20))
    assert counts[:4] == [1, 2, 3, 4]  # at batches 5, 10, 15, 20: one read each
    assert trainer.connector.progress_bar_cached["v0_epoch"] == 9.5
    assert trainer.callback_metrics["host_epoch"] == 19.0
    assert trainer.lightning_module._engine.reads == 1


def test_equal_plans_of_an_eager_engine_pile_up_nowhere(fake: Any) -> None:
    import dataclasses

    class Module(fake.Module):  # type: ignore[name-defined,misc]
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.log("x", jnp.float32(batch_idx), on_step=True, on_epoch=True)
            if batch_idx % 2:
                self.log("odd", jnp.float32(batch_idx))

    trainer = fake.Trainer(Module(), log_every_n_steps=1)
    step = trainer.lightning_module._engine.step

    def eager(*args: Any) -> Any:
        out = step(*args)
        out.plan = dataclasses.replace(out.plan)
        return out

    trainer.lightning_module._engine.step = eager
    seen = []
    inner = trainer.connector.update_train_epoch_metrics

    def look() -> None:
        results = trainer.connector._collections["train"]
        seen.append((len(results._older), len(results._active_plans), len(results._known._by_id)))
        inner()

    trainer.connector.update_train_epoch_metrics = look
    trainer.fit(fake.batches(*[2] * 150))
    assert seen[0][:2] == (1, 2)
    assert seen[0][2] <= 64
    assert trainer.callback_metrics == {"x": 74.5, "x_step": 149.0, "odd": 149.0, "x_epoch": 74.5}


@pytest.mark.parametrize("collect", [0.0, 3600.0])
def test_late_emission_sends_the_same_when_it_was_collected(
    fake: Any, monkeypatch: pytest.MonkeyPatch, collect: float
) -> None:
    monkeypatch.setattr("jaxlightning.metrics._emission._COLLECT", collect)
    moments: list[tuple[str, Any]] = []

    class Module(fake.Module):  # type: ignore[name-defined,misc]
        def training_step(self, batch: Any, batch_idx: int) -> None:
            moments.append(("step", batch_idx))
            self.log("x", jnp.float32(batch_idx))

    class Logger(fake.Logger):  # type: ignore[name-defined,misc]
        def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
            moments.append(("log", step))

    trainer = fake.Trainer(Module(), loggers=(Logger(),), log_every_n_steps=2)
    trainer.connector.may_be_late = lambda: True
    trainer.fit(fake.batches(2, 2, 2, 2))
    if collect:
        assert moments == [("step", 0), ("step", 1), ("step", 2), ("step", 3), ("log", 1), ("log", 3)]
    else:
        assert moments == [("step", 0), ("step", 1), ("step", 2), ("log", 1), ("step", 3), ("log", 3)]


def test_emission_is_late_only_when_nobody_could_notice(fake: Any) -> None:
    trainer = fake.Trainer(fake.Module())
    connector = trainer.connector
    assert connector.may_be_late() is False  # no hook table: nothing is known
    for user_code, loggers, expected in ((False, [], True), (True, [], False), (False, [fake.Logger()], False)):
        connector.late_emission = None
        trainer._hooks = SimpleNamespace(wants_outputs=lambda name, answer=user_code: answer)
        trainer.loggers = loggers
        assert connector.may_be_late() is expected
