"""Draws the learning-rate schedulers of a run: which, at what interval and frequency, and what a plateau watches."""

from __future__ import annotations

import random
from typing import Any

_PLAIN: list[tuple[str, dict[str, Any]]] = [
    ("StepLR", {"step_size": 1, "gamma": 0.5}),
    ("StepLR", {"step_size": 2, "gamma": 0.5}),
    ("ExponentialLR", {"gamma": 0.75}),
    ("MultiStepLR", {"milestones": [1, 3], "gamma": 0.5}),
    ("LinearLR", {"start_factor": 0.25, "total_iters": 3}),
    ("CosineAnnealingLR", {"T_max": 3}),
    ("PolynomialLR", {"total_iters": 4, "power": 2.0}),
    ("ConstantLR", {"factor": 0.5, "total_iters": 2}),
    ("CosineAnnealingWarmRestarts", {"T_0": 2}),
]


def sample_schedulers(seed: int, logs: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Draw the schedulers of a seed; from a source of chance of their own, so that the rest of a seed stays as it is.

    Args:
        seed: The seed.
        logs: The log calls of the run, for what a plateau can watch.

    Returns:
        `form` (how `configure_optimizers` returns them) and `configs`, a list of one or two; None for no scheduler.
    """
    rng = random.Random(seed * 6007 + 29)
    if rng.random() < 0.5:
        return None
    configs = [_config(rng, logs) for _ in range(rng.choice([1, 1, 1, 2]))]
    return {"form": "dict" if len(configs) == 1 and rng.random() < 0.6 else "lists", "configs": configs}


def _config(rng: random.Random, logs: list[dict[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    if rng.random() < 0.35:
        watched = _watched(logs)
        out["scheduler"] = "ReduceLROnPlateau"
        out["options"] = {
            "mode": rng.choice(["min", "max"]),
            "factor": 0.5,
            "patience": rng.choice([0, 0, 1]),
            "threshold": rng.choice([1e-4, 0.25]),
            "threshold_mode": rng.choice(["rel", "abs"]),
            "cooldown": rng.choice([0, 0, 1]),
        }
        out["monitor"] = rng.choice(watched) if watched and rng.random() < 0.9 else "missing"
        if out["monitor"] == "missing" or rng.random() < 0.6:
            out["strict"] = rng.random() < 0.2
    else:
        out["scheduler"], out["options"] = rng.choice(_PLAIN)
    for name, chance, values in [
        ("interval", 0.6, ["step", "step", "epoch"]),
        ("frequency", 0.45, [1, 2, 2, 3]),
        ("name", 0.2, ["mine"]),
    ]:
        if rng.random() < chance:
            out[name] = rng.choice(values)
    return out


def _watched(logs: list[dict[str, Any]]) -> list[str]:
    """Metrics of which the reference tells a new value from an old one: those of every batch of a step."""
    return sorted(
        {
            log["name"]
            for log in logs
            if log["hook"] in ("training_step", "validation_step")
            and log["epochs"] is None
            and log["batches"] is None
            and not [other for other in logs if other["name"] == log["name"] and other["hook"] != log["hook"]]
        }
    )
