"""Optax schedules of our own."""

from __future__ import annotations

import optax

from jaxlightning.optim._optimizer import require


def lr_schedule(
    base_lr: float, steps_per_epoch: int, epochs: int, warmup_epochs: float = 0, *, final_lr: float = 0.0
) -> optax.Schedule:
    """A linear warm-up from `base_lr / 10` to `base_lr`, then a cosine decay to `final_lr` at the end of the run.

    Args:
        base_lr: The highest learning rate.
        steps_per_epoch: Optimizer steps per epoch (batches over `accumulate_grad_batches`).
        epochs: Epochs of the whole run, warm-up included.
        warmup_epochs: Epochs of warm-up, possibly a fraction; 0 begins at `base_lr`.
        final_lr: The last learning rate.

    Returns:
        A function of the number of updates made so far, for any optax optimizer.

    Raises:
        ValueError: If a number is out of range.

    Example:
        ```python
        schedule = lr_schedule(1e-3, steps_per_epoch=937, epochs=5, warmup_epochs=1)
        return {"optimizer": optax.adam(schedule), "lr": schedule}
        ```
    """
    require(base_lr > 0, "lr_schedule", "base_lr", base_lr, "above 0")
    require(steps_per_epoch >= 1, "lr_schedule", "steps_per_epoch", steps_per_epoch, "at least 1")
    require(epochs >= 1, "lr_schedule", "epochs", epochs, "at least 1")
    require(0 <= warmup_epochs <= epochs, "lr_schedule", "warmup_epochs", warmup_epochs, f"between 0 and {epochs}")
    require(0 <= final_lr <= base_lr, "lr_schedule", "final_lr", final_lr, "between 0 and base_lr")
    total = round(steps_per_epoch * epochs)
    warmup = round(steps_per_epoch * warmup_epochs)
    decay = optax.cosine_decay_schedule(base_lr, max(total - warmup, 1), alpha=final_lr / base_lr)
    if warmup == 0:
        return decay
    return optax.join_schedules([optax.linear_schedule(base_lr / 10, base_lr, warmup), decay], [warmup])
