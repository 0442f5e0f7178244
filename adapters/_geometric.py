"""Crops and flips of whole uint8 batches, for the fast path.

`CenterCrop` is exact. Random ones draw from a numpy generator of their own, so they match torchvision in distribution
only and are used when the user asks for that (`vectorize="distribution"`). All move values without changing them, so
they are applied to the stored images before the table of the pointwise transforms.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import numpy as np

from ._leaves import Array
from ._pointwise import NotVectorizableError

_V1 = "torchvision.transforms.transforms"
_V2 = "torchvision.transforms.v2._geometry"
_MODES = ("constant", "edge", "reflect", "symmetric")


class Move(abc.ABC):
    """One crop or flip of a batch of images `[n, H, W]` or `[n, H, W, C]`.

    Attributes:
        random: Whether the result differs from call to call.
        needs_stored_values: Whether it fills in values, so that it has to come before a transform of values.
    """

    random = True
    needs_stored_values = False

    @abc.abstractmethod
    def __call__(self, images: Array, rng: np.random.Generator) -> Array:
        """Move every image of a batch, each by a draw of its own."""

    @abc.abstractmethod
    def outcomes(self, image: Array) -> Array:
        """Give everything that can become of one image `[1, H, W(, C)]`, stacked along the first axis."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flip(Move):
    """RandomHorizontalFlip (`axis=2`) or RandomVerticalFlip (`axis=1`) with probability `p`."""

    axis: int
    p: float

    def __call__(self, images: Array, rng: np.random.Generator) -> Array:
        """Flip the chosen images of a batch that nobody else holds."""
        chosen = rng.random(len(images)) < self.p
        images[chosen] = np.flip(images[chosen], self.axis)
        return images

    def outcomes(self, image: Array) -> Array:
        """The image as it is, flipped, or both."""
        both = [image] * (self.p < 1.0) + [np.flip(image, self.axis)] * (self.p > 0.0)
        return np.concatenate(both)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Crop(Move):
    """RandomCrop: pad, then cut `size` at a uniformly drawn place.

    Attributes:
        size: Height and width of the result.
        padding: Left, top, right, bottom.
        pad_if_needed: Whether smaller images are padded on both sides by what they lack.
        fill: Value of constant padding; one for each channel or for all.
        mode: "constant", "edge", "reflect" or "symmetric".
    """

    size: tuple[int, int]
    padding: tuple[int, int, int, int]
    pad_if_needed: bool
    fill: Any
    mode: str

    @property
    def needs_stored_values(self) -> bool:  # type: ignore[override]
        """Constant padding brings in values of its own."""
        return self.mode == "constant" and (any(self.padding) or self.pad_if_needed)

    def _windows(self, images: Array) -> Array:
        left, top, right, bottom = self.padding
        missing = [
            max(0, wanted - have) if self.pad_if_needed else 0
            for wanted, have in zip(
                self.size, (images.shape[1] + top + bottom, images.shape[2] + left + right), strict=True
            )
        ]
        widths = [(top + missing[0], bottom + missing[0]), (left + missing[1], right + missing[1])]
        padded = _pad(images, widths, self.mode, self.fill)
        if padded.shape[1] < self.size[0] or padded.shape[2] < self.size[1]:
            raise NotVectorizableError(
                f"RandomCrop({self.size}) is larger than the padded images of {padded.shape[1]} x {padded.shape[2]}"
            )
        return np.lib.stride_tricks.sliding_window_view(padded, self.size, axis=(1, 2))

    def __call__(self, images: Array, rng: np.random.Generator) -> Array:
        """Cut every image at a place of its own."""
        windows = self._windows(images)
        n = len(images)
        rows, columns = (rng.integers(0, windows.shape[axis], n) for axis in (1, 2))
        return _channels_back(windows[np.arange(n), rows, columns])

    def outcomes(self, image: Array) -> Array:
        """All places."""
        windows = self._windows(image)[0]
        return _channels_back(windows.reshape(-1, *windows.shape[2:]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Centre(Move):
    """CenterCrop to `size`, of images that are at least as large."""

    size: tuple[int, int]

    random = False

    def __call__(self, images: Array, rng: np.random.Generator) -> Array:
        """Cut the middle."""
        height, width = self.size
        if images.shape[1] < height or images.shape[2] < width:
            raise NotVectorizableError(f"CenterCrop({self.size}) pads images of {images.shape[1:3]}")
        # torchvision rounds half to even, as Python does
        top, left = round((images.shape[1] - height) / 2.0), round((images.shape[2] - width) / 2.0)
        return np.ascontiguousarray(images[:, top : top + height, left : left + width])

    def outcomes(self, image: Array) -> Array:
        """The middle."""
        return self(image, np.random.default_rng(0))


def _channels_back(windows: Array) -> Array:
    # sliding windows put their own axes last: [n, C, H, W]
    return np.ascontiguousarray(windows.transpose(0, 2, 3, 1)) if windows.ndim == 4 else np.ascontiguousarray(windows)


def _pad(images: Array, widths: list[tuple[int, int]], mode: str, fill: Any) -> Array:
    if not any(map(any, widths)):
        return images
    if mode != "constant":
        every = [(0, 0), *widths, *[(0, 0)] * (images.ndim - 3)]
        pad: Any = np.pad  # its stubs know literal modes only
        padded_by_mode: Array = pad(images, every, mode=mode)
        return padded_by_mode
    n, height, width = images.shape[:3]
    (top, bottom), (left, right) = widths
    padded = np.empty((n, top + height + bottom, left + width + right, *images.shape[3:]), images.dtype)
    padded[:] = np.asarray(fill).astype(images.dtype)
    padded[:, top : top + height, left : left + width] = images
    return padded


def as_move(step: Any) -> Move | None:
    """Read a crop or flip of torchvision.

    Args:
        step: A transform.

    Returns:
        The move, or None if the transform is something else.

    Raises:
        NotVectorizableError: If it has options that are not built.
    """
    module, name = type(step).__module__, type(step).__qualname__
    if module not in (_V1, _V2):
        return None
    if name in ("RandomHorizontalFlip", "RandomVerticalFlip"):
        return Flip(axis=2 if name == "RandomHorizontalFlip" else 1, p=float(step.p))
    if name == "CenterCrop":
        size = step.size if isinstance(step.size, (tuple, list)) else (step.size, step.size)
        return Centre(size=(int(size[0]), int(size[1])))
    if name != "RandomCrop":
        return None
    fill = step.fill
    if isinstance(fill, dict) or step.padding_mode not in _MODES:
        raise NotVectorizableError(f"RandomCrop with fill={fill!r} and padding_mode={step.padding_mode!r}")
    left, top, right, bottom = _padding(step.padding, in_v2=module == _V2)
    return Crop(
        size=(int(step.size[0]), int(step.size[1])),
        padding=(left, top, right, bottom),
        pad_if_needed=bool(step.pad_if_needed),
        fill=0 if fill is None else fill,
        mode=str(getattr(step.padding_mode, "value", step.padding_mode)),
    )


def _padding(given: Any, *, in_v2: bool) -> tuple[int, int, int, int]:
    if given is None:
        return 0, 0, 0, 0
    if isinstance(given, int):
        return given, given, given, given
    values = [int(value) for value in given]
    if len(values) == 1:
        values *= 4
    elif len(values) == 2:
        values = [values[0], values[1], values[0], values[1]]
    elif in_v2:  # keeps left, right, top, bottom
        values = [values[0], values[2], values[1], values[3]]
    left, top, right, bottom = values
    return left, top, right, bottom
