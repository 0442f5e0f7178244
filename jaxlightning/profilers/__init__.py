"""Profilers: where the time of a run goes."""

from jaxlightning.profilers.advanced import AdvancedProfiler as AdvancedProfiler
from jaxlightning.profilers.base import PassThroughProfiler as PassThroughProfiler
from jaxlightning.profilers.jax_profiler import JaxProfiler as JaxProfiler
from jaxlightning.profilers.profiler import Profiler as Profiler
from jaxlightning.profilers.simple import SimpleProfiler as SimpleProfiler
