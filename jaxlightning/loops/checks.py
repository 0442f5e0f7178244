"""What is wrong with a module, said before anything runs."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from jaxlightning.loops.call import accepts, is_overridden
from jaxlightning.loops.optimizer_step import check_optimizer_step_signature
from jaxlightning.utilities.exceptions import MisconfigurationException
from jaxlightning.utilities.rank_zero import rank_zero_warn
from jaxlightning.utilities.states import RunningStage, TrainerFn
from jaxlightning.utilities.warnings import PossibleUserWarning

if TYPE_CHECKING:
    from jaxlightning.trainer import Trainer

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def check_model(model: object, fn: TrainerFn) -> None:
    """Refuse what is not a module of ours.

    Args:
        model: What the user passed.
        fn: The verb, for the message.

    Raises:
        TypeError: Saying what was received and what to do.
        RuntimeError: When the module's `__init__` did not call its parent's.
    """
    from jaxlightning.module import JaxLightningModule

    if isinstance(model, JaxLightningModule):
        if "_trainer" not in vars(model) or "automatic_optimization" not in dir(model):
            raise RuntimeError(
                f"`{type(model).__name__}.__init__` does not call `super().__init__()`. Call it first, before any"
                " attribute is set."
            )
        return
    name = type(model).__name__
    origin = [cls.__module__.partition(".")[0] for cls in type(model).__mro__ if cls.__name__ == "LightningModule"]
    if origin:
        raise TypeError(
            f"`{name}` is a PyTorch LightningModule (from `{origin[0]}`), and `Trainer.{fn.value}` of jaxlightning runs"
            " `jaxlightning.LightningModule`. Derive the class from it and use jax.numpy, Flax and optax in its steps;"
            " MIGRATION.md shows what changes."
        )
    if isinstance(model, type):
        raise TypeError(
            f"`model` must be an instance of a `LightningModule`, got the class `{model.__name__}` itself: call it."
        )
    raise TypeError(f"`model` must be a `LightningModule`, got `{name}`.")


def verify_loop_configuration(trainer: Trainer) -> None:
    """Check that the module can do what is asked of it.

    Raises:
        MisconfigurationException: When a method is missing or two settings contradict each other.
        NotImplementedError: For hooks of old versions, and for what is not built yet.
        RuntimeError: For signatures of old versions.
    """
    model, fn = trainer.lightning_module, trainer.state.fn
    if fn == TrainerFn.FITTING:
        _verify_fit(trainer, model)
        _verify_manual(trainer, model)
    elif fn == TrainerFn.VALIDATING:
        _verify_evaluation(model, "validation", "validate")
    elif fn == TrainerFn.TESTING:
        _verify_evaluation(model, "test", "test")
    elif fn == TrainerFn.PREDICTING:
        if model.predict_step is None:
            raise MisconfigurationException("`predict_step` cannot be None to run `Trainer.predict`")
        if not is_overridden("predict_step", model) and not is_overridden("forward", model):
            raise MisconfigurationException("`Trainer.predict` requires `forward` method to run.")
    for name in _STEPS:
        step = getattr(model, name, None)
        if callable(step) and "dataloader_iter" in inspect.signature(step).parameters:
            raise MisconfigurationException(
                f"`{type(model).__name__}.{name}` takes a `dataloader_iter`. A compiled step cannot draw from an"
                " iterator: take `batch` and let the Trainer draw."
            )


def _verify_fit(trainer: Trainer, model: Any) -> None:
    for name in ("training_step", "configure_optimizers"):
        if not is_overridden(name, model):
            raise MisconfigurationException(
                f"No `{name}()` method defined. Lightning `Trainer` expects as minimum a `training_step()`,"
                " `train_dataloader()` and `configure_optimizers()` to be defined."
            )
    has_loader = trainer.fit_loop.epoch_loop.val_loop.data_source.is_defined()
    has_step = is_overridden("validation_step", model)
    if has_loader and not has_step:
        rank_zero_warn("You passed in a `val_dataloader` but have no `validation_step`. Skipping val loop.")
    if has_step and not has_loader:
        rank_zero_warn(
            "You defined a `validation_step` but have no `val_dataloader`. Skipping val loop.",
            category=PossibleUserWarning,
        )
    _refuse_old_hook(model, "training_epoch_end", "on_train_epoch_end")
    _refuse_old_hook(model, "validation_epoch_end", "on_validation_epoch_end")
    check_optimizer_step_signature(model)


def _refuse_old_hook(model: Any, old: str, new: str) -> None:
    if callable(getattr(model, old, None)):
        raise NotImplementedError(
            f"Support for `{old}` has been removed in v2.0.0. `{type(model).__name__}` implements this method. You can"
            f" use the `{new}` hook instead. To access outputs, save them in-memory as instance attributes."
        )


def _verify_evaluation(model: Any, word: str, verb: str) -> None:
    if not is_overridden(f"{word}_step", model):
        raise MisconfigurationException(f"No `{word}_step()` method defined to run `Trainer.{verb}`.")
    _refuse_old_hook(model, f"{word}_epoch_end", f"on_{word}_epoch_end")


def _verify_manual(trainer: Trainer, model: Any) -> None:
    if model.automatic_optimization:
        return
    if trainer.gradient_clip_val is not None and trainer.gradient_clip_val > 0:
        raise MisconfigurationException(
            "Automatic gradient clipping is not supported for manual optimization. Remove"
            f" `Trainer(gradient_clip_val={trainer.gradient_clip_val})` or switch to automatic optimization."
        )
    if trainer.accumulate_grad_batches != 1:
        raise MisconfigurationException(
            "Automatic gradient accumulation is not supported for manual optimization. Remove"
            f" `Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches})` or switch to automatic"
            " optimization."
        )


def verify_dataloader_idx(hooks: tuple[str, ...], several: bool, stage: RunningStage, module: Any) -> None:
    """Check that hooks take `dataloader_idx` when, and only when, there is one.

    Args:
        hooks: The names of the step and of the batch hooks.
        several: Whether there are several loaders, one after the other.
        stage: For the message.
        module: The user's module.

    Raises:
        RuntimeError: Saying which signature to change.
    """
    prefix = stage.dataloader_prefix
    for name in hooks:
        hook = getattr(module, name)
        if not callable(hook):
            continue
        where = f"`{type(module).__name__}.{name}()`"
        if several:
            if not accepts(hook, "dataloader_idx"):
                raise RuntimeError(
                    f"You provided multiple `{prefix}_dataloader`, but no `dataloader_idx` argument in {where}. Try"
                    " adding `dataloader_idx=0` to its signature."
                )
            continue
        parameter = inspect.signature(hook).parameters.get("dataloader_idx")
        if parameter is not None and parameter.default is inspect.Parameter.empty:
            raise RuntimeError(
                f"You provided only a single `{prefix}_dataloader`, but have included `dataloader_idx` in {where}."
                " Either remove the argument or give it a default value i.e. `dataloader_idx=0`."
            )
