"""What an engine has learnt about the effects of its module's steps, over all traces of a run.

A fact makes a step be traced again (`RetraceError`), so facts only ever grow while a module is attached.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["EffectFacts"]


@dataclass
class EffectFacts:
    """Knowledge that every later trace starts with.

    Attributes:
        state: Paths of attributes that are part of the carried state: `"queue"`, `"child.ema"`.
    """

    state: dict[str, str] = field(default_factory=dict)
