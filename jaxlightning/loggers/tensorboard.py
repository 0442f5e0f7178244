"""Metrics, hyper-parameters and graphs as TensorBoard events, written by tensorboardX."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from jaxlightning.loggers._params import convert_params, flatten_dict, sanitize_params
from jaxlightning.loggers._versioned import VersionedLogger
from jaxlightning.loggers._versions import known_version
from jaxlightning.loggers.logger import add_prefix, rank_zero_experiment
from jaxlightning.utilities.hparams import save_hparams_to_yaml
from jaxlightning.utilities.rank_zero import rank_zero_only, rank_zero_warn

__all__ = ["TensorBoardLogger"]


class TensorBoardLogger(VersionedLogger):
    """Record events in `<save_dir>/<name>/version_<n>`; needs neither torch nor TensorFlow.

    Args:
        save_dir: Where everything is kept.
        name: Name of the experiment and of its folder; None or "" for no folder.
        version: Number or name of the version; by default the number after the highest in the folder.
        log_graph: Whether the jaxpr of `module(example_input_array)` is recorded as text.
        default_hp_metric: Whether a placeholder `hp_metric` is recorded with the hyper-parameters, without which
            TensorBoard does not list the run.
        prefix: Put before every metric, with a dash.
        sub_dir: Folder inside the version for events and hyper-parameters (checkpoints do not go there).
        **kwargs: For `tensorboardX.SummaryWriter`.
    """

    NAME_HPARAMS_FILE = "hparams.yaml"
    LOGGER_JOIN_CHAR = "-"

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        log_graph: bool = False,
        default_hp_metric: bool = True,
        prefix: str = "",
        sub_dir: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(save_dir, name, version)
        self._log_graph = log_graph
        self._default_hp_metric = default_hp_metric
        self._prefix = prefix
        self._sub_dir = None if sub_dir is None else os.fspath(sub_dir)
        self._kwargs = kwargs
        self._experiment: Any = None
        self._purge_step: int | None = None
        self.hparams: dict[str, Any] = {}

    @property
    def sub_dir(self) -> str | None:
        """Folder inside the version, or None."""
        return self._sub_dir

    @property
    def log_dir(self) -> str:
        """Directory of this version's events."""
        path = super().log_dir
        if self._sub_dir is not None:
            path = os.path.join(path, self._sub_dir)
        return os.path.expanduser(os.path.expandvars(path))

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The `tensorboardX.SummaryWriter`; the run's directory is made at the first call."""
        if self._experiment is None:
            from jaxlightning.loggers._event_writer import EventWriter

            options = dict(self._kwargs)
            if self._purge_step is not None:
                options["purge_step"], self._purge_step = self._purge_step, None
            self._experiment = EventWriter(logdir=self.log_dir, **options)
        return self._experiment

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Record scalars.

        Args:
            metrics: Numbers by name; a dictionary of numbers becomes one chart with several lines.
            step: The step.

        Raises:
            ValueError: If a value is no number.
        """
        for name, value in add_prefix(metrics, self._prefix, self.LOGGER_JOIN_CHAR).items():
            if isinstance(value, Mapping):
                self.experiment.add_scalars(name, dict(value), step)
                continue
            if hasattr(value, "item") and hasattr(value, "dtype"):
                value = value.item()
            try:
                self.experiment.add_scalar(name, float(value), step)
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"The metric {name!r} has the value {value!r} of type `{type(value).__name__}`, which cannot be "
                    "logged. Try a number, or a dictionary of numbers."
                ) from error

    @rank_zero_only
    def log_hyperparams(
        self,
        params: Mapping[str, Any] | Namespace,
        metrics: Mapping[str, Any] | float | None = None,
        step: int | None = None,
    ) -> None:
        """Record hyper-parameters, with metrics by which TensorBoard compares the runs.

        Args:
            params: The hyper-parameters.
            metrics: The metrics, or one number; by default the placeholder `hp_metric` if that is wanted.
            step: The step of the metrics.
        """
        params = convert_params(params)
        self.hparams.update(params)
        if metrics is None:
            metrics = {"hp_metric": -1} if self._default_hp_metric else {}
        elif not isinstance(metrics, Mapping):
            metrics = {"hp_metric": metrics}
        if not metrics:
            return
        self.log_metrics(metrics, step)
        self.experiment.add_session(sanitize_params(flatten_dict(params)), metrics, step)

    @rank_zero_only
    def log_graph(self, model: Any, input_array: Any = None) -> None:
        """Record the jaxpr of a module's `forward` as text; only with `TensorBoardLogger(log_graph=True)`.

        Args:
            model: The module.
            input_array: Its input, or a tuple of inputs; by default `model.example_input_array`.
        """
        if not self._log_graph:
            return
        if input_array is None:
            input_array = getattr(model, "example_input_array", None)
        if input_array is None:
            rank_zero_warn(
                "Could not log the graph to TensorBoard: `model.example_input_array` is not set and no `input_array` "
                "was given."
            )
            return
        import jax

        inputs = input_array if isinstance(input_array, tuple) else (input_array,)
        jaxpr = jax.make_jaxpr(model)(*inputs)
        indented = "\n".join(f"    {line}" for line in str(jaxpr).splitlines())  # a code block for TensorBoard
        self.experiment.add_text("graph", indented)

    @rank_zero_only
    def save(self) -> None:
        """Write what waits; hyper-parameters go to `hparams.yaml` the first time, also if there are none."""
        self.experiment.flush()
        path = os.path.join(self.log_dir, self.NAME_HPARAMS_FILE)
        if os.path.isdir(self.log_dir) and not os.path.isfile(path):
            save_hparams_to_yaml(path, self.hparams)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write what waits and close the file; a later call opens another one.

        Args:
            status: `"success"` also writes `hparams.yaml`.
        """
        if status == "success":
            self.save()
        if self._experiment is not None:
            self._experiment.flush()
            self._experiment.close()
            self._experiment = None

    def position(self) -> dict[str, Any]:
        """The version; events that wait are written first, since the checkpoint counts on them."""
        if self._experiment is not None:
            self._experiment.flush()
        return {"version": self.version}

    def adopt(self, position: Mapping[str, Any]) -> None:
        """Go on in the version of the interrupted run, unless the user named one."""
        if self._version is None:
            self._version = known_version(position)

    @rank_zero_only
    def resume(self, step: int | None = None, position: Mapping[str, Any] | None = None) -> bool | None:
        """Let TensorBoard hide the events of the interrupted run from a step on.

        Args:
            step: The first step that will be recorded again.
            position: From `position`; events are told apart by their step, so only the version counts.

        Returns:
            Whether this is the version of that run.
        """
        if step is None:
            return None
        if self._experiment is None:
            self._purge_step = step
        else:
            self._experiment.purge(step)
        return position is not None and position.get("version") == self.version

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_experiment": None}
