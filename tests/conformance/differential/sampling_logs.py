"""Draws the calls of `self.log`: from which hook of which object, with which options."""

from __future__ import annotations

import random
from typing import Any

TRAIN_EPOCH = ["on_train_start", "on_train_epoch_start", "on_train_epoch_end"]
VAL_EPOCH = ["on_validation_start", "on_validation_epoch_start", "on_validation_epoch_end"]
TRAIN_BATCH = ["on_train_batch_start", "on_train_batch_end"]
VAL_BATCH = ["on_validation_batch_start", "on_validation_batch_end"]
OPTIMIZER = ["on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"]
FORBIDDEN = ["on_fit_start", "on_validation_end", "on_train_end", "setup", "on_sanity_check_start"]


def sample_logs(rng: random.Random, *, optimizer_hooks: bool, batch_hooks: bool) -> list[dict[str, Any]]:
    """Draw the log calls of a run.

    Args:
        rng: Source of chance.
        optimizer_hooks: Whether the hooks between gradient and update may log.
        batch_hooks: Whether the hooks around a batch may log.

    Returns:
        One dictionary per call: `owner`, `hook`, `name`, `value`, `options`, `epochs` (None for all).
    """
    logs = [_log(rng, "module", "training_step", rng.choice(["a", "a", "b", "t/c"])) for _ in range(_count(rng))]
    logs += [_log(rng, "module", "validation_step", rng.choice(["v", "v", "w", "a"])) for _ in range(_count(rng))]
    logs += [_log(rng, "module", "test_step", rng.choice(["v", "s"])) for _ in range(_count(rng))]
    hooks = TRAIN_EPOCH + VAL_EPOCH
    if batch_hooks:
        hooks = hooks + TRAIN_BATCH + VAL_BATCH
    if optimizer_hooks:
        hooks = hooks + OPTIMIZER
    for _ in range(rng.choice([0, 0, 1, 1, 2, 3])):
        hook = rng.choice(hooks)
        logs.append(_log(rng, rng.choice(["module", "callback"]), hook, rng.choice(["h", "h", "i", "v", "a"])))
    if rng.random() < 0.02:
        hook = rng.choice(FORBIDDEN)
        owner = "callback" if hook == "on_sanity_check_start" else rng.choice(["module", "callback"])
        logs.append(_log(rng, owner, hook, "f"))
    return _without_conflicts(logs)


def sample_sparse(seed: int, logs: list[dict[str, Any]]) -> None:
    """Draw which calls in a step are made at every second or third batch only (`every`).

    Args:
        seed: Of the run; other draws do not depend on these.
        logs: What `sample_logs` drew.
    """
    rng = random.Random(f"sparse {seed}")
    for log in logs:
        in_step = log["hook"] in ("training_step", "validation_step", "test_step")
        log["every"] = rng.choice([2, 3]) if in_step and rng.random() < 0.2 else 1


def _count(rng: random.Random) -> int:
    return rng.choice([0, 1, 1, 1, 2])


def _log(rng: random.Random, owner: str, hook: str, name: str) -> dict[str, Any]:
    in_step = hook.endswith("_step") and not hook.startswith("on_")
    options: dict[str, Any] = {}
    levels = rng.random()
    if hook in TRAIN_EPOCH + VAL_EPOCH:
        if levels < 0.3:
            options["on_epoch"] = True
        elif levels < 0.32:
            options["on_step"] = True
    elif levels < 0.35:
        options.update(on_step=True, on_epoch=True)
    elif levels < 0.5:
        options.update(on_step=False, on_epoch=True)
    elif levels < 0.6:
        options.update(on_step=True, on_epoch=False)
    elif levels < 0.68:
        options["on_epoch"] = True
    elif levels < 0.69:
        options.update(on_step=False, on_epoch=False)
    for option, chance, values in [
        ("prog_bar", 0.3, [True]),
        ("logger", 0.25, [True, False]),
        ("reduce_fx", 0.35, ["sum", "min", "max", "mean"]),
        ("batch_size", 0.2, [1, 3]),
        ("add_dataloader_idx", 0.05, [False]),
        ("rank_zero_only", 0.05, [True]),
        ("sync_dist", 0.05, [True]),
    ]:
        if rng.random() < chance:
            options[option] = rng.choice(values)
    return {
        "owner": owner,
        "hook": hook,
        "name": name,
        "value": rng.choice(["loss", "loss", "sum", "size", "half"] if in_step else ["counter"]),
        "options": options,
        "epochs": [rng.choice([0, 1])] if rng.random() < 0.1 else None,
        "batches": [rng.choice([0, 1])] if not in_step and rng.random() < 0.1 else None,
        "as_dict": rng.random() < 0.15,
    }


def _without_conflicts(logs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give two calls with one key in one hook the same options: anything else is only an error."""
    seen: dict[tuple[str, str], dict[str, Any]] = {}
    for log in logs:
        log["options"] = seen.setdefault((log["hook"], log["name"]), log["options"])
    return logs
