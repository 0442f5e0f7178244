"""What can be learnt about an optax transformation: a name, what its update needs, and perhaps its learning rate.

Optax keeps no description of a transformation, only functions. What is read here is read conservatively: a shape that
is not known for certain gives None, never a guess. The tests pin it for the installed optax.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

# Links of a chain that keep the meaning of the learning rate that follows them: they give a direction.
_DIRECTIONS = frozenset(
    {
        "identity",
        "trace",
        "ema",
        "add_decayed_weights",
        "add_noise",
        "clip",
        "clip_by_global_norm",
        "clip_by_block_rms",
        "adaptive_grad_clip",
        "centralize",
        "normalize_by_update_norm",
        "scale_by_adam",
        "scale_by_adamax",
        "scale_by_amsgrad",
        "scale_by_adan",
        "scale_by_belief",
        "scale_by_lion",
        "scale_by_novograd",
        "scale_by_optimistic_gradient",
        "scale_by_radam",
        "scale_by_rms",
        "scale_by_rprop",
        "scale_by_rss",
        "scale_by_sign",
        "scale_by_sm3",
        "scale_by_stddev",
        "scale_by_trust_ratio",
        "scale_by_yogi",
        "scale_by_adadelta",
        "zero_nans",
    }
)


def closure_of(fn: Any) -> dict[str, Any]:
    """The free variables of a function and their values; empty if it has none."""
    fn = getattr(fn, "__func__", fn)
    code, cells = getattr(fn, "__code__", None), getattr(fn, "__closure__", None)
    if code is None or not cells:
        return {}
    out: dict[str, Any] = {}
    for name, cell in zip(code.co_freevars, cells, strict=True):
        try:
            out[name] = cell.cell_contents
        except ValueError:  # an empty cell
            continue
    return out


def maker_of(fn: Any) -> str:
    """The name of the optax factory that made `fn`: `"trace"` for `trace.<locals>.update_fn`."""
    if not str(getattr(fn, "__module__", "")).startswith("optax"):
        return ""
    return str(getattr(fn, "__qualname__", "")).split(".", 1)[0]


def chain_links(update: Any) -> list[Any] | None:
    """The update functions of a (nested) chain, in order; None if some part cannot be read."""
    maker, free = maker_of(update), closure_of(update)
    if maker == "chain":
        parts = free.get("update_fns")
        if not isinstance(parts, (tuple, list)):
            return None
        out: list[Any] = []
        for part in parts:
            links = chain_links(part)
            if links is None:
                return None
            out.extend(links)
        return out
    if maker == "with_extra_args_support":
        inner = getattr(free.get("tx"), "update", None)
        return None if inner is None else chain_links(inner)
    return [update]


def find_learning_rate(tx: Any) -> float | Callable[[Any], Any] | None:
    """The learning rate of a plain optax transformation, if it is certain.

    Args:
        tx: The transformation.

    Returns:
        A number, a schedule, or None if it is unknown.
    """
    links = chain_links(getattr(tx, "update", None))
    if not links or any(maker_of(link) not in _DIRECTIONS for link in links[:-1]):
        return None
    maker, free = maker_of(links[-1]), closure_of(links[-1])
    if maker == "scale":
        try:
            step_size = float(free["step_size"])
        except (KeyError, TypeError, ValueError):
            return None
        return -step_size if step_size < 0 else None
    if maker == "scale_by_schedule":
        inner = free.get("step_size_fn")
        if maker_of(inner) == "scale_by_learning_rate":
            parts = closure_of(inner)
            schedule = parts.get("learning_rate")
            if parts.get("m") == -1 and callable(schedule):
                found: Callable[[Any], Any] = schedule
                return found
    return None


def find_name(tx: Any) -> str:
    """A short name for a transformation, for log keys: `"adam"`, `"sgd"`, ..., or `"optax"` if nothing is known."""
    update = getattr(tx, "update", None)
    injected = [fn for fn in reachable(tx) if "inner_factory" in closure_of(fn) and "numeric_hps" in closure_of(fn)]
    factories = {getattr(closure_of(fn)["inner_factory"], "__name__", "") for fn in injected}
    if len(factories) == 1 and "" not in factories:
        return str(factories.pop())
    makers = [maker_of(link) for link in chain_links(update) or []]
    rules = [maker.removeprefix("scale_by_") for maker in makers if maker.startswith("scale_by_")]
    rules = [rule for rule in rules if rule not in ("schedule", "learning_rate")]
    if rules:
        decayed = rules[0] == "adam" and "add_decayed_weights" in makers[makers.index("scale_by_adam") :]
        return "adamw" if decayed else rules[0]
    if makers and set(makers) <= _DIRECTIONS | {"scale", "scale_by_schedule"}:
        return "sgd"
    known = [maker for maker in makers if maker and maker != "chain"]
    return known[0] if known else "optax"


def find_schedules(tx: Any) -> dict[str, Callable[[Any], Any]]:
    """The schedules given to `optax.inject_hyperparams`, by hyper-parameter; empty if there are none to be found."""
    wrapped = closure_of(getattr(tx, "update", None)).get("sched_hps")
    if not isinstance(wrapped, dict):
        return {}
    found = {name: getattr(value, "schedule_fn", None) for name, value in wrapped.items()}
    return {name: fn for name, fn in found.items() if callable(fn)}


def reachable(tx: Any) -> Iterator[Any]:
    """Every optax function that can be reached from a transformation through closures, each once."""
    seen: set[int] = set()
    stack: list[Any] = [tx]
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, (tuple, list)):
            stack.extend(item)
        elif isinstance(item, Mapping):
            stack.extend(item.values())
        elif type(item).__name__ == "MultiSteps":
            stack.extend(vars(item).values())
        elif callable(item) and maker_of(item):
            yield item
            stack.append(getattr(item, "__self__", None))
            stack.extend(closure_of(item).values())


def find_injections(tx: Any) -> list[tuple[dict[str, Any], set[str]]]:
    """The numbers and the scheduled names of every `inject_hyperparams` in a transformation, in no certain order."""
    out = []
    for fn in reachable(tx):
        free = closure_of(fn)
        if maker_of(fn) == "inject_hyperparams" and isinstance(free.get("numeric_hps"), dict):
            out.append((dict(free["numeric_hps"]), set(free.get("sched_hps", {}))))
    return out


def find_needs(tx: Any, params: Any) -> tuple[bool, bool]:
    """Finds out which extra arguments an update wants, by tracing it with more and more of them.

    Args:
        tx: The transformation.
        params: Its parameters; only shapes and dtypes are looked at.

    Returns:
        Whether it needs `value` (and perhaps `grad`), and whether it needs `value_fn`.
    """

    def shape(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf))  # type: ignore[no-untyped-call]

    def total(tree: Any, *args: Any, **kwargs: Any) -> Any:
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(tree))

    def works_with(names: tuple[str, ...]) -> bool:
        def run(grads: Any, tree: Any) -> Any:
            offered = {"value": total(tree), "grad": grads, "value_fn": total}
            return tx.update(grads, tx.init(tree), tree, **{name: offered[name] for name in names})[0]

        shapes = jax.tree.map(shape, params)
        try:
            jax.eval_shape(run, shapes, shapes)
        except TypeError:  # a keyword-only argument is missing
            return False
        return True

    for names in ((), ("value",), ("value", "grad"), ("value", "grad", "value_fn")):
        if works_with(names):
            return "value" in names, "value_fn" in names
    return False, False  # the update itself will say what is wrong
