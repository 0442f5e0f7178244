"""Where a Trainer is: what it was asked to do (`fn`), what it is doing (`stage`) and how it went (`status`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class TrainerStatus(StrEnum):
    """How the current or the last run stands."""

    INITIALIZING = "initializing"
    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"

    @property
    def stopped(self) -> bool:
        """Whether the run is over, for good or for bad."""
        return self in (TrainerStatus.FINISHED, TrainerStatus.INTERRUPTED)


class TrainerFn(StrEnum):
    """The verb that the user called on the Trainer."""

    FITTING = "fit"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"


class RunningStage(StrEnum):
    """What is running at this moment; `fit` passes through sanity checking, training and validating."""

    TRAINING = "train"
    SANITY_CHECKING = "sanity_check"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"

    @property
    def evaluating(self) -> bool:
        """Whether an evaluation loop is running."""
        return self in (RunningStage.VALIDATING, RunningStage.TESTING, RunningStage.SANITY_CHECKING)

    @property
    def dataloader_prefix(self) -> str:
        """The word before `_dataloader` and `limit_*_batches` that belongs to this stage."""
        if self in (RunningStage.VALIDATING, RunningStage.SANITY_CHECKING):
            return "val"
        return self.value


@dataclass
class TrainerState:
    """The state of a Trainer: Lightning's three words, and the plain pytrees of the run.

    Attributes:
        status: How the run stands.
        fn: The verb that the user called, None before the first one.
        stage: What is running now, None when nothing is.
    """

    status: TrainerStatus = TrainerStatus.INITIALIZING
    fn: TrainerFn | None = None
    stage: RunningStage | None = None
    _engine: Any = field(default=None, repr=False, compare=False)

    @property
    def finished(self) -> bool:
        """Whether the last run ended normally."""
        return self.status == TrainerStatus.FINISHED

    @property
    def stopped(self) -> bool:
        """Whether the last run is over."""
        return self.status.stopped

    def _require_engine(self, name: str) -> Any:
        if self._engine is None:
            raise AttributeError(
                f"`trainer.state.{name}` exists once a model is attached: call `Trainer.fit`, `validate`, `test` or"
                " `predict` first."
            )
        return self._engine

    @property
    def params(self) -> Any:
        """The parameters as a plain nested dict, a copy that later steps leave alone; assign to replace them."""
        return self._require_engine("params").params

    @params.setter
    def params(self, value: Any) -> None:
        self._require_engine("params").params = value

    @property
    def opt_state(self) -> Any:
        """The real optax state of the optimizers; assign to replace it."""
        return self._require_engine("opt_state").opt_state

    @opt_state.setter
    def opt_state(self, value: Any) -> None:
        self._require_engine("opt_state").opt_state = value

    @property
    def variables(self) -> Any:
        """The collections other than parameters (batch statistics and the like); assign to replace them."""
        return self._require_engine("variables").variables

    @variables.setter
    def variables(self, value: Any) -> None:
        self._require_engine("variables").variables = value

    @property
    def step(self) -> Any:
        """The number of optimizer updates that the engine has made; assign to replace it."""
        return self._require_engine("step").step

    @step.setter
    def step(self, value: Any) -> None:
        self._require_engine("step").step = value
