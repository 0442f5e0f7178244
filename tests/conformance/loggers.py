"""A logger of the user's own, for either library."""

from __future__ import annotations

from typing import Any


def recorder(side: Any, calls: list[Any], name: str = "rec") -> Any:
    """A logger that keeps what it is told."""
    base = side.get("loggers.logger.Logger")

    class Recorder(base):  # type: ignore[misc,valid-type]
        @property
        def name(self) -> str:
            return name

        @property
        def version(self) -> int:
            return 0

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            if any(type(value) not in (int, float) for value in metrics.values()):
                raise TypeError(f"numbers of Python were expected, got {metrics}")
            calls.append([name, "log_metrics", dict(metrics), step])

        def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
            calls.append([name, "log_hyperparams", dict(params)])

        def save(self) -> None:
            calls.append([name, "save"])

        def finalize(self, status: str) -> None:
            calls.append([name, "finalize", status])

    return Recorder()
