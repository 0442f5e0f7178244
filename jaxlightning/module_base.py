"""Where a module is and in which mode: its trainer, its engine, and what follows from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxlightning.compile.host_trainer import NoTrainer
from jaxlightning.compile.trace import current_trace
from jaxlightning.compile.user_code import asked_by_us
from jaxlightning.utilities.seed import global_seed

if TYPE_CHECKING:
    from typing import Self

    from jaxlightning.compile.engine import Engine
    from jaxlightning.trainer import Trainer

__all__ = ["ModuleBase"]


class ModuleBase:
    """What every part of a module builds on.

    Attributes:
        training: Whether the module is in training mode.
        automatic_optimization: Whether the framework computes gradients and applies the optimizer.
    """

    training: bool
    automatic_optimization: bool
    _trainer: Trainer | None
    _engine: Engine | None
    _current_fx_name: str | None

    def _require_engine(self) -> Engine:
        if self._engine is None:
            from jaxlightning.compile.engine import Engine

            Engine(self, seed=global_seed()).attach()
        engine = self._engine
        if engine is None:
            raise RuntimeError("The engine did not attach.")
        return engine

    # --- where the module is ------------------------------------------------------------------------------------

    @property
    def trainer(self) -> Trainer:
        """The trainer.

        Raises:
            RuntimeError: If the module is not attached to one.
        """
        trace = current_trace()
        if self._trainer is None:
            if trace is not None and trace.creating:
                return NoTrainer(type(self).__name__)  # type: ignore[return-value]
            raise RuntimeError(f"{type(self).__name__} is not attached to a `Trainer`.")
        if trace is not None and trace.view is not None and not asked_by_us():
            view: Trainer = trace.view
            return view
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: Trainer | None) -> None:
        self._trainer = trainer
        for value in self.__dict__.values():
            if isinstance(value, ModuleBase) and value is not self:
                value.trainer = trainer

    @property
    def current_epoch(self) -> Any:
        """Index of the epoch, from 0; inside a step a 0-d integer that follows it."""
        trace = current_trace()
        if trace is not None:
            return trace.scalars.current_epoch
        return 0 if self._trainer is None else self._trainer.current_epoch

    @property
    def global_step(self) -> Any:
        """Optimizer steps so far; inside a step a 0-d integer that follows it."""
        trace = current_trace()
        if trace is not None:
            return trace.scalars.global_step
        return 0 if self._trainer is None else self._trainer.global_step

    @property
    def global_rank(self) -> int:
        """Index of this process among all."""
        return 0 if self._trainer is None else self._trainer.global_rank

    @property
    def local_rank(self) -> int:
        """Index of this process on its host."""
        return 0 if self._trainer is None else self._trainer.local_rank

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Arrays of every process, stacked along a new first axis.

        A compiled step, and any run with one process, sees whole arrays already, whatever the number of devices: there
        the data come back as they are.

        Args:
            data: A pytree of arrays.
            group: Must be None: all processes take part.
            sync_grads: Accepted for Lightning's sake; inside a step gradients flow through whole arrays.

        Returns:
            The pytree; with several processes each leaf has shape (processes, ...).

        Raises:
            ValueError: For a group.
        """
        if group is not None:
            raise ValueError(f"`all_gather(group={group!r})`: groups of processes do not exist here; leave it out.")
        import jax

        if current_trace() is not None or jax.process_count() == 1:
            return data
        from jax.experimental import multihost_utils

        return multihost_utils.process_allgather(data)

    @property
    def on_gpu(self) -> bool:
        """Whether the variables are on a GPU."""
        return self._engine is not None and self._engine.strategy.root_device.platform == "gpu"

    @property
    def device(self) -> Any:
        """The (first) JAX device of the run, None before one started."""
        return None if self._engine is None else self._engine.strategy.root_device

    @property
    def logger(self) -> Any:
        """The trainer's first logger, or None."""
        return None if self._trainer is None else self._trainer.logger

    @property
    def loggers(self) -> list[Any]:
        """The trainer's loggers."""
        return [] if self._trainer is None else self._trainer.loggers

    @property
    def fabric(self) -> None:
        """Always None: there is no Fabric here."""
        return None

    # --- modes --------------------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> Self:
        """Puts the module and its networks in training mode (or evaluation mode with `mode=False`)."""
        self.training = mode
        if self._engine is not None:
            self._engine.binding.set_mode(mode)
            self._engine.modes_changed()
        return self

    def eval(self) -> Self:
        """Puts the module and its networks in evaluation mode."""
        return self.train(False)
