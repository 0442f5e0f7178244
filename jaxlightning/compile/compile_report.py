"""What `Trainer(log_compiles=True)` says about a compilation: why there was one, how long it took, what it costs.

`Variants` looks steps up under keys made of everything that a compiled step depends on. A compilation means that no key
matched, so the reason is the difference to the closest key of the same kind.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax

if TYPE_CHECKING:
    from jaxlightning.compile.compiled_step import CompiledStep

__all__ = ["CompileReports"]

_log = logging.getLogger("jaxlightning")

_PARTS = {
    "train": ("options", "modes", "frozen", "state", "batch", "host", "state_shapes", "batch_shapes"),
    "fused": ("steps", "unroll", "options", "modes", "frozen", "state", "batch", "state_shapes", "batch_shapes"),
    "eval": ("options", "modes", "state", "batch", "host", "state_shapes", "batch_shapes"),
    "update": (),
}
"""What the parts of a key of `Variants` are, after the first, which names the kind."""

_TRAINING = ("train", "train_fused", "update")

_MOST = 4
"""Leaves that are named; the others are counted."""

_EVALUATION = ("params", "variables", "attributes")


class CompileReports:
    """Reports the compilations of one engine at INFO.

    Args:
        owner: Class name of the module.
    """

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self._keys: dict[str, list[dict[str, Any]]] = {}
        self._changed: dict[str, list[str]] = {}
        self._optimizers: set[str] = set()

    def optimizers_changed(self) -> None:
        """Remembers that training steps were dropped because a run has optimizers of its own."""
        self._optimizers.update(kind for kind in self._keys if kind in _TRAINING)

    def attributes_changed(self, kind: str, names: Iterable[str]) -> None:
        """Remembers why the variants of a kind were dropped.

        Args:
            kind: `"train"`, `"validate"`, ...
            names: Attributes with another value than in the trace, `"self.x"`.
        """
        self._changed.setdefault(kind, []).extend(names)

    def report(self, variant: CompiledStep, key: tuple[Any, ...], count: int) -> None:
        """Writes the report.

        Args:
            variant: The new variant.
            key: Its key in `Variants`.
            count: How many of its kind were compiled, this one included.
        """
        parts = dict(zip(_PARTS[key[0]], key[1:], strict=True))
        host = variant.info.host
        decisions = [] if host is None else [str(guard) for guard in host.guards.values() if guard.decides]
        reason = self._reason(variant.kind, parts, decisions)
        self._keys.setdefault(variant.kind, []).append(parts)
        _log.info(
            "%s: compiled the %s step (number %d of its kind) in %.2f s, because %s. %s",
            self.owner, variant.kind, count, variant.seconds, reason, _figures(variant),
        )  # fmt: skip
        if decisions:
            _log.info(
                "%s: this variant of the %s step is for the steps in which %s.",
                self.owner, variant.kind, "; ".join(decisions),
            )  # fmt: skip

    def _reason(self, kind: str, parts: dict[str, Any], decisions: list[str]) -> str:
        changed = list(dict.fromkeys(self._changed.pop(kind, [])))
        optimizers = kind in self._optimizers
        self._optimizers.discard(kind)
        known = self._keys.get(kind)
        if not known:
            return "it is the first"
        if changed:
            return f"{', '.join(changed)} changed, which it had read as a constant"
        if optimizers:
            return "the run has new optimizers"
        different = [[name for name in parts if old.get(name) != parts[name]] for old in known]
        # The last of the closest: `min` takes the first, so it looks from the end.
        closest = min(reversed(range(len(known))), key=lambda i: len(different[i]))
        names, old = different[closest], known[closest]
        if names:
            return "; ".join(_difference(name, old, parts) for name in names if not _implied(name, names))
        if decisions:
            return f"Python decided differently in it: {'; '.join(decisions)}"
        return "the one before was dropped, since the structure of the state or the numbers that it reads had changed"


def _implied(name: str, names: list[str]) -> bool:
    """Whether another difference says it already."""
    return (name == "state_shapes" and "state" in names) or (name == "batch_shapes" and "batch" in names)


def _difference(name: str, old: dict[str, Any], new: dict[str, Any]) -> str:
    before, now = old[name], new[name]
    if name == "options":
        return "; ".join(
            f"{field.name} is {getattr(now, field.name)!r} instead of {getattr(before, field.name)!r}"
            for field in dataclasses.fields(now)
            if getattr(before, field.name) != getattr(now, field.name)
        )
    if name == "batch_shapes":
        return _shapes("the batch", _names(new["batch"], new.get("host"), "batch"), before, now)
    if name == "state_shapes":
        return _shapes("the state", _names(new["state"], None, ""), before, now)
    if name in ("state", "batch"):
        root = "batch" if name == "batch" else ""
        return _structure(f"the {name}", _names(before, None, root), _names(now, None, root))
    if name == "host":
        return "other leaves of the batch stay on the host"
    if name == "steps":
        return f"a call has {now} steps instead of {before}"
    return {
        "modes": "networks changed between training and evaluation mode",
        "frozen": "other parameters are frozen",
        "unroll": "the loop over the steps is written out differently",
    }[name]


def _shapes(what: str, names: Sequence[str], before: Any, now: Any) -> str:
    if len(before) != len(now):
        return f"{what} has {len(now)} arrays instead of {len(before)}"
    found = [
        f"{names[i] if len(names) == len(now) else f'leaf {i} of {what}'} is {_type(new)} instead of {_type(old)}"
        for i, (old, new) in enumerate(zip(before, now, strict=True))
        if old != new
    ]
    return _some(found)


def _structure(what: str, before: Sequence[str], now: Sequence[str]) -> str:
    gone, fresh = [n for n in before if n not in set(now)], [n for n in now if n not in set(before)]
    words = []
    if fresh:
        words.append(f"with {_some(fresh)}")
    if gone:
        words.append(f"without {_some(gone)}")
    return f"{what} has another structure" + (f" ({' and '.join(words)})" if words else "")


def _some(items: list[str]) -> str:
    rest = len(items) - _MOST
    return ", ".join(items[:_MOST]) + (f" and {rest} more" if rest > 0 else "")


def _type(shape_and_dtype: Any) -> str:
    shape, dtype = shape_and_dtype
    return f"{dtype}[{','.join(map(str, shape))}]"


def _names(treedef: Any, positions: Any, root: str) -> list[str]:
    """Paths of the leaves, those at `positions` where some stay on the host."""
    if treedef is None:
        return []
    try:
        tree = jax.tree_util.tree_unflatten(treedef, range(treedef.num_leaves))
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    except Exception:  # a user's container that cannot hold integers
        return [f"leaf {i}" for i in range(treedef.num_leaves)] if positions is None else []
    if not root and type(tree) is tuple and len(tree) == len(_EVALUATION):
        paths = [_EVALUATION[int(path[1])] + path[3:] for path in paths]
    names = [f"{root}{path}".removeprefix(".") for path in paths]
    return names if positions is None else [names[i] for i in positions]


def _figures(variant: CompiledStep) -> str:
    """Operations and memory of one call, as XLA counts them."""
    flops = (variant.cost_analysis() or {}).get("flops", math.nan)
    words = [f"One call: {flops:.3g} floating-point operations" if flops == flops else "One call"]
    memory = variant.memory
    if memory is not None:
        sizes = [
            ("arguments", memory.argument_size_in_bytes),
            ("results", memory.output_size_in_bytes),
            ("of them in place", memory.alias_size_in_bytes),
            ("temporary", memory.temp_size_in_bytes),
        ]
        words.append(", ".join(f"{name} {_size(size)}" for name, size in sizes))
    return "; ".join(words) + "."


def _size(count: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024  # type: ignore[assignment]
    return f"{count:.3g} GiB"
