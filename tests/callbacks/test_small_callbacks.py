from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from jaxlightning.callbacks import BasePredictionWriter, Callback, GradientAccumulationScheduler, LambdaCallback
from jaxlightning.utilities.exceptions import MisconfigurationException

MakeTrainer = Callable[..., Any]


# GradientAccumulationScheduler


@pytest.mark.lightning
@pytest.mark.parametrize("scheduling", [{0: 1, 1: 4, 3: 2}, {2: 3}, {0: 8}, {5: 1, 1: 2}])
def test_the_schedule_gives_the_factors_of_lightning(scheduling: dict[int, int], make_trainer: MakeTrainer) -> None:
    from lightning.pytorch.callbacks import GradientAccumulationScheduler as Theirs

    ours, theirs = GradientAccumulationScheduler(dict(scheduling)), Theirs(dict(scheduling))
    assert ours.going_to_accumulate_grad_batches() == theirs.going_to_accumulate_grad_batches()
    for epoch in range(8):
        trainer = make_trainer(current_epoch=epoch)
        ours.on_train_epoch_start(trainer)
        assert trainer.accumulate_grad_batches == theirs.get_accumulate_grad_batches(epoch)


def test_the_users_schedule_stays_as_it_is() -> None:
    scheduling = {2: 3}
    GradientAccumulationScheduler(scheduling)
    assert scheduling == {2: 3}


@pytest.mark.parametrize(
    ("scheduling", "error", "message"),
    [
        ({}, TypeError, "Empty dict cannot be interpreted correct"),
        ({-1: 2}, MisconfigurationException, r"Epoch should be an int greater than or equal to 0. Got \[-1\]"),
        ({"a": 2}, MisconfigurationException, "Epoch should be an int"),
        ({0: 0}, MisconfigurationException, r"Accumulation factor should be an int greater than 0. Got \[0\]"),
        ({0: 1.5}, MisconfigurationException, "Accumulation factor should be an int"),
    ],
)
def test_a_wrong_schedule_is_refused(scheduling: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        GradientAccumulationScheduler(scheduling)


def test_nothing_else_may_accumulate(make_trainer: MakeTrainer) -> None:
    scheduler = GradientAccumulationScheduler({0: 2})
    with pytest.raises(RuntimeError, match="not supported for manual optimization"):
        scheduler.on_train_start(make_trainer(), SimpleNamespace(automatic_optimization=False))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="You have set `accumulate_grad_batches` and are using"):
        scheduler.on_train_start(
            make_trainer(accumulate_grad_batches=2),
            SimpleNamespace(automatic_optimization=True),  # type: ignore[arg-type]
        )


def test_an_overridden_optimizer_step_is_pointed_out(make_trainer: MakeTrainer) -> None:
    class Module:
        automatic_optimization = True

        def optimizer_step(self) -> None: ...

    with pytest.warns(UserWarning, match="the hooks will not be called on every batch"):
        GradientAccumulationScheduler({0: 2}).on_train_start(make_trainer(), Module())  # type: ignore[arg-type]
    GradientAccumulationScheduler({0: 1}).on_train_start(make_trainer(), Module())  # type: ignore[arg-type]


# LambdaCallback


def test_every_hook_may_be_a_function() -> None:
    hooks = [n for n, _ in inspect.getmembers(Callback, inspect.isfunction) if n.startswith("on_")]
    hooks += ["setup", "teardown"]
    called: list[str] = []
    callback = LambdaCallback(**{name: lambda *_, name=name: called.append(name) for name in hooks})
    for name in hooks:
        getattr(callback, name)(None, None)
    assert called == hooks


@pytest.mark.parametrize("name", ["on_trian_start", "state_dict", "log"])
def test_another_name_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=f"unexpected hook names: '{name}'"):
        LambdaCallback(**{name: print})


# BasePredictionWriter


class _Writer(BasePredictionWriter):
    def __init__(self, interval: Any) -> None:
        super().__init__(interval)
        self.calls: list[Any] = []

    def write_on_batch_end(
        self,
        trainer: Any,
        pl_module: Any,
        prediction: Any,
        batch_indices: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        self.calls.append(("batch", prediction, batch_indices, batch, batch_idx, dataloader_idx))

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        self.calls.append(("epoch", predictions, batch_indices))


@pytest.mark.parametrize(("interval", "kinds"), [("batch", "b"), ("epoch", "e"), ("batch_and_epoch", "be")])
def test_writes_when_the_interval_says_so(interval: str, kinds: str, make_trainer: MakeTrainer) -> None:
    writer, trainer = _Writer(interval), make_trainer()
    trainer.predict_loop.current_batch_indices = [4, 5]
    trainer.predict_loop.epoch_batch_indices = [[[4, 5]]]
    trainer.predict_loop.predictions = ["p"]
    writer.on_predict_batch_end(trainer, None, "p", "b", 3, 1)  # type: ignore[arg-type]
    writer.on_predict_epoch_end(trainer, None)  # type: ignore[arg-type]
    both = {"b": ("batch", "p", [4, 5], "b", 3, 1), "e": ("epoch", ["p"], [[[4, 5]]])}
    assert writer.calls == [both[kind] for kind in kinds]


def test_another_write_interval_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"should be one of \['batch', 'epoch', 'batch_and_epoch'\]"):
        BasePredictionWriter("something")  # type: ignore[arg-type]


def test_a_writer_must_override_what_its_interval_needs(make_trainer: MakeTrainer) -> None:
    writer = BasePredictionWriter("batch_and_epoch")
    with pytest.raises(NotImplementedError, match="must override `write_on_batch_end`"):
        writer.on_predict_batch_end(make_trainer(), None, None, None, 0)  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match="must override `write_on_epoch_end`"):
        writer.on_predict_epoch_end(make_trainer(), None)  # type: ignore[arg-type]
