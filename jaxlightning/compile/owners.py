"""A Lightning module and the Lightning modules among its attributes."""

from __future__ import annotations

from typing import Any

from jaxlightning.compile.effects import INTERNAL
from jaxlightning.hooks import ModuleHooks

__all__ = ["owners_of"]


def owners_of(module: Any) -> dict[str, Any]:
    """The module under `""` and the Lightning modules among its attributes under their paths, ending with a dot."""
    found: dict[str, Any] = {}

    def visit(owner: Any, prefix: str) -> None:
        if any(owner is known for known in found.values()):
            return
        found[prefix] = owner
        for name, value in owner.__dict__.items():
            if name in INTERNAL or name.startswith(("__", "_hparams")):
                continue
            items = enumerate(value) if isinstance(value, list | tuple) else [(None, value)]
            for index, item in items:
                if isinstance(item, ModuleHooks):
                    visit(item, f"{prefix}{name}." if index is None else f"{prefix}{name}.{index}.")

    visit(module, "")
    return found
