"""A training batch of a module that optimizes by itself: the engine's step and what the loop counts of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxlightning.loops.base import Loop
from jaxlightning.loops.call import call_callback_hooks, call_lightning_module_hook
from jaxlightning.loops.progress import Progress, ReadyCompleted

if TYPE_CHECKING:
    from jaxlightning.trainer import Trainer

HOOKS = ("on_before_backward", "backward", "on_after_backward", "on_before_optimizer_step")
"""Hooks that run in the middle of a step; the others around an optimizer step belong to automatic optimization."""


class ManualOptimization(Loop):
    """Counters of manual optimization."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self.optim_step_progress = Progress.of(ReadyCompleted)


class ManualStep:
    """Runs training batches with manual optimization.

    Args:
        trainer: The trainer.
        loop: Holds the counters.
    """

    def __init__(self, trainer: Trainer, loop: ManualOptimization) -> None:
        self.trainer = trainer
        self.progress = loop.optim_step_progress
        self.steps = trainer._engine.manual
        hooks = trainer._hooks
        self.steps.hooks = frozenset(
            name for name in HOOKS if hooks.module(name) is not None or (name != "backward" and hooks.any(name))
        )
        self._counted = 0
        self.steps.on_step = self.count
        self.steps.call = self._hook

    def _hook(self, name: str, index: int | None, loss: Any, steps: int) -> None:
        """Runs a hook in the middle of a step: callbacks, then the module."""
        trainer = self.trainer
        self.count(steps - self._counted)  # hooks see the steps before them
        self._counted = steps
        args = (loss,) if name in ("on_before_backward", "backward") else ()
        if index is not None:
            args = (trainer.optimizers[index],)
        if name != "backward":
            call_callback_hooks(trainer, name, *args)
        call_lightning_module_hook(trainer, name, *args)

    def count(self, steps: int) -> None:
        """Counts optimizer steps."""
        for progress in (self.progress.total, self.progress.current):
            progress.ready += steps
            progress.completed += steps

    def run(self, batch: Any, batch_idx: int, epoch: int, micro_step: int, want_outputs: bool) -> Any:
        """Runs one batch.

        Args:
            batch: The batch.
            batch_idx: Its index in the epoch.
            epoch: The epoch.
            micro_step: Batches so far, over the whole run.
            want_outputs: Whether somebody gets the outputs.

        Returns:
            The engine's StepOutput.
        """
        self._counted = 0
        profile = self.trainer._active_profiler
        if profile is not None:
            profile.start("run_training_batch")
        out = self.steps.run(
            batch,
            batch_idx=batch_idx,
            current_epoch=epoch,
            global_step=self.progress.total.completed,
            micro_step=micro_step,
            want_outputs=want_outputs,
        )
        if profile is not None:
            profile.stop("run_training_batch")
        self.count(len(out.manual.steps) - self._counted)
        return out
