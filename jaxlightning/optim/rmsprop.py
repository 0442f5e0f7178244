"""RMSprop with torch's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optax

from jaxlightning.optim._optimizer import Optimizer, require
from jaxlightning.optim._rules import decayed_chain


class RMSprop(Optimizer):
    """`torch.optim.RMSprop`, optionally centered and with momentum.

    Args:
        params: What it owns, see `Optimizer`.
        lr: Learning rate.
        alpha: Decay rate of the second moment.
        eps: Added to the denominator.
        weight_decay: L2 penalty, added to the gradient.
        momentum: Momentum factor; 0 keeps no buffer.
        centered: Whether to divide by the standard deviation.
        capturable: Only torch's default is accepted.
        foreach: Only torch's default is accepted.
        maximize: Whether to climb.
        differentiable: Only torch's default is accepted.
    """

    _hyper_fields = ("lr", "alpha", "eps", "weight_decay", "momentum")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum: float = 0,
        centered: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "alpha": alpha,
                "eps": eps,
                "weight_decay": weight_decay,
                "momentum": momentum,
                "centered": centered,
                "capturable": capturable,
                "foreach": foreach,
                "maximize": maximize,
                "differentiable": differentiable,
            },
        )

    def _validate(self, group: Mapping[str, Any]) -> None:
        super()._validate(group)
        for key in ("alpha", "eps", "momentum"):
            require(group[key] >= 0.0, self.name, key, group[key], "at least 0")

    def _pieces(self, group: Mapping[str, Any]) -> frozenset[str]:
        return frozenset({"momentum buffers"} if group["momentum"] != 0 else ())

    def _rule(self, options: Mapping[str, Any], pieces: frozenset[str]) -> optax.GradientTransformation:
        scale = optax.scale_by_stddev if options["centered"] else optax.scale_by_rms
        rule = scale(decay=options["alpha"], eps=options["eps"], eps_in_sqrt=False)
        if "momentum buffers" in pieces:
            rule = optax.chain(rule, optax.trace(options["momentum"]))
        return decayed_chain(rule, lr=options["lr"], weight_decay=options["weight_decay"], maximize=options["maximize"])
