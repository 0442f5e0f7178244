"""Arrays on a module by torch's names: buffers and parameters that belong to no network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxlightning.module_base import ModuleBase

if TYPE_CHECKING:
    import jax

__all__ = ["ModuleArrays"]


class ModuleArrays(ModuleBase):
    """`register_buffer`, `register_parameter` and what lists them."""

    def register_buffer(self, name: str, tensor: Any, persistent: bool = True) -> None:
        """Adds an array that is state but not trained, such as a queue or running statistics.

        Every attribute that holds a JAX array is carried from step to step; a buffer is in `state_dict` besides.

        Args:
            name: Name of the attribute.
            tensor: The array, or None for an attribute that is set later.
            persistent: Whether it is part of `state_dict` and of checkpoints.

        Raises:
            TypeError: If the name is no string or the value no array.
            KeyError: If the name is empty, has a dot, or is taken.
        """
        self._check_name("buffer", name)
        if tensor is not None and not (hasattr(tensor, "shape") and hasattr(tensor, "dtype")):
            raise TypeError(
                f"cannot assign '{type(tensor).__name__}' object to buffer '{name}' (array or None required)"
            )
        if tensor is not None and type(tensor).__module__.partition(".")[0] == "torch":
            raise TypeError(f"The buffer '{name}' is a torch tensor: pass a JAX or numpy array (`tensor.numpy()`).")
        self.__dict__.setdefault("_buffers", {})[name] = persistent
        setattr(self, name, tensor)

    def register_parameter(self, name: str, init: Any) -> None:
        """Adds a trainable array that belongs to no network, such as a temperature; a step reads it as `self.name`.

        Args:
            name: Name of the attribute, and the path of the parameter for optimizers and checkpoints.
            init: Its first value, or a function from a JAX key to it; the key follows from the seed and the name.

        Raises:
            TypeError: If the name is no string, or `init` neither an array nor a function.
            KeyError: If the name is empty, has a dot, or is taken.
        """
        self._check_name("parameter", name)
        if not callable(init) and not isinstance(init, int | float) and not hasattr(init, "shape"):
            raise TypeError(
                f"cannot assign '{type(init).__name__}' object to parameter '{name}' (an array, or a function from a "
                "key to an array)"
            )
        self.__dict__.setdefault("_raw_parameters", {})[name] = init
        if self._engine is not None:
            self._engine.attach()

    def _check_name(self, what: str, name: str) -> None:
        if "_current_fx_name" not in self.__dict__:
            raise AttributeError(f"cannot assign {what} before {type(self).__name__}.__init__() call")
        if not isinstance(name, str):
            raise TypeError(f"{what} name should be a string. Got {type(name).__name__}")
        if "." in name:
            raise KeyError(f'{what} name can\'t contain "."')
        if not name:
            raise KeyError(f'{what} name can\'t be empty string ""')
        kept = self.__dict__.get("_buffers", {}) if what == "buffer" else self.__dict__.get("_raw_parameters", {})
        if name not in kept and hasattr(self, name):
            raise KeyError(f"attribute '{name}' already exists")

    def named_buffers(self) -> Iterator[tuple[str, jax.Array]]:
        """Names and values of the registered buffers, copies of what the next step starts from."""
        for name in self.__dict__.get("_buffers", {}):
            value = getattr(self, name)
            if value is not None:
                yield name, value

    def buffers(self) -> Iterator[jax.Array]:
        """Values of the registered buffers."""
        for _, value in self.named_buffers():
            yield value

    def _raw_parameter(self, name: str) -> Any:
        engine = self.__dict__.get("_engine")
        if engine is None:
            init = self.__dict__["_raw_parameters"][name]
            if callable(init):
                raise RuntimeError(
                    f"The parameter `{name}` has no value yet: its key follows from the seed of the run. Call "
                    "`module.init(batch)`, or start `fit`."
                )
            return init
        return engine.params_of(engine.path_of(self, name))

    def _set_raw_parameter(self, name: str, value: Any) -> None:
        engine = self.__dict__.get("_engine")
        if engine is None:
            self.__dict__["_raw_parameters"][name] = value
        else:
            engine.params = {**engine.params, engine.path_of(self, name): value}


def initial_value(name: str, init: Any, key: Callable[[], Any]) -> Any:
    """The first value of a parameter that was registered by itself.

    Raises:
        TypeError: If it is not an array of real floating-point numbers.
    """
    import jax.numpy as jnp

    value = jnp.asarray(init(key()) if callable(init) else np.asarray(init) if isinstance(init, float) else init)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise TypeError(
            f"The parameter `{name}` has dtype {value.dtype}; only floating-point arrays can be trained. Use "
            "`register_buffer` for others."
        )
    return value
