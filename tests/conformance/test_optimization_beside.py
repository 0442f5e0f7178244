"""OP and SC: what no recorded trace says about optimizers and schedulers; with Lightning beside."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from support.beside import Side, caught, same

pytestmark = [pytest.mark.torch, pytest.mark.lightning]


def schedulers(side: Side) -> Any:
    return importlib.import_module("jaxlightning.optim.lr_scheduler" if side.ours else "torch.optim.lr_scheduler")


def halving(side: Side, count: int = 1, **extra: Any) -> type:
    """A module whose learning rate halves after every epoch, once for each scheduler."""

    def configure_optimizers(self: Any) -> Any:
        optimizer = side.sgd(self, lr=0.5)
        return [optimizer], [schedulers(side).ExponentialLR(optimizer, 0.5) for _ in range(count)]

    return type("Model", (side.Tiny,), {"configure_optimizers": configure_optimizers, **extra})


def rates(trainer: Any) -> list[float]:
    return [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]


@pytest.mark.catalogue("OP02")
def test_no_optimizer_at_all() -> None:
    def scenario(side: Side) -> Any:
        model = type("Model", (side.Tiny,), {"configure_optimizers": lambda self: None})()
        trainer = side.trainer(limit_val_batches=0)
        with caught() as warned:
            trainer.fit(model)
        says = any(kind == "UserWarning" and "will run with no optimizer" in text for kind, text in warned)
        return trainer.global_step, says

    assert same(scenario) == [3, True]


@pytest.mark.catalogue("SC05")
def test_a_checkpoint_at_the_end_of_an_epoch_holds_the_scheduler_after_its_step() -> None:
    def scenario(side: Side) -> Any:
        saved: list[Any] = []

        class Saves(side.Callback):  # type: ignore[name-defined,misc]
            def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
                state = trainer._checkpoint_connector.dump_checkpoint()["lr_schedulers"][0]
                saved.append([state["last_epoch"], rates(trainer)])

            def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
                saved.append(rates(trainer))

        side.trainer(max_epochs=3, num_sanity_val_steps=0, callbacks=Saves()).fit(halving(side)())
        return saved

    assert same(scenario)[:2] == [[0.25], [1, [0.25]]]


@pytest.mark.catalogue("SC10")
@pytest.mark.parametrize("plateau", [False, True])
def test_the_hook_that_steps_a_scheduler_gets_the_metric_or_none(plateau: bool) -> None:
    def scenario(side: Side) -> Any:
        metrics: list[Any] = []

        class Model(halving(side)):  # type: ignore[misc]
            def on_train_epoch_end(self) -> None:
                self.log("watched", 2.0)

            def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
                metrics.append([type(scheduler).__name__, metric if metric is None else float(metric)])
                super().lr_scheduler_step(scheduler, metric)

            def configure_optimizers(self) -> Any:
                if not plateau:
                    return super().configure_optimizers()
                optimizer = side.sgd(self, lr=0.5)
                scheduler = schedulers(side).ReduceLROnPlateau(optimizer, patience=0)
                return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "watched"}

        trainer = side.trainer(max_epochs=3, limit_val_batches=0)
        trainer.fit(Model())
        return metrics, rates(trainer)

    metrics, after = same(scenario)
    assert [metric for _, metric in metrics] == [2.0 if plateau else None] * 3
    assert len(after) == 1


@pytest.mark.catalogue("SC12")
def test_an_epoch_that_is_cut_short_still_steps_its_scheduler() -> None:
    def scenario(side: Side) -> Any:
        seen: list[Any] = []

        def on_train_batch_start(self: Any, batch: Any, batch_idx: int) -> int | None:
            seen.append([self.trainer.current_epoch, batch_idx, rates(self.trainer)])
            return -1 if batch_idx == 1 else None

        trainer = side.trainer(max_epochs=3, limit_val_batches=0)
        trainer.fit(halving(side, on_train_batch_start=on_train_batch_start)())
        return seen, rates(trainer)

    seen, after = same(scenario)
    assert len(seen) == 6
    assert after == [0.0625]


@pytest.mark.catalogue("SC13")
@pytest.mark.parametrize("count", [0, 1, 2])
def test_what_lr_schedulers_gives(count: int) -> None:
    def scenario(side: Side) -> Any:
        found: list[Any] = []

        def on_train_start(self: Any) -> None:
            got = self.lr_schedulers()
            found.append([type(each).__name__ for each in got] if isinstance(got, list) else type(got).__name__)

        side.trainer(limit_val_batches=0).fit(halving(side, count, on_train_start=on_train_start)())
        return found

    one = "ExponentialLR"
    assert same(scenario) == [["NoneType", one, [one, one]][count]]
