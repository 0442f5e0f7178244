"""Containers on a module that a step only fills: stand-ins record appends and item writes, to be done on the host.

`self.outputs.append(loss)` cannot happen while the step is traced. A stand-in takes the place of the list meanwhile,
and each change becomes a `Replay`: after every step it is made on the user's own object, with concrete arrays. So a
list costs the step nothing but its new items, however long it is. A step that also *reads* the contents needs them as
inputs: the container is then carried like an array (`containers`), after one more trace.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import jax

from jaxlightning.compile.batch import HostLeaf
from jaxlightning.compile.replay import Replay
from jaxlightning.compile.trace import RetraceError
from jaxlightning.compile.user_code import user_line

if TYPE_CHECKING:
    from jaxlightning.compile.trace import Trace

__all__ = ["Place", "stand_in"]

_ABSENT = object()


class Place:
    """Where a container is: an attribute of a module, and keys from there on.

    Args:
        owner: The module.
        name: The attribute.
        path: Full path of the attribute, for messages and facts.
        trace: The run of the step.
        carry: Makes the attribute part of the carried state, before the step is traced again.
        keys: Keys below the attribute.
    """

    def __init__(
        self, owner: Any, name: str, path: str, trace: Trace, carry: Callable[[str], None], keys: tuple[Any, ...] = ()
    ) -> None:
        self.owner = owner
        self.name = name
        self.path = path
        self.trace = trace
        self.carry = carry
        self.keys = keys

    @property
    def text(self) -> str:
        """The container as source."""
        return f"self.{self.path}" + "".join(f"[{key!r}]" for key in self.keys)

    def below(self, key: Any) -> Place:
        """The place of an item."""
        return Place(self.owner, self.name, self.path, self.trace, self.carry, (*self.keys, key))

    def find(self) -> Any:
        """The user's object, as it is now."""
        found = self.owner.__dict__[self.name]
        for key in self.keys:
            found = found[key]
        return found

    def look(self) -> Any:
        """The user's object without making anything on the way; `_ABSENT` where there is none."""
        found = self.owner.__dict__.get(self.name, _ABSENT)
        for key in self.keys:
            try:
                present = found is not _ABSENT and (key in found if isinstance(found, dict) else True)
                found = found[key] if present else _ABSENT
            except (LookupError, TypeError):
                return _ABSENT
        return found

    def change(self, method: str, value: Any) -> None:
        """Records that a method is to be called with `value` (a tuple of arguments) after each step."""
        self.trace.require_own_level(
            f"`{self.text}.{method}(...)`", "return the value from the function and append it outside"
        )
        if self.trace.silent:
            return
        find = self.find

        def apply(arguments: Any) -> None:
            getattr(find(), method)(*arguments)

        self.trace.replays.append(Replay(f"`{self.text}.{method}(...)` ({user_line()})", value, apply))

    def contents(self) -> RetraceError:
        """The step reads what is in the container, so it becomes part of the state."""
        path, carry = self.path, self.carry
        return RetraceError(f"the contents of `{self.text}` ({user_line()})", lambda facts: carry(path))

    def ask(self, question: str, answer: Callable[[Any], Any]) -> Any:
        """Answers a question about the container on the host; the variant is for this answer only.

        Args:
            question: As source, for example `"len(self.outputs)"`.
            answer: From the user's object (or `_ABSENT`) to a hashable value.
        """
        look = self.look
        return self.trace.ask(question, lambda: answer(look()))


def _length(value: Any) -> int | None:
    return None if value is _ABSENT else len(value)


class _Recorded:
    """What the stand-ins share: a place, and what this step has added."""

    _place: Place

    def _len(self, added: int) -> int:
        return int(self._place.ask(f"len({self._place.text})", _length) or 0) + added

    def __bool__(self) -> bool:
        place = self._place
        if self._added():
            return True
        return bool(place.ask(f"bool({place.text})", lambda value: value is not _ABSENT and bool(value)))

    def _added(self) -> bool:
        raise NotImplementedError

    def _need_contents(self, *_args: Any, **_kwargs: Any) -> Any:
        raise self._place.contents()

    __hash__ = None  # type: ignore[assignment]
    __reduce_ex__ = _need_contents


class RecordedList(_Recorded, list[Any]):
    """Stands for a list that the step appends to."""

    def __init__(self, place: Place) -> None:
        list.__init__(self)
        self._place = place
        self._new: list[Any] = []
        self._cleared = False

    def _added(self) -> bool:
        return bool(self._new)

    def append(self, item: Any) -> None:
        self._place.change("append", (item,))
        self._new.append(item)

    def extend(self, items: Iterable[Any]) -> None:
        items = list(items)
        self._place.change("extend", (items,))
        self._new.extend(items)

    def __iadd__(self, items: Iterable[Any]) -> RecordedList:  # type: ignore[misc]
        self.extend(items)
        return self

    def clear(self) -> None:
        self._place.change("clear", ())
        self._new.clear()
        self._cleared = True

    def __len__(self) -> int:
        return len(self._new) if self._cleared else self._len(len(self._new))

    def __bool__(self) -> bool:
        return bool(self._new) if self._cleared else super().__bool__()

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, jax.Array):
            index = plain_key(index)
        if isinstance(index, int):
            if self._cleared:
                return self._new[index]
            if -len(self._new) <= index < 0:
                return self._new[index]
            nested = _nested(self._place, index)
            if nested is not None:
                return nested
        raise self._place.contents()

    def __iter__(self) -> Any:
        if self._cleared:
            return iter(list(self._new))
        old = self._place.look()
        if isinstance(old, list) and old and len(old) <= 64 and not self._new:
            nested = [_nested(self._place, index) for index in range(self._len(0))]
            if all(item is not None for item in nested):
                return iter(nested)
        if self._len(0) == 0:  # nothing was there before the step: a guard, no input
            return iter(list(self._new))
        raise self._place.contents()

    insert = pop = remove = sort = reverse = index = count = copy = _Recorded._need_contents
    __contains__ = __eq__ = __ne__ = __add__ = __mul__ = __rmul__ = __imul__ = __reversed__ = _Recorded._need_contents
    __setitem__ = __delitem__ = __lt__ = __le__ = __gt__ = __ge__ = _Recorded._need_contents

    def __repr__(self) -> str:
        return f"<list `{self._place.text}` in a step, {len(self._new)} new items>"


class RecordedDeque(_Recorded, collections.deque[Any]):
    """Stands for a deque that the step appends to."""

    def __init__(self, place: Place) -> None:
        collections.deque.__init__(self)
        self._place = place
        self._new: list[Any] = []

    def _added(self) -> bool:
        return bool(self._new)

    def append(self, item: Any) -> None:
        self._place.change("append", (item,))
        self._new.append(item)

    def appendleft(self, item: Any) -> None:
        self._place.change("appendleft", (item,))
        self._new.append(item)

    def extend(self, items: Iterable[Any]) -> None:
        for item in items:
            self.append(item)

    def __iadd__(self, items: Iterable[Any]) -> RecordedDeque:  # type: ignore[misc]
        self.extend(items)
        return self

    def __len__(self) -> int:
        old = self._place.look()
        length = self._len(len(self._new))
        limit = old.maxlen if isinstance(old, collections.deque) else None
        return length if limit is None else min(length, limit)

    clear = extendleft = insert = pop = popleft = remove = reverse = rotate = index = count = copy = (
        _Recorded._need_contents
    )
    __contains__ = __eq__ = __ne__ = __add__ = __mul__ = __rmul__ = __imul__ = __reversed__ = _Recorded._need_contents
    __getitem__ = __setitem__ = __delitem__ = __iter__ = __lt__ = __le__ = __gt__ = __ge__ = _Recorded._need_contents

    def __repr__(self) -> str:
        return f"<deque `{self._place.text}` in a step, {len(self._new)} new items>"


class RecordedSet(_Recorded, set[Any]):
    """Stands for a set that the step adds to."""

    def __init__(self, place: Place) -> None:
        set.__init__(self)
        self._place = place
        self._new: set[Any] = set()

    def _added(self) -> bool:
        return bool(self._new)

    def add(self, item: Any) -> None:
        self._place.change("add", (plain_key(item),))
        self._new.add(plain_key(item))

    def update(self, *items: Iterable[Any]) -> None:
        for item in (item for group in items for item in group):
            self.add(item)

    def discard(self, item: Any) -> None:
        self._place.change("discard", (plain_key(item),))
        self._new.discard(plain_key(item))

    def __contains__(self, item: Any) -> bool:
        key = plain_key(item, asks=True)
        if key in self._new:
            return True
        place = self._place
        return bool(place.ask(f"{key!r} in {place.text}", lambda old: old is not _ABSENT and key in old))

    clear = pop = remove = union = difference = intersection = issubset = issuperset = copy = _Recorded._need_contents
    difference_update = intersection_update = symmetric_difference_update = _Recorded._need_contents
    symmetric_difference = isdisjoint = __iter__ = __len__ = __eq__ = __ne__ = _Recorded._need_contents
    __and__ = __or__ = __sub__ = __xor__ = __iand__ = __isub__ = __ixor__ = __ior__ = _Recorded._need_contents
    __lt__ = __le__ = __gt__ = __ge__ = _Recorded._need_contents

    def __repr__(self) -> str:
        return f"<set `{self._place.text}` in a step, {len(self._new)} new items>"


class RecordedDict(_Recorded, dict[Any, Any]):
    """Stands for a dict that the step writes items of."""

    def __init__(self, place: Place, factory: Callable[[], Any] | None) -> None:
        dict.__init__(self)
        self._place = place
        self._new: dict[Any, Any] = {}
        self._factory = factory

    def _added(self) -> bool:
        return bool(self._new)

    def __setitem__(self, key: Any, value: Any) -> None:
        key = plain_key(key)
        self._place.change("__setitem__", (key, value))
        self._new[key] = value

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __ior__(self, other: Any) -> RecordedDict:  # type: ignore[misc]
        self.update(other)
        return self

    def setdefault(self, key: Any, default: Any = None) -> Any:
        key = plain_key(key, asks=True)
        if key in self._new:
            return self._new[key]
        place, fresh = self._place, type(default) in _STAND_INS and not default
        if not fresh:
            raise place.contents()
        place.change("setdefault", (key, default))
        return stand_in(default, place.below(key))

    def __getitem__(self, key: Any) -> Any:
        key = plain_key(key, asks=True)
        if key in self._new:
            return self._new[key]
        made = None if self._factory is None else self._factory()
        if type(made) in _STAND_INS:
            # The user's defaultdict makes it when the change is made there.
            old = self._place.below(key).look()
            if old is _ABSENT or type(old) is type(made):
                return stand_in(made if old is _ABSENT else old, self._place.below(key))
        nested = _nested(self._place, key)
        if nested is not None:
            return nested
        raise self._place.contents()

    def __contains__(self, key: Any) -> bool:
        key = plain_key(key, asks=True)
        if key in self._new:
            return True
        place = self._place
        return bool(place.ask(f"{key!r} in {place.text}", lambda old: old is not _ABSENT and key in old))

    def __len__(self) -> int:
        raise self._place.contents()

    clear = pop = popitem = get = items = keys = values = copy = _Recorded._need_contents
    __delitem__ = __iter__ = __eq__ = __ne__ = __or__ = __ror__ = __reversed__ = _Recorded._need_contents

    def __repr__(self) -> str:
        return f"<dict `{self._place.text}` in a step, {len(self._new)} new items>"


_STAND_INS: dict[type, Callable[[Any, Place], Any]] = {
    list: lambda _, place: RecordedList(place),
    collections.deque: lambda _, place: RecordedDeque(place),
    set: lambda _, place: RecordedSet(place),
    dict: lambda _, place: RecordedDict(place, None),
    collections.OrderedDict: lambda _, place: RecordedDict(place, None),
    collections.defaultdict: lambda old, place: RecordedDict(place, old.default_factory),
}


def can_stand_in(value: Any) -> bool:
    """Whether there is a stand-in for a container of this type."""
    return type(value) in _STAND_INS


def stand_in(value: Any, place: Place) -> Any:
    """What the step gets in place of a container that it fills."""
    return _STAND_INS[type(value)](value, place)


def _nested(place: Place, key: Any) -> Any:
    """A stand-in for an item that is a container itself, None for any other item."""
    below = place.below(key)
    item = below.look()
    if type(item) not in _STAND_INS:
        return None
    kind = type(item)
    place.ask(f"type({below.text})", lambda _: type(below.look()))
    return _STAND_INS[kind](item, below)


def plain_key(key: Any, asks: bool = False) -> Any:
    """A key without traced parts: a number of the host is looked at, which decides the variant.

    Raises:
        TypeError: If the key is an array of the step.
    """
    if isinstance(key, HostLeaf) and asks:
        key._refuse()
    if isinstance(key, jax.core.Tracer):
        raise TypeError(f"A key of a dict or set must be known on the host; it is {key} of the compiled step.")
    if isinstance(key, jax.Array):
        return key.__index__()
    return key
