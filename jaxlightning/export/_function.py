"""The pure function behind an export: a module's `forward` in evaluation mode, on its present weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlightning.compile.run_step import run_user_step
from jaxlightning.compile.trace import Scalars, Trace
from jaxlightning.utilities.exceptions import MisconfigurationException

__all__ = ["forward_of", "input_shapes"]


def forward_of(module: Any) -> Callable[..., Any]:
    """The module's `forward` as a pure function of its inputs; the weights are constants of it.

    Args:
        module: A `LightningModule` whose variables exist.

    Returns:
        A function that can be traced; it runs networks in evaluation mode.

    Raises:
        MisconfigurationException: If the module has no `forward`, or no variables yet.
    """
    from jaxlightning.loops.call import is_overridden

    engine = module._require_engine()
    if not is_overridden("forward", module):
        raise MisconfigurationException(
            f"`{type(module).__name__}` has no `forward`, which is what `export` exports. Define it, for example "
            "`def forward(self, x): return self.net(x)`."
        )
    if not engine.has_variables:
        missing = engine.binding.missing(engine.params_live)
        raise MisconfigurationException(
            f"`{type(module).__name__}` has no weights yet (networks {missing} were never called): train it, load a "
            "checkpoint, or call `module.init(batch)`."
        )
    params, variables = jax.tree.map(np.asarray, (engine.params, engine.variables))

    def forward(*inputs: Any) -> Any:
        trace = Trace(
            kind="predict",
            key=jax.random.key(0),
            scalars=Scalars(0, 0, 0, 0),
            params=jax.tree.map(jnp.asarray, params),
            variables=jax.tree.map(jnp.asarray, variables),
        )
        mode, modes = module.training, engine.binding.modes()
        module.eval()
        try:
            return run_user_step(engine.binding, trace, tuple(inputs), None, strict=False, forward=True)
        finally:
            module.training = mode
            engine.binding.restore_modes(modes)
            engine.sync_modes()

    return forward


def input_shapes(inputs: Any, batch: int | None) -> tuple[Any, ...]:
    """Shapes of the inputs, with a symbol or a number for the batch.

    Args:
        inputs: An array or a tuple of arrays (nested ones too); axis 0 of each is the batch.
        batch: A fixed batch size, or None for any.

    Returns:
        Nested `jax.ShapeDtypeStruct`.

    Raises:
        MisconfigurationException: If an input has no batch axis.
    """
    from jax import export

    size: Any = export.symbolic_shape("batch")[0] if batch is None else batch

    def shape(leaf: Any) -> Any:
        array = np.asarray(leaf) if not hasattr(leaf, "dtype") else leaf
        if array.ndim == 0:
            raise MisconfigurationException(
                "An input of an export must have the batch on axis 0, and one of them is a single number."
            )
        return jax.ShapeDtypeStruct((size, *array.shape[1:]), jax.dtypes.canonicalize_dtype(array.dtype))  # type: ignore[no-untyped-call]

    given = inputs if isinstance(inputs, tuple) else (inputs,)
    return tuple(jax.tree.map(shape, given))
