"""Which form a hand-written step has: what its arguments are, and what it returns.

Arguments are known by their names, or by their place where a name says nothing. What comes back is known by its
structure: the part that looks like the state is the state. Anything that fits no form is refused with the list.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

__all__ = [
    "FORMS",
    "Form",
    "LossForm",
    "StepOutputs",
    "entries_of",
    "form_of",
    "is_jitted",
    "plain_logs",
    "read_logs",
    "split_outputs",
]

FORMS = """\
    train_step(state, batch, opt_state) -> (state, loss_dict, opt_state)
    train_step(state, batch)            -> (state, loss_dict)
    train_step(params, batch)           -> (params, loss)
    train_step(params, opt_state, batch, key) -> (params, opt_state, loss, *parts)
    train_step(model, optimizer, batch) -> loss or loss_dict       (NNX; both are changed in place)
    loss_fn(params, batch)              -> (loss, aux)              (the step is written for you)
    eval_step(state, batch)             -> accuracy or a dict
  A random key may be one more argument, called `key` or `rng`; `params` and `model` may stand for `state`.
  `loss_fn` may also take `batch_stats` or `state`, and return them as aux = (loss_dict, {"batch_stats": ...})."""

_NAMES: dict[str, tuple[str, ...]] = {
    "state": ("state", "train_state", "ts", "trainstate"),
    "params": ("params", "parameters", "param", "weights", "variables"),
    "model": ("model", "net", "network", "module"),
    "batch": ("batch", "data", "minibatch", "examples", "example", "samples", "graph", "graphs", "inputs"),
    "opt": ("opt_state", "optimizer_state", "optim_state", "optstate", "optimizer", "opt", "optim"),
    "key": ("key", "rng", "prng", "prng_key", "rng_key", "dropout_key", "dropout_rng", "subkey", "random_key"),
    "batch_stats": ("batch_stats", "model_state", "net_state", "network_state"),
}
_ROLES = {name: role for role, names in _NAMES.items() for name in names}
CARRIES = ("state", "params", "model")
"""Roles of what is trained."""


@dataclass(frozen=True)
class Form:
    """The arguments of a step.

    Attributes:
        roles: For each argument what it is: one of `CARRIES`, `"batch"`, `"opt"`, `"key"`, `"batch_stats"`.
        where: The step's name, for messages.
        keywords: Names of the last arguments, where they have to be passed by name.
    """

    roles: tuple[str, ...]
    where: str
    keywords: tuple[str, ...] = ()

    @property
    def carry(self) -> str:
        """What the step calls the thing that is trained."""
        return next(role for role in self.roles if role in CARRIES)


@dataclass(frozen=True)
class LossForm(Form):
    """A loss function; the step around it is ours."""


@dataclass(frozen=True)
class StepOutputs:
    """Where the parts of a step's return value are.

    Attributes:
        opt: Index of the optimizer state, or None.
        logs: Indices of losses and dictionaries of losses.
    """

    opt: int | None
    logs: tuple[int, ...]


def is_jitted(function: Any) -> bool:
    """Whether a step is compiled already: by `jax.jit`, `nnx.jit` or `eqx.filter_jit`."""
    return callable(getattr(function, "lower", None)) and not inspect.isfunction(function)


def form_of(function: Callable[..., Any], name: str, *, nnx: bool = False, loss: bool = False) -> Form:
    """Find out what the arguments of a step are.

    Args:
        function: The step, jitted or not.
        name: What it was given as, for messages.
        nnx: Whether the thing that is trained is an NNX module.
        loss: Whether it is a loss function.

    Returns:
        The form.

    Raises:
        TypeError: If that is not clear; the message lists the forms.
    """
    inner = function.func if isinstance(function, functools.partial) else function
    where = f"`{name}={getattr(inner, '__name__', type(inner).__name__)}`"
    if not callable(function):
        raise TypeError(f"`{name}` must be a function, got {type(function).__name__}. The forms are:\n{FORMS}")
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise TypeError(f"{where} has no signature that could be read. The forms are:\n{FORMS}") from error
    bound = function.keywords if isinstance(function, functools.partial) else {}
    # An argument with a default is passed only when its name says what it is for.
    wanted = [
        p
        for p in parameters
        if p.kind is not p.VAR_KEYWORD
        and p.name not in bound
        and (p.default is p.empty or _ROLES.get(p.name.strip("_").lower()) == "key")
    ]
    named = sorted(wanted, key=lambda p: p.kind is p.KEYWORD_ONLY)
    if any(p.kind is p.VAR_POSITIONAL for p in named) or not 2 <= len(named) <= 5:
        raise _unclear(where, parameters)
    keywords = tuple(p.name for p in named if p.kind is p.KEYWORD_ONLY)
    roles: list[str | None] = [_ROLES.get(p.name.strip("_").lower()) for p in named]
    if roles[0] is None and not any(role in CARRIES for role in roles):
        roles[0] = "params" if loss else "model" if nnx else "state"
    if roles.count(None) == 1 and "batch" not in roles:
        roles[roles.index(None)] = "batch"
    if len(roles) == 3 and roles.count(None) == 1 and "batch" in roles and roles[2] is None and not keywords:
        roles[2] = "opt" if not loss else "key"
    known = [role for role in roles if role is not None]
    trained = [role for role in known if role in CARRIES]
    if loss and set(trained) == {"params", "state"}:
        trained = ["params"]  # the rest of the state is what the loss function reads beside them
    repeated = len(set(known)) != len(known)
    if len(known) != len(roles) or "batch" not in known or len(trained) != 1 or repeated:
        raise _unclear(where, parameters)
    if not loss and "batch_stats" in known:
        raise _unclear(where, parameters)
    return (LossForm if loss else Form)(tuple(known), where, keywords)


def _unclear(where: str, parameters: Sequence[inspect.Parameter]) -> TypeError:
    received = ", ".join(str(p) for p in parameters)
    return TypeError(
        f"{where} has the arguments ({received}), from which it is not clear what to pass. The forms are:\n{FORMS}\n"
        "  Name the arguments like this, or wrap the step: `lambda state, batch: my_step(state, *batch)`."
    )


def split_outputs(form: Form, out: Any, carry: Any, opt: Any) -> StepOutputs | None:
    """Find the parts of a step's return value by their structure.

    Args:
        form: The form of the step.
        out: What it returned, or the shapes of that.
        carry: What is trained, as it was passed.
        opt: The optimizer state, as it was passed.

    Returns:
        The places; None when the value is `(loss, aux)` or a loss alone, as a loss function returns it.

    Raises:
        TypeError: If the value fits no form.
    """
    if form.carry == "model" and not isinstance(out, tuple):
        return StepOutputs(None, (0,))
    structure = _structure(carry)
    items = tuple(out) if isinstance(out, tuple | list) else (out,)
    if len(items) >= 2 and _structure(items[0]) == structure and not _is_loss(items, carry):
        _require_same_shapes(form, items[0], carry)
        rest = list(range(1, len(items)))
        place = None
        if "opt" in form.roles:
            want = _structure(opt)
            places = [i for i in rest if _structure(items[i]) == want]
            if not places:
                raise TypeError(
                    f"{form.where} takes an optimizer state and must return it too. It returned {_describe(items)}. "
                    f"The forms are:\n{FORMS}"
                )
            # In the order of the arguments: (params, opt_state, batch) returns it second, (state, batch, opt) last.
            place = places[0] if form.roles.index("opt") == 1 else places[-1]
            rest.remove(place)
        if rest:
            return StepOutputs(place, tuple(rest))
    if "opt" not in form.roles and _is_loss(items, carry):
        return None
    raise TypeError(
        f"{form.where} returned {_describe(items)}, which fits none of the forms: its first part must have the "
        f"structure of what it was given as `{form.carry}`, and a loss must be among the others. The forms are:\n"
        f"{FORMS}"
    )


def _structure(tree: Any) -> Any:
    return jax.tree_util.tree_structure(tree)


def _is_loss(items: tuple[Any, ...], carry: Any) -> bool:
    first = items[0]
    scalar = hasattr(first, "shape") and tuple(first.shape) == ()
    return scalar and _structure(carry) != _structure(first)


def _require_same_shapes(form: Form, new: Any, old: Any) -> None:
    changed = []
    for (path, a), b in zip(jax.tree_util.tree_flatten_with_path(old)[0], jax.tree_util.tree_leaves(new), strict=True):
        if not hasattr(a, "shape") or not hasattr(b, "shape"):
            continue
        before, after = jax.numpy.shape(a), jax.numpy.shape(b)
        if before != after:
            changed.append(f"{jax.tree_util.keystr(path)}: {before} became {after}")
    if changed:
        raise TypeError(f"{form.where} changed shapes in `{form.carry}`: {'; '.join(changed[:10])}")


def _describe(items: tuple[Any, ...]) -> str:
    parts = []
    for item in items:
        if hasattr(item, "shape") and hasattr(item, "dtype"):
            parts.append(f"{item.dtype}{list(item.shape)}")
        elif isinstance(item, dict):
            parts.append("dict(" + ", ".join(map(str, item)) + ")")
        else:
            parts.append(type(item).__name__)
    return f"({', '.join(parts)})" if len(parts) != 1 else parts[0]


def read_logs(parts: Sequence[Any], form: Form, names: Sequence[str] = (), first: str = "loss") -> dict[str, Any]:
    """Name the losses of a step.

    Args:
        parts: Scalars, dictionaries of scalars (nested ones too) and tuples of scalars.
        form: For messages.
        names: Names of the scalars that have none, after the first one.
        first: Name of the first scalar.

    Returns:
        Scalars by name, in order.

    Raises:
        ValueError: If a value is no scalar.
    """
    logs: dict[str, Any] = {}
    fallback = iter([*names, *(f"part_{i}" for i in range(len(names) + 1, 100))])
    started = False

    def put(name: str, value: Any) -> None:
        if value is None:
            return
        if jax.numpy.size(value) != 1:
            raise ValueError(
                f"{form.where} returned {name!r} with shape {jax.numpy.shape(value)} among the values to log. They "
                "must be scalars: reduce it, for example with `.mean()`, or leave it out."
            )
        logs[name] = value

    def visit(value: Any, prefix: str) -> None:
        nonlocal started
        entries = entries_of(value)
        if entries is not None:
            for key, item in entries.items():
                name = f"{prefix}{key}"
                if entries_of(item) is None:
                    put(name, item)
                else:
                    visit(item, f"{name}/")
            started = True
        elif isinstance(value, list | tuple):
            for item in value:
                visit(item, prefix)
        else:
            name = next(fallback) if started else first
            started = True
            put(f"{prefix}{name}", value)

    for part in parts:
        visit(part, "")
    return logs


def entries_of(value: Any) -> dict[Any, Any] | None:
    """The named entries of a dictionary of any kind, a named tuple or a dataclass; None if the value has none."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return dict(value._asdict())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def plain_logs(value: Any) -> Any:
    """The same losses in containers that a compiled function may return, whether or not JAX knows their own."""
    entries = entries_of(value)
    if entries is not None:
        return {str(name): plain_logs(item) for name, item in entries.items()}
    return type(value)(map(plain_logs, value)) if type(value) in (list, tuple) else value
