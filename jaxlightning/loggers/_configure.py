"""From `Trainer(logger=...)` to a list of loggers, and what all of them get at the start of a run."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxlightning.loggers.csv_logs import CSVLogger
from jaxlightning.loggers.logger import Logger
from jaxlightning.loggers.tensorboard import TensorBoardLogger
from jaxlightning.utilities.exceptions import MisconfigurationException

__all__ = [
    "adopt_versions",
    "call_loggers",
    "configure_loggers",
    "log_hyperparams",
    "logger_positions",
    "logger_version",
    "resume_loggers",
]

# What the trainer and the checkpoint callback call on every logger.
_NEEDED = ("log_metrics", "log_hyperparams", "save", "finalize", "after_save_checkpoint")


def configure_loggers(logger: Any, default_root_dir: str | os.PathLike[str]) -> list[Any]:
    """The loggers that a `logger` argument stands for.

    Args:
        logger: True for the default logger (TensorBoard's if tensorboardX is installed, else CSV), False or None for
            none, a logger, or several. A logger is anything with the methods of `Logger`; those of
            `lightning.pytorch.loggers` are accepted.
        default_root_dir: Where the default logger writes.

    Returns:
        The loggers.

    Raises:
        MisconfigurationException: If something in it is no logger.
    """
    if logger is True:
        version = _slurm_job_id()
        if importlib.util.find_spec("tensorboardX") is not None:
            return [TensorBoardLogger(default_root_dir, version=version)]
        return [CSVLogger(default_root_dir, version=version)]
    if logger is None or logger is False:
        return []
    if is_logger(logger):
        return [logger]
    if not isinstance(logger, Iterable) or isinstance(logger, str):
        raise _no_logger(logger)
    loggers = list(logger)
    for item in loggers:
        if not is_logger(item):
            raise _no_logger(item)
    return loggers


def is_logger(value: Any) -> bool:
    """Whether a value has what a logger needs."""
    return not isinstance(value, type) and all(callable(getattr(value, word, None)) for word in _NEEDED)


def _no_logger(value: Any) -> MisconfigurationException:
    missing = [word for word in _NEEDED if not callable(getattr(value, word, None))]
    what = f"the class `{value.__name__}`, not an object of it" if isinstance(value, type) else repr(value)
    return MisconfigurationException(
        f"`Trainer(logger=...)` received {what}. "
        + (f"A logger has the methods {list(_NEEDED)}; {missing} are missing. " if missing else "")
        + "Pass True, False, a `jaxlightning.loggers.Logger` (a base class that has them all), or a list of loggers."
    )


def _slurm_job_id() -> int | None:
    if os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive"):
        return None
    text = os.environ.get("SLURM_JOB_ID", "")
    return int(text) if text.isdigit() else None


def logger_version(loggers: Sequence[Any], separator: str = "_") -> int | str | None:
    """The version that the progress bar shows.

    Args:
        loggers: At least one logger.
        separator: What joins the versions of several.

    Returns:
        The version of a single logger; of several their different versions, joined.
    """
    if len(loggers) == 1:
        version: int | str | None = getattr(loggers[0], "version", None)
        return version
    return separator.join(dict.fromkeys(str(getattr(logger, "version", None)) for logger in loggers))


def call_loggers(loggers: Iterable[Any], method: str, *args: Any, **kwargs: Any) -> None:
    """Call a method on every logger that has it."""
    for logger in loggers:
        function = getattr(logger, method, None)
        if function is not None:
            function(*args, **kwargs)


def resume_loggers(
    loggers: Iterable[Any], step: int | None = None, positions: Sequence[Mapping[str, Any]] | None = None
) -> bool:
    """Tell our loggers that the run continues another one; those of other packages know nothing of it.

    Args:
        loggers: The loggers.
        step: The first step that will be recorded again; None before anything is opened.
        positions: What `logger_positions` returned when the checkpoint was written.

    Returns:
        Whether one of them goes on in the records of that run.
    """
    answers = [
        logger.resume(step) if position is None else logger.resume(step, position)
        for logger, position in _with_positions(loggers, positions)
    ]
    return any(answers)


def adopt_versions(loggers: Iterable[Any], positions: Sequence[Mapping[str, Any]]) -> None:
    """Let our loggers go on in the versions of an interrupted run, where the user named none.

    Args:
        loggers: The loggers.
        positions: From the checkpoint.
    """
    for logger, position in _with_positions(loggers, positions):
        if position is not None:
            logger.adopt(position)


def logger_positions(loggers: Iterable[Any]) -> list[dict[str, Any]]:
    """How far each logger's records go; with the name of its class, by which a changed list is found out."""
    return [
        {"class": type(logger).__qualname__, **(logger.position() if isinstance(logger, Logger) else {})}
        for logger in loggers
    ]


def _with_positions(loggers: Iterable[Any], positions: Any) -> Iterator[tuple[Logger, Mapping[str, Any] | None]]:
    saved = list(positions) if isinstance(positions, Sequence) else []
    for index, logger in enumerate(loggers):
        if isinstance(logger, Logger):
            found = saved[index] if index < len(saved) else None
            same = isinstance(found, Mapping) and found.get("class") == type(logger).__qualname__ and len(found) > 1
            yield logger, found if same else None


def log_hyperparams(trainer: Any) -> None:
    """Give every logger the hyper-parameters of module and datamodule and the graph, then let it save.

    Args:
        trainer: The trainer, with module, datamodule and loggers attached.

    Raises:
        RuntimeError: If module and datamodule have different values under one name.
    """
    if not trainer.loggers:
        return
    module, datamodule = trainer.lightning_module, getattr(trainer, "datamodule", None)
    params: dict[str, Any] | None = None
    if getattr(module, "_log_hyperparams", False):
        params = dict(module.hparams_initial)
    if datamodule is not None and getattr(datamodule, "_log_hyperparams", False):
        extra = dict(datamodule.hparams_initial)
        if params is not None:
            clashing = sorted(
                name for name in params.keys() & extra.keys() - {"_class_path"} if not _same(params[name], extra[name])
            )
            if clashing:
                raise RuntimeError(
                    f"Error while merging hparams: the keys {clashing} are in both the LightningModule's and the "
                    "LightningDataModule's hparams but have different values: "
                    f"{ {name: (params[name], extra[name]) for name in clashing} }."
                )
        params = {**(params or {}), **extra}
    if params is not None:
        params.pop("_class_path", None)
    for logger in trainer.loggers:
        if params is not None:
            logger.log_hyperparams(params)
        call_loggers([logger], "log_graph", module)
        logger.save()


def _same(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if left is right:
        return True
    try:
        return bool(left == right)
    except (TypeError, ValueError):  # arrays have no single answer
        return False
