"""NAdam with torch's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optax

from jaxlightning.optim._adaptive import scale_by_torch_nadam
from jaxlightning.optim._optimizer import MomentOptimizer, require
from jaxlightning.optim._rules import decayed_chain


class NAdam(MomentOptimizer):
    """`torch.optim.NAdam`: Adam with Nesterov momentum and a momentum schedule.

    Args:
        params: What it owns, see `Optimizer`.
        lr: Learning rate.
        betas: Decay rates of the first and second moments.
        eps: Added to the denominator.
        weight_decay: L2 penalty, added to the gradient.
        momentum_decay: How fast the momentum schedule rises.
        decoupled_weight_decay: Whether the decay acts on the parameters directly, as in AdamW.
        foreach: Only torch's default is accepted.
        maximize: Whether to climb.
        capturable: Only torch's default is accepted.
        differentiable: Only torch's default is accepted.
    """

    _hyper_fields = (*MomentOptimizer._hyper_fields, "momentum_decay")

    def __init__(
        self,
        params: Any,
        lr: float = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum_decay: float = 4e-3,
        decoupled_weight_decay: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "momentum_decay": momentum_decay,
                "decoupled_weight_decay": decoupled_weight_decay,
                "foreach": foreach,
                "maximize": maximize,
                "capturable": capturable,
                "differentiable": differentiable,
            },
        )

    def _validate(self, group: Mapping[str, Any]) -> None:
        super()._validate(group)
        require(group["momentum_decay"] >= 0.0, self.name, "momentum_decay", group["momentum_decay"], "at least 0")

    def _rule(self, options: Mapping[str, Any], pieces: frozenset[str]) -> optax.GradientTransformation:
        b1, b2 = options["betas"]
        return decayed_chain(
            scale_by_torch_nadam(b1, b2, options["eps"], options["momentum_decay"]),
            lr=options["lr"],
            weight_decay=options["weight_decay"],
            decoupled=options["decoupled_weight_decay"],
            maximize=options["maximize"],
        )
