"""Configurations that stop at a random moment and go on from a checkpoint in fresh objects, on both sides."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

Config = dict[str, Any]
Result = dict[str, Any]

CHECKPOINT = "resume.ckpt"


class Stopped(RuntimeError):
    """Ends the first part of a run."""


def sample_resume(seed: int, config: Config) -> Config | None:
    """Draw where a run stops; from a stream of its own, so that nothing else of the configuration depends on it.

    Args:
        seed: The seed of the configuration.
        config: Everything else of it; loaders become ones that can tell their position when the stop is in an epoch.

    Returns:
        `hook`, `epoch` and `batch`, or None for a run in one part.
    """
    rng = random.Random(seed * 104729 + 5)
    plans, flags = config["callbacks"], config["flags"]
    if rng.random() > 0.8 or config["verbs"] != ["fit"] or flags.get("fast_dev_run"):
        return None
    if any(plans[name] for name in ("stop", "raise", "skip")) or config["step"]["none_epochs"]:
        return None
    # Gradients that wait for a later batch are lost there.
    if config["manual"] and config["manual"]["every"] != [1]:
        return None
    epoch = rng.choice([0, 0, 1])
    if rng.random() < 0.35:
        # With a step limit Lightning takes a finished epoch for one that goes on (batch 3 of 3), and it forgets the
        # step of a plateau at the epoch's end.
        schedulers = (config["schedulers"] or {}).get("configs", [])
        if flags.get("max_steps", -1) != -1 or any("Plateau" in each["scheduler"] for each in schedulers):
            return None
        return {"hook": "on_train_epoch_end", "epoch": epoch, "batch": None}
    # Lightning forgets the sums of a window that is under way (RS11), so the stop is after an optimizer step.
    # It also skips the validation that is due after the batch (RS12), and what is decided by metrics it has lost.
    if "accumulation" in plans or config["train"]["join"] is not None or plans["early_stopping"]:
        return None
    # Not 1.0 but an int 1 is a validation after every batch.
    if repr(flags.get("val_check_interval", 1.0)) != "1.0" or flags.get("check_val_every_n_epoch", 1) is None:
        return None
    window = flags.get("accumulate_grad_batches", 1)
    batch = window * rng.randint(1, 3) - 1
    spec = config["train"]["loaders"][0]
    limit = flags.get("limit_train_batches", 1.0)
    count = min(limit, len(spec["sizes"])) if isinstance(limit, int) else int(limit * len(spec["sizes"]))
    if spec["kind"] != "sized" or batch >= count - 1:
        return None
    spec["kind"] = "stateful"
    return {"hook": "on_train_batch_end", "epoch": epoch, "batch": batch}


def stopper(side: Any, plan: Config, root: Path) -> Any:
    """Make the callback that saves and ends the first part.

    Args:
        side: The library.
        plan: From `sample_resume`.
        root: The directory of the run.
    """

    def strike(self: Any, trainer: Any, pl_module: Any, *arguments: Any) -> None:
        index = next((each for each in arguments if isinstance(each, int)), plan["batch"])
        if trainer.current_epoch == plan["epoch"] and index == plan["batch"]:
            trainer.save_checkpoint(root / CHECKPOINT)
            raise Stopped

    return type("Stopper", (side.pl.Callback,), {plan["hook"]: strike})()


def resumes(config: Config) -> bool:
    """Say whether the run goes on from a checkpoint."""
    return bool(config.get("resume"))


def forget_what_lightning_loses(config: Config, expected: Result, got: Result) -> None:
    """RS11: a resumed run of Lightning has lost its metrics, the axis of validation batches and some counters.

    Ours are those of a run that was never stopped, which `tests/resume` compares bit for bit. What both have is left:
    the order of hooks with epoch and step, every batch, weights, optimizer steps; and after an epoch's end also the
    states of callbacks and the files.
    """
    in_epoch = config["resume"]["hook"] == "on_train_batch_end"
    for result in (expected, got):
        for name in ("csv", "metrics", "returns", *(("callbacks", "checkpoints") if in_epoch else ())):
            result[name] = None
        counters = result["counters"]
        for name in ("current_epoch", "val_batch_progress", "should_stop"):  # a limit reached at once, the sanity check
            counters.pop(name, None)
        for side in counters.get("epoch_progress", {}).values():
            side.pop("completed", None)
        result["events"] = [
            (_LAST_HOOKS.sub(r"\1", text), {name: value for name, value in numbers.items() if name == "batch"})
            for text, numbers in result["events"]
            if not text.startswith(("logger.", *(_SAVING if in_epoch else ())))
        ]


_SAVING = ("callback.state_dict", "callback.on_save", "module.on_save")
#: The epoch in the last hooks of a run that has nothing left to do: Lightning has not counted the one that ended.
_LAST_HOOKS = re.compile(r"(\.(?:on_fit_end|teardown)\([^)]*\) @\S+) e\d+")
