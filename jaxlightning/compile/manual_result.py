"""What `training_step` may return in manual optimization."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxlightning.compile.run_step import is_array
from jaxlightning.utilities.exceptions import MisconfigurationException

__all__ = ["manual_outputs"]


def manual_outputs(result: Any, where: str) -> dict[str, Any]:
    """The outputs that `on_train_batch_end` gets.

    Args:
        result: What the step returned: an array, a dictionary or None.
        where: The user's step, for the message.

    Returns:
        The dictionary as it is, `{"loss": array}`, or `{}`.

    Raises:
        MisconfigurationException: For anything else.
    """
    if result is None:
        return {}
    if isinstance(result, Mapping):
        return dict(result)
    if is_array(result):
        return {"loss": result}
    raise MisconfigurationException(
        "In manual optimization, `training_step` must either return a Tensor or have no return. "
        f"`{where}` returned {type(result).__name__} {result!r:.80}; an array, a dictionary or None is possible."
    )
