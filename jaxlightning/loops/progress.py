"""Counters of a run, with the names and the dictionaries that Lightning's checkpoints have.

An event is *ready* before its start hook, *started* after it, *processed* when its work is done and *completed*
after its end hook. `total` counts over the whole run, `current` since the loop began its present pass.
The training loop increments these slots directly, so they are plain integers and nothing here is a property.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(slots=True)
class ReadyCompleted:
    """An event with only a beginning and an end."""

    ready: int = 0
    completed: int = 0

    def reset(self) -> None:
        """Set every counter to zero."""
        for item in fields(self):
            setattr(self, item.name, 0)

    def reset_on_restart(self) -> None:
        """Forget an event that began and did not complete."""
        for item in fields(self):
            setattr(self, item.name, self.completed)

    def increment_by(self, n: int) -> None:
        """Count `n` whole events."""
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + n)

    def state_dict(self) -> dict[str, int]:
        """Return the counters by name."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take the counters from `state`; names that it lacks keep their value."""
        for item in fields(self):
            if item.name in state:
                setattr(self, item.name, int(state[item.name]))


@dataclass(slots=True)
class Started(ReadyCompleted):
    """An event whose start hook is told apart."""

    started: int = 0


@dataclass(slots=True)
class Processed(Started):
    """An event whose work is told apart from its end hook."""

    processed: int = 0


@dataclass(slots=True)
class Progress:
    """One event's counters over the run (`total`) and in this pass (`current`)."""

    total: Any = field(default_factory=Processed)
    current: Any = field(default_factory=Processed)

    @classmethod
    def of(cls, tracker: type[ReadyCompleted]) -> Progress:
        """Return a pair of `tracker` counters."""
        return cls(total=tracker(), current=tracker())

    def increment_ready(self) -> None:
        """Count an event that is about to start."""
        self.total.ready += 1
        self.current.ready += 1

    def increment_started(self) -> None:
        """Count an event whose start hook ran."""
        self.total.started += 1
        self.current.started += 1

    def increment_processed(self) -> None:
        """Count an event whose work is done."""
        self.total.processed += 1
        self.current.processed += 1

    def increment_completed(self) -> None:
        """Count an event whose end hook ran."""
        self.total.completed += 1
        self.current.completed += 1

    def increment_by(self, n: int) -> None:
        """Count `n` whole events."""
        self.total.increment_by(n)
        self.current.increment_by(n)

    def reset(self) -> None:
        """Set both sides to zero."""
        self.total.reset()
        self.current.reset()

    def reset_on_run(self) -> None:
        """Begin a new pass."""
        self.current.reset()

    def reset_on_restart(self) -> None:
        """Forget an unfinished event, on both sides: a resumed run counts it once."""
        self.total.reset_on_restart()
        self.current.reset_on_restart()

    def state_dict(self) -> dict[str, Any]:
        """Return both sides by name."""
        return {"total": self.total.state_dict(), "current": self.current.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take both sides from `state`."""
        self.total.load_state_dict(state["total"])
        self.current.load_state_dict(state["current"])


@dataclass(slots=True)
class BatchProgress(Progress):
    """Batches, and whether the present one is the last of its pass."""

    is_last_batch: bool = False

    def reset(self) -> None:
        """Set everything to zero."""
        Progress.reset(self)
        self.is_last_batch = False

    def reset_on_run(self) -> None:
        """Begin a new pass."""
        Progress.reset_on_run(self)
        self.is_last_batch = False

    def state_dict(self) -> dict[str, Any]:
        """Return the counters and the flag."""
        return {**Progress.state_dict(self), "is_last_batch": self.is_last_batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the counters and the flag from `state`."""
        Progress.load_state_dict(self, state)
        self.is_last_batch = bool(state["is_last_batch"])


@dataclass(slots=True)
class OptimizerProgress:
    """Optimizer steps and gradient resets."""

    step: Progress = field(default_factory=lambda: Progress.of(ReadyCompleted))
    zero_grad: Progress = field(default_factory=lambda: Progress.of(Started))

    def reset(self) -> None:
        """Set everything to zero."""
        self.step.reset()
        self.zero_grad.reset()

    def reset_on_run(self) -> None:
        """Begin a new pass."""
        self.step.reset_on_run()
        self.zero_grad.reset_on_run()

    def reset_on_restart(self) -> None:
        """Forget an unfinished step."""
        self.step.reset_on_restart()
        self.zero_grad.reset_on_restart()

    def state_dict(self) -> dict[str, Any]:
        """Return both events by name."""
        return {"step": self.step.state_dict(), "zero_grad": self.zero_grad.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take both events from `state`."""
        self.step.load_state_dict(state["step"])
        self.zero_grad.load_state_dict(state["zero_grad"])


@dataclass(slots=True)
class OptimizationProgress:
    """The optimizer's progress in automatic optimization."""

    optimizer: OptimizerProgress = field(default_factory=OptimizerProgress)

    @property
    def optimizer_steps(self) -> int:
        """Completed optimizer steps over the run."""
        return int(self.optimizer.step.total.completed)

    def reset(self) -> None:
        """Set everything to zero."""
        self.optimizer.reset()

    def reset_on_run(self) -> None:
        """Begin a new pass."""
        self.optimizer.reset_on_run()

    def reset_on_restart(self) -> None:
        """Forget an unfinished step."""
        self.optimizer.reset_on_restart()

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's progress."""
        return {"optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the optimizer's progress from `state`."""
        self.optimizer.load_state_dict(state["optimizer"])


AnyProgress = (Progress, OptimizerProgress, OptimizationProgress)
"""What a loop saves under the name of its attribute."""
