"""Draws runs with manual optimization, and runs of ours that dispatch several steps at once."""

from __future__ import annotations

import random
from typing import Any

Config = dict[str, Any]


def sample_manual(seed: int, config: Config) -> Config | None:
    """Draw how a module optimizes by itself; from a source of chance of its own, so that other seeds stay as they are.

    Args:
        seed: The seed of the configuration.
        config: Everything else of it; the flags that manual optimization refuses go, but for a few mistakes.

    Returns:
        `every` (for each of one or two optimizers, after how many batches it steps), `zero` (when gradients are set to
        zero), `closure`, `toggle`, `clip`, `rates` (where schedulers are stepped), `returns`; None for a module that is
        optimized by the trainer.
    """
    rng = random.Random(seed * 3571 + 101)
    if rng.random() >= 0.15:
        return None
    if rng.random() >= 0.06:
        for name in ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm"):
            config["flags"].pop(name, None)
        config["callbacks"].pop("accumulation", None)
    config["step"]["none_epochs"] = []
    every = [rng.choice([1, 1, 2, 3]) for _ in range(rng.choice([1, 1, 2]))]
    return {
        "every": every,
        "zero": rng.choice(["before", "before", "after"]),
        "closure": every == [1] and rng.random() < 0.3,
        "toggle": len(every) == 2 and rng.random() < 0.5,
        "clip": rng.choice([None, None, None, "norm", "value"]),
        "rates": rng.choice([None, "batch", "epoch"]),
        "returns": rng.choice(["loss", "loss", "nothing"]),
    }


def sample_dispatch(seed: int, config: Config) -> int | str | None:
    """Draw how many steps of ours are dispatched at once, which nobody may notice.

    Args:
        seed: The seed of the configuration.
        config: Everything else of it.

    Returns:
        What the flag `steps_per_dispatch` gets; None for none.
    """
    rng = random.Random(seed * 2713 + 7)
    return rng.choice([2, 3, "auto"]) if rng.random() < 0.2 and config["jit"] else None
