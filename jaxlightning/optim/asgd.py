"""Averaged SGD with torch's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optax

from jaxlightning.optim._adaptive import averaged_sgd
from jaxlightning.optim._optimizer import Optimizer
from jaxlightning.optim._rules import negate_if


class ASGD(Optimizer):
    """`torch.optim.ASGD`: SGD with a falling step and a running average of the parameters (`ax` in the state).

    Args:
        params: What it owns, see `Optimizer`.
        lr: Learning rate.
        lambd: Decay term.
        alpha: Power of the falling step.
        t0: Update at which averaging begins.
        weight_decay: L2 penalty, added to the gradient.
        foreach: Only torch's default is accepted.
        maximize: Whether to climb.
        differentiable: Only torch's default is accepted.
        capturable: Only torch's default is accepted.
    """

    _hyper_fields = ("lr", "lambd", "alpha", "t0", "weight_decay")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        lambd: float = 1e-4,
        alpha: float = 0.75,
        t0: float = 1e6,
        weight_decay: float = 0,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        capturable: bool = False,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "lambd": lambd,
                "alpha": alpha,
                "t0": t0,
                "weight_decay": weight_decay,
                "foreach": foreach,
                "maximize": maximize,
                "differentiable": differentiable,
                "capturable": capturable,
            },
        )

    def _rule(self, options: Mapping[str, Any], pieces: frozenset[str]) -> optax.GradientTransformation:
        return optax.chain(
            negate_if(options["maximize"]),
            optax.add_decayed_weights(options["weight_decay"]),
            averaged_sgd(options["lr"], options["lambd"], options["alpha"], options["t0"]),
        )
