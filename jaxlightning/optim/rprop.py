"""Rprop with torch's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optax

from jaxlightning.optim._adaptive import scale_by_torch_rprop
from jaxlightning.optim._optimizer import Optimizer, require
from jaxlightning.optim._rules import negate_if


class Rprop(Optimizer):
    """`torch.optim.Rprop`: step sizes of their own, changed by the signs of the gradients. For full batches.

    Args:
        params: What it owns, see `Optimizer`.
        lr: The first step size; later values change nothing, as in torch.
        etas: Factors at a change of sign and without one.
        step_sizes: Smallest and largest step.
        capturable: Only torch's default is accepted.
        foreach: Only torch's default is accepted.
        maximize: Whether to climb.
        differentiable: Only torch's default is accepted.
    """

    _hyper_fields = ("lr", "etas.0", "etas.1", "step_sizes.0", "step_sizes.1")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        etas: tuple[float, float] = (0.5, 1.2),
        step_sizes: tuple[float, float] = (1e-6, 50),
        *,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "etas": etas,
                "step_sizes": step_sizes,
                "capturable": capturable,
                "foreach": foreach,
                "maximize": maximize,
                "differentiable": differentiable,
            },
        )

    def _validate(self, group: Mapping[str, Any]) -> None:
        super()._validate(group)
        etas = group["etas"]
        valid = isinstance(etas, tuple) and len(etas) == 2 and 0.0 < etas[0] < 1.0 < etas[1]
        require(valid, self.name, "etas", etas, "a number below 1 and one above 1, both positive")
        require(len(group["step_sizes"]) == 2, self.name, "step_sizes", group["step_sizes"], "a pair of numbers")

    def _rule(self, options: Mapping[str, Any], pieces: frozenset[str]) -> optax.GradientTransformation:
        return optax.chain(
            negate_if(options["maximize"]),
            scale_by_torch_rprop(options["lr"], options["etas"], options["step_sizes"]),
            optax.scale(-1.0),
        )
