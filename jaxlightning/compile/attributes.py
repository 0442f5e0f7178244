"""Attributes of a module that hold arrays: state of the step, read as tracers and written back.

The engine carries the values (`TrainState.attributes`); while a step is traced they stand on the module.
"""

from __future__ import annotations

from typing import Any

__all__ = ["TracedAttributes"]


class TracedAttributes:
    """The carried attributes of one run of a step.

    Args:
        values: `{path: array or container}`, as traced values.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = dict(values)
