"""Presents a hand-written step to the trainer as the module that its loops expect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxlightning.functional._engine import FunctionalEngine
from jaxlightning.functional._forms import Form
from jaxlightning.functional._held import Held
from jaxlightning.functional._values import Rate
from jaxlightning.module import JaxLightningModule
from jaxlightning.optim._closures import find_name
from jaxlightning.optim._handle import OptimizerHandle
from jaxlightning.utilities.exceptions import MisconfigurationException

__all__ = ["StepModule", "Steps"]


@dataclass(kw_only=True)
class Steps:
    """What `fit` was given, sorted.

    Attributes:
        train_step: The step, the user's own or the one around a loss function.
        train_form: Its arguments.
        eval_step: The evaluation, or None.
        eval_form: Its arguments, or None.
        eval_view: Makes of the carry (and the optimizer state) what `eval_step` wants to see.
        held: The state.
        tx: The optax transformation, where it is known.
        loss_names: Names of losses that have none.
        type_name: What a summary calls the network.
    """

    train_step: Callable[..., Any]
    train_form: Form
    eval_step: Callable[..., Any] | None
    eval_form: Form | None
    eval_view: Callable[[Any, Any], Any]
    held: Held
    tx: Any = None
    loss_names: Sequence[str] = field(default=())
    type_name: str = "function"


class StepModule(JaxLightningModule):
    """Holds the steps of a `fit`; the work is done by its engine.

    Args:
        steps: The steps and the state.
        hparams: Hyper-parameters to save and log.
        on_metrics: Called with the names of the metrics when evaluation knows them.
    """

    def __init__(
        self, steps: Steps, hparams: dict[str, Any] | None, on_metrics: Callable[[Sequence[str]], None]
    ) -> None:
        super().__init__()
        self.__dict__["steps"] = steps
        self.__dict__["_on_metrics"] = on_metrics
        if hparams:
            self.save_hyperparameters(hparams)
        if steps.eval_step is None:
            self.__dict__["validation_step"] = None

    def _make_engine(self, **options: Any) -> FunctionalEngine:
        """Called by the trainer in place of making an `Engine`."""
        return FunctionalEngine(self, **options)

    def _require_engine(self) -> Any:
        if self._engine is None:
            self._make_engine().attach()
        return self._engine

    def on_metrics_known(self, names: Sequence[str]) -> None:
        """Called by the engine before the first values of an evaluation."""
        self.__dict__["_on_metrics"](names)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Never called: the engine calls the hand-written step."""
        raise RuntimeError("The step of `fit` is called by its engine.")

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        """Never called: the engine calls `eval_step`."""
        raise RuntimeError("The step of `fit` is called by its engine.")

    def on_train_epoch_end(self) -> None:
        """Exhausts the loaders, as the `for` statement of a hand-written loop does: random orders go on as there."""
        feed = self.trainer.fit_loop.feed
        if feed is not None:
            feed.finish_pass()

    def configure_optimizers(self) -> Any:
        """The optimizer as callbacks see it."""
        return HandWritten(self.__dict__["steps"])


class _FixedGroup(dict[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        raise MisconfigurationException(
            f"`optimizer.param_groups[0][{key!r}]` cannot be set: the update is inside a hand-written step. Change it "
            "in the state, with `optax.inject_hyperparams`, or train a LightningModule."
        )


class HandWritten(OptimizerHandle):
    """The optimizer inside a hand-written step: it can be looked at, not changed.

    Args:
        steps: The steps of the `fit`.
    """

    def __init__(self, steps: Steps) -> None:
        super().__init__()
        self.tx = steps.tx
        self.name = find_name(steps.tx) if steps.tx is not None else "Optimizer"
        self.param_groups = [_FixedGroup()]
        self.defaults = {}
        self._held = steps.held

    @property
    def optimizer(self) -> Any:
        """The optax transformation, or the handle itself where there is none to be seen."""
        return self if self.tx is None else self.tx

    def read_lr(self, opt_state: Any = None) -> list[float | None]:
        """The learning rate of the last update; one device read."""
        source = self._held.opt if self._held.opt is not None else self._held.dynamic()[0]
        rate = Rate(source, self.tx)
        if rate.get is not None:
            return [float(jax.device_get(rate.get(source)))]
        # What the optimizer has counted is the number of its next update.
        return [None if rate.schedule is None else rate.at(-min(rate.offset, 1))]
