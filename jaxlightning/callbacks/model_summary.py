"""Print a table of the module's networks when training begins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxlightning.callbacks._summary import Summary, check_depth, summarize
from jaxlightning.callbacks.callback import Callback

if TYPE_CHECKING:
    from jaxlightning.module import JaxLightningModule
    from jaxlightning.trainer import Trainer


class ModelSummary(Callback):
    """Print name, type, number, size and shapes of the parameters of every network at the start of `fit`.

    Networks whose variables are created by the first step that calls them are shown as soon as that has happened. Input
    and output sizes are shown when the module sets `example_input_array`.

    Args:
        max_depth: How many levels of layers are shown: 1 for the networks, -1 for all, 0 for no table.

    Raises:
        ValueError: `max_depth` is not an int >= -1.
    """

    def __init__(self, max_depth: int = 1) -> None:
        super().__init__()
        check_depth(max_depth)
        self._max_depth = max_depth
        self._is_due = False
        self._modes: dict[str, str] = {}

    def on_fit_start(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        """Print now, or as soon as the networks have variables."""
        self._is_due = bool(self._max_depth) and trainer.is_global_zero
        if not self._is_due:
            return
        engine = trainer._engine
        # the step that creates the variables may belong to the sanity check, which runs in eval mode
        self._modes = {network.name: network.mode for network in engine.networks()}
        if engine.has_variables:
            self._show(trainer, pl_module)
            return

        def created() -> None:
            if self._is_due and engine.has_variables:
                self._show(trainer, pl_module)

        engine.on_variables_created.append(created)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        """Print without the networks that no step has called in a whole epoch."""
        if self._is_due:
            self._show(trainer, pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        """Print no later than this fit."""
        self._is_due = False

    def summarize(self, summary: Summary) -> str:
        """Return the text that is printed; override it for a table of your own.

        Args:
            summary: Rows and totals.

        Returns:
            The text.
        """
        return str(summary)

    def _show(self, trainer: Trainer, pl_module: JaxLightningModule) -> None:
        self._is_due = False
        text = self.summarize(summarize(pl_module, self._max_depth, optimizers=trainer.optimizers, modes=self._modes))
        bar: Any = trainer.progress_bar_callback
        if bar is not None:
            bar.print(text)
        else:
            print(text)
