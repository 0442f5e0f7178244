"""Muon with torch's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optax

from jaxlightning.optim._muon import scale_by_torch_muon
from jaxlightning.optim._optimizer import Optimizer, require
from jaxlightning.optim._rules import decayed_chain


class Muon(Optimizer):
    """`torch.optim.Muon`: momentum that is orthogonalised, for matrices.

    The factor of `adjust_lr_fn` takes rows over columns. A Flax kernel is the transpose of a torch weight, so for the
    same layer `"match_rms_adamw"` gives the same factor and the others do not.

    Args:
        params: What it owns, matrices only, see `Optimizer`.
        lr: Learning rate.
        weight_decay: Share of a parameter that is taken away per unit of learning rate.
        momentum: Decay of the average of gradients.
        nesterov: Whether to use Nesterov momentum.
        ns_coefficients: Of the Newton-Schulz polynomial.
        eps: Smallest norm to divide by.
        ns_steps: Newton-Schulz iterations, below 100.
        adjust_lr_fn: None, `"original"`, `"match_rms_adamw"` or `"spectral_unclamped"`.
    """

    _hyper_fields = ("lr", "weight_decay", "momentum")
    _complements = ("momentum",)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "weight_decay": weight_decay,
                "momentum": momentum,
                "nesterov": nesterov,
                "ns_coefficients": ns_coefficients,
                "eps": eps,
                "ns_steps": ns_steps,
                "adjust_lr_fn": adjust_lr_fn,
            },
        )

    def _validate(self, group: Mapping[str, Any]) -> None:
        super()._validate(group)
        require(group["momentum"] >= 0.0, self.name, "momentum", group["momentum"], "at least 0")
        names = (None, "original", "match_rms_adamw", "spectral_unclamped")
        require(
            group["adjust_lr_fn"] in names, self.name, "adjust_lr_fn", group["adjust_lr_fn"], f"one of {list(names)}"
        )
        require(group["ns_steps"] < 100, self.name, "ns_steps", group["ns_steps"], "below 100")
        count = len(group["ns_coefficients"])
        require(count == 3, self.name, "ns_coefficients", group["ns_coefficients"], "three numbers")

    def _rule(self, options: Mapping[str, Any], pieces: frozenset[str]) -> optax.GradientTransformation:
        return decayed_chain(
            scale_by_torch_muon(
                options["momentum"],
                options["1-momentum"],
                options["nesterov"],
                tuple(options["ns_coefficients"]),
                options["eps"],
                options["ns_steps"],
                options["adjust_lr_fn"],
            ),
            lr=options["lr"],
            weight_decay=options["weight_decay"],
            decoupled=True,
        )
