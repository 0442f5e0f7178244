"""Deterministic pointwise transforms of uint8 images as lookup tables.

All 256 values go through the user's own transform once per channel, so the table has the transform's own bits. Images
are then looked up two values at a time: a table of 65536 pairs needs half the index work (48 us against 76 us for a
batch of 128 x 28 x 28 to float32).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ._leaves import Array

if TYPE_CHECKING:
    from ._geometric import Move

_V1 = "torchvision.transforms.transforms"
_V2 = "torchvision.transforms.v2"
_COMPOSE = {(_V1, "Compose"), (f"{_V2}._container", "Compose")}
_GRAYSCALE = {(_V1, "Grayscale"), (f"{_V2}._color", "Grayscale")}
# every value of the result depends on one value of the input, at the same place and in the same channel
_POINTWISE = {
    (_V1, "ToTensor"),
    (_V1, "PILToTensor"),
    (_V1, "ConvertImageDtype"),
    (_V1, "Normalize"),
    (f"{_V2}._deprecated", "ToTensor"),
    (f"{_V2}._type_conversion", "PILToTensor"),
    (f"{_V2}._type_conversion", "ToImage"),
    (f"{_V2}._type_conversion", "ToPureTensor"),
    (f"{_V2}._misc", "ToDtype"),
    (f"{_V2}._misc", "ConvertImageDtype"),
    (f"{_V2}._misc", "Normalize"),
    (f"{_V2}._misc", "Identity"),
}
_PAIR_VIEWS = {1: "u2", 2: "u4", 4: "u8", 8: "c16"}


class NotVectorizableError(Exception):
    """A loader cannot use the fast path; the message names the object that prevents it."""


def _type_key(value: Any) -> tuple[str, str]:
    return type(value).__module__, type(value).__qualname__


# those that leave the values themselves as they are
_KEEPING = {
    (_V1, "PILToTensor"),
    (f"{_V2}._type_conversion", "PILToTensor"),
    (f"{_V2}._type_conversion", "ToImage"),
    (f"{_V2}._type_conversion", "ToPureTensor"),
    (f"{_V2}._misc", "Identity"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Steps:
    """A transform taken apart.

    Attributes:
        pointwise: The steps that change values, in order; `Grayscale` only as the first.
        moves: The crops and flips, in order.
        values: From a PIL image to a tensor, by the pointwise steps alone.
    """

    pointwise: list[Any]
    moves: list[Move]
    values: Callable[[Any], Any]


def flatten_transform(transform: Any) -> list[Any]:
    """List the steps of a transform, with nested `Compose` opened."""
    if _type_key(transform) in _COMPOSE:
        return [step for part in transform.transforms for step in flatten_transform(part)]
    return [transform]


def take_apart(transform: Any, *, random: bool) -> Steps:
    """Find out whether a transform can be computed for a whole batch.

    Args:
        transform: A torchvision transform.
        random: Whether random crops and flips may be replaced by ones that match in distribution only.

    Returns:
        Its steps.

    Raises:
        NotVectorizableError: If a step is none of those that are known.
    """
    from ._geometric import as_move

    steps = flatten_transform(transform)
    pointwise: list[Any] = []
    moves: list[Move] = []
    changed = False
    for position, step in enumerate(steps):
        key = _type_key(step)
        if getattr(step, "_forward_hooks", None) or getattr(step, "_forward_pre_hooks", None):
            raise NotVectorizableError(f"the transform {_name(step)} has forward hooks")
        move = as_move(step)
        if move is not None and (random or not move.random):
            if changed and move.needs_stored_values:
                raise NotVectorizableError(f"the transform {_name(step)} pads after the values were changed")
            moves.append(move)
        elif key in _POINTWISE or (key in _GRAYSCALE and position == 0):
            pointwise.append(step)
            changed = changed or key not in _KEEPING | _GRAYSCALE
        elif move is not None:
            raise NotVectorizableError(
                f'the transform {_name(step)} is random (vectorize="distribution" replaces it by one that draws other '
                "numbers)"
            )
        else:
            raise NotVectorizableError(f"the transform {_name(step)} is not a pointwise transform of torchvision")
    if not moves:
        return Steps(pointwise=pointwise, moves=[], values=transform)
    return Steps(pointwise=pointwise, moves=moves, values=functools.partial(_in_order, pointwise))


def _in_order(steps: list[Any], image: Any) -> Any:
    for step in steps:
        image = step(image)
    return image


def _name(value: Any) -> str:
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def starts_with_grayscale(steps: list[Any]) -> bool:
    """Tell whether the first step is a Grayscale, which reads the PIL image."""
    return bool(steps) and _type_key(steps[0]) in _GRAYSCALE


def probe_table(transform: Callable[[Any], Any], mode: str, to_numpy: Callable[[Any], Any]) -> Array:
    """Push all 256 values through a transform.

    Args:
        transform: From a PIL image to a tensor `[C, H, W]`.
        mode: PIL mode of the images, "L" or "RGB".
        to_numpy: Conversion of the result to the array that a batch would hold.

    Returns:
        Table `[C, 256]`: the output of channel c for input value v. For "RGB", channel c reads input channel c.

    Raises:
        NotVectorizableError: If the result has another form.
    """
    from PIL import Image

    ramp = np.arange(256, dtype=np.uint8).reshape(16, 16)
    # another order in each channel, so that a transform that mixes channels gives a table that fails the sample check
    planes = [ramp, ramp[::-1], ramp.T] if mode == "RGB" else [ramp]
    image = Image.fromarray(np.stack(planes, axis=-1) if mode == "RGB" else ramp, mode=None)
    try:
        result = to_numpy(transform(image))
    except Exception as error:  # the user's own error, which the slow path will raise with its own traceback
        raise NotVectorizableError(f"the transform raises {type(error).__name__}: {error}") from error
    if not isinstance(result, np.ndarray) or result.ndim != 3 or result.shape[1:] != (16, 16):
        raise NotVectorizableError(f"the transform gives {type(result).__qualname__}, not an image tensor")
    channels = result.shape[0]
    if mode == "RGB" and channels != 3:
        raise NotVectorizableError(f"the transform gives {channels} channels for an RGB image")
    table = np.empty((channels, 256), result.dtype)
    for channel in range(channels):
        plane = planes[channel if mode == "RGB" else 0]
        table[channel, plane.reshape(-1)] = result[channel].reshape(-1)
    return table


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lookup:
    """Look uint8 samples up in a table per channel.

    Attributes:
        table: `[K, 65536]` of pairs or `[K, 256]` of single values, K distinct channel patterns.
        offsets: Start of the table for each position of a flat sample, or None if there is one table.
        paired: Whether positions are pairs of values.
        dtype: Dtype of the result.
    """

    table: Array
    offsets: Array | None
    paired: bool
    dtype: np.dtype[Any]

    @classmethod
    def build(cls, table: Array, channel_of: Array) -> Lookup:
        """Prepare a lookup.

        Args:
            table: `[C, 256]`.
            channel_of: Channel of each value of a flat sample, int `[L]`.

        Returns:
            The lookup for samples of length L.
        """
        unique, inverse = np.unique(table.view(np.uint8).reshape(len(table), -1), axis=0, return_inverse=True)
        kinds = inverse.reshape(-1)[channel_of]  # channels with equal tables are one
        first = {int(kind): channel for channel, kind in reversed(list(enumerate(inverse.reshape(-1))))}
        tables = [table[first[kind]] for kind in range(len(unique))]
        itemsize = table.dtype.itemsize
        if len(channel_of) % 2 or itemsize not in _PAIR_VIEWS:
            flat = np.concatenate(tables)
            offsets = None if len(tables) == 1 else kinds.astype(np.intp) * 256
            return cls(table=flat, offsets=offsets, paired=False, dtype=table.dtype)
        left, right = kinds[0::2], kinds[1::2]
        codes = left.astype(np.intp) * len(tables) + right
        combinations, which = np.unique(codes, return_inverse=True)
        pairs = np.empty((len(combinations), 256, 256, 2), table.dtype)
        for index, code in enumerate(combinations):
            # little endian: the first value of a pair is the low byte of the uint16
            pairs[index, :, :, 0] = tables[code // len(tables)][None, :]
            pairs[index, :, :, 1] = tables[code % len(tables)][:, None]
        flat = pairs.reshape(-1).view(_PAIR_VIEWS[itemsize])
        offsets = None if len(combinations) == 1 else which.reshape(-1).astype(np.intp) * 65536
        return cls(table=flat, offsets=offsets, paired=True, dtype=table.dtype)

    def __call__(self, samples: Array) -> Array:
        """Look samples up.

        Args:
            samples: Contiguous uint8 `[n, L]`.

        Returns:
            Fresh array `[n, L]` of the table's dtype.
        """
        index: Array = samples.view("<u2") if self.paired else samples
        if self.offsets is not None:
            index = np.add(index, self.offsets, dtype=np.intp)
        # indices cannot leave the table, and "wrap" skips the check
        found = np.take(self.table, index, mode="wrap")
        return found.view(self.dtype) if self.paired else found


def grayscale_like_pil(images: Array) -> Array:
    """Convert RGB to luma as PIL does (ITU-R 601-2 weights in 16-bit fixed point).

    Args:
        images: uint8 `[n, H, W, 3]`.

    Returns:
        uint8 `[n, H, W]`.
    """
    wide = images.astype(np.uint32)
    total = wide[..., 0] * 19595 + wide[..., 1] * 38470 + wide[..., 2] * 7471 + 0x8000
    return (total >> 16).astype(np.uint8)
