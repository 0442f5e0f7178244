"""Precision policies, under the names of `lightning.pytorch.plugins`."""

from jaxlightning.compile.precision import DoublePrecision as DoublePrecision
from jaxlightning.compile.precision import GradScaler as GradScaler
from jaxlightning.compile.precision import HalfPrecision as HalfPrecision
from jaxlightning.compile.precision import MixedPrecision as MixedPrecision
from jaxlightning.compile.precision import Precision as Precision

__all__ = ["DoublePrecision", "GradScaler", "HalfPrecision", "MixedPrecision", "Precision"]
