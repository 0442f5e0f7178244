"""From a module to pure compiled steps.

- `networks`, `nnx_networks`, `foreign_networks`, `binding`: networks on a module, bound to the variables of a trace
- `trace`, `effects`, `explain`: what a step reads, logs and must not do
- `run_step`, `differentiation`, `core`, `packing`, `state`: one run of a step, and the pure step functions
- `flat_steps`, `variants`, `compiled_step`, `creation`: from pure functions to compiled calls
- `engine` and the `engine_*` that it is made of: compiled steps and the state carried between them
- `manual*`: the same for modules that optimize by themselves
- `functional`: the same pure functions for people with a loop of their own
"""

from jaxlightning.compile.compiled_step import CompiledStep as CompiledStep
from jaxlightning.compile.engine import Engine as Engine
from jaxlightning.compile.engine import StepOutput as StepOutput
from jaxlightning.compile.foreign_networks import PureNetwork as PureNetwork
from jaxlightning.compile.functional import Functional as Functional
from jaxlightning.compile.functional import functionalize as functionalize
from jaxlightning.compile.log_plan import LogKey as LogKey
from jaxlightning.compile.log_plan import LogMeta as LogMeta
from jaxlightning.compile.log_plan import LogPlan as LogPlan
from jaxlightning.compile.networks import LinenNetwork as LinenNetwork
from jaxlightning.compile.networks import NetworkInfo as NetworkInfo
from jaxlightning.compile.selection import ParameterSelection as ParameterSelection
from jaxlightning.compile.trace import current_trace as current_trace

__all__ = [
    "CompiledStep",
    "Engine",
    "Functional",
    "LinenNetwork",
    "LogKey",
    "LogMeta",
    "LogPlan",
    "NetworkInfo",
    "ParameterSelection",
    "PureNetwork",
    "StepOutput",
    "current_trace",
    "functionalize",
]
