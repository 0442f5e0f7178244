"""Adafactor with torch's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optax

from jaxlightning.optim._adafactor import scale_by_torch_adafactor
from jaxlightning.optim._optimizer import Optimizer, require
from jaxlightning.optim._rules import decouple_decay, negate_if


class Adafactor(Optimizer):
    """`torch.optim.Adafactor`: factored second moments, steps relative to the parameters' size.

    Args:
        params: What it owns, see `Optimizer`.
        lr: Upper bound of the relative step.
        beta2_decay: The weight of a new square in update `t` is `t ** beta2_decay`; at most 0.
        eps: Smallest mean square (None: the dtype's epsilon) and smallest size of a parameter.
        d: Largest root mean square of an update before scaling, at least 1.
        weight_decay: Share of a parameter that is taken away per unit of learning rate.
        foreach: Only torch's default is accepted.
        maximize: Whether to climb.
    """

    _hyper_fields = ("lr", "beta2_decay", "d", "weight_decay")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "beta2_decay": beta2_decay,
                "eps": eps,
                "d": d,
                "weight_decay": weight_decay,
                "foreach": foreach,
                "maximize": maximize,
            },
        )

    def _validate(self, group: Mapping[str, Any]) -> None:
        super()._validate(group)
        eps = group["eps"]
        require(group["beta2_decay"] <= 0.0, self.name, "beta2_decay", group["beta2_decay"], "at most 0")
        require(len(eps) == 2, self.name, "eps", eps, "a pair of numbers")
        require(eps[0] is None or eps[0] >= 0.0, self.name, "eps[0]", eps[0], "None or at least 0")
        require(eps[1] >= 0.0, self.name, "eps[1]", eps[1], "at least 0")
        require(group["d"] >= 1.0, self.name, "d", group["d"], "at least 1")

    def _rule(self, options: Mapping[str, Any], pieces: frozenset[str]) -> optax.GradientTransformation:
        lr, eps = options["lr"], options["eps"]
        return optax.chain(
            negate_if(options["maximize"]),
            scale_by_torch_adafactor(lr, options["beta2_decay"], (eps[0], eps[1]), options["d"]),
            decouple_decay(lr, options["weight_decay"]),
        )
