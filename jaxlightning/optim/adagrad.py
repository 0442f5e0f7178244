"""Adagrad with torch's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optax

from jaxlightning.optim._adaptive import scale_by_inverse_time, scale_by_torch_rss
from jaxlightning.optim._optimizer import Optimizer, require
from jaxlightning.optim._rules import decayed_chain


class Adagrad(Optimizer):
    """`torch.optim.Adagrad`: every number has its own learning rate, falling with the gradients seen.

    Args:
        params: What it owns, see `Optimizer`.
        lr: Learning rate.
        lr_decay: How fast the learning rate falls: divided by `1 + updates * lr_decay`.
        weight_decay: L2 penalty, added to the gradient.
        initial_accumulator_value: Where the sums of squares begin.
        eps: Added to the denominator.
        foreach: Only torch's default is accepted.
        maximize: Whether to climb.
        differentiable: Only torch's default is accepted.
        fused: Only torch's default is accepted.
    """

    _hyper_fields = ("lr", "lr_decay", "weight_decay", "eps")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "lr_decay": lr_decay,
                "weight_decay": weight_decay,
                "initial_accumulator_value": initial_accumulator_value,
                "eps": eps,
                "foreach": foreach,
                "maximize": maximize,
                "differentiable": differentiable,
                "fused": fused,
            },
        )

    def _validate(self, group: Mapping[str, Any]) -> None:
        super()._validate(group)
        for key in ("lr_decay", "initial_accumulator_value", "eps"):
            require(group[key] >= 0.0, self.name, key, group[key], "at least 0")

    def _rule(self, options: Mapping[str, Any], pieces: frozenset[str]) -> optax.GradientTransformation:
        rule = scale_by_torch_rss(options["initial_accumulator_value"], options["eps"])
        return decayed_chain(
            optax.chain(rule, scale_by_inverse_time(options["lr_decay"])),
            lr=options["lr"],
            weight_decay=options["weight_decay"],
            maximize=options["maximize"],
        )
