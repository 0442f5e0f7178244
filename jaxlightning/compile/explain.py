"""Advice added to errors that are raised while a user's step is traced; their type and traceback stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jaxlightning.compile.user_code import line_of

__all__ = ["explain", "explained"]

_DECISION = (
    "The step is compiled: an array has no value yet, so Python cannot decide by it. Use jnp.where(condition, a, b) or "
    "jax.lax.cond. To stop training by a value, log or return it and set `self.trainer.should_stop = True` in "
    "`on_train_batch_end`. Decisions by batch_idx, self.global_step, self.current_epoch and numbers on self are "
    "possible (`self.count`; numbers in a dict or object that the step changes are arrays). To look at values, run "
    "with `Trainer(jit=False)`, where `print(x)` and a debugger show them."
)
_NUMBER = (
    "The step is compiled: an array has no value yet, so it cannot become a number of Python's or a NumPy array (no "
    ".item(), float(x), int(x), np.asarray(x)). Keep it as an array: `self.log` takes arrays, jax.numpy computes with "
    "them. Move host work to a hook such as `on_train_batch_end`, or debug with `Trainer(jit=False)`, where "
    "`print(x)` and a debugger show numbers."
)
_EAGER = (
    "With `Trainer(jit=False)` the step runs once with numbers and then to be differentiated, when JAX gives what was "
    "computed from parameters no value that Python may use. Take it from behind `jax.lax.stop_gradient`, as in "
    "`float(jax.lax.stop_gradient(loss))`, or look at it with `print(loss)` or a debugger."
)
_DYNAMIC = (
    "A compiled step needs shapes that do not depend on values: replace `x[mask]` by `jnp.where(mask, x, 0)` or a "
    "weighted mean, and `jnp.nonzero(x)` by its `size=` form."
)
_IN_PLACE = "JAX arrays do not change in place: `x = x.at[i].set(v)` for `x[i] = v`, `x.at[i].add(v)` for `x[i] += v`."
_TORCH = (
    "A torch tensor or a torch function is used inside the step. The step works on JAX arrays (the batch arrives as "
    "such): use jax.numpy / jax.nn / optax there, and keep torch in the data loader."
)
_CHECK = 'A `checkify.check` in a compiled step needs `Trainer(checkify="user")`, or `checkify=True` for all checks.'
_UNBOUND = (
    "A linen network was called that the framework has not bound to variables. It finds the networks that are "
    "attributes of the LightningModule itself, also in lists, tuples and dictionaries, when the step begins: not "
    "class attributes, not those in objects of other classes, not those made inside the step. Assign it to `self` in "
    "`__init__`, `setup` or `configure_model`."
)
_TORCH_METHODS = {
    "detach": "`jax.lax.stop_gradient(x)`",
    "backward": "nothing (the trainer differentiates the returned loss), or `self.manual_backward(loss)`",
    "cpu": "nothing: arrays are fetched when a hook reads them",
    "cuda": "nothing: the Trainer places arrays",
    "to": "nothing for a device, `x.astype(dtype)` for a dtype",
    "numpy": "nothing in a step; `np.asarray(x)` in a hook",
    "view": "`x.reshape(...)`",
    "unsqueeze": "`x[:, None]` or `jnp.expand_dims(x, axis)`",
    "permute": "`x.transpose(...)`",
    "float": "`x.astype(jnp.float32)`",
    "long": "`x.astype(jnp.int32)`",
    "requires_grad_": "`jax.grad` of a function of x",
    "add_": "`x = x + y`",
    "mul_": "`x = x * y`",
    "copy_": "`self.x = y`",
    "zero_": "`x = jnp.zeros_like(x)`",
}


def explain(error: BaseException, where: str, *, jit: bool = True) -> None:
    """Adds a note with the user's line and the way out to a well-known kind of error.

    Args:
        error: The exception, about to travel on.
        where: The user's step, for example `"Net.training_step"`.
        jit: Whether steps are compiled.
    """
    note = _advice(error)
    if not jit and note in (_NUMBER, _DECISION):
        note = _EAGER
    if note is None or any(note in given for given in getattr(error, "__notes__", [])):
        return
    line = line_of(error)
    error.add_note(f"In `{where}`{f' at {line}' if line else ''}: {note}")


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


def _advice(error: BaseException) -> str | None:
    text = str(error)
    if isinstance(error, jax.errors.NonConcreteBooleanIndexError):
        return _DYNAMIC
    if isinstance(error, jax.errors.TracerBoolConversionError):
        return _DECISION
    if isinstance(
        error,
        jax.errors.ConcretizationTypeError
        | jax.errors.TracerArrayConversionError
        | jax.errors.TracerIntegerConversionError,
    ):
        return _DYNAMIC if "nonzero" in text or "size argument" in text else _NUMBER
    if isinstance(error, TypeError) and ("item assignment" in text or "immutable" in text):
        return _IN_PLACE
    if "checkify.check" in text and "not functionalized" in text:
        return _CHECK
    if type(error).__name__ in ("CallCompactUnboundModuleError", "CallUnbindOnUnboundModuleError"):
        return _UNBOUND
    if isinstance(error, AttributeError) and error.name in _TORCH_METHODS and isinstance(error.obj, jax.Array):
        return f"`.{error.name}` is a word of torch. In JAX: {_TORCH_METHODS[error.name]}."
    if isinstance(error, TypeError | AttributeError | RuntimeError | ValueError) and _mentions_torch(text):
        return _TORCH
    return None


def _mentions_torch(text: str) -> bool:
    return "torch." in text or "torch tensor" in text.lower() or "must be Tensor" in text or "'Tensor'" in text
