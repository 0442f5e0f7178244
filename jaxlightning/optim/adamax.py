"""Adamax with torch's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optax

from jaxlightning.optim._optimizer import MomentOptimizer
from jaxlightning.optim._rules import decayed_chain


class Adamax(MomentOptimizer):
    """`torch.optim.Adamax`: Adam with the infinity norm in place of the second moment.

    Args:
        params: What it owns, see `Optimizer`.
        lr: Learning rate.
        betas: Decay rates of the first and second moments.
        eps: Added to the denominator.
        weight_decay: L2 penalty, added to the gradient.
        foreach: Only torch's default is accepted.
        maximize: Whether to climb.
        differentiable: Only torch's default is accepted.
        capturable: Only torch's default is accepted.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        capturable: bool = False,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "foreach": foreach,
                "maximize": maximize,
                "differentiable": differentiable,
                "capturable": capturable,
            },
        )

    def _rule(self, options: Mapping[str, Any], pieces: frozenset[str]) -> optax.GradientTransformation:
        return decayed_chain(
            optax.scale_by_adamax(*options["betas"], options["eps"]),
            lr=options["lr"],
            weight_decay=options["weight_decay"],
            maximize=options["maximize"],
        )
