"""A progress bar on rich, for those who ask for it (`pip install jaxlightning[rich]`)."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxlightning.callbacks.progress._tqdm import finite_or_none
from jaxlightning.callbacks.progress.loop_progress import LoopProgressBar

if TYPE_CHECKING:
    from jaxlightning.module import JaxLightningModule
    from jaxlightning.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class RichProgressBarTheme:
    """Styles (rich's notation, for example `"bold green"`) of the parts of a `RichProgressBar`.

    Attributes:
        description: What is running, for example the epoch.
        progress_bar: The bar while it grows.
        progress_bar_finished: The bar when it is full.
        progress_bar_pulse: The bar of a loader without length.
        batch_progress: The count of batches.
        time: Time gone and time left.
        processing_speed: Batches per second.
        metrics: The metrics.
        metrics_text_delimiter: What stands between two metrics.
        metrics_format: Format of a number among the metrics.
    """

    description: str = ""
    progress_bar: str = "#6206E0"
    progress_bar_finished: str = "#6206E0"
    progress_bar_pulse: str = "#6206E0"
    batch_progress: str = ""
    time: str = "dim"
    processing_speed: str = "dim underline"
    metrics: str = "italic"
    metrics_text_delimiter: str = " "
    metrics_format: str = ".3f"


class RichProgressBar(LoopProgressBar):
    """Show progress with rich.

    The loop itself draws, at most `refresh_rate` times a second and without a thread; metrics are those of the last log
    point, as with `TQDMProgressBar`.

    Args:
        refresh_rate: How many times per second the screen is redrawn at most; 0 shows nothing.
        leave: Whether the bar of each training epoch stays on the screen.
        theme: Styles.
        console_kwargs: Arguments of `rich.console.Console`.

    Raises:
        ModuleNotFoundError: rich is not installed.
    """

    def __init__(
        self,
        refresh_rate: int = 10,
        leave: bool = False,
        theme: RichProgressBarTheme | None = None,
        console_kwargs: dict[str, Any] | None = None,
    ) -> None:
        if importlib.util.find_spec("rich") is None:
            raise ModuleNotFoundError(
                "`RichProgressBar` needs the package `rich`. Install it with `pip install jaxlightning[rich]`, or use "
                "`TQDMProgressBar`."
            )
        super().__init__(refresh_rate, leave)
        self.theme = RichProgressBarTheme() if theme is None else theme
        self._console_kwargs = console_kwargs or {}
        self.progress: Any = None
        self._train_task: Any = None
        self._eval_task: Any = None
        self._totals: dict[Any, int | float | None] = {}
        self._last: tuple[Any, int] | None = None
        self._next_draw = 0.0

    def __getstate__(self) -> dict[str, Any]:
        live = ("progress", "_train_task", "_eval_task", "_trainer")
        return {name: None if name in live else value for name, value in vars(self).items()}

    # the screen

    def configure_columns(self, trainer: Trainer) -> Sequence[Any]:
        """Return rich's columns; override it to show others. The metrics are the field `metrics` of a task."""
        from rich.progress import BarColumn, TextColumn

        theme = self.theme
        return (
            TextColumn("{task.description}", style=theme.description),
            BarColumn(
                complete_style=theme.progress_bar,
                finished_style=theme.progress_bar_finished,
                pulse_style=theme.progress_bar_pulse,
            ),
            TextColumn("{task.fields[count]}", style=theme.batch_progress),
            TextColumn("{task.fields[clock]}", style=theme.time),
            TextColumn("{task.fields[speed]}", style=theme.processing_speed),
            TextColumn("{task.fields[metrics]}", style=theme.metrics, markup=False),
        )

    def _open(self, trainer: Trainer) -> None:
        if self.is_disabled or self.progress is not None:
            return
        from rich.console import Console
        from rich.progress import Progress

        self.progress = Progress(
            *self.configure_columns(trainer), auto_refresh=False, console=Console(**self._console_kwargs)
        )
        self.progress.start()

    def _close(self) -> None:
        if self.progress is not None:
            self._flush_count()
            self.progress.stop()
        self.progress = self._train_task = self._eval_task = self._last = None
        self._totals.clear()

    def _flush_count(self) -> None:
        """Show a count that was not due for drawing."""
        if self._last is not None and self._last[0] in self.progress.task_ids:
            self._write(*self._last)
        self.progress.refresh()

    def _add(self, description: str, total: float) -> Any:
        number = finite_or_none(total)
        count = f"0/{'?' if number is None else number}"
        task_id = self.progress.add_task(description, total=number, count=count, clock="", speed="", metrics="")
        self._totals[task_id] = number
        return task_id

    def _advance(self, task_id: Any, n: int, metrics: dict[str, Any] | None = None) -> None:
        if self.progress is None or task_id is None:
            return
        if metrics is not None:
            self.progress.update(task_id, metrics=self._text(metrics))
        self._last = (task_id, n)
        now = time.monotonic()
        if now < self._next_draw and n != self._totals[task_id]:
            return
        self._next_draw = now + 1.0 / self._refresh_rate
        self._write(task_id, n)
        self.progress.refresh()

    def _write(self, task_id: Any, n: int) -> None:
        task = next(task for task in self.progress.tasks if task.id == task_id)
        elapsed = task.elapsed or 0.0
        speed = n / elapsed if elapsed else 0.0
        left = (task.total - n) / speed if task.total is not None and speed else None
        self.progress.update(
            task_id,
            completed=n,
            count=f"{n}/{'?' if task.total is None else task.total}",
            clock=f"{_clock(elapsed)} < {'-:--:--' if left is None else _clock(left)}",
            speed=f"{speed:.2f}it/s",
        )

    def _text(self, metrics: dict[str, Any]) -> str:
        shown = (
            f"{name}: {format(value, self.theme.metrics_format) if isinstance(value, float) else value}"
            for name, value in metrics.items()
        )
        return self.theme.metrics_text_delimiter.join(shown)

    # training

    def on_sanity_check_start(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        """Open the screen."""
        self._open(trainer)

    def on_sanity_check_end(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        """Take the sanity check off the screen."""
        self._drop_eval_task()
        self.reset_dataloader_idx_tracker()

    def on_train_start(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        """Open the screen."""
        self._open(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        """Begin the count of an epoch."""
        if self.progress is None:
            return
        if self._train_task is not None and not self._leave:
            self.progress.remove_task(self._train_task)
        description = f"Epoch {trainer.current_epoch}" + (
            f"/{trainer.max_epochs - 1}" if trainer.max_epochs is not None and trainer.max_epochs > 0 else ""
        )
        self._train_task = self._add(description, self.total_train_batches)
        self._next_draw = 0.0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: JaxLightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count a batch, and take over new metrics when there was a log point."""
        if self.progress is not None:
            self._advance(self._train_task, batch_idx + 1, self._changed_metrics(trainer, pl_module))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        """Show the epoch's metrics."""
        if self.progress is not None and self._train_task is not None:
            self.progress.update(self._train_task, metrics=self._text(self.get_metrics(trainer, pl_module)))
            self._flush_count()

    def on_train_end(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        """Close the screen."""
        self._close()

    # evaluation and prediction

    def _begin_count(self, trainer: Trainer, stage: str, description: str, total: float) -> None:
        if self.progress is None:
            return
        if trainer.state.fn == "fit":
            self._drop_eval_task()
        self._eval_task = self._add(description, total)
        self._next_draw = 0.0

    def _count_batches(self, stage: str, n: int) -> None:
        self._advance(self._eval_task, n)

    def _drop_eval_task(self) -> None:
        if self.progress is not None and self._eval_task is not None:
            self.progress.remove_task(self._eval_task)
            self.progress.refresh()
        self._eval_task = None

    def on_validation_start(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        """Open the screen, if `fit` has not."""
        self._open(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        """Take validation off the screen and show its metrics on the training bar."""
        self.reset_dataloader_idx_tracker()
        if trainer.state.fn != "fit":
            self._close()
            return
        self._drop_eval_task()
        if self.progress is not None and self._train_task is not None:
            self.progress.update(self._train_task, metrics=self._text(self.get_metrics(trainer, pl_module)))

    def on_test_start(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        """Open the screen."""
        self._open(trainer)

    def on_test_end(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        """Close the screen."""
        self.reset_dataloader_idx_tracker()
        self._close()

    def on_predict_start(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        """Open the screen."""
        self._open(trainer)

    def on_predict_end(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        """Close the screen."""
        self.reset_dataloader_idx_tracker()
        self._close()

    # end and printing

    def on_exception(self, trainer: Trainer, pl_module: JaxLightningModule, exception: BaseException) -> None:
        """Close the screen, so that the traceback stands below it."""
        self.reset_dataloader_idx_tracker()
        self._close()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print above the bar."""
        if self.progress is None:
            super().print(*args, **kwargs)
        else:
            # text as it is: no folding of tables, no markup in brackets
            self.progress.console.print(*args, **{"soft_wrap": True, "markup": False, "highlight": False, **kwargs})


def _clock(seconds: float) -> str:
    minutes, second = divmod(int(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02d}:{second:02d}"
