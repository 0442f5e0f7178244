"""The step cut in two: gradients, then the users' hooks with the real gradients, then the update.

Used only when somebody overrides a hook that sits between gradient and update; otherwise one compiled call does it all.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from jaxlightning.loops.call import call_callback_hooks, call_lightning_module_hook
from jaxlightning.utilities.exceptions import MisconfigurationException

if TYPE_CHECKING:
    from jaxlightning.loops.progress import OptimizerProgress
    from jaxlightning.trainer import Trainer

CALLBACK_HOOKS = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
MODULE_HOOKS = (*CALLBACK_HOOKS, "optimizer_step", "optimizer_zero_grad", "backward", "configure_gradient_clipping")
_ZERO_GRAD_HOOKS = ("on_before_zero_grad", "optimizer_zero_grad")


def needs_split(trainer: Trainer) -> bool:
    """Tell whether a hook between gradient and update is overridden, by the module or by a callback."""
    hooks = trainer._hooks
    return any(hooks.module(name) is not None for name in MODULE_HOOKS) or hooks.any(*CALLBACK_HOOKS)


class SplitStep:
    """Runs one training batch as two compiled halves with the hooks between them.

    Args:
        trainer: The trainer.
        progress: Counts optimizer steps and gradient resets.
    """

    def __init__(self, trainer: Trainer, progress: OptimizerProgress) -> None:
        self.trainer = trainer
        self.engine = trainer._engine
        self.progress = progress
        self.optimizer = trainer.optimizers[0] if trainer.optimizers else None
        # The old gradients are kept aside for zero_grad hooks only when there is such a hook.
        self._zero_hooks = trainer._hooks.any(*_ZERO_GRAD_HOOKS)
        self._has_gradients = False
        self._window: tuple[int, int] = (1, 1)
        self._closure_ran = False
        self._stepping = False
        self.output: Any = None
        bind = getattr(self.optimizer, "bind", None)
        if callable(bind):
            state = getattr(self.optimizer, "_get_state", None)
            bind(step=self._optimizer_step, zero_grad=self.engine.zero_grad, get_state=state)

    def run(
        self,
        batch: Any,
        batch_idx: int,
        *,
        window_start: bool,
        apply: bool,
        window_count: int,
        accumulate: int,
        counters: dict[str, int],
    ) -> Any:
        """Run one batch.

        Args:
            batch: The batch.
            batch_idx: Its index in the epoch.
            window_start: Whether it is the first of an accumulation window.
            apply: Whether an optimizer step follows.
            window_count: Batches in the window so far, with this one.
            accumulate: Batches in a full window.
            counters: `current_epoch`, `global_step` and `micro_step` for the engine.

        Returns:
            The engine's StepOutput.

        Raises:
            MisconfigurationException: When an `optimizer_step` hook did not run the closure.
        """
        self._window = (window_count, accumulate)
        self.output = None
        self._closure_ran = False

        def closure() -> Any:
            return self._closure(batch, batch_idx, window_start, accumulate, counters)

        if not apply:
            closure()
            return self.output
        trainer = self.trainer
        self._stepping = True
        try:
            call_lightning_module_hook(
                trainer, "optimizer_step", trainer.current_epoch, batch_idx, self.optimizer, closure
            )
        finally:
            self._stepping = False
        if not self._closure_ran:
            raise MisconfigurationException(
                "The closure hasn't been executed. HINT: did you call `optimizer_closure()` in your `optimizer_step`"
                " hook? It could also happen because the `optimizer.step(optimizer_closure)` call did not execute it"
                " internally."
            )
        return self.output

    def flush(self, batch_idx: int, window_count: int, accumulate: int) -> None:
        """Apply a window that the epoch's end cut short after its last batch had run."""
        self._window = (window_count, accumulate)
        self._has_gradients = self.engine.has_gradients
        trainer = self.trainer
        self._stepping = True
        try:
            call_lightning_module_hook(
                trainer, "optimizer_step", trainer.current_epoch, batch_idx, self.optimizer, lambda: None
            )
        finally:
            self._stepping = False

    def _closure(
        self, batch: Any, batch_idx: int, window_start: bool, accumulate: int, counters: dict[str, int]
    ) -> Any:
        trainer, engine = self.trainer, self.engine
        self._closure_ran = True
        keep = window_start and self._zero_hooks
        old = engine.grads if keep else None
        out = engine.grad_step(
            batch,
            batch_idx=batch_idx,
            accumulate=accumulate,
            window_start=window_start,
            want_outputs=True,
            **counters,
        )
        self.output = out
        if window_start:
            self._zero_grad(batch_idx, old)
        if out.skipped:
            trainer._warnings.warn("`training_step` returned `None`. If this was on purpose, ignore this warning...")
            return None
        loss = out.outputs["loss"]
        call_callback_hooks(trainer, "on_before_backward", loss)
        call_lightning_module_hook(trainer, "on_before_backward", loss)
        if trainer._hooks.module("backward") is not None:
            call_lightning_module_hook(trainer, "backward", loss)
        self._has_gradients = True
        call_callback_hooks(trainer, "on_after_backward")
        call_lightning_module_hook(trainer, "on_after_backward")
        return loss

    def _zero_grad(self, batch_idx: int, old: Any) -> None:
        """Call the zero_grad hooks with the old gradients in place; what they leave is added to the new ones."""
        trainer, engine, progress = self.trainer, self.engine, self.progress.zero_grad
        self._has_gradients = False
        progress.increment_ready()
        if self._zero_hooks:
            new, has_gradients = engine.grads, engine.has_gradients
            if old is not None:
                engine.grads = old
            call_callback_hooks(trainer, "on_before_zero_grad", self.optimizer)
            call_lightning_module_hook(trainer, "on_before_zero_grad", self.optimizer)
            progress.increment_started()
            call_lightning_module_hook(trainer, "optimizer_zero_grad", trainer.current_epoch, batch_idx, self.optimizer)
            if trainer._hooks.module("optimizer_zero_grad") is None or old is None:
                engine.grads = new
            else:
                engine.grads = jax.tree.map(lambda left, right: left + right, engine.grads, new)
            # The hooks emptied the old gradients; those of this batch are there as before.
            engine.has_gradients = has_gradients
        else:
            progress.increment_started()
        progress.increment_completed()

    def _optimizer_step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """What `optimizer.step(closure)` does while `optimizer_step` runs: closure, hooks, clipping, update."""
        if not self._stepping:
            raise MisconfigurationException(
                "`optimizer.step()` was called outside of the `optimizer_step` hook. In automatic optimization the"
                " Trainer decides when the optimizer steps; set `self.automatic_optimization = False` to do it"
                " yourself."
            )
        trainer = self.trainer
        result = None if closure is None else closure()
        window_count, accumulate = self._window
        if window_count != accumulate and self._has_gradients:
            # A window cut short is divided by its real count, before anybody looks at the gradients or clips them.
            scale = accumulate / window_count
            self.engine.grads = jax.tree.map(lambda leaf: leaf * scale, self.engine.grads)
        call_callback_hooks(trainer, "on_before_optimizer_step", self.optimizer)
        call_lightning_module_hook(trainer, "on_before_optimizer_step", self.optimizer)
        call_lightning_module_hook(
            trainer,
            "configure_gradient_clipping",
            self.optimizer,
            gradient_clip_val=trainer.gradient_clip_val,
            gradient_clip_algorithm=trainer.gradient_clip_algorithm,
        )
        if self.optimizer is not None and self._has_gradients:
            # Without any gradient (training_step returned None) not even weight decay may touch the parameters.
            self.engine.update_step(window_count=accumulate, accumulate=accumulate)
        return result


def check_optimizer_step_signature(module: Any) -> None:
    """Refuse a `training_step` that still takes the `optimizer_idx` of old versions.

    Raises:
        RuntimeError: Naming the way out.
    """
    if "optimizer_idx" in inspect.signature(module.training_step).parameters:
        raise RuntimeError(
            "Training with multiple optimizers is only supported with manual optimization. Remove the `optimizer_idx`"
            " argument from `training_step`, set `self.automatic_optimization = False` and access your optimizers in"
            " `training_step` with `opt1, opt2, ... = self.optimizers()`."
        )
