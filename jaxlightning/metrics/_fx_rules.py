"""In which hooks `self.log` may be called, and what `on_step` and `on_epoch` mean there when they are left out."""

from __future__ import annotations

from dataclasses import dataclass

from jaxlightning.utilities.exceptions import MisconfigurationException

__all__ = ["resolve_levels"]


@dataclass(frozen=True, kw_only=True)
class _Rule:
    """What one kind of hook allows.

    Attributes:
        default: `(on_step, on_epoch)` where the call leaves them out.
        free: Whether the call may choose both; otherwise only the default is possible.
    """

    default: tuple[bool, bool]
    free: bool


_TRAIN_BATCH = _Rule(default=(True, False), free=True)
_EVAL_BATCH = _Rule(default=(False, True), free=True)
_EPOCH = _Rule(default=(False, True), free=False)

_RULES: dict[str, _Rule | None] = {
    **dict.fromkeys(
        (
            "training_step",
            "on_train_batch_start",
            "on_train_batch_end",
            "on_before_zero_grad",
            "optimizer_zero_grad",
            "on_before_backward",
            "backward",
            "on_after_backward",
            "on_before_optimizer_step",
            "configure_gradient_clipping",
            "clip_gradients",
            "optimizer_step",
        ),
        _TRAIN_BATCH,
    ),
    **dict.fromkeys(
        (
            "validation_step",
            "on_validation_batch_start",
            "on_validation_batch_end",
            "test_step",
            "on_test_batch_start",
            "on_test_batch_end",
        ),
        _EVAL_BATCH,
    ),
    **dict.fromkeys(
        tuple(
            f"on_{stage}_{moment}"
            for stage in ("train", "validation", "test")
            for moment in ("start", "epoch_start", "epoch_end")
        ),
        _EPOCH,
    ),
    **dict.fromkeys(
        (
            "prepare_data",
            "setup",
            "teardown",
            "configure_callbacks",
            "configure_model",
            "configure_sharded_model",
            "configure_optimizers",
            "on_fit_start",
            "on_fit_end",
            "on_sanity_check_start",
            "on_sanity_check_end",
            "on_train_end",
            "on_validation_end",
            "on_test_end",
            "on_predict_start",
            "on_predict_end",
            "on_predict_epoch_start",
            "on_predict_epoch_end",
            "on_predict_batch_start",
            "on_predict_batch_end",
            "predict_step",
            "on_before_batch_transfer",
            "transfer_batch_to_device",
            "on_after_batch_transfer",
            "train_dataloader",
            "val_dataloader",
            "test_dataloader",
            "predict_dataloader",
            "lr_scheduler_step",
            "on_exception",
            "state_dict",
            "load_state_dict",
            "on_save_checkpoint",
            "on_load_checkpoint",
            "on_validation_model_zero_grad",
            "on_validation_model_eval",
            "on_validation_model_train",
            "on_test_model_eval",
            "on_test_model_train",
            "on_predict_model_eval",
            "on_predict_model_train",
        ),
        None,
    ),
}


def resolve_levels(fx: str, on_step: bool | None, on_epoch: bool | None) -> tuple[bool, bool]:
    """Check that a hook may log, and fill in the levels that the call left out.

    Args:
        fx: Name of the hook that is running.
        on_step: As passed to `self.log`; None for the hook's default.
        on_epoch: As passed to `self.log`; None for the hook's default.

    Returns:
        `(on_step, on_epoch)`.

    Raises:
        RuntimeError: If the hook is unknown.
        MisconfigurationException: If the hook may not log, or not with these levels.
    """
    if fx not in _RULES:
        raise RuntimeError(
            f"Logging inside `{fx}` is not implemented: it is none of the hooks that the trainer knows. "
            f"The hooks that may log are {sorted(name for name, rule in _RULES.items() if rule is not None)}."
        )
    rule = _RULES[fx]
    if rule is None:
        raise MisconfigurationException(
            f"You can't `self.log()` inside `{fx}`: no step or epoch is under way to which the value could belong. "
            "Write to the logger yourself there (`self.logger.log_metrics(...)` or `self.logger.experiment`)."
        )
    default_step, default_epoch = rule.default
    step = default_step if on_step is None else bool(on_step)
    epoch = default_epoch if on_epoch is None else bool(on_epoch)
    if not rule.free:
        for word, value, only in (("on_step", step, default_step), ("on_epoch", epoch, default_epoch)):
            if value is not only:
                raise MisconfigurationException(
                    f"You can't `self.log({word}={value})` inside `{fx}`, must be one of ({only},): "
                    "this hook runs once per epoch."
                )
    if not step and not epoch:
        raise MisconfigurationException(
            f"`self.log(on_step=False, on_epoch=False)` is not useful. Received in `{fx}`: on_step={on_step}, "
            f"on_epoch={on_epoch}. Set at least one of them."
        )
    return step, epoch
