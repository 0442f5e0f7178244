"""What an engine has learnt about the effects of its module's steps, over all traces of a run.

A fact makes a step be traced again (`RetraceError`), so facts only ever grow while a module is attached.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jaxlightning.compile.host_inputs import HostFacts

__all__ = ["EffectFacts"]


@dataclass
class EffectFacts:
    """Knowledge that every later trace starts with.

    Attributes:
        host: Numbers of the host that steps read and write.
        recorded: Paths of containers that steps fill without reading them: `"outputs"`, `"child.outputs"`.
        converted: For carried containers the paths of numbers that are arrays from now on, with their dtypes.
        constants: Attributes (`(id(module), name)`) that some trace read as constants or did not find.
        pure: Whether there is no host after a step, so that an attribute that is only written is carried too.
        changes: Shapes, dtypes and structures that steps gave to a carried attribute, once they changed.
    """

    host: HostFacts = field(default_factory=HostFacts)
    recorded: set[str] = field(default_factory=set)
    converted: dict[str, dict[str, Any]] = field(default_factory=dict)
    constants: set[tuple[int, str]] = field(default_factory=set)
    changes: dict[str, list[str]] = field(default_factory=dict)
    pure: bool = False
