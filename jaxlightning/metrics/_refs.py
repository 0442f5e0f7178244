"""Values that are still on the device: who holds them, and how many are fetched with one read."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Any

import jax
import numpy as np

__all__ = ["Ref", "Snapshot", "fetch", "on_cpu", "resolve", "resolve_in_place", "to_scalar"]


class Snapshot:
    """One device array and, once it was fetched, its host copy.

    Step outputs are never donated, so the array stays valid for as long as the snapshot holds it.
    """

    __slots__ = ("_array", "_numbers", "host")

    def __init__(self, array: Any) -> None:
        self._array = array
        self._numbers: list[Any] | None = None
        self.host: np.ndarray[Any, Any] | None = array if isinstance(array, np.ndarray) else None

    def start_fetch(self) -> None:
        """Begin the copy to the host without waiting for it."""
        if self.host is None and hasattr(self._array, "copy_to_host_async"):
            self._array.copy_to_host_async()

    def numbers(self) -> list[Any]:
        """The elements of a vector as Python numbers; it must have been fetched."""
        if self._numbers is None:
            if self.host is None:
                raise RuntimeError("Logged values were read before they were fetched; this is a defect.")
            self._numbers = self.host.tolist()
        return self._numbers

    @property
    def ready(self) -> bool:
        """Whether it can be fetched without waiting for the device."""
        return self.host is not None or not hasattr(self._array, "is_ready") or bool(self._array.is_ready())

    def array(self) -> Any:
        """The device array; only before `deliver`."""
        return self._array

    def deliver(self, host: Any) -> None:
        """Take the fetched copy and let the device array go."""
        self.host = np.asarray(host)
        self._array = None


class Ref:
    """A logged number: element `index` of a snapshot, or the snapshot itself if that is 0-d (`index` None)."""

    __slots__ = ("index", "snapshot")

    def __init__(self, snapshot: Snapshot, index: int | None) -> None:
        self.snapshot = snapshot
        self.index = index

    def value(self) -> Any:
        """The number as a NumPy scalar; the snapshot must have been fetched."""
        host = self.snapshot.host
        if host is None:
            raise RuntimeError("A logged value was read before it was fetched from the device; this is a defect.")
        return host[()] if self.index is None else host[self.index]


def on_cpu(snapshot: Snapshot) -> bool:
    """Whether a snapshot's array lies in the host's own memory already."""
    array = snapshot.array()
    device = getattr(array, "device", None)  # of a sharded array its sharding
    return getattr(device, "platform", None) == "cpu"


def fetch(snapshots: Iterable[Snapshot]) -> None:
    """Bring snapshots to the host, all of them with one `jax.device_get`; nothing happens if all are there."""
    missing = list(dict.fromkeys(snapshot for snapshot in snapshots if snapshot.host is None))
    if len(missing) == 1:  # the common case, without a tree around the array
        missing[0].deliver(jax.device_get(missing[0].array()))
    elif missing:
        for snapshot, host in zip(missing, jax.device_get([s.array() for s in missing]), strict=True):
            snapshot.deliver(host)


def resolve(values: Iterable[Any]) -> list[Any]:
    """Replace every `Ref` by its number, with at most one device read."""
    items = list(values)
    fetch(item.snapshot for item in items if type(item) is Ref)
    return [item.value() if type(item) is Ref else item for item in items]


def resolve_in_place(*mappings: MutableMapping[str, Any]) -> None:
    """Replace every `Ref` in the mappings by its number, with at most one device read."""
    fetch(value.snapshot for mapping in mappings for value in mapping.values() if type(value) is Ref)
    for mapping in mappings:
        for name, value in mapping.items():
            if type(value) is Ref:
                mapping[name] = value.value()


def to_scalar(value: Any) -> Any:
    """A single-element array (JAX, NumPy, torch) as a Python number; anything else as it is."""
    if hasattr(value, "item") and hasattr(value, "dtype"):
        return value.item()
    return value
