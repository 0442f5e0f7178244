"""Metrics and hyper-parameters in Weights & Biases, online or offline."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from jaxlightning.loggers._params import convert_params, flatten_dict, sanitize_params
from jaxlightning.loggers.logger import Logger, add_prefix, rank_zero_experiment
from jaxlightning.utilities.rank_zero import rank_zero_only

__all__ = ["WandbLogger"]


class WandbLogger(Logger):
    """Record a run in Weights & Biases; the package `wandb` is imported when the run is opened.

    Args:
        name: What the run is called; wandb invents a name otherwise.
        save_dir: Directory of local files.
        version: Identifier of the run, to continue one.
        offline: Keep everything in `save_dir`, without a network; `wandb sync` sends it later.
        project: Project of the run.
        log_model: Whether the best checkpoint is uploaded as an artifact when the run ends. Not possible offline.
        experiment: A `wandb` run that is open already.
        prefix: Put before every metric, with a dash.
        **kwargs: For `wandb.init`.

    Raises:
        ValueError: For `log_model` together with `offline`.
    """

    LOGGER_JOIN_CHAR = "-"

    def __init__(
        self,
        name: str | None = None,
        save_dir: str | os.PathLike[str] = ".",
        version: str | None = None,
        offline: bool = False,
        project: str | None = None,
        log_model: bool = False,
        experiment: Any = None,
        prefix: str = "",
        **kwargs: Any,
    ) -> None:
        if offline and log_model:
            raise ValueError(
                "`WandbLogger(log_model=True, offline=True)` cannot be done: a checkpoint is uploaded, and offline "
                "there is nowhere to upload it to. Set one of the two to False."
            )
        self._options = {
            "name": name,
            "project": project or os.environ.get("WANDB_PROJECT", "lightning_logs"),
            "dir": os.fspath(save_dir),
            "id": version,
            "resume": "allow",
            **({"mode": "offline"} if offline else {}),
            **kwargs,
        }
        self._save_dir = os.fspath(save_dir)
        self._prefix = prefix
        self._log_model = log_model
        self._experiment = experiment
        self._checkpoint: Any = None

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The `wandb` run; opened at the first call.

        Raises:
            ModuleNotFoundError: If wandb is not installed.
        """
        if self._experiment is None:
            try:
                import wandb
            except ImportError as error:
                raise ModuleNotFoundError(
                    "`WandbLogger` needs the package `wandb`: `pip install 'jaxlightning[wandb]'`."
                ) from error
            os.makedirs(self._save_dir, exist_ok=True)
            self._experiment = wandb.init(**self._options)
            # Metrics of one step may come in several calls, so that the axis is a metric of its own.
            self._experiment.define_metric("trainer/global_step")
            self._experiment.define_metric("*", step_metric="trainer/global_step", step_sync=True)
        return self._experiment

    @property
    def name(self) -> str | None:
        """The project, as in Lightning."""
        return str(self._options["project"])

    @property
    def version(self) -> str | None:
        """Identifier of the run; None before it is open."""
        if self._experiment is not None:
            return str(self._experiment.id)
        given = self._options["id"]
        return None if given is None else str(given)

    @property
    def save_dir(self) -> str:
        """Directory of local files."""
        return self._save_dir

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Record numbers.

        Args:
            metrics: The numbers by name.
            step: The step.
        """
        named = dict(add_prefix(metrics, self._prefix, self.LOGGER_JOIN_CHAR))
        if step is not None:
            named["trainer/global_step"] = step
        self.experiment.log(named)

    @rank_zero_only
    def log_hyperparams(self, params: Mapping[str, Any] | Namespace) -> None:
        """Record hyper-parameters in the run's config.

        Args:
            params: The hyper-parameters.
        """
        self.experiment.config.update(sanitize_params(flatten_dict(convert_params(params))), allow_val_change=True)

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Remember who knows the best checkpoint."""
        self._checkpoint = checkpoint_callback

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Upload the best checkpoint where that is wanted; the run stays open, as in Lightning.

        Args:
            status: `"success"` or `"failed"`.
        """
        best = getattr(self._checkpoint, "best_model_path", "")
        if not self._log_model or status != "success" or not best or self._experiment is None:
            return
        import wandb

        artifact = wandb.Artifact(name=f"model-{self._experiment.id}", type="model")
        (artifact.add_dir if os.path.isdir(best) else artifact.add_file)(best)
        self._experiment.log_artifact(artifact, aliases=["latest", "best"])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_experiment": None, "_checkpoint": None}
