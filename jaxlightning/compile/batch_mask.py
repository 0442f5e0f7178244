"""What a step sees of a batch that `Trainer(pad_batches=...)` filled up: the mask of its real rows (see `padding`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from jaxlightning.compile.trace import Trace, current_trace
from jaxlightning.utilities.exceptions import MisconfigurationException

__all__ = ["BatchMask", "PaddedBatch", "refuse_unmasked"]

_PASSED = "<passed to self.log>"  # `metrics._objects.PASSED`; metrics import this package


class _Unnamed:
    """A key that adds nothing to a path, so that messages name leaves as the user does."""

    def __str__(self) -> str:
        return ""


_UNNAMED = _Unnamed()


@dataclass
class PaddedBatch:
    """A batch whose rows beyond the real ones are padding.

    Attributes:
        batch: The batch of the full size.
        mask: Which rows are real, bool of shape [rows].
    """

    batch: Any
    mask: Any


jax.tree_util.register_pytree_with_keys(
    PaddedBatch,
    lambda padded: (((_UNNAMED, padded.batch), (jax.tree_util.GetAttrKey("batch_mask"), padded.mask)), None),
    lambda _, children: PaddedBatch(*children),
    lambda padded: ((padded.batch, padded.mask), None),
)


class BatchMask:
    """The attribute `batch_mask` of a module; not a data descriptor, so that a module may have one of its own."""

    def __get__(self, module: Any, owner: Any = None) -> Any:
        """Which rows of the step's batch are real.

        Returns:
            A bool array of shape [rows]; all True without `Trainer(pad_batches=...)`.

        Raises:
            RuntimeError: Outside of a step.
        """
        if module is None:
            return self
        trace = current_trace()
        if trace is None:
            raise RuntimeError(
                "`self.batch_mask` belongs to the batch inside a step. Hooks see batches as the loader gave them, "
                "without padding."
            )
        trace.mask_read = True
        if trace.mask is None:
            from jaxlightning.metrics._batch_size import first_batch_size

            return jax.numpy.ones(first_batch_size(trace.step_batch), bool)
        return trace.mask


def refuse_unmasked(trace: Trace, where: str) -> None:
    """Complains about a step on padded rows whose numbers would count them."""
    if trace.kind == "predict":
        return  # its outputs are cut back to the real rows
    plain = [entry.meta.name for entry in trace.logs if entry.meta.metric in (None, _PASSED) and entry.meta.fx]
    plain += trace.unmasked
    if trace.kind != "train" and not plain:
        return  # metric objects leave padding out by themselves
    what = "its loss" if trace.kind == "train" else f"{plain[0]!r}, which it gives to a metric or logs,"
    raise MisconfigurationException(
        f"`{where}` runs on batches padded by `Trainer(pad_batches=...)` and never looks at `self.batch_mask`, so "
        f"{what} would count the padding as data. Average over the real rows, for example "
        "`jnp.mean(losses, where=self.batch_mask)` with one loss per sample, or leave `pad_batches` out: a short last "
        "batch then costs one more compilation."
    )
