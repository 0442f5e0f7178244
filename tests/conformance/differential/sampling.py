"""Draws one random configuration per seed: flags, loaders, log calls, callbacks, loggers and what is traced.

A configuration is a plain dictionary of plain values, so that a failing one can be printed, cut down and run again.
What later issues own (see `rules.SKIPPED`) is never drawn.
"""

from __future__ import annotations

import random
from typing import Any

from conformance.differential.data import ends_early
from conformance.differential.resuming import sample_resume
from conformance.differential.sampling_logs import sample_logs, sample_sparse
from conformance.differential.sampling_manual import sample_dispatch, sample_manual
from conformance.differential.sampling_schedulers import sample_schedulers

Config = dict[str, Any]

_FLAG_CHOICES: list[tuple[str, float, list[Any]]] = [
    # name, chance to be given at all, values
    ("min_epochs", 0.15, [1, 2, 3]),
    ("max_steps", 0.3, [0, 1, 2, 3, 4, 5, 7, -1]),
    ("min_steps", 0.12, [1, 3, 5, 8]),
    ("limit_train_batches", 0.3, [0, 1, 2, 3, 100, 0.5, 0.34, 1.0]),
    ("limit_val_batches", 0.3, [0, 1, 2, 100, 0.5, 1.0]),
    ("limit_test_batches", 0.2, [0, 1, 2, 0.5]),
    ("limit_predict_batches", 0.2, [0, 1, 2, 1.0]),
    ("val_check_interval", 0.4, [1, 2, 3, 0.5, 0.34, 1.0, 0.25, 0]),
    ("check_val_every_n_epoch", 0.3, [1, 2, 2, 3, None]),
    ("num_sanity_val_steps", 0.6, [0, 1, 2, -1]),
    ("log_every_n_steps", 0.9, [0, 1, 1, 2, 3]),
    ("overfit_batches", 0.08, [1, 2, 0.5]),
    ("fast_dev_run", 0.07, [True, 2, 3]),
    ("reload_dataloaders_every_n_epochs", 0.2, [1, 2]),
    ("accumulate_grad_batches", 0.4, [2, 2, 3, 4]),
    ("gradient_clip_val", 0.25, [0.25, 1.0, 0.5]),
]


def sample(seed: int) -> Config:
    """Draw the configuration of a seed.

    Args:
        seed: Any number; the same one gives the same configuration.

    Returns:
        The configuration.
    """
    rng = random.Random(seed * 7919 + 13)
    config: Config = {"seed": seed, "verbs": _verbs(rng), "jit": rng.random() < 0.9, "flags": _flags(rng)}
    config["train"] = _train_loaders(rng, config["flags"])
    for stage in ("val", "test", "predict"):
        config[stage] = _eval_loaders(rng, stage)
    config["owner"] = rng.choice(["passed", "passed", "module", "datamodule"])
    config["loggers"] = rng.choice([[], ["record"], ["record"], ["csv"], ["csv"], ["record", "csv"], ["csv", "record"]])
    config["trace"] = _trace(rng)
    config["logs"] = sample_logs(
        rng, optimizer_hooks=config["trace"]["optimizer"], batch_hooks=config["trace"]["batch"]
    )
    config["callbacks"] = _callbacks(rng, config)
    config["step"] = _step(rng)
    if "gradient_clip_val" in config["flags"] and rng.random() < 0.7:
        config["flags"]["gradient_clip_algorithm"] = rng.choice(["norm", "value"])
    if config["step"]["none_epochs"] and "gradient_clip_val" in config["flags"]:
        config["flags"]["gradient_clip_algorithm"] = "norm"
    _make_sensible(rng, config)
    sample_sparse(seed, config["logs"])
    config["schedulers"] = sample_schedulers(seed, config["logs"])
    config["manual"] = sample_manual(seed, config)
    config["steps_per_dispatch"] = sample_dispatch(seed, config)
    config["resume"] = sample_resume(seed, config)
    return config


def _verbs(rng: random.Random) -> list[str]:
    return rng.choice(
        [["fit"]] * 14
        + [
            ["validate"],
            ["test"],
            ["predict"],
            ["fit", "validate"],
            ["fit", "test"],
            ["fit", "predict"],
            ["fit", "fit"],
        ]
    )


def _flags(rng: random.Random) -> dict[str, Any]:
    flags: dict[str, Any] = {"max_epochs": rng.choice([1, 2, 2, 2, 3, 3])}
    for name, chance, values in _FLAG_CHOICES:
        if rng.random() < chance:
            flags[name] = rng.choice(values)
    return flags


def _loader(rng: random.Random, kinds: list[str], least: int, most: int) -> dict[str, Any]:
    batches = rng.randint(least, most)
    sizes = [2] * batches
    if batches and rng.random() < 0.25:
        sizes[-1] = 1
    spec: dict[str, Any] = {"kind": rng.choice(kinds), "sizes": sizes, "start": rng.randrange(1000)}
    if spec["kind"] == "early":
        spec["claims"] = batches + rng.randint(1, 2)
    return spec


def _train_loaders(rng: random.Random, flags: dict[str, Any]) -> dict[str, Any]:
    kinds = ["sized"] * 6 + ["torch"] * 3 + ["sizeless"] * 3 + ["early"]
    if flags.get("overfit_batches"):
        kinds = ["sized", "torch", "shuffled"]
    least = 0 if rng.random() < 0.04 else 1
    if rng.random() < 0.82:
        return {"join": None, "loaders": [_loader(rng, kinds, least, 6)]}
    kinds = [kind for kind in kinds if kind != "early"]
    join = rng.choice(["list", "dict", "max_size_cycle", "min_size", "max_size", "sequential"])
    return {"join": join, "loaders": [_loader(rng, kinds, 1, 4) for _ in range(2)]}


def _eval_loaders(rng: random.Random, stage: str) -> dict[str, Any]:
    kinds = ["sized"] * 5 + ["torch"] * 2 + ["sizeless"] * 2 + ["early"]
    number = rng.choice([1, 1, 1, 1, 1, 2, 2, 3]) if stage != "val" else rng.choice([0, 1, 1, 1, 1, 1, 1, 2, 2, 3])
    least = 0 if rng.random() < 0.04 else 1
    loaders = [_loader(rng, kinds, least, 3) for _ in range(number)]
    join: str | None = "list"
    if number == 1:
        join = rng.choice([None, None, None, "list"])
    elif number > 1 and rng.random() < 0.25:
        join = rng.choice(["max_size_cycle", "min_size", "max_size", "sequential"])
    return {"join": join, "loaders": loaders}


def _trace(rng: random.Random) -> dict[str, Any]:
    batch = rng.random() < 0.7
    observe = ["on_train_epoch_end", "on_validation_epoch_end", "on_validation_end", "on_train_end", "on_test_end"]
    if batch and rng.random() < 0.6:
        observe += ["on_train_batch_end", "on_train_batch_start", "on_validation_batch_end"]
    return {
        "batch": batch,
        "optimizer": rng.random() < 0.2,
        "observe": observe if rng.random() < 0.7 else [],
    }


def _callbacks(rng: random.Random, config: Config) -> dict[str, Any]:
    monitors = sorted({log["name"] for log in config["logs"] if log["owner"] == "module"}) or ["a"]
    out: dict[str, Any] = {"checkpoints": [], "stop": None, "raise": None, "skip": None}
    out["early_stopping"] = _early_stopping(rng, monitors) if rng.random() < 0.25 else None
    if rng.random() < 0.45:
        out["checkpoints"] = [_checkpoint(rng, monitors) for _ in range(rng.choice([1, 1, 1, 2]))]
    if rng.random() < 0.12:
        hooks = ["on_train_epoch_end", "on_validation_end", "on_train_epoch_start", "on_validation_epoch_end"]
        out["stop"] = {"hook": rng.choice(hooks + _batch_hooks(config)), **_place(rng)}
    if rng.random() < 0.05:
        hooks = ["on_train_epoch_end", "on_validation_end", "on_train_start", "on_train_end", "on_fit_end", "setup"]
        out["raise"] = {"hook": rng.choice(hooks + _batch_hooks(config)), **_place(rng)}
    if rng.random() < 0.08:
        out["skip"] = _place(rng)
    if rng.random() < 0.12:
        schedule = {rng.choice([0, 0, 1]): rng.choice([1, 2, 3]), rng.choice([1, 2]): rng.choice([1, 2, 4])}
        out["accumulation"] = {str(epoch): factor for epoch, factor in schedule.items()}
    if rng.random() < 0.1:
        out["lr_monitor"] = rng.choice([None, "step", "epoch"])
    return out


def _batch_hooks(config: Config) -> list[str]:
    if not config["trace"]["batch"]:
        return []
    return ["on_train_batch_end", "on_train_batch_end", "on_train_batch_start", "on_validation_batch_end"]


def _place(rng: random.Random) -> dict[str, int]:
    return {"epoch": rng.randint(0, 1), "batch": rng.randint(0, 3)}


def _early_stopping(rng: random.Random, monitors: list[str]) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "monitor": rng.choice([*monitors, *monitors, *monitors, "missing"]),
        "mode": rng.choice(["min", "max"]),
        "patience": rng.choice([0, 1, 1, 2]),
    }
    for name, chance, values in [
        ("min_delta", 0.2, [0.25]),
        ("strict", 0.5, [False]),
        ("stopping_threshold", 0.15, [-1.0, 1.0]),
        ("divergence_threshold", 0.15, [-2.0, 2.0]),
        ("check_on_train_epoch_end", 0.4, [True, False]),
    ]:
        if rng.random() < chance:
            spec[name] = rng.choice(values)
    return spec


def _checkpoint(rng: random.Random, monitors: list[str]) -> dict[str, Any]:
    spec: dict[str, Any] = {"save_top_k": rng.choice([1, 1, -1, 2, 0])}
    if rng.random() < 0.5:
        spec["monitor"] = rng.choice(monitors)
        spec["mode"] = rng.choice(["min", "max"])
    elif spec["save_top_k"] == 2 and rng.random() < 0.8:
        spec["save_top_k"] = -1
    moments = rng.choice([None, None, "every_n_epochs", "every_n_train_steps"])
    if moments is not None:
        spec[moments] = rng.choice([1, 2, 3]) if moments == "every_n_epochs" else rng.choice([2, 3, 4])
    for name, chance, values in [
        ("save_last", 0.35, [True, "link", False]),
        ("save_on_train_epoch_end", 0.3, [True, False]),
        ("filename", 0.3, ["{epoch}", "{step}-x", "f-{epoch:02d}-{" + rng.choice(monitors) + ":.2f}", "fixed"]),
        ("auto_insert_metric_name", 0.15, [False]),
        ("enable_version_counter", 0.1, [False]),
        ("save_weights_only", 0.3, [True]),
        ("dirpath", 0.3, ["ck"]),
    ]:
        if rng.random() < chance:
            spec[name] = rng.choice(values)
    return spec


def _step(rng: random.Random) -> dict[str, Any]:
    return {
        "returns": rng.choice(["tensor", "tensor", "dict"]),
        "none_epochs": rng.choice([[0], [1]]) if rng.random() < 0.08 else [],
        "quadratic": rng.random() < 0.4,
        "lr": rng.choice([0.125, 0.25]),
        "momentum": rng.choice([0.0, 0.0, 0.5]),
    }


def _make_sensible(rng: random.Random, config: Config) -> None:
    """Keep most runs out of errors; a few stay, because errors are compared too."""
    flags = config["flags"]
    mistakes_wanted = rng.random() < 0.12
    kinds = {spec["kind"] for spec in config["train"]["loaders"]}
    if ends_early(config["train"], flags) or "early" in kinds:
        # What such a loader means is one of our differences; the rest of the run is kept plain.
        for name in ("val_check_interval", "check_val_every_n_epoch", "max_steps"):
            flags.pop(name, None)
        config["callbacks"].update(stop=None, skip=None, early_stopping=None)
        if isinstance(flags.get("limit_train_batches"), float):
            del flags["limit_train_batches"]
    if config["callbacks"]["early_stopping"] or config["callbacks"]["checkpoints"]:
        flags.setdefault("num_sanity_val_steps", 0)
    if mistakes_wanted:
        return
    if config["train"]["join"] == "sequential":
        config["train"]["join"] = "min_size"
    config["predict"]["join"] = "list" if len(config["predict"]["loaders"]) > 1 else config["predict"]["join"]
    for stage in ("train", "val", "test", "predict"):
        name = f"limit_{stage}_batches"
        specs = config[stage]["loaders"]
        unsized = any(spec["kind"] == "sizeless" for spec in specs)
        short = any(len(spec["sizes"]) * flags.get(name, 1.0) < 1 for spec in specs)
        if isinstance(flags.get(name), float) and flags[name] != 1.0 and (unsized or short):
            del flags[name]
    overfit = flags.get("overfit_batches")
    if isinstance(overfit, float):
        specs = config["train"]["loaders"] + config["val"]["loaders"]
        if any(spec["kind"] == "sizeless" or len(spec["sizes"]) * overfit < 1 for spec in specs):
            flags["overfit_batches"] = 1
    interval = flags.get("val_check_interval")
    every = flags.get("check_val_every_n_epoch", 1)
    if interval == 0 or (isinstance(interval, float) and interval != 1.0 and ("sizeless" in kinds or every is None)):
        del flags["val_check_interval"]
    elif isinstance(interval, int) and every is not None and rng.random() < 0.7:
        flags["val_check_interval"] = 1
    if flags.get("check_val_every_n_epoch", 1) is None and isinstance(flags.get("val_check_interval"), float):
        del flags["val_check_interval"]
    if "accumulation" in config["callbacks"]:
        flags.pop("accumulate_grad_batches", None)
    if "lr_monitor" in config["callbacks"] and not config["loggers"]:
        config["loggers"] = ["record"]
    if len(config["callbacks"]["checkpoints"]) == 2:
        first, second = config["callbacks"]["checkpoints"]
        if all(
            first.get(key) == second.get(key) for key in ("monitor", "mode", "every_n_epochs", "every_n_train_steps")
        ):
            config["callbacks"]["checkpoints"] = [first]
    for spec in config["callbacks"]["checkpoints"]:
        if spec.get("monitor") is None and spec["save_top_k"] == 2:
            spec["save_top_k"] = -1
