"""What a module asks of its optimizers and decides about what they train; manual optimization's words among it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jaxlightning.compile.freezing import Decision, decide, patterns_of
from jaxlightning.compile.selection import ParameterSelection, TrainableSelection
from jaxlightning.compile.trace import current_trace
from jaxlightning.module_base import ModuleBase
from jaxlightning.utilities.exceptions import MisconfigurationException

__all__ = ["ModuleOptimization"]


class ModuleOptimization(ModuleBase):
    """Freezing, `optimizers`, `lr_schedulers`, `manual_backward` and gradient clipping of a module."""

    def freeze(self, *networks: Any) -> None:
        """Freezes all parameters and goes into evaluation mode.

        A frozen parameter is not differentiated; an optimizer changes neither it nor its part of the state.

        Args:
            *networks: Freeze only these: networks such as `self.encoder` (the way for NNX, whose objects have no
                `freeze` of their own), path patterns such as `"encoder/Dense_0"`, or selections.
        """
        self._freeze(networks, True)

    def unfreeze(self, *networks: Any) -> None:
        """Lets all parameters (or those of `networks`, see `freeze`) be trained again, in training mode."""
        self._freeze(networks, False)

    def _freeze(self, networks: tuple[Any, ...], frozen: bool) -> None:
        patterns = patterns_of(self, networks) if networks else ("*",)
        decide(self, Decision(patterns=patterns, frozen=frozen, mode=not frozen))
        if not networks:
            self.train(not frozen)
        elif self._engine is not None:
            self._engine.binding.set_network_modes(patterns, not frozen)
            self._engine.modes_changed()

    def parameters(self, *, requires_grad: bool | None = None) -> ParameterSelection | TrainableSelection:
        """A lazy selection of parameters, for an optimizer in `configure_optimizers`.

        Args:
            requires_grad: True for those only that are not frozen now: what
                `filter(lambda p: p.requires_grad, self.parameters())` is in torch. False for the frozen ones.

        Returns:
            The selection.
        """
        selection = ParameterSelection(("*",), lambda: None if self._engine is None else self._engine.flat_params())
        return selection if requires_grad is None else TrainableSelection(self, selection, requires_grad)

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """The optimizer of the run, or the list of them.

        Args:
            use_pl_optimizer: False gives the wrapped objects.
        """
        found = self.trainer.optimizers if self._trainer is not None else self._provisional().optimizers
        handles = [h if use_pl_optimizer else h.optimizer for h in found]
        return handles[0] if len(handles) == 1 else handles

    def _provisional(self) -> Any:
        """Optimizers and schedulers for `init(batch)` before there is a trainer; nothing steps then.

        Raises:
            RuntimeError: Outside of `init`.
        """
        trace = current_trace()
        if self._engine is None or trace is None or not trace.creating:
            raise RuntimeError(f"{type(self).__name__} is not attached to a `Trainer`.")
        return self._engine.manual.provisional()

    def lr_schedulers(self) -> Any:
        """The scheduler of the run, the list of them, or None."""
        configs = self.trainer.lr_scheduler_configs if self._trainer is not None else self._provisional().schedulers
        schedulers = [config.scheduler for config in configs]
        if not schedulers:
            return None
        return schedulers[0] if len(schedulers) == 1 else schedulers

    def manual_backward(self, loss: Any, *args: Any, gradient: Any = None, **kwargs: Any) -> None:
        """Adds the gradients of `loss` to those of the parameters, in manual optimization.

        Args:
            loss: A scalar array of this step.
            *args: `gradient`, as torch's `backward` takes it.
            gradient: The cotangent of a loss that is no scalar.
            **kwargs: torch's `retain_graph` and `create_graph` are accepted: what was computed can always be
                differentiated again here.

        Raises:
            MisconfigurationException: In automatic optimization, or outside of `training_step`.
            TypeError: For other arguments.
        """
        if self.automatic_optimization:
            raise MisconfigurationException(
                "to use manual_backward, please disable automatic optimization: set model property "
                "`automatic_optimization` as False"
            )
        unknown = set(kwargs) - {"retain_graph", "create_graph"}
        if unknown or len(args) > 3:
            raise TypeError(f"`manual_backward` got unexpected arguments: {sorted(unknown) or args}.")
        if args and gradient is None:
            gradient = args[0]
        self._require_engine().manual.backward(loss, gradient)

    def toggle_optimizer(self, optimizer: Any) -> None:
        """Until `untoggle_optimizer`, only the parameters of this optimizer have gradients.

        Args:
            optimizer: One of `self.optimizers()`.
        """
        self._require_engine().manual.toggle(optimizer, True)

    def untoggle_optimizer(self, optimizer: Any) -> None:
        """Ends what `toggle_optimizer` began.

        Args:
            optimizer: The same optimizer.
        """
        self._require_engine().manual.toggle(optimizer, False)

    @contextmanager
    def toggled_optimizer(self, optimizer: Any) -> Iterator[None]:
        """`toggle_optimizer` for the length of a `with` block.

        Args:
            optimizer: One of `self.optimizers()`.
        """
        self.toggle_optimizer(optimizer)
        try:
            yield
        finally:
            self.untoggle_optimizer(optimizer)

    def clip_gradients(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clips the gradients between backward and update; called in `configure_gradient_clipping`.

        Args:
            optimizer: The optimizer of the hook.
            gradient_clip_val: The largest norm or absolute value; None takes the trainer's.
            gradient_clip_algorithm: `"norm"` or `"value"`; None takes the trainer's.

        Raises:
            MisconfigurationException: If the values contradict those of the trainer.
        """
        trace = current_trace()
        if trace is not None and trace.creating:
            return  # there may be no trainer yet, and there are no gradients
        trainer = self.trainer
        val, algorithm = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
        if gradient_clip_val is None:
            gradient_clip_val = val or 0.0
        elif val is not None and val != gradient_clip_val:
            raise MisconfigurationException(
                f"You have set `Trainer(gradient_clip_val={val!r})` and have passed "
                f"`clip_gradients(gradient_clip_val={gradient_clip_val!r})`. Please use only one of them."
            )
        if gradient_clip_algorithm is None:
            gradient_clip_algorithm = algorithm or "norm"
        else:
            gradient_clip_algorithm = str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm)).lower()
            if algorithm is not None and algorithm != gradient_clip_algorithm:
                raise MisconfigurationException(
                    f"You have set `Trainer(gradient_clip_algorithm={algorithm!r})` and have passed "
                    f"`clip_gradients(gradient_clip_algorithm={gradient_clip_algorithm!r})`. Please use only one of "
                    "them."
                )
        if not isinstance(gradient_clip_val, int | float):
            raise TypeError(f"`gradient_clip_val` should be an int or a float. Got {gradient_clip_val!r}.")
        if gradient_clip_algorithm not in ("norm", "value"):
            raise MisconfigurationException(
                f"`gradient_clip_algorithm` {gradient_clip_algorithm} is invalid. Allowed algorithms: ['value', "
                "'norm']."
            )
        if gradient_clip_val and gradient_clip_val > 0:
            engine = self._require_engine()
            if self.automatic_optimization:
                engine.clip_gradients(float(gradient_clip_val), gradient_clip_algorithm)
            else:
                engine.manual.clip(optimizer, float(gradient_clip_val), gradient_clip_algorithm)
