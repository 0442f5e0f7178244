"""Adam and AdamW with torch's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optax

from jaxlightning.optim._optimizer import MomentOptimizer
from jaxlightning.optim._rules import decayed_chain, scale_by_torch_amsgrad


class Adam(MomentOptimizer):
    """`torch.optim.Adam`.

    Args:
        params: What it owns, see `Optimizer`.
        lr: Learning rate.
        betas: Decay rates of the first and second moments.
        eps: Added to the denominator.
        weight_decay: L2 penalty, added to the gradient (or decoupled, see below).
        amsgrad: Whether to divide by the largest second moment so far.
        foreach: Only torch's default is accepted.
        maximize: Whether to climb.
        capturable: Only torch's default is accepted.
        differentiable: Only torch's default is accepted.
        fused: Only torch's default is accepted.
        decoupled_weight_decay: Whether the decay acts on the parameters directly, as in AdamW.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "amsgrad": amsgrad,
                "maximize": maximize,
                "foreach": foreach,
                "capturable": capturable,
                "differentiable": differentiable,
                "fused": fused,
                "decoupled_weight_decay": decoupled_weight_decay,
            },
        )

    def _rule(self, options: Mapping[str, Any], pieces: frozenset[str]) -> optax.GradientTransformation:
        (b1, b2), eps, lr, decay = options["betas"], options["eps"], options["lr"], options["weight_decay"]
        return decayed_chain(
            scale_by_torch_amsgrad(b1, b2, eps) if options["amsgrad"] else optax.scale_by_adam(b1, b2, eps),
            lr=lr,
            weight_decay=decay,
            decoupled=options["decoupled_weight_decay"],
            maximize=options["maximize"],
        )


class AdamW(Adam):
    """`torch.optim.AdamW`: Adam with decoupled weight decay.

    Args:
        params: What it owns, see `Optimizer`.
        lr: Learning rate.
        betas: Decay rates of the first and second moments.
        eps: Added to the denominator.
        weight_decay: Share of a parameter that is taken away per unit of learning rate.
        amsgrad: Whether to divide by the largest second moment so far.
        maximize: Whether to climb.
        foreach: Only torch's default is accepted.
        capturable: Only torch's default is accepted.
        differentiable: Only torch's default is accepted.
        fused: Only torch's default is accepted.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=True,
        )
