"""Which transform of JAX the user's code is in, for messages: read off the call stack."""

from __future__ import annotations

import sys
from types import FrameType

__all__ = ["transform_name"]

_NAMES = {
    ("jax._src.api", "grad_f"): "jax.grad",
    ("jax._src.api", "grad_f_aux"): "jax.grad",
    ("jax._src.api", "value_and_grad_f"): "jax.value_and_grad",
    ("jax._src.api", "vmap_f"): "jax.vmap",
    ("jax._src.api", "jvp"): "jax.jvp",
    ("jax._src.api", "vjp"): "jax.vjp",
    ("jax._src.api", "jacfun"): "jax.jacfwd / jax.jacrev",
    ("jax._src.api", "linearize"): "jax.linearize",
    ("jax._src.api", "eval_shape"): "jax.eval_shape",
    ("jax._src.pjit", "cache_miss"): "jax.jit",
    ("jax._src.pjit", "jit_trace"): "jax.jit",
    ("jax._src.ad_checkpoint", "fun_remat"): "jax.checkpoint",
    ("jax._src.lax.control_flow.loops", "scan"): "jax.lax.scan",
    ("jax._src.lax.control_flow.loops", "map"): "jax.lax.map",
    ("jax._src.lax.control_flow.loops", "fori_loop"): "jax.lax.fori_loop",
    ("jax._src.lax.control_flow.loops", "while_loop"): "jax.lax.while_loop",
    ("jax._src.lax.control_flow.conditionals", "cond"): "jax.lax.cond",
    ("jax._src.lax.control_flow.conditionals", "switch"): "jax.lax.switch",
    ("jax._src.custom_derivatives", "__call__"): "jax.custom_vjp / jax.custom_jvp",
    ("jax._src.shard_map", "wrapped"): "jax.shard_map",
    ("flax.core.axes_scan", "scan_fn"): "flax.linen.scan",
}
"""Functions on the stack that call a transformed function, with the public name of the transform."""

_LIFTED = {"jax.checkpoint": "flax.linen.remat", "jax.vmap": "flax.linen.vmap", "jax.jit": "flax.linen.jit"}


def transform_name() -> str:
    """The innermost transform between the caller and the start of the step, as a user writes it; empty for none."""
    frame: FrameType | None = sys._getframe(1)
    found, lifted = "", False
    while frame is not None:
        module, name = str(frame.f_globals.get("__name__", "")), frame.f_code.co_name
        if module == "jaxlightning.compile.run_step":
            break
        library = module.partition(".")[0] in ("jax", "flax", "jaxlib")
        if found and not library:
            break  # the user's own code, which called the transform
        if library:
            # The outermost of one block counts: `jax.grad` is made of `jax.value_and_grad`.
            found = _NAMES.get((module, name), found)
            lifted = lifted or module == "flax.linen.transforms"
        frame = frame.f_back
    return _LIFTED.get(found, found) if lifted else found
