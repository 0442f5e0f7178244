"""Advice added to errors that are raised while a user's step is traced; their type and traceback stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

__all__ = ["explain", "explained"]

_DECISION = (
    "The step is compiled: inside it arrays (and batch_idx, self.global_step, self.current_epoch) have no value "
    "yet, so "
    "Python cannot decide or convert by them. Use jnp.where / jax.lax.cond for decisions, keep numbers as arrays "
    "(no float(x), .item(), np.asarray(x)), move host work to a hook such as `on_train_batch_end`, or debug with "
    "`Trainer(jit=False)`."
)
_DYNAMIC = (
    "A compiled step needs shapes that do not depend on values: replace `x[mask]` by `jnp.where(mask, x, 0)` or a "
    "weighted mean, and `jnp.nonzero(x)` by its `size=` form."
)
_IN_PLACE = "JAX arrays do not change in place: write `x = x.at[i].set(v)` instead of `x[i] = v`."
_TORCH = (
    "A torch tensor or a torch function is used inside the step. The step works on JAX arrays (the batch arrives as "
    "such): use jax.numpy / jax.nn / optax there, and keep torch in the data loader."
)
_CHECK = 'A `checkify.check` in a compiled step needs `Trainer(checkify="user")`, or `checkify=True` for all checks.'


def explain(error: BaseException, where: str) -> None:
    """Adds a note with the way out to a well-known kind of error.

    Args:
        error: The exception, about to travel on.
        where: The user's step, for example `"Net.training_step"`.
    """
    text = str(error)
    note = None
    if isinstance(error, jax.errors.NonConcreteBooleanIndexError):
        note = _DYNAMIC
    elif isinstance(
        error,
        jax.errors.ConcretizationTypeError
        | jax.errors.TracerArrayConversionError
        | jax.errors.TracerIntegerConversionError,
    ):
        note = _DECISION
    elif isinstance(error, TypeError) and ("item assignment" in text or "immutable" in text):
        note = _IN_PLACE
    elif "checkify.check" in text and "not functionalized" in text:
        note = _CHECK
    elif isinstance(error, TypeError | AttributeError | RuntimeError | ValueError) and _mentions_torch(text):
        note = _TORCH
    if note is not None and note not in getattr(error, "__notes__", []):
        error.add_note(f"In `{where}`: {note}")


def explained(call: Callable[..., Any], where: str) -> Callable[..., Any]:
    """A call whose errors get advice: some are raised only when a traced step is compiled.

    Args:
        call: Traces and compiles.
        where: Whose step it is.
    """

    def run(*args: Any) -> Any:
        try:
            return call(*args)
        except Exception as error:
            explain(error, where)
            raise

    return run


def _mentions_torch(text: str) -> bool:
    return "torch." in text or "torch tensor" in text.lower() or "must be Tensor" in text or "'Tensor'" in text
