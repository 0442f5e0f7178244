"""Schedulers as host objects: own ones, what they refuse, what they restore."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxlightning import optim
from jaxlightning.optim import lr_scheduler
from jaxlightning.utilities.exceptions import MisconfigurationException


def _sgd(**options: Any) -> optim.SGD:
    return optim.SGD([{"params": "a"}, {"params": "b", "lr": 0.5}], lr=0.1, **options)


class Warmup(lr_scheduler._LRScheduler):
    """A user's own scheduler, as it stands in a torch project."""

    def __init__(self, optimizer: Any, steps: int, last_epoch: int = -1) -> None:
        self.steps = steps
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float]:
        assert self._get_lr_called_within_step
        return [base * min(1.0, (self.last_epoch + 1) / self.steps) for base in self.base_lrs]


def test_an_own_scheduler_needs_get_lr_only() -> None:
    optimizer = _sgd()
    scheduler = Warmup(optimizer, 4)
    assert scheduler.get_last_lr() == [0.025, 0.125]
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.25]
    with pytest.raises(NotImplementedError, match="LRScheduler must override"):
        lr_scheduler.LRScheduler(_sgd())


def test_a_wrong_number_of_rates_is_named() -> None:
    class One(Warmup):
        def get_lr(self) -> list[float]:
            return [0.1]

    with pytest.raises(ValueError, match=r"One.get_lr\(\) gave 1 learning rates for the 2 parameter groups"):
        One(_sgd(), 1)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.ConstantLR(o, 1.5),
        lambda o: lr_scheduler.LinearLR(o, 0.0),
        lambda o: lr_scheduler.LinearLR(o, 0.5, 1.5),
        lambda o: lr_scheduler.LambdaLR(o, [lambda n: 1.0]),
        lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.2, mode="none", cycle_momentum=False),
        lambda o: lr_scheduler.CyclicLR(o, [0.1], 0.2, cycle_momentum=False),
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 0),
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5, 0),
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5, 1, "x"),
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5).step(-1),
        lambda o: lr_scheduler.OneCycleLR(o, 0.1),
        lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=0),
        lambda o: lr_scheduler.OneCycleLR(o, 0.1, epochs=3, steps_per_epoch=0),
        lambda o: lr_scheduler.OneCycleLR(o, 0.1, 5, pct_start=2.0),
        lambda o: lr_scheduler.OneCycleLR(o, 0.1, 5, anneal_strategy="x"),
        lambda o: lr_scheduler.SWALR(o, 0.1, anneal_strategy="x"),
        lambda o: lr_scheduler.SWALR(o, 0.1, anneal_epochs=-1),
        lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=1.0),
        lambda o: lr_scheduler.ReduceLROnPlateau(o, mode="x"),
        lambda o: lr_scheduler.ReduceLROnPlateau(o, threshold_mode="x"),
        lambda o: lr_scheduler.ReduceLROnPlateau(o, min_lr=[0.1]),
        lambda o: lr_scheduler.SequentialLR(o, [], []),
        lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.StepLR(o, 1)], [1]),
        lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.StepLR(_sgd(), 1)], []),
        lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.ReduceLROnPlateau(o)], []),
        lambda o: lr_scheduler.ChainedScheduler([]),
        lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.StepLR(o, 1), lr_scheduler.StepLR(_sgd(), 1)]),
    ],
)
def test_bad_arguments_raise_value_errors(make: Any) -> None:
    with pytest.raises(ValueError):
        make(_sgd(momentum=0.9))


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.StepLR(3, 1),
        lambda o: lr_scheduler.MultiplicativeLR(o, 0.5),
        lambda o: lr_scheduler.SequentialLR(o, [3], []),
        lambda o: lr_scheduler.ChainedScheduler([3]),
        lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.StepLR(o, 1)], []).step(3),
        lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.StepLR(o, 1)]).step(3),
    ],
)
def test_wrong_types_raise_type_errors(make: Any) -> None:
    with pytest.raises(TypeError):
        make(_sgd())


def test_a_cycle_that_is_over_names_the_total() -> None:
    scheduler = lr_scheduler.OneCycleLR(_sgd(momentum=0.9), 0.1, total_steps=3)
    for _ in range(3):
        scheduler.step()
    with pytest.raises(ValueError, match="total_steps=3"):
        scheduler.step()


def test_momentum_is_cycled_only_where_there_is_one() -> None:
    with pytest.raises(ValueError, match="Pass cycle_momentum=False"):
        lr_scheduler.OneCycleLR(optim.Adagrad("*"), 0.1, total_steps=3)


def test_a_step_number_is_deprecated_as_in_torch() -> None:
    scheduler = lr_scheduler.StepLR(_sgd(), 5)
    with pytest.warns(UserWarning, match="deprecated"):
        scheduler.step(11)
    assert scheduler.get_last_lr() == pytest.approx([0.001, 0.005])
    plateau = lr_scheduler.ReduceLROnPlateau(_sgd())
    with pytest.warns(UserWarning, match="deprecated"):
        plateau.step(1.0, 3)
    assert plateau.last_epoch == 3


def test_going_on_without_initial_lr_is_an_error() -> None:
    with pytest.raises(KeyError, match="initial_lr"):
        lr_scheduler.StepLR(_sgd(), 1, last_epoch=3)


def test_a_hand_change_is_kept_by_chainable_schedulers() -> None:
    optimizer = _sgd()
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.param_groups[0]["lr"] = 1.0
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_plateau_notices_new_groups() -> None:
    optimizer = _sgd()
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    fixed = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, min_lr=[0.0, 0.0])
    optimizer.add_param_group({"params": "c", "lr": 1.0})
    for _ in range(2):
        scheduler.step(1.0)
    assert optimizer.param_groups[2]["lr"] == pytest.approx(0.1)
    fixed.step(1.0)
    with pytest.raises(RuntimeError, match="made with 2 lower bounds"):
        fixed.step(1.0)


def test_only_attributes_of_callable_objects_are_saved() -> None:
    class Factor:
        def __init__(self) -> None:
            self.seen = 0

        def __call__(self, step: int) -> float:
            self.seen += 1
            return 1.0

    scheduler = lr_scheduler.LambdaLR(_sgd(), [Factor(), lambda n: 1.0])
    saved = json.loads(json.dumps(scheduler.state_dict()))
    assert saved["lr_lambdas"] == [{"seen": 1}, None]
    other = lr_scheduler.LambdaLR(_sgd(), [Factor(), lambda n: 1.0])
    other.lr_lambdas[0].seen = 9  # type: ignore[attr-defined]
    other.load_state_dict(saved)
    assert other.lr_lambdas[0].seen == 1  # type: ignore[attr-defined]


def test_a_learning_rate_that_overflows_names_the_scheduler() -> None:
    with pytest.raises(MisconfigurationException, match="MultiplicativeLR computed the learning rate inf"):
        lr_scheduler.MultiplicativeLR(_sgd(), lambda n: float("inf")).step()


def test_torchs_module_for_swa_has_its_scheduler() -> None:
    assert optim.swa_utils.SWALR is lr_scheduler.SWALR
