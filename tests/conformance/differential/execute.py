"""Runs one configuration on one side and returns everything that is compared, as plain values."""

from __future__ import annotations

import contextlib
import csv
import io
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from conformance.differential.behaviour import (
    Loaders,
    Model,
    Probe,
    callback_hooks,
    module_hooks,
    number,
    visible_metrics,
    with_hooks,
)
from conformance.differential.data import make_loaders
from conformance.differential.resuming import CHECKPOINT, Stopped, stopper
from conformance.differential.sides import Side

LOADER_ARGUMENTS = {
    "fit": {"train_dataloaders": "train", "val_dataloaders": "val"},
    "validate": {"dataloaders": "val"},
    "test": {"dataloaders": "test"},
    "predict": {"dataloaders": "predict"},
}


def run(side: Side, config: dict[str, Any], adapt: Any = None) -> dict[str, Any]:
    """Run a configuration.

    Args:
        side: The library.
        config: The configuration.
        adapt: Called with the list of callbacks before the trainer gets it; for the rules of our differences.

    Returns:
        `error` (type's name or None), `events`, `metrics`, `counters`, `returns`, `csv`, `checkpoints`, `callbacks`,
        `weights`.
    """
    probe = Probe(config)
    with _quiet_directory() as root:
        result = _run(side, config, probe, root, adapt)
        result["csv"] = _csv_rows(root)
        result["checkpoints"] = _checkpoint_names(root)
    result["events"] = probe.events
    return result


@contextlib.contextmanager
def _quiet_directory() -> Iterator[Path]:
    root, before = tempfile.mkdtemp(prefix="differential-"), os.getcwd()
    level = logging.root.manager.disable
    os.chdir(root)
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield Path(root)
    finally:
        logging.disable(level)
        os.chdir(before)
        shutil.rmtree(root, ignore_errors=True)


def _run(side: Side, config: dict[str, Any], probe: Probe, root: Path, adapt: Any) -> dict[str, Any]:
    result: dict[str, Any] = {"error": None, "metrics": {}, "counters": {}, "returns": [], "callbacks": {}}
    module = trainer = None
    callbacks: list[Any] = []
    verb = "construction"
    try:
        if config.get("resume"):
            _first_part(side, config, probe, root, adapt)
        callbacks = _callbacks(side, config, probe, root)
        if adapt is not None:
            callbacks = adapt(callbacks)
        trainer = _trainer(side, config, probe, root, callbacks)
        module = _module(side, config, probe)
        datamodule = _datamodule(side, probe) if config["owner"] == "datamodule" else None
        for verb in config["verbs"]:
            probe.add(f"--- {verb}")
            result["returns"].append(_call(side, config, trainer, module, datamodule, verb, root))
            result["metrics"] |= {f"{verb}/{name}": value for name, value in visible_metrics(trainer).items()}
    except Exception as error:
        result["error"] = f"{type(error).__name__} in {verb}"
        result["exception"] = error
    if trainer is not None:
        result["counters"] = _counters(trainer)
    if module is not None:
        result["weights"] = side.weights(module)
    for index, callback in enumerate(callbacks):
        result["callbacks"].update({f"{index}.{key}": value for key, value in _callback_state(callback, root).items()})
    return result


def _first_part(side: Side, config: dict[str, Any], probe: Probe, root: Path, adapt: Any) -> None:
    """Train until the drawn stop, where a checkpoint is saved."""
    callbacks = _callbacks(side, config, probe, root)
    if adapt is not None:
        callbacks = adapt(callbacks)
    trainer = _trainer(side, config, probe, root, [*callbacks, stopper(side, config["resume"], root)])
    datamodule = _datamodule(side, probe) if config["owner"] == "datamodule" else None
    probe.add("--- the first part")
    with contextlib.suppress(Stopped):
        _call(side, config, trainer, _module(side, config, probe), datamodule, "fit", root=None)


def _call(
    side: Side, config: dict[str, Any], trainer: Any, module: Any, datamodule: Any, verb: str, root: Path | None
) -> Any:
    arguments: dict[str, Any] = {}
    if root is not None and (root / CHECKPOINT).exists():
        arguments["ckpt_path"] = root / CHECKPOINT
    if datamodule is not None:
        arguments["datamodule"] = datamodule
    elif config["owner"] == "passed":
        for argument, stage in LOADER_ARGUMENTS[verb].items():
            loaders = make_loaders(config[stage], side.convert, side.combined)
            if loaders is not None:
                arguments[argument] = loaders
    if verb in ("validate", "test"):
        arguments["verbose"] = False
    return _plain(getattr(trainer, verb)(module, **arguments))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value if value is None else number(value)


def _module(side: Side, config: dict[str, Any], probe: Probe) -> Any:
    bases: tuple[type, ...] = (Model, side.pl.LightningModule)
    if config["owner"] == "module":
        bases = (Model, Loaders, side.pl.LightningModule)
    base = type("Base", bases, {"prepare_data": lambda self: None})
    if config["owner"] == "module" and not config["val"]["loaders"]:
        base.val_dataloader = side.pl.LightningModule.val_dataloader  # type: ignore[attr-defined]
    module = with_hooks(base, "module", module_hooks(config), probe, side=side)()
    module.set_up()
    return module


def _datamodule(side: Side, probe: Probe) -> Any:
    base = type("Data", (Loaders, side.pl.LightningDataModule), {"side": side, "prepare_data": lambda self: None})
    if not probe.config["val"]["loaders"]:
        base.val_dataloader = side.pl.LightningDataModule.val_dataloader  # type: ignore[attr-defined]
    return with_hooks(base, "datamodule", ["setup", "teardown", "prepare_data"], probe)()


def _callbacks(side: Side, config: dict[str, Any], probe: Probe, root: Path) -> list[Any]:
    plans, known = config["callbacks"], side.pl.callbacks
    out = [with_hooks(side.pl.Callback, "callback", callback_hooks(config), probe)()]
    if plans["early_stopping"]:
        out.append(known.EarlyStopping(**plans["early_stopping"]))
    for spec in plans["checkpoints"]:
        options = dict(spec)
        if "dirpath" in options:
            options["dirpath"] = str(root / options["dirpath"])
        out.append(known.ModelCheckpoint(**options))
    if "accumulation" in plans:
        schedule = {int(epoch): factor for epoch, factor in plans["accumulation"].items()}
        out.append(known.GradientAccumulationScheduler(schedule))
    if "lr_monitor" in plans:
        out.append(known.LearningRateMonitor(plans["lr_monitor"]))
    return out


def _trainer(side: Side, config: dict[str, Any], probe: Probe, root: Path, callbacks: list[Any]) -> Any:
    loggers = []
    for kind in config["loggers"]:
        loggers.append(side.recording_logger(probe) if kind == "record" else side.pl.loggers.CSVLogger(str(root)))
    options: dict[str, Any] = {"jit": config["jit"]} if side.name == "jaxlightning" else {}
    if options and config.get("steps_per_dispatch"):
        options["steps_per_dispatch"] = config["steps_per_dispatch"]
    return side.pl.Trainer(
        accelerator="cpu",
        devices=1,
        default_root_dir=str(root),
        logger=loggers or False,
        callbacks=callbacks,
        enable_checkpointing=bool(config["callbacks"]["checkpoints"]),
        enable_progress_bar=False,
        enable_model_summary=False,
        **config["flags"],
        **options,
    )


def _counters(trainer: Any) -> dict[str, Any]:
    fit, epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    stage = trainer.state.stage
    counters = {
        "global_step": trainer.global_step,
        "current_epoch": trainer.current_epoch,
        "num_training_batches": trainer.num_training_batches,
        "num_val_batches": list(trainer.num_val_batches),
        "num_sanity_val_batches": list(trainer.num_sanity_val_batches),
        "num_test_batches": list(trainer.num_test_batches),
        "num_predict_batches": list(trainer.num_predict_batches),
        "is_last_batch": trainer.is_last_batch,
        "should_stop": trainer.should_stop,
        "status": trainer.state.status.value,
        "fn": None if trainer.state.fn is None else trainer.state.fn.value,
        "stage": None if stage is None else stage.value,
        "interrupted": trainer.interrupted,
        "max_epochs": trainer.max_epochs,
        "min_epochs": trainer.min_epochs,
        "max_steps": trainer.max_steps,
        "val_check_batch": trainer.val_check_batch,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "log_dir": None if trainer.log_dir is None else os.path.relpath(trainer.log_dir),
    }
    for name, progress in [
        ("epoch_progress", fit.epoch_progress),
        ("batch_progress", epoch_loop.batch_progress),
        ("val_batch_progress", epoch_loop.val_loop.batch_progress),
        ("optimizer", epoch_loop.automatic_optimization.optim_progress),
        ("manual", epoch_loop.manual_optimization.optim_step_progress),
    ]:
        counters[name] = _nested(progress.state_dict())
    return counters


def _nested(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _nested(each) for key, each in sorted(state.items())}
    return state


def _callback_state(callback: Any, root: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("wait_count", "stopped_epoch", "best_model_path", "last_model_path", "kth_best_model_path"):
        if hasattr(callback, name):
            value = getattr(callback, name)
            found[name] = os.path.relpath(value, root) if isinstance(value, str) and value else value
    for name in ("best_score", "best_model_score", "current_score"):
        value = getattr(callback, name, None)
        found[name] = None if value is None else number(value)
    if hasattr(callback, "stopping_reason"):
        found["stopping_reason"] = callback.stopping_reason.value
    for path, score in getattr(callback, "best_k_models", {}).items():
        found[f"kept {os.path.relpath(path, root)}"] = number(score)
    return found


def _csv_rows(root: Path) -> dict[str, list[dict[str, str]]]:
    """Return the rows of every `metrics.csv`, with empty cells left out, and its header as the first row."""
    files: dict[str, list[dict[str, str]]] = {}
    for path in sorted(root.rglob("metrics.csv")):
        with path.open(newline="") as stream:
            reader = csv.DictReader(stream)
            rows = [{key: cell for key, cell in row.items() if cell != ""} for row in reader]
            files[str(path.relative_to(root))] = [dict.fromkeys(reader.fieldnames or [], "header"), *rows]
    return files


def _checkpoint_names(root: Path) -> list[str]:
    """Return the names of checkpoints on disk, relative to the run's directory; a link is marked with `@`."""
    names = []
    for path in sorted(root.rglob("*.ckpt")):
        target = f" @ {os.path.basename(os.readlink(path))}" if path.is_symlink() else ""
        names.append(str(path.relative_to(root)) + target)
    return names
