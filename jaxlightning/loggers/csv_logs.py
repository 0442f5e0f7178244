"""Metrics in a CSV file, hyper-parameters in a YAML file."""

from __future__ import annotations

import csv
import io
import os
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from jaxlightning.loggers._params import convert_params
from jaxlightning.loggers._versioned import VersionedLogger
from jaxlightning.loggers._versions import known_version
from jaxlightning.loggers.logger import add_prefix, rank_zero_experiment
from jaxlightning.utilities.hparams import save_hparams_to_yaml
from jaxlightning.utilities.rank_zero import rank_zero_only, rank_zero_warn

__all__ = ["CSVLogger", "ExperimentWriter"]


class ExperimentWriter:
    """Writes `metrics.csv` and `hparams.yaml` of one run.

    Args:
        log_dir: Directory of the run, made if missing.
        keep: Whether rows that are in the file already stay (a resumed run); otherwise the file is deleted.
    """

    NAME_METRICS_FILE = "metrics.csv"
    NAME_HPARAMS_FILE = "hparams.yaml"

    def __init__(self, log_dir: str, *, keep: bool = False) -> None:
        self.log_dir = log_dir
        self.metrics: list[dict[str, Any]] = []
        self.metrics_keys: list[str] = []
        self._known_keys: set[str] = set()
        self._written: int | None = None if keep else 0  # rows in the file; counted when somebody asks
        self.hparams: dict[str, Any] = {}
        self.metrics_file_path = os.path.join(log_dir, self.NAME_METRICS_FILE)
        self._descriptor: int | None = None
        if keep:
            self.metrics_keys = self._header()
            self._known_keys.update(self.metrics_keys)
        elif os.path.isdir(log_dir) and os.listdir(log_dir):
            rank_zero_warn(
                f"Experiment logs directory {log_dir} exists and is not empty. The metrics of an earlier run in it are "
                "deleted. Use another `version` to keep them, or `fit(ckpt_path=...)` to continue that run."
            )
            if os.path.isfile(self.metrics_file_path):
                os.remove(self.metrics_file_path)
        os.makedirs(log_dir, exist_ok=True)

    def log_hparams(self, params: dict[str, Any]) -> None:
        """Record hyper-parameters and write the file."""
        self.hparams.update(params)
        save_hparams_to_yaml(os.path.join(self.log_dir, self.NAME_HPARAMS_FILE), self.hparams)

    def log_metrics(self, metrics_dict: Mapping[str, Any], step: int | None = None) -> None:
        """Record one row; without a step its number is the number of rows that wait."""
        row = {
            name: value.item() if hasattr(value, "item") and hasattr(value, "dtype") else value
            for name, value in metrics_dict.items()
        }
        row["step"] = len(self.metrics) if step is None else step
        self.metrics.append(row)

    def save(self) -> None:
        """Write the rows that wait; the header is written anew when they bring new columns."""
        if not self.metrics:
            return
        known = self.metrics_keys
        if any(row.keys() - self._known_keys for row in self.metrics):
            self.close()
            known = self.metrics_keys = sorted({name for row in self.metrics for name in row}.union(known))
            self._known_keys = set(known)
            if os.path.isfile(self.metrics_file_path):
                self._write(self._rows())
        text = io.StringIO(newline="")
        writer = csv.writer(text)
        if self._descriptor is None:
            # Kept open: to open it again for every row would cost more than to write the row.
            self._descriptor = os.open(self.metrics_file_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            if os.fstat(self._descriptor).st_size == 0:
                writer.writerow(known)
        writer.writerows([[row.get(name, "") for name in known] for row in self.metrics])
        _write_all(self._descriptor, text.getvalue().encode("utf-8"))
        if self._written is not None:
            self._written += len(self.metrics)
        self.metrics = []

    def close(self) -> None:
        """Close the file; the next `save` opens it again."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __del__(self) -> None:
        if getattr(self, "_descriptor", None) is not None:
            self.close()

    def count(self) -> int:
        """Rows in the file and rows that wait."""
        if self._written is None:
            self._written = len(self._rows())
        return self._written + len(self.metrics)

    def keep(self, rows: int) -> bool:
        """Keep the first rows of the file.

        Args:
            rows: How many there were when the checkpoint was written.

        Returns:
            Whether the file has so many; otherwise nothing is done.
        """
        found = self._rows()
        if len(found) < rows:
            return False
        if len(found) > rows:
            self._write(found[:rows])
        self._written = rows
        return True

    def cut(self, step: int) -> None:
        """Drop the rows of an interrupted run that a resumed run will write again.

        Rows with an epoch lie on the train axis; those of validation batches and of callbacks count differently, so a
        row without an epoch stays if a train row of a step before `step` follows it.

        Args:
            step: The first step that comes again.
        """
        rows = self._rows()
        on_axis = [index for index, row in enumerate(rows) if row.get("epoch")]
        if on_axis:
            kept = [index for index in on_axis if _number(rows[index].get("step")) < step]
            rows = rows[: kept[-1] + 1] if kept else []
        else:
            rows = [row for row in rows if _number(row.get("step")) < step]
        if os.path.isfile(self.metrics_file_path):
            self._write(rows)
            self._written = len(rows)

    def _header(self) -> list[str]:
        if not os.path.isfile(self.metrics_file_path):
            return []
        with open(self.metrics_file_path, newline="", encoding="utf-8") as file:
            return next(csv.reader(file), [])

    def _rows(self) -> list[dict[str, str]]:
        if not os.path.isfile(self.metrics_file_path):
            return []
        with open(self.metrics_file_path, newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    def _write(self, rows: list[dict[str, str]]) -> None:
        # Beside the file and then over it: a run killed here keeps what it had.
        self.close()
        fresh = f"{self.metrics_file_path}.new"
        with open(fresh, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self.metrics_keys)
            writer.writeheader()
            writer.writerows(rows)
        os.replace(fresh, self.metrics_file_path)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _number(text: str | None) -> float:
    try:
        return float(text or 0)
    except ValueError:
        return 0.0


class CSVLogger(VersionedLogger):
    """Record metrics in `<save_dir>/<name>/version_<n>/metrics.csv`.

    Args:
        save_dir: Where everything is kept.
        name: Name of the experiment and of its folder; None or "" for no folder.
        version: Number or name of the version; by default the number after the highest in the folder.
        prefix: Put before every metric, with a dash.
        flush_logs_every_n_steps: At every how many steps the rows are written, unless somebody calls `save` before.
    """

    LOGGER_JOIN_CHAR = "-"

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        super().__init__(save_dir, name, version)
        self._prefix = prefix
        self._flush_logs_every_n_steps = flush_logs_every_n_steps
        self._experiment: ExperimentWriter | None = None
        self._resuming = False

    @property
    @rank_zero_experiment
    def experiment(self) -> ExperimentWriter:
        """The writer; the run's directory is made at the first call."""
        if self._experiment is None:
            self._experiment = ExperimentWriter(self.log_dir, keep=self._resuming)
        return self._experiment

    @rank_zero_only
    def log_hyperparams(self, params: Mapping[str, Any] | Namespace | None = None) -> None:
        """Write hyper-parameters to `hparams.yaml`."""
        self.experiment.log_hparams(convert_params(params))

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Record one row.

        Args:
            metrics: Numbers by name.
            step: The step; by default the number of rows that wait.
        """
        if step is None:
            step = len(self.experiment.metrics)
        self.experiment.log_metrics(add_prefix(metrics, self._prefix, self.LOGGER_JOIN_CHAR), step)
        if (step + 1) % self._flush_logs_every_n_steps == 0:
            self.save()

    @rank_zero_only
    def save(self) -> None:
        """Write the rows that wait."""
        self.experiment.save()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write the rows that wait, if there was anything to record.

        Args:
            status: How the run ended.
        """
        if self._experiment is not None:
            self.save()
            self._experiment.close()

    def position(self) -> dict[str, Any]:
        """The version, and the number of rows; those that wait are written first, so all of them are in the file."""
        if self._experiment is None:
            return {"version": self.version, "rows": 0}
        self._experiment.save()
        return {"version": self.version, "rows": self._experiment.count()}

    @rank_zero_only
    def resume(self, step: int | None = None, position: Mapping[str, Any] | None = None) -> bool | None:
        """Keep the rows of the run that is continued.

        Args:
            step: The first step that will be recorded again.
            position: From `position`; it tells the number of rows to keep, more exactly than the step.

        Returns:
            Whether the rows of that run are here.
        """
        self._resuming = True
        if step is None:
            return None
        same = position is not None and position.get("version") == self.version
        rows = position.get("rows") if same and position is not None else None
        if isinstance(rows, int) and self.experiment.keep(rows):
            return True
        self.experiment.cut(step)
        return False

    def adopt(self, position: Mapping[str, Any]) -> None:
        """Go on in the version of the interrupted run, unless the user named one."""
        if self._version is None:
            self._version = known_version(position)

    def __getstate__(self) -> dict[str, Any]:
        # A copy goes on in the same file: what waits is written, and the copy keeps what is there.
        if self._experiment is not None:
            self._experiment.save()
            self._experiment.close()
        return {**self.__dict__, "_experiment": None, "_resuming": self._resuming or self._experiment is not None}
