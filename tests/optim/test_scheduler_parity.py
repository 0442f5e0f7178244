"""Every scheduler against `torch.optim.lr_scheduler`: 300 steps in float64, also saved and restored in the middle."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxlightning import optim
from jaxlightning.optim import lr_scheduler as ours_lr

pytestmark = pytest.mark.torch

STEPS = 300
TOLERANCE = 1e-12
Maker = Callable[[Any, Any], Any]


class Slope:
    """A callable object, whose attributes a checkpoint keeps."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __call__(self, step: int) -> float:
        return 1 / (1 + self.rate * step)


def _swalr(s: Any, o: Any, **options: Any) -> Any:
    if hasattr(s, "SWALR"):
        return s.SWALR(o, **options)
    from torch.optim.swa_utils import SWALR

    return SWALR(o, **options)


def _warm_then_cosine(s: Any, o: Any) -> Any:
    return s.SequentialLR(
        o, [s.LinearLR(o, 0.1, total_iters=20), s.CosineAnnealingLR(o, 200, 1e-4), s.ConstantLR(o, 0.5, 10)], [20, 230]
    )


def _chained(s: Any, o: Any) -> Any:
    return s.ChainedScheduler([s.ConstantLR(o, 0.1, 30), s.ExponentialLR(o, 0.99), s.MultiStepLR(o, [50, 90])])


def _nested(s: Any, o: Any) -> Any:
    warm = s.SequentialLR(o, [s.LinearLR(o, 0.2, total_iters=10), s.StepLR(o, 30, 0.5)], [10])
    return s.ChainedScheduler([warm, s.ExponentialLR(o, 0.999)], optimizer=o)


SCHEDULERS: dict[str, Maker] = {
    "lambda": lambda s, o: s.LambdaLR(o, lambda n: 0.95**n),
    "lambda_per_group": lambda s, o: s.LambdaLR(o, [lambda n: 0.95**n, Slope(0.1)]),
    "multiplicative": lambda s, o: s.MultiplicativeLR(o, lambda n: 0.99 if n % 2 else 1.001),
    "step": lambda s, o: s.StepLR(o, 30),
    "step_1_half": lambda s, o: s.StepLR(o, 7, 0.5),
    "multi_step": lambda s, o: s.MultiStepLR(o, [30, 80, 80, 200], 0.3),
    "constant": lambda s, o: s.ConstantLR(o),
    "constant_long": lambda s, o: s.ConstantLR(o, 0.25, 100),
    "linear": lambda s, o: s.LinearLR(o),
    "linear_down": lambda s, o: s.LinearLR(o, 1.0, 0.05, 250),
    "exponential": lambda s, o: s.ExponentialLR(o, 0.97),
    "polynomial": lambda s, o: s.PolynomialLR(o, 200),
    "polynomial_2": lambda s, o: s.PolynomialLR(o, 120, 2.5),
    "cosine": lambda s, o: s.CosineAnnealingLR(o, 300),
    "cosine_waves": lambda s, o: s.CosineAnnealingLR(o, 17, 1e-3),
    "restarts": lambda s, o: s.CosineAnnealingWarmRestarts(o, 13),
    "restarts_longer": lambda s, o: s.CosineAnnealingWarmRestarts(o, 10, 2, 1e-3),
    "one_cycle": lambda s, o: s.OneCycleLR(o, 0.4, total_steps=STEPS),
    "one_cycle_epochs": lambda s, o: s.OneCycleLR(o, [0.4, 0.7], epochs=30, steps_per_epoch=10, pct_start=0.1),
    "one_cycle_three": lambda s, o: s.OneCycleLR(o, 0.4, STEPS, three_phase=True, anneal_strategy="linear"),
    "one_cycle_plain": lambda s, o: s.OneCycleLR(
        o, 0.4, STEPS, cycle_momentum=False, div_factor=10.0, final_div_factor=50.0
    ),
    "cyclic": lambda s, o: s.CyclicLR(o, 0.01, 0.3, step_size_up=20),
    "cyclic_uneven": lambda s, o: s.CyclicLR(o, [0.01, 0.02], [0.3, 0.5], 15, 33, mode="triangular2"),
    "cyclic_exp": lambda s, o: s.CyclicLR(o, 0.01, 0.3, 20, mode="exp_range", gamma=0.99, base_momentum=0.7),
    "cyclic_own": lambda s, o: s.CyclicLR(
        o, 0.01, 0.3, 20, scale_fn=lambda x: 0.5 * (1 + math.sin(x)), scale_mode="iterations", cycle_momentum=False
    ),
    "cyclic_object": lambda s, o: s.CyclicLR(o, 0.01, 0.3, 20, scale_fn=Slope(0.2)),
    "swa_cos": lambda s, o: _swalr(s, o, swa_lr=0.05, anneal_epochs=40),
    "swa_linear": lambda s, o: _swalr(s, o, swa_lr=[0.05, 0.5], anneal_epochs=25, anneal_strategy="linear"),
    "swa_at_once": lambda s, o: _swalr(s, o, swa_lr=0.05, anneal_epochs=0),
    "sequential": _warm_then_cosine,
    "chained": _chained,
    "nested": _nested,
    "sequential_restarts": lambda s, o: s.SequentialLR(
        o, [s.ExponentialLR(o, 0.9), s.CosineAnnealingWarmRestarts(o, 11)], [40]
    ),
}
PLATEAUS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "quick": {"factor": 0.5, "patience": 1},
    "max": {"mode": "max", "factor": 0.7, "patience": 2},
    "absolute": {"factor": 0.7, "patience": 2, "threshold": 0.05, "threshold_mode": "abs"},
    "absolute_max": {"mode": "max", "factor": 0.7, "patience": 2, "threshold": 0.05, "threshold_mode": "abs"},
    "cooldown": {"factor": 0.8, "patience": 0, "cooldown": 5, "min_lr": 1e-3},
    "floors": {"factor": 0.5, "patience": 0, "min_lr": [1e-3, 2e-2], "eps": 1e-4},
}


def _torch_optimizer(name: str) -> Any:
    import torch

    a, b = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    return getattr(torch.optim, name)([{"params": [a]}, {"params": [b], "lr": 0.5}], lr=0.1)


def _our_optimizer(name: str) -> Any:
    return getattr(optim, name)([{"params": "net/a"}, {"params": "net/b", "lr": 0.5}], lr=0.1)


def _values(optimizer: Any) -> list[float]:
    out = []
    for group in optimizer.param_groups:
        out += [float(group["lr"]), float(group["betas"][0] if "betas" in group else group.get("momentum", 0))]
    return out


def _run_torch(name: str, make: Maker, optimizer_name: str, steps: int = STEPS) -> list[list[float]]:
    import torch

    optimizer = _torch_optimizer(optimizer_name)
    rows = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scheduler = make(torch.optim.lr_scheduler, optimizer)
        for _ in range(steps):
            rows.append(_values(optimizer))
            scheduler.step()
    return rows


@pytest.mark.parametrize("optimizer_name", ["SGD", "Adam"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_300_steps_equal_torch_with_a_restore_in_the_middle(name: str, optimizer_name: str) -> None:
    make = SCHEDULERS[name]
    theirs = _run_torch(name, make, optimizer_name)
    optimizer = _our_optimizer(optimizer_name)
    scheduler = make(ours_lr, optimizer)
    rows = []
    for step in range(STEPS):
        if step == 123:
            saved = json.loads(json.dumps([optimizer.state_dict(), scheduler.state_dict()]))
            optimizer = _our_optimizer(optimizer_name)
            scheduler = make(ours_lr, optimizer)
            optimizer.load_state_dict(saved[0])
            scheduler.load_state_dict(saved[1])
            assert scheduler.get_last_lr() == rows[-1][::2] or scheduler.get_last_lr() == _values(optimizer)[::2]
        rows.append(_values(optimizer))
        scheduler.step()
        assert scheduler.get_last_lr() == [group["lr"] for group in optimizer.param_groups]
    np.testing.assert_allclose(rows, theirs, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", PLATEAUS)
@pytest.mark.parametrize("seed", range(3))
def test_plateau_equals_torch_on_300_metrics_with_a_restore_in_the_middle(name: str, seed: int) -> None:
    import torch

    rng = np.random.default_rng(seed)
    metrics = rng.normal(size=STEPS) * 0.3 + np.exp(-np.arange(STEPS) / 60) * (1 if seed != 2 else -1)
    metrics[::17] = np.nan
    theirs, ours = _torch_optimizer("SGD"), _our_optimizer("SGD")
    reference = torch.optim.lr_scheduler.ReduceLROnPlateau(theirs, **PLATEAUS[name])
    scheduler = ours_lr.ReduceLROnPlateau(ours, **PLATEAUS[name])
    for step, metric in enumerate(metrics):
        if step == 123:
            saved = json.loads(json.dumps([ours.state_dict(), scheduler.state_dict()]))
            ours = _our_optimizer("SGD")
            scheduler = ours_lr.ReduceLROnPlateau(ours, **PLATEAUS[name])
            ours.load_state_dict(saved[0])
            scheduler.load_state_dict(saved[1])
        reference.step(metric)
        scheduler.step(metric)
        np.testing.assert_allclose(_values(ours), _values(theirs), rtol=TOLERANCE, atol=TOLERANCE)
        assert scheduler.num_bad_epochs == reference.num_bad_epochs


def test_every_scheduler_of_torch_is_here() -> None:
    import torch

    missing = set(torch.optim.lr_scheduler.__all__) - set(dir(ours_lr))
    assert not missing


def test_signatures_are_torchs() -> None:
    import inspect

    import torch
    from torch.optim.swa_utils import SWALR

    for name in [*torch.optim.lr_scheduler.__all__, "SWALR"]:
        theirs = SWALR if name == "SWALR" else getattr(torch.optim.lr_scheduler, name)
        expected = {k: p.default for k, p in inspect.signature(theirs.__init__).parameters.items()}
        got = {k: p.default for k, p in inspect.signature(getattr(ours_lr, name).__init__).parameters.items()}
        assert list(got) == list(expected), name
        assert got == expected, name


JUMPS: dict[str, Maker] = {
    "step": lambda s, o: s.StepLR(o, 7, 0.5),
    "multi_step": lambda s, o: s.MultiStepLR(o, [3, 8, 8, 20], 0.3),
    "constant": lambda s, o: s.ConstantLR(o, 0.25, 10),
    "linear": lambda s, o: s.LinearLR(o, 0.2, 0.9, 25),
    "exponential": lambda s, o: s.ExponentialLR(o, 0.97),
    "polynomial": lambda s, o: s.PolynomialLR(o, 20, 1.5),
    "cosine": lambda s, o: s.CosineAnnealingLR(o, 17, 1e-3),
    "lambda": lambda s, o: s.LambdaLR(o, lambda n: 0.95**n),
    "restarts": lambda s, o: s.CosineAnnealingWarmRestarts(o, 5),
    "restarts_longer": lambda s, o: s.CosineAnnealingWarmRestarts(o, 5, 2, 1e-3),
}


@pytest.mark.parametrize("name", JUMPS)
def test_jumps_to_a_step_equal_torch(name: str) -> None:
    import torch

    theirs, ours = _torch_optimizer("SGD"), _our_optimizer("SGD")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference, scheduler = JUMPS[name](torch.optim.lr_scheduler, theirs), JUMPS[name](ours_lr, ours)
        fraction = 0.25 if name.startswith("restarts") else 0
        for step in (3, 1, 12, 40 + fraction, 2 + fraction, None, None, 17):
            reference.step(step)
            scheduler.step(step)
            np.testing.assert_allclose(_values(ours), _values(theirs), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["cosine", "exponential", "step", "multi_step", "linear", "polynomial"])
def test_a_scheduler_can_begin_at_a_later_step(name: str) -> None:
    """`last_epoch` is how a run goes on without the scheduler's own state."""
    import torch

    def start(s: Any, optimizer: Any) -> Any:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
        kinds = {
            "cosine": lambda: s.CosineAnnealingLR(optimizer, 50, last_epoch=10),
            "exponential": lambda: s.ExponentialLR(optimizer, 0.9, last_epoch=10),
            "step": lambda: s.StepLR(optimizer, 5, last_epoch=10),
            "multi_step": lambda: s.MultiStepLR(optimizer, [12, 20], last_epoch=10),
            "linear": lambda: s.LinearLR(optimizer, total_iters=20, last_epoch=10),
            "polynomial": lambda: s.PolynomialLR(optimizer, 40, last_epoch=10),
        }
        return kinds[name]()

    theirs, ours = _torch_optimizer("SGD"), _our_optimizer("SGD")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference = start(torch.optim.lr_scheduler, theirs)
        scheduler = start(ours_lr, ours)
        for _ in range(25):
            np.testing.assert_allclose(_values(ours), _values(theirs), rtol=TOLERANCE)
            reference.step()
            scheduler.step()
