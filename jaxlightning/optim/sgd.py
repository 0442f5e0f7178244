"""Stochastic gradient descent with torch's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optax

from jaxlightning.optim._optimizer import Optimizer, require
from jaxlightning.optim._rules import dampened_trace, decayed_chain


class SGD(Optimizer):
    """`torch.optim.SGD`: optional momentum, Nesterov momentum and dampening.

    Args:
        params: What it owns, see `Optimizer`.
        lr: Learning rate.
        momentum: Momentum factor; 0 keeps no buffer.
        dampening: Share of each later gradient that does not enter the buffer.
        weight_decay: L2 penalty, added to the gradient.
        nesterov: Whether to use Nesterov momentum.
        maximize: Whether to climb.
        foreach: Only torch's default is accepted.
        differentiable: Only torch's default is accepted.
        fused: Only torch's default is accepted.
    """

    _hyper_fields = ("lr", "momentum", "dampening", "weight_decay")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "dampening": dampening,
                "weight_decay": weight_decay,
                "nesterov": nesterov,
                "maximize": maximize,
                "foreach": foreach,
                "differentiable": differentiable,
                "fused": fused,
            },
        )

    def _validate(self, group: Mapping[str, Any]) -> None:
        super()._validate(group)
        require(group["momentum"] >= 0.0, self.name, "momentum", group["momentum"], "at least 0")
        if group["nesterov"]:
            require(group["momentum"] > 0, self.name, "momentum", group["momentum"], "above 0 for Nesterov momentum")
            require(group["dampening"] == 0, self.name, "dampening", group["dampening"], "0 for Nesterov momentum")

    def _pieces(self, group: Mapping[str, Any]) -> frozenset[str]:
        pieces = set()
        if group["momentum"] != 0:
            pieces.add("momentum buffers")
            if group["dampening"] != 0:
                pieces.add("dampening")
        return frozenset(pieces)

    def _rule(self, options: Mapping[str, Any], pieces: frozenset[str]) -> optax.GradientTransformation:
        if "dampening" in pieces:
            momentum = dampened_trace(options["momentum"], options["dampening"], options["nesterov"])
        elif "momentum buffers" in pieces:
            momentum = optax.trace(options["momentum"], options["nesterov"])
        else:
            momentum = optax.identity()
        return decayed_chain(
            momentum, lr=options["lr"], weight_decay=options["weight_decay"], maximize=options["maximize"]
        )
