"""The recorded runs of Lightning, which notice what a test looks at.

A row of the catalogue cites a place in a recording. Whether the test that carries the row really looks there is seen
when it runs, not guessed from its source: what `read` returns is a dictionary like any other that notes each look-up.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parents[1] / "conformance" / "golden"

_seen: set[str] = set()


def read(name: str) -> Any:
    """The `data` of a recording, with places noted as `name.key.key`."""
    return _noting(_data(name), name)


@functools.cache
def _data(name: str) -> Any:
    return json.loads((GOLDEN / f"{name}.json").read_text())["data"]


def forget() -> None:
    """Begin anew, with nothing looked at."""
    _seen.clear()


def looked_at(places: Iterable[str]) -> list[str]:
    """Those of some places that were looked at since `forget`.

    Args:
        places: A recording (`"flags"`), or a place in one (`"flags.max_steps_0"`).
    """
    return [place for place in places if any(_covers(seen, place) for seen in _seen)]


def _covers(seen: str, place: str) -> bool:
    if f"{seen}.".startswith(f"{place}."):
        return True  # the place itself, or something in it
    return seen.endswith(".*") and f"{place}.".startswith(seen.removesuffix("*"))  # all that it is a part of


def _noting(value: Any, place: str) -> Any:
    if isinstance(value, dict):
        return _Table(value, place)
    return _Items(value, place) if isinstance(value, list) else value


class _Compared:
    """A container whose comparison reads all of it."""

    _place: str

    def __eq__(self, other: object) -> bool:
        _seen.add(f"{self._place}.*")
        return super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # type: ignore[assignment]


class _Table(_Compared, dict[str, Any]):
    """A dictionary that notes which entries are read; a comparison reads all of it."""

    def __init__(self, data: dict[str, Any], place: str) -> None:
        super().__init__(data)
        self._place = place

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        place = f"{self._place}.{key}"
        _seen.add(place)
        if isinstance(value, dict | list) and not isinstance(value, _Table | _Items):
            value = _noting(value, place)
            self[key] = value  # so that a test may strike out what it does not compare
        return value

    def __iter__(self) -> Iterator[str]:
        # Spelled out, so that `{**table}` and `dict(table)` go through the look-up above.
        return super().__iter__()

    def get(self, key: str, default: Any = None) -> Any:
        if key not in self:
            return default
        return self[key]

    def pop(self, key: str, *default: Any) -> Any:
        value = self.get(key, *default)
        super().pop(key, None)
        return value

    def items(self) -> Any:
        return {key: self[key] for key in self}.items()

    def values(self) -> Any:
        return {key: self[key] for key in self}.values()


class _Items(_Compared, list[Any]):
    """A list that notes that it is read; what it holds has its place."""

    def __init__(self, data: list[Any], place: str) -> None:
        # Its items are the same objects at every look, so that a test may write a difference into one.
        super().__init__(_noting(each, place) for each in data)
        self._place = place

    def __getitem__(self, index: Any) -> Any:
        _seen.add(self._place)
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[Any]:
        _seen.add(self._place)
        return super().__iter__()
