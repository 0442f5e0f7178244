"""Warning categories, and a cache that says a thing once per run."""

from __future__ import annotations

import os
import warnings

from jaxlightning.utilities.rank_zero import rank_zero_info, rank_zero_warn

_SILENCE_VARIABLE = "POSSIBLE_USER_WARNINGS"


class PossibleUserWarning(UserWarning):
    """A warning about something that is often, but not always, a mistake.

    Setting the environment variable ``POSSIBLE_USER_WARNINGS=off`` (or ``0``) silences all of them.
    """


def disable_possible_user_warnings(module: str = "") -> None:
    """Ignore every `PossibleUserWarning`.

    Args:
        module: Regular expression of the modules to silence; empty means all.
    """
    warnings.filterwarnings("ignore", module=module, category=PossibleUserWarning)


def possible_user_warnings_silenced() -> bool:
    """Say whether the environment asks for silence about `PossibleUserWarning`."""
    return os.environ.get(_SILENCE_VARIABLE, "").lower() in ("off", "0")


class WarningCache:
    """Remember which messages were given, so that a loop says each of them once.

    One object belongs to one run (the trainer owns it); a new run warns anew.
    """

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def __contains__(self, key: object) -> bool:
        return key in self._seen

    def __len__(self) -> int:
        return len(self._seen)

    def add(self, key: str) -> None:
        """Mark ``key`` as already said."""
        self._seen.add(key)

    def clear(self) -> None:
        """Forget everything that was said."""
        self._seen.clear()

    def warn(
        self, message: str, category: type[Warning] = UserWarning, *, key: str | None = None, stacklevel: int = 4
    ) -> None:
        """Warn unless the same key was used before.

        Args:
            message: The text.
            category: The warning class.
            key: What counts as "the same"; the message itself by default.
            stacklevel: Frames between the user's line and `warnings.warn`.
        """
        key = message if key is None else key
        if key in self._seen:
            return
        self._seen.add(key)
        rank_zero_warn(message, category=category, stacklevel=stacklevel + 1)

    def info(self, message: str, *, key: str | None = None) -> None:
        """Write an INFO record unless the same key was used before."""
        key = message if key is None else key
        if key in self._seen:
            return
        self._seen.add(key)
        rank_zero_info(message)


#: For code that has no trainer at hand. A trainer clears its own cache at every run; this one lives with the process.
_process_cache = WarningCache()


def warn_once(
    key: str, message: str, category: type[Warning] = UserWarning, *, cache: WarningCache | None = None
) -> None:
    """Give a warning once per cache.

    Args:
        key: What counts as "the same" warning.
        message: The text.
        category: The warning class.
        cache: The run's cache; without one the warning comes once per process.
    """
    (_process_cache if cache is None else cache).warn(message, category, key=key, stacklevel=5)
