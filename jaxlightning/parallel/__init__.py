"""Strategies: devices, mesh, shardings and the jit call."""

from jaxlightning.parallel._strategy import DataParallelStrategy as DataParallelStrategy
from jaxlightning.parallel._strategy import SingleDeviceStrategy as SingleDeviceStrategy
from jaxlightning.parallel._strategy import Strategy as Strategy
from jaxlightning.parallel._strategy import make_strategy as make_strategy

__all__ = ["DataParallelStrategy", "SingleDeviceStrategy", "Strategy", "make_strategy"]
