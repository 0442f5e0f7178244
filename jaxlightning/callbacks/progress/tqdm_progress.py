"""The default progress bar, on tqdm."""

from __future__ import annotations

import builtins
import math
import os
import time
from typing import TYPE_CHECKING, Any

from jaxlightning.callbacks.progress import _stdout as above_bars
from jaxlightning.callbacks.progress._tqdm import finite_or_none, hide, show, tqdm_class
from jaxlightning.callbacks.progress.loop_progress import LoopProgressBar
from jaxlightning.utilities.rank_zero import rank_zero_debug

if TYPE_CHECKING:
    from jaxlightning.module import JaxLightningModule
    from jaxlightning.trainer import Trainer

_PLAIN_INTERVAL = 30.0
"""Seconds between two plain lines of a long epoch, where the output cannot be redrawn."""

_COLAB_REFRESH_RATE = 20
_BARS = ("_train_progress_bar", "_val_progress_bar", "_test_progress_bar", "_predict_progress_bar")


class TQDMProgressBar(LoopProgressBar):
    """Show progress with tqdm, on standard output.

    One line is on the screen at any time: validation takes the line of the training bar and gives it back. The bar is
    redrawn at most every `mininterval` seconds (tqdm's setting, 0.1 by default), and its metrics are those of the last
    log point (`Trainer(log_every_n_steps=...)`), so that showing them never waits for the device. Where the output is
    no terminal, a plain line is written at the end of each epoch and every 30 seconds within one.

    To change a bar, override the `init_*_tqdm` method that makes it.

    Args:
        refresh_rate: The bars count in steps of this many batches; 0 shows nothing. The variable `TQDM_MINITERS` sets
            a lower bound; on Colab the default becomes 20.
        process_position: By how many lines the bar is moved down, for a program that shows bars of its own above.
        leave: Whether the bar of each training epoch stays on the screen.
    """

    BAR_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_noinv_fmt}{postfix}]"

    def __init__(self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False) -> None:
        super().__init__(_resolve_refresh_rate(refresh_rate), leave)
        self._process_position = process_position
        self._train_progress_bar: Any = None
        self._val_progress_bar: Any = None
        self._test_progress_bar: Any = None
        self._predict_progress_bar: Any = None
        self._next_draw = 0.0

    def __getstate__(self) -> dict[str, Any]:
        return {name: None if name in (*_BARS, "_trainer") else value for name, value in vars(self).items()}

    # settings

    @property
    def process_position(self) -> int:
        """By how many lines the bar is moved down."""
        return self._process_position

    # the bars

    def _bar(self, name: str) -> Any:
        bar = getattr(self, name)
        if bar is None:
            raise TypeError(f"The `{type(self).__name__}.{name}` reference has not been set yet.")
        return bar

    @property
    def train_progress_bar(self) -> Any:
        """The tqdm bar of training."""
        return self._bar("_train_progress_bar")

    @train_progress_bar.setter
    def train_progress_bar(self, bar: Any) -> None:
        self._train_progress_bar = bar

    @property
    def val_progress_bar(self) -> Any:
        """The tqdm bar of validation or of the sanity check."""
        return self._bar("_val_progress_bar")

    @val_progress_bar.setter
    def val_progress_bar(self, bar: Any) -> None:
        self._val_progress_bar = bar

    @property
    def test_progress_bar(self) -> Any:
        """The tqdm bar of testing."""
        return self._bar("_test_progress_bar")

    @test_progress_bar.setter
    def test_progress_bar(self, bar: Any) -> None:
        self._test_progress_bar = bar

    @property
    def predict_progress_bar(self) -> Any:
        """The tqdm bar of prediction."""
        return self._bar("_predict_progress_bar")

    @predict_progress_bar.setter
    def predict_progress_bar(self, bar: Any) -> None:
        self._predict_progress_bar = bar

    def _make(self, desc: str, **settings: Any) -> Any:
        bar = tqdm_class()(
            desc=desc,
            position=2 * self.process_position,
            disable=self.is_disabled,
            dynamic_ncols=True,
            file=above_bars.stream(),
            bar_format=self.BAR_FORMAT,
            **settings,
        )
        if not bar.disable and not getattr(bar, "plain", True):
            above_bars.install()
        return bar

    def teardown(self, trainer: Trainer, pl_module: JaxLightningModule, stage: str) -> None:
        """Let others write straight to the terminal again."""
        above_bars.remove()

    def init_sanity_tqdm(self) -> Any:
        """Make the bar of the sanity check."""
        return self._make(self.sanity_check_description, leave=False)

    def init_train_tqdm(self) -> Any:
        """Make the bar of training."""
        return self._make(self.train_description, leave=True, smoothing=0)

    def init_validation_tqdm(self) -> Any:
        """Make the bar of validation."""
        return self._make(self.validation_description, leave=self.trainer.state.fn == "validate")

    def init_test_tqdm(self) -> Any:
        """Make the bar of testing."""
        return self._make(self.test_description, leave=True)

    def init_predict_tqdm(self) -> Any:
        """Make the bar of prediction."""
        return self._make(self.predict_description, leave=True, smoothing=0)

    # drawing

    def _should_update(self, current: int, total: int | None) -> bool:
        return self.is_enabled and (current % self._refresh_rate == 0 or current == total)

    def _advance(self, bar: Any, n: int) -> bool:
        """Count a bar on to `n` batches and redraw it when this is due; a few microseconds otherwise."""
        if bar is None or bar.disable or not self._should_update(n, bar.total):
            return False
        bar.n = n
        now = time.monotonic()
        if now >= self._next_draw:
            self._draw(bar, now)
        return True

    def _draw(self, bar: Any, now: float) -> None:
        if getattr(bar, "plain", False):
            bar.write_line()
            self._next_draw = now + _PLAIN_INTERVAL
        else:
            bar.refresh()
            self._next_draw = now + bar.mininterval

    def _begin_count(self, trainer: Trainer, stage: str, description: str, total: float) -> None:
        self._restart(getattr(self, f"{stage}_progress_bar"), description, total)

    def _count_batches(self, stage: str, n: int) -> None:
        self._advance(getattr(self, f"_{stage}_progress_bar"), n)

    def _restart(self, bar: Any, description: str, total: float) -> None:
        """Begin a new count on a bar, with one redraw instead of tqdm's three."""
        bar.hidden = True
        bar.reset()
        bar.total = finite_or_none(total)
        bar.initial = 0
        bar.set_description(description, refresh=False)
        show(bar)
        plain = getattr(bar, "plain", False)
        self._next_draw = time.monotonic() + (_PLAIN_INTERVAL if plain else 0.0)

    def _finish(self, bar: Any) -> None:
        """Show the last state of a bar."""
        if bar.disable:
            return
        if getattr(bar, "plain", False):
            bar.write_line()
        else:
            bar.refresh()

    # training

    def on_sanity_check_start(self, *_: Any) -> None:
        """Open the bar of the sanity check."""
        self.val_progress_bar = self.init_sanity_tqdm()
        self.train_progress_bar = tqdm_class()(disable=True)  # until training starts

    def on_sanity_check_end(self, *_: Any) -> None:
        """Close the bar of the sanity check."""
        self.val_progress_bar.close()
        self.train_progress_bar.close()

    def on_train_start(self, *_: Any) -> None:
        """Open the bar of training."""
        self.train_progress_bar = self.init_train_tqdm()

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        """Begin the count of an epoch."""
        if self._leave and self.train_progress_bar.disable:
            self.train_progress_bar = self.init_train_tqdm()
        self._restart(self.train_progress_bar, f"Epoch {trainer.current_epoch}", self.total_train_batches)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: JaxLightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count a batch, and take over new metrics when there was a log point."""
        bar = self._train_progress_bar
        if self._advance(bar, batch_idx + 1):
            metrics = self._changed_metrics(trainer, pl_module)
            if metrics is not None:
                if hasattr(bar, "show_metrics"):
                    bar.show_metrics(metrics)
                else:  # a bar that the user made
                    bar.set_postfix(metrics, refresh=False)

    def quiet_batches(self, trainer: Trainer) -> tuple[float, float]:
        """For how many batches, and until which `time.monotonic()`, the bar has nothing to draw."""
        bar = self._train_progress_bar
        if bar is None or bar.disable:
            return math.inf, math.inf
        return math.inf, self._next_draw

    def on_train_epoch_end(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        """Show the epoch's metrics."""
        bar = self.train_progress_bar
        if not bar.disable:
            bar.set_postfix(self.get_metrics(trainer, pl_module), refresh=False)
            self._finish(bar)
        if self._leave:
            bar.close()

    def on_train_end(self, *_: Any) -> None:
        """Close the bar of training."""
        self.train_progress_bar.close()

    # validation

    def on_validation_start(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        """Open the bar of validation, in the place of the training bar."""
        if trainer.sanity_checking:
            return
        if self._train_progress_bar is not None and trainer.state.fn == "fit":
            hide(self._train_progress_bar)
        self.val_progress_bar = self.init_validation_tqdm()

    def on_validation_end(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        """Close the bar of validation and show its metrics on the training bar."""
        fitting = trainer.state.fn == "fit"
        if not fitting:
            self._finish(self.val_progress_bar)
        self.val_progress_bar.close()
        self.reset_dataloader_idx_tracker()
        train_bar = self._train_progress_bar
        if fitting and train_bar is not None and not train_bar.disable:
            train_bar.set_postfix(self.get_metrics(trainer, pl_module), refresh=False)
            show(train_bar)

    # test

    def on_test_start(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        """Open the bar of testing."""
        self.test_progress_bar = self.init_test_tqdm()

    def on_test_end(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        """Close the bar of testing."""
        self._finish(self.test_progress_bar)
        self.test_progress_bar.close()
        self.reset_dataloader_idx_tracker()

    # predict

    def on_predict_start(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        """Open the bar of prediction."""
        self.predict_progress_bar = self.init_predict_tqdm()

    def on_predict_end(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        """Close the bar of prediction."""
        self._finish(self.predict_progress_bar)
        self.predict_progress_bar.close()
        self.reset_dataloader_idx_tracker()

    # end and printing

    def on_exception(self, trainer: Trainer, pl_module: JaxLightningModule, exception: BaseException) -> None:
        """Close every bar, so that the traceback begins on a line of its own."""
        self.reset_dataloader_idx_tracker()
        above_bars.remove()
        for name in reversed(_BARS):
            bar = getattr(self, name)
            if bar is not None:
                bar.hidden = False
                bar.close()

    def print(self, *args: Any, sep: str = " ", **kwargs: Any) -> None:
        """Print above the bar that is shown, or as usual when there is none."""
        if any(bar is not None and not bar.disable for bar in (getattr(self, name) for name in _BARS)):
            tqdm_class().write(sep.join(map(str, args)), **kwargs)
        else:
            builtins.print(*args, sep=sep, **kwargs)


def _resolve_refresh_rate(refresh_rate: int) -> int:
    if os.getenv("COLAB_GPU") and refresh_rate == 1:
        rank_zero_debug("A bar that is redrawn often stalls Colab; refresh_rate becomes %s", _COLAB_REFRESH_RATE)
        return _COLAB_REFRESH_RATE
    if "TQDM_MINITERS" in os.environ:
        return max(int(os.environ["TQDM_MINITERS"]), refresh_rate)
    return refresh_rate
