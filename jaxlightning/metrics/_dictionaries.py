"""The three dictionaries that a trainer shows: for callbacks, for loggers, for the progress bar."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from jaxlightning.metrics._entries import Items
from jaxlightning.metrics._refs import resolve_in_place, to_scalar

__all__ = ["MetricDictionaries"]


class MetricDictionaries:
    """Last known values, some of which may still be on the device.

    Attributes:
        callback: For callbacks, NumPy scalars once read.
        logged: What loggers got or would have got, NumPy scalars once read.
        bar: For the progress bar, Python floats once read.
        known_bar: The part of `bar` that is known without a device read.
    """

    def __init__(self) -> None:
        self.callback: dict[str, Any] = {}
        self.logged: dict[str, Any] = {}
        self.bar: dict[str, Any] = {}
        self.known_bar: dict[str, float] = {}
        self._versions: dict[str, Any] = {}
        self._unknown = itertools.count()

    def clear(self) -> None:
        """Start with new, empty dictionaries; those handed out before stay as they are."""
        self.callback, self.logged, self.bar, self.known_bar = {}, {}, {}, {}
        self._versions = {}

    def update(self, items: Items) -> None:
        """Take newer values, fetched or not."""
        self.callback.update(items.callback)
        self.logged.update(items.log)
        self.bar.update(items.bar)
        self._versions.update(items.versions)

    def update_callback(self, values: Mapping[str, Any]) -> None:
        """Take values that no `self.log` brought."""
        self.callback.update(values)
        for name in values:
            self._versions.pop(name, None)

    def show(self, bar: Mapping[str, Any]) -> None:
        """Take fetched values for the progress bar."""
        self.known_bar.update((name, to_scalar(value)) for name, value in bar.items())

    def version(self, name: str) -> Any:
        """What tells one measurement of a metric from the next; two equal answers mean "nothing new"."""
        known = self._versions.get(name)
        return ("unknown", next(self._unknown)) if known is None else known

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """The values, fetched."""
        self.resolve()
        return {"callback": dict(self.callback), "logged": dict(self.logged), "bar": dict(self.bar)}

    def load_state_dict(self, state: dict[str, dict[str, Any]]) -> None:
        """Take saved values; they count as one old measurement each."""
        self.clear()
        self.callback.update(state["callback"])
        self.logged.update(state["logged"])
        self.bar.update(state["bar"])
        self._versions = {name: ("restored", name) for name in self.callback}

    def resolve(self) -> None:
        """Fetch everything that is still on the device, with one read."""
        resolve_in_place(self.callback, self.logged, self.bar)

    def resolve_bar(self) -> dict[str, float]:
        """Fetch what the progress bar shows."""
        resolve_in_place(self.bar)
        for name, value in self.bar.items():
            self.bar[name] = to_scalar(value)
        self.known_bar.update(self.bar)
        return self.bar
