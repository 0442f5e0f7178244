"""Constants that a trace read: on the module, its child modules, objects beside them, in closures and globals."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from jaxlightning.compile.watched import MISSING, current_value, in_place, is_generator, same, snapshot, used_by

__all__ = ["Read", "ReadRecorder"]

_log = logging.getLogger("jaxlightning")


@dataclass
class Read:
    """One constant.

    Attributes:
        holder: The module or object, the dictionary of globals, or the cell of a closure that holds it.
        name: Its name there.
        kept: A snapshot of what it was.
        key: How the user reaches it, where that is not `self.<name>`.
    """

    holder: Any
    name: str
    kept: Any
    key: str | None = None

    @property
    def outside(self) -> bool:
        """Whether it lies in a closure or in the globals of a module, and not on the user's module."""
        return self.key is not None and (self.key.startswith("the global ") or " in the closure of " in self.key)

    @property
    def now(self) -> Any:
        """What is there now."""
        return current_value(self.holder, self.name)


class ReadRecorder:
    """What a trace took for constants.

    Attributes:
        reads: By identity of the holder and by name.
        hidden: Whether any of it can change without an assignment to an attribute of a module.
    """

    def __init__(self) -> None:
        self.reads: dict[tuple[int, str], Read] = {}
        self.hidden = False
        self._code: set[int] = set()

    def record(self, holder: Any, name: str, value: Any, key: str | None = None) -> None:
        """Remembers a read; only the first of each name counts.

        Args:
            holder: The module, or what else holds the value.
            name: The attribute.
            value: What it holds.
            key: How the user reaches it, where that is not `self.<name>`.
        """
        place = (id(holder), name)
        if place not in self.reads:
            kept = snapshot(value)
            self.reads[place] = Read(holder, name, kept, key)
            inherited = key is None and name not in getattr(holder, "__dict__", ())
            self.hidden = self.hidden or key is not None or inherited or in_place(kept)

    def record_missing(self, holder: Any, name: str) -> None:
        """Remembers that there was no such attribute."""
        self.record(holder, name, MISSING)

    def record_code(self, function: Any) -> None:
        """Remembers what a method of the user's reads from its closure and from globals."""
        for holder, name, value, text in used_by(function, self._code):
            self.record(holder, name, value, text)

    def held(self, holder: Any, name: str, default: Any = None) -> Any:
        """What an attribute held when it was read as a constant, `default` when it was not."""
        found = self.reads.get((id(holder), name))
        return default if found is None or found.kept is MISSING else found.kept

    def changed(self) -> list[Read]:
        """What is another value now, or was changed in place."""
        return [read for read in self.reads.values() if not same(read.kept, read.now)]

    def refuse_changes(self, where: str) -> None:
        """Refuses a step that changed what it had read, in a way that nothing else takes care of.

        Args:
            where: The user's step, for example `"Net.training_step"`.

        Raises:
            RuntimeError: Naming what was changed.
        """
        lost: list[str] = []
        drawn: list[str] = []
        outside: list[str] = []
        for place, read in list(self.reads.items()):
            now = read.now
            if same(read.kept, now):
                continue
            if same(read.kept, now, grown=True):
                read.kept = snapshot(now)  # something was cached on it
            elif read.outside and not is_generator(read.kept):
                # Not a part of the module: often a list that notes when the step is traced. Nothing waits for it, so
                # it is no reason to compile again either.
                outside.append(str(read.key))
                del self.reads[place]
            else:
                (drawn if is_generator(read.kept) else lost).append(
                    f"self.{read.name}" if read.key is None else read.key
                )
        if drawn:
            raise RuntimeError(
                f"`{where}` drew random numbers from {', '.join(f'`{name}`' for name in drawn)}. The step is compiled: "
                "the same numbers would be used at every step. Draw with `jax.random.*(self.next_rng(), ...)`, which "
                "gives a new key at every call and step."
            )
        if outside:
            _log.warning(
                "`%s` changed %s. The step is compiled, so such a change happens while it is traced and not at every "
                "step; what the step reads from there is what it was then. What has to follow belongs on the module.",
                where,
                ", ".join(f"`{name}`" for name in outside),
            )
        if lost:
            raise RuntimeError(
                f"`{where}` changed {', '.join(f'`{name}`' for name in lost)} in place. The step is compiled: such a "
                "change would happen once, while it is traced, and never again. Keep numbers, arrays, lists and "
                "dictionaries that a step changes directly on the module, or change them in a hook such as "
                "`on_train_batch_end`."
            )
