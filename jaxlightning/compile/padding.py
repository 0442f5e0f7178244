"""`Trainer(pad_batches=...)`: short batches get the full batch's shape, and a mask that says which rows are real.

Hooks, callbacks and the logging of host values see the batch as the loader gave it. Only the compiled step sees the
padded one, so a short last batch costs no second compilation. What honours the mask: the weight of an epoch mean
(`metrics/_logging.py`), metric objects (`metrics/metric.py`), `self.batch_mask`, and the arrays that a step returns,
appends to lists or gives to a logger, which are cut back to the real rows. A step whose numbers would average the
padding is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlightning.compile.batch_mask import PaddedBatch
from jaxlightning.compile.engine import Engine
from jaxlightning.compile.repeated_step import RepeatedStep
from jaxlightning.compile.step_output import StepOutput, real_rows
from jaxlightning.metrics._batch_size import first_batch_size
from jaxlightning.utilities.exceptions import MisconfigurationException

__all__ = ["BatchPadding", "PaddingEngine"]


class BatchPadding:
    """Pads batches to one size per loader.

    Rows are filled by repeating the real ones from the first, which keeps values in range: zeros would give infinite
    gradients in a norm or a logarithm, which a mask applied later turns into NaN.

    Args:
        size: Rows of a padded batch; None takes what `expected` says, else the largest batch of the loader so far.
        expected: Gives the rows of a full batch of a stage and loader index, or None where that is unknown.
    """

    def __init__(self, size: int | None, expected: Callable[[str, int | None], int | None]) -> None:
        self._size = size
        self._expected = expected
        self._largest: dict[tuple[str, int | None], int] = {}
        # For each loader and structure: which leaves have one row per sample, and how long the others were.
        self._lengths: dict[Any, list[int | None]] = {}
        self._met: set[tuple[str, int | None]] = set()
        self._masks: dict[tuple[int, int], Any] = {}

    def __call__(self, stage: str, dataloader_idx: int | None, batch: Any) -> tuple[PaddedBatch, int]:
        """Pad one batch.

        Args:
            stage: What runs.
            dataloader_idx: Index of the loader, None if there is only one.
            batch: Any pytree; leaves whose first axis is the batch's are padded, others stay.

        Returns:
            The batch with its mask, and its number of real rows.

        Raises:
            MisconfigurationException: If the batch is larger than the size asked for, or a leaf follows neither the
                batch size nor a length of its own.
        """
        where = ("validate" if stage == "sanity_check" else stage, dataloader_idx)
        rows = first_batch_size(batch)
        size = self._size_for(where, rows)
        if rows == size and where in self._met:
            return PaddedBatch(batch, self._mask(rows, size)), rows  # nearly all batches
        self._met.add(where)
        leaves, treedef = jax.tree_util.tree_flatten(batch, is_leaf=_is_list_of_text)
        lengths = self._lengths.setdefault((where, treedef), [_length(leaf) for leaf in leaves])
        padded = []
        for position, leaf in enumerate(leaves):
            length = _length(leaf)
            if length is None or (length == lengths[position] and length != rows):
                padded.append(leaf)
            elif length == rows:
                padded.append(_repeat(leaf, rows, size))
            else:
                raise MisconfigurationException(_odd_leaf(batch, position, length, rows, stage))
        return PaddedBatch(jax.tree_util.tree_unflatten(treedef, padded), self._mask(rows, size)), rows

    def _mask(self, rows: int, size: int) -> Any:
        mask = self._masks.get((rows, size))
        if mask is None:
            mask = self._masks[rows, size] = np.arange(size) < rows
            mask.flags.writeable = False  # a device may share its memory
        return mask

    def _size_for(self, where: tuple[str, int | None], rows: int) -> int:
        if self._size is not None:
            if rows > self._size:
                raise MisconfigurationException(
                    f"`Trainer(pad_batches={self._size})` received a batch of {rows} rows in `{where[0]}`. Give a size "
                    "that no batch exceeds (with several devices that of the batches of all of them together), or "
                    "`pad_batches=True` to pad to the loader's own batch size."
                )
            return self._size
        known = self._largest.get(where)
        if known is None:
            known = self._expected(*where) or rows
        size = self._largest[where] = max(known, rows)
        return size


def _is_list_of_text(value: Any) -> bool:
    return type(value) in (list, tuple) and bool(value) and all(isinstance(item, (str, bytes)) for item in value)


def _length(leaf: Any) -> int | None:
    if _is_list_of_text(leaf):
        return len(leaf)
    shape = getattr(leaf, "shape", None)
    return int(shape[0]) if shape else None


def _repeat(leaf: Any, rows: int, size: int) -> Any:
    if rows == size:
        return leaf
    if isinstance(leaf, (list, tuple)):
        return type(leaf)(leaf[index % rows] for index in range(size)) if rows else type(leaf)("" for _ in range(size))
    if rows == 0:
        return np.zeros((size, *leaf.shape[1:]), leaf.dtype)
    index = np.arange(size) % rows
    return leaf.take(index, axis=0) if isinstance(leaf, np.ndarray) else jnp.take(leaf, index, axis=0)


def _odd_leaf(batch: Any, position: int, length: int, rows: int, stage: str) -> str:
    paths = jax.tree_util.tree_flatten_with_path(batch, is_leaf=_is_list_of_text)[0]
    name = jax.tree_util.keystr(paths[position][0]) or "the batch"
    return (
        f"`pad_batches` cannot pad this batch of the {stage} step: it has {rows} rows (its first array), but the leaf "
        f"`batch{name}` has {length}, and had another length before. One mask describes one batch size: make batches "
        "whose arrays have one row per sample, give loaders of one batch size, or leave `pad_batches` out."
    )


class _PaddedRepeatedStep(RepeatedStep):
    """Pads what it runs."""

    engine: PaddingEngine

    def prepared(self, batches: list[Any]) -> list[Any]:
        return [self.engine.padding("train", None, batch)[0] for batch in batches]

    def __call__(self, batch: Any, integers: Any) -> bool:
        if type(batch) is not PaddedBatch:
            batch, _ = self.engine.padding("train", None, batch)
        return super().__call__(batch, integers)


class PaddingEngine(Engine):
    """An engine whose steps see padded batches; made only when they are asked for, so nobody else pays.

    Attributes:
        padding: Pads the batches; set by the trainer.
    """

    padding: BatchPadding
    _short: tuple[int, int] | None = None

    def train_batch(self, batch: Any, *args: Any, **kwargs: Any) -> StepOutput:
        """See `Engine.train_batch`."""
        return self._padded("train", None, batch, super().train_batch, args, kwargs)

    def _train(self, flags: tuple[Any, ...], batch: Any, *args: Any) -> StepOutput:
        # What all other ways of training come through: accumulation, the gradient half of a split step, manual steps.
        def run(padded: Any) -> StepOutput:
            return super(PaddingEngine, self)._train(flags, padded, *args)

        return self._padded("train", None, batch, run, (), {})

    def eval_step(self, stage: str, batch: Any, **kwargs: Any) -> StepOutput:
        """See `Engine.eval_step`."""

        def run(padded: Any) -> StepOutput:
            return super(PaddingEngine, self).eval_step(stage, padded, **kwargs)

        return self._padded(stage, kwargs.get("dataloader_idx"), batch, run, (), {})

    def repeated_step(self, clip: tuple[float | None, str | None], want_outputs: bool) -> RepeatedStep | None:
        """See `Engine.repeated_step`."""
        plain = super().repeated_step(clip, want_outputs)
        return None if plain is None else _PaddedRepeatedStep(self, plain.variant)

    def _padded(
        self, stage: str, dataloader_idx: int | None, batch: Any, run: Callable[..., StepOutput], args: Any, kwargs: Any
    ) -> StepOutput:
        if type(batch) is PaddedBatch:  # one way of running a step calls another
            return run(batch, *args, **kwargs)
        padded, rows = self.padding(stage, dataloader_idx, batch)
        size = len(padded.mask)
        self._short = None if rows == size else (size, rows)
        out = run(padded, *args, **kwargs)
        if rows != size:
            out.shorten(size, rows)
        return out

    def _real_rows(self, arrays: Any) -> Any:
        return arrays if self._short is None else real_rows(arrays, *self._short)
