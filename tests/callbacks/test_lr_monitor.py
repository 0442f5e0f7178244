from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from support.tracing import RecordingLogger

import jaxlightning as pl
from jaxlightning.callbacks import LearningRateMonitor
from jaxlightning.utilities.exceptions import MisconfigurationException

MakeTrainer = Callable[..., Any]


class _Logger:
    def __init__(self) -> None:
        self.calls: list[tuple[int, dict[str, Any]]] = []

    def log_metrics(self, metrics: dict[str, Any], step: int) -> None:
        self.calls.append((step, dict(metrics)))


class _Optimizer:
    """What the monitor reads of an optimizer handle."""

    def __init__(
        self, name: str = "SGD", *groups: dict[str, Any], device_rates: list[float | None] | None = None
    ) -> None:
        self.name = name
        self.param_groups = [*groups] or [{"lr": 0.1, "momentum": 0, "weight_decay": 0}]
        self.state = "the state"
        self._device_rates = device_rates
        self.reads = 0

    def read_lr(self, state: Any = None) -> list[float | None]:
        assert state is None  # the handle reads its live state by itself, without a copy
        self.reads += 1
        return self._device_rates or [None for _ in self.param_groups]


def _scheduler(optimizer: _Optimizer, interval: str = "epoch", name: str | None = None) -> Any:
    return SimpleNamespace(scheduler=SimpleNamespace(optimizer=optimizer), interval=interval, name=name)


def _names(make_trainer: MakeTrainer, optimizers: list[_Optimizer], schedulers: list[Any] = []) -> list[str]:  # noqa: B006
    monitor = LearningRateMonitor()
    monitor.on_train_start(make_trainer(optimizers=optimizers, lr_scheduler_configs=schedulers, loggers=[_Logger()]))
    return list(monitor.lrs)


def test_names_follow_class_number_and_group(make_trainer: MakeTrainer) -> None:
    a, b, c = _Optimizer("SGD"), _Optimizer("SGD"), _Optimizer("Adam", {"lr": 1.0}, {"lr": 2.0})
    named = _Optimizer("SGD", {"lr": 1.0, "name": "head"}, {"lr": 1.0})
    only = _Optimizer("Lion", {"lr": 1.0, "name": "only"})
    assert _names(make_trainer, [a]) == ["lr-SGD"]
    assert _names(make_trainer, [a, b, c]) == ["lr-SGD", "lr-SGD-1", "lr-Adam/pg1", "lr-Adam/pg2"]
    assert _names(make_trainer, [named]) == ["lr-SGD/head", "lr-SGD/pg2"]
    assert _names(make_trainer, [only]) == ["lr-Lion/only"]
    assert _names(make_trainer, [a, b], [_scheduler(b)]) == ["lr-SGD", "lr-SGD-1"]
    assert _names(make_trainer, [a, c], [_scheduler(a, name="mine")]) == ["mine", "lr-Adam/pg1", "lr-Adam/pg2"]


def test_two_groups_of_one_name_are_refused(make_trainer: MakeTrainer) -> None:
    optimizer = _Optimizer("SGD", {"lr": 1.0, "name": "a"}, {"lr": 1.0, "name": "a"})
    with pytest.raises(MisconfigurationException, match=r"lr-SGD has duplicated parameter group names \{'a'\}"):
        _names(make_trainer, [optimizer])


def test_without_a_logger_it_is_refused(make_trainer: MakeTrainer) -> None:
    with pytest.raises(
        MisconfigurationException, match="Cannot use `LearningRateMonitor` callback with `Trainer` that"
    ):
        LearningRateMonitor().on_train_start(make_trainer())


def test_another_interval_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match="logging_interval should be `step` or `epoch` or `None`"):
        LearningRateMonitor("batch")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("logging_interval", "interval", "at_epoch", "at_step"),
    [
        (None, None, True, True),
        (None, "epoch", True, False),
        (None, "step", False, True),
        ("step", "epoch", False, True),
        ("epoch", "step", True, False),
    ],
)
def test_the_interval_decides_when(
    logging_interval: Any, interval: str | None, at_epoch: bool, at_step: bool, make_trainer: MakeTrainer
) -> None:
    optimizer, logger = _Optimizer(), _Logger()
    schedulers = [] if interval is None else [_scheduler(optimizer, interval)]
    trainer = make_trainer(optimizers=[optimizer], lr_scheduler_configs=schedulers, loggers=[logger])
    monitor = LearningRateMonitor(logging_interval)
    monitor.on_train_start(trainer)
    trainer.fit_loop.epoch_loop._batches_that_stepped = 5
    monitor.on_train_epoch_start(trainer)
    assert logger.calls == ([(5, {"lr-SGD": 0.1})] if at_epoch else [])
    logger.calls.clear()
    monitor.on_train_batch_start(trainer)
    assert logger.calls == ([(5, {"lr-SGD": 0.1})] if at_step else [])
    logger.calls.clear()
    trainer._logger_connector.should_update_logs = False
    monitor.on_train_batch_start(trainer)
    assert logger.calls == []
    assert monitor.lrs == {"lr-SGD": [0.1] * (at_epoch + at_step)}
    assert trainer.callback_metrics == {"lr-SGD": 0.1}


def test_momentum_and_weight_decay_are_logged_on_request(make_trainer: MakeTrainer) -> None:
    adam = _Optimizer("Adam", {"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.5})
    logger = _Logger()
    trainer = make_trainer(optimizers=[adam], loggers=[logger])
    monitor = LearningRateMonitor(log_momentum=True, log_weight_decay=True)
    monitor.on_train_start(trainer)
    assert monitor.last_momentum_values == {"lr-Adam-momentum": None}
    monitor.on_train_epoch_start(trainer)
    assert logger.calls == [(0, {"lr-Adam": 0.1, "lr-Adam-momentum": 0.9, "lr-Adam-weight_decay": 0.5})]
    assert monitor.last_momentum_values == {"lr-Adam-momentum": 0.9}
    assert monitor.last_weight_decay_values == {"lr-Adam-weight_decay": 0.5}


def test_an_optimizer_without_momentum_logs_zero_with_a_warning(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(optimizers=[_Optimizer("Adagrad", {"lr": 0.1})], loggers=[_Logger()])
    monitor = LearningRateMonitor(log_momentum=True)
    with pytest.warns(RuntimeWarning, match="some optimizers do not have momentum"):
        monitor.on_train_start(trainer)
    monitor.on_train_epoch_start(trainer)
    assert monitor.last_momentum_values == {"lr-Adagrad-momentum": 0}


def test_the_device_is_read_only_for_a_rate_that_lives_there(make_trainer: MakeTrainer) -> None:
    host, device = _Optimizer("SGD"), _Optimizer("adam", {"lr": None}, device_rates=[0.25])
    logger = _Logger()
    trainer = make_trainer(optimizers=[host, device], loggers=[logger])
    monitor = LearningRateMonitor()
    monitor.on_train_start(trainer)
    assert (host.reads, device.reads) == (0, 0)
    monitor.on_train_batch_start(trainer)
    assert (host.reads, device.reads) == (0, 1)
    assert logger.calls == [(0, {"lr-SGD": 0.1, "lr-adam": 0.25})]


def test_an_unknown_rate_is_left_out_with_one_warning(make_trainer: MakeTrainer) -> None:
    logger = _Logger()
    trainer = make_trainer(optimizers=[_Optimizer("sgd", {})], loggers=[logger])
    monitor = LearningRateMonitor()
    monitor.on_train_start(trainer)
    with pytest.warns(UserWarning, match=r"cannot know the learning rate `lr-sgd`.*inject_hyperparams"):
        monitor.on_train_batch_start(trainer)
    monitor.on_train_batch_start(trainer)
    assert logger.calls == []


class _Device(pl.LightningModule):
    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self.layer = nn.Dense(1)
        self.make = make

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        return self.layer(batch).mean()

    def configure_optimizers(self) -> Any:
        return self.make()


def _fit(make: Callable[[], Any], sink: list[dict[str, Any]]) -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=RecordingLogger(sink),
        callbacks=[LearningRateMonitor("step")],
        log_every_n_steps=2,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(_Device(make), pl.ArrayLoader(np.ones((8, 2), np.float32), batch_size=2))


def test_an_injected_optax_schedule_is_logged_from_the_device() -> None:
    schedule = optax.linear_schedule(1.0, 0.0, 4)
    events: list[dict[str, Any]] = []
    _fit(lambda: optax.inject_hyperparams(optax.sgd)(learning_rate=schedule), events)
    logged = [(event["step"], event["metrics"]) for event in events if event["hook"] == "log_metrics"]
    assert [step for step, _ in logged] == [1, 3]
    assert [list(metrics) for _, metrics in logged] == [["lr-sgd"]] * 2
    # as in Lightning the rate is that of the step about to run
    assert [float(metrics["lr-sgd"]) for _, metrics in logged] == [0.75, 0.25]


def test_a_rate_hidden_in_a_plain_transformation_gives_a_warning() -> None:
    events: list[dict[str, Any]] = []
    descent = optax.stateless(lambda grads, _: jax.tree.map(lambda g: -0.1 * g, grads))
    with pytest.warns(UserWarning, match="LearningRateMonitor cannot know the learning rate"):
        _fit(lambda: descent, events)
    assert not [event for event in events if event["hook"] == "log_metrics"]
