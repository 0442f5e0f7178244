"""What every experiment logger offers, and a logger that swallows everything."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

from jaxlightning.utilities.rank_zero import process_rank

__all__ = ["DummyExperiment", "DummyLogger", "Logger", "rank_zero_experiment"]


class Logger(ABC):
    """Base class of experiment loggers.

    A logger of one's own defines `name`, `version`, `log_metrics` and `log_hyperparams`; the rest has defaults. Its
    methods are called on every process: decorate those that write with `rank_zero_only`, and the property that makes
    the writer with `rank_zero_experiment`.
    """

    @property
    @abstractmethod
    def name(self) -> str | None:
        """Name of the experiment, or None."""

    @property
    @abstractmethod
    def version(self) -> int | str | None:
        """Version of the experiment, or None."""

    @property
    def save_dir(self) -> str | None:
        """Directory under which everything is kept; None if nothing is kept locally."""
        return None

    @property
    def root_dir(self) -> str | None:
        """Directory of all versions of the experiment; None if nothing is kept locally."""
        return None

    @property
    def log_dir(self) -> str | None:
        """Directory of this version; None if nothing is kept locally."""
        return None

    @property
    def group_separator(self) -> str:
        """What separates the parts of a metric's name that the logger groups by."""
        return "/"

    @abstractmethod
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Record numbers.

        Args:
            metrics: The numbers by name.
            step: The step to which they belong.
        """

    @abstractmethod
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Record hyper-parameters.

        Args:
            params: The hyper-parameters by name.
            *args: For particular loggers.
            **kwargs: For particular loggers.
        """

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        """Record the computation of a model.

        Args:
            model: The module.
            input_array: An input for it.
        """
        return None

    def save(self) -> None:
        """Write what was recorded and is not written yet."""
        return None

    def finalize(self, status: str) -> None:
        """A run is over.

        Args:
            status: `"success"` or `"failed"`.
        """
        self.save()

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """A checkpoint callback saved.

        Args:
            checkpoint_callback: The callback.
        """
        return None

    def position(self) -> dict[str, Any]:
        """How far the records go, as JSON; a checkpoint keeps it, and `resume` gets it back."""
        return {}

    def resume(self, step: int | None = None, position: Mapping[str, Any] | None = None) -> bool | None:
        """The run continues an earlier one in the same directory: keep its records up to a step.

        Called once without a step before anything is opened, and again when the checkpoint has told the step.

        Args:
            step: The first step that will be recorded again.
            position: What `position` returned when the checkpoint was written.

        Returns:
            True when the records of that run are here and go on; then rows that it had not sent are sent now.
        """
        return None

    def adopt(self, position: Mapping[str, Any]) -> None:
        """The run was interrupted and goes on by itself: use its version, if the user named none.

        Args:
            position: What `position` returned when the checkpoint was written.
        """
        return None


class DummyExperiment:
    """Accepts any call and any index, and does nothing."""

    def _nothing(self, *_args: Any, **_kwargs: Any) -> None:
        return None

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._nothing

    def __getitem__(self, index: Any) -> DummyExperiment:
        return self

    def __setitem__(self, index: Any, value: Any) -> None:
        return None


class DummyLogger(Logger):
    """Stands in for the user's loggers where nothing is to be recorded (`fast_dev_run`); any method may be called."""

    def __init__(self) -> None:
        self._experiment = DummyExperiment()

    @property
    def experiment(self) -> DummyExperiment:
        """An experiment that accepts everything."""
        return self._experiment

    @property
    def name(self) -> str:
        """Empty."""
        return ""

    @property
    def version(self) -> str:
        """Empty."""
        return ""

    def log_metrics(self, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing."""

    def log_hyperparams(self, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing."""

    def __getitem__(self, index: int) -> DummyLogger:
        return self

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    return None


def rank_zero_experiment(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap the getter of an `experiment` property: the real one on global rank 0, a `DummyExperiment` elsewhere.

    Args:
        fn: The getter.

    Returns:
        The wrapped getter.
    """

    @functools.wraps(fn)
    def experiment(self: Any) -> Any:
        return fn(self) if process_rank() == 0 else DummyExperiment()

    return experiment


def add_prefix(metrics: Mapping[str, Any], prefix: str, separator: str) -> Mapping[str, Any]:
    """Put a prefix before every key.

    Args:
        metrics: Values by name.
        prefix: The prefix; empty for none.
        separator: What stands between prefix and name.

    Returns:
        The metrics under their new names.
    """
    return {f"{prefix}{separator}{name}": value for name, value in metrics.items()} if prefix else metrics
