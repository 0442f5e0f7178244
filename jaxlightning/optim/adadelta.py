"""Adadelta with torch's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optax

from jaxlightning.optim._optimizer import Optimizer, require
from jaxlightning.optim._rules import decayed_chain


class Adadelta(Optimizer):
    """`torch.optim.Adadelta`: steps in units of earlier steps.

    Args:
        params: What it owns, see `Optimizer`.
        lr: Learning rate.
        rho: Decay rate of both averages.
        eps: Added to the denominator.
        weight_decay: L2 penalty, added to the gradient.
        foreach: Only torch's default is accepted.
        capturable: Only torch's default is accepted.
        maximize: Whether to climb.
        differentiable: Only torch's default is accepted.
    """

    _hyper_fields = ("lr", "rho", "eps", "weight_decay")

    def __init__(
        self,
        params: Any,
        lr: float = 1.0,
        rho: float = 0.9,
        eps: float = 1e-6,
        weight_decay: float = 0,
        foreach: bool | None = None,
        *,
        capturable: bool = False,
        maximize: bool = False,
        differentiable: bool = False,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "rho": rho,
                "eps": eps,
                "weight_decay": weight_decay,
                "foreach": foreach,
                "capturable": capturable,
                "maximize": maximize,
                "differentiable": differentiable,
            },
        )

    def _validate(self, group: Mapping[str, Any]) -> None:
        super()._validate(group)
        require(0.0 <= group["rho"] <= 1.0, self.name, "rho", group["rho"], "between 0 and 1")
        require(group["eps"] >= 0.0, self.name, "eps", group["eps"], "at least 0")

    def _rule(self, options: Mapping[str, Any], pieces: frozenset[str]) -> optax.GradientTransformation:
        return decayed_chain(
            optax.scale_by_adadelta(options["rho"], options["eps"]),
            lr=options["lr"],
            weight_decay=options["weight_decay"],
            maximize=options["maximize"],
        )
