"""A class method that refuses to be called on an instance."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    restricted_classmethod = classmethod
else:

    class restricted_classmethod:
        """Like `classmethod`, but `obj.method()` is a TypeError: its result is a new object, which is easily missed."""

        def __init__(self, method: Callable[..., Any]) -> None:
            self.method = method
            functools.update_wrapper(self, method)

        def __get__(self, instance: Any, cls: type) -> Callable[..., Any]:
            @functools.wraps(self.method)
            def call(*args: Any, **kwargs: Any) -> Any:
                # At the call and not at the access, so that looking through an object's attributes stays harmless.
                if instance is not None:
                    raise TypeError(
                        f"The classmethod `{cls.__name__}.{self.method.__name__}` cannot be called on an instance. "
                        "Please call it on the class type and make sure the return value is used."
                    )
                return self.method(cls, *args, **kwargs)

            return call
