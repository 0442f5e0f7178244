"""What an engine has learnt about the effects of its module's steps, over all traces of a run.

A fact makes a step be traced again (`RetraceError`), so facts only ever grow while a module is attached.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxlightning.compile.host_inputs import HostFacts

__all__ = ["EffectFacts"]


@dataclass
class EffectFacts:
    """Knowledge that every later trace starts with.

    Attributes:
        state: Paths of attributes that are part of the carried state: `"queue"`, `"child.ema"`.
        host: Numbers of the host that steps read and write.
    """

    state: dict[str, str] = field(default_factory=dict)
    host: HostFacts = field(default_factory=HostFacts)
