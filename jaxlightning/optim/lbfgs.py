"""L-BFGS with torch's arguments, through optax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optax

from jaxlightning.optim._lbfgs import lbfgs_steps
from jaxlightning.optim._optimizer import Optimizer, require
from jaxlightning.utilities.exceptions import MisconfigurationException


class LBFGS(Optimizer):
    """`torch.optim.LBFGS`: a quasi-Newton method that evaluates the loss several times per update.

    Directions are optax's (`optax.scale_by_lbfgs`), and so is the line search, which fulfils the same conditions as
    torch's `"strong_wolfe"` but may choose other lengths. Without a line search the iterates are torch's, except that
    torch leaves out a pair of differences whose curvature is below 1e-10. In manual optimization call
    `opt.step(closure)`: logs and appends of the closure happen at its first evaluation only.

    Args:
        params: What it owns, without parameter groups.
        lr: Step length.
        max_iter: Iterations per update.
        max_eval: Evaluations of the loss per update; `max_iter * 5 // 4` if None.
        tolerance_grad: Stop when no gradient is larger.
        tolerance_change: Stop when loss or parameters change less.
        history_size: Pairs of differences to keep.
        line_search_fn: None or `"strong_wolfe"`.
        maximize: Whether to climb.

    Raises:
        ValueError: For several parameter groups, or an option that is out of range.
    """

    _hyper_fields = ("lr",)

    def __init__(
        self,
        params: Any,
        lr: float = 1,
        max_iter: int = 20,
        max_eval: int | None = None,
        tolerance_grad: float = 1e-7,
        tolerance_change: float = 1e-9,
        history_size: int = 100,
        line_search_fn: str | None = None,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "max_iter": max_iter,
                "max_eval": max_iter * 5 // 4 if max_eval is None else max_eval,
                "tolerance_grad": tolerance_grad,
                "tolerance_change": tolerance_change,
                "history_size": history_size,
                "line_search_fn": line_search_fn,
                "maximize": maximize,
            },
        )
        if len(self.param_groups) != 1:
            raise ValueError(f"LBFGS has no parameter groups, but got {len(self.param_groups)}.")
        self.needs_value = self.needs_value_fn = True

    def _validate(self, group: Mapping[str, Any]) -> None:
        super()._validate(group)
        for key in ("max_iter", "max_eval", "history_size"):
            require(int(group[key]) >= 1, self.name, key, group[key], "at least 1")
        search = group["line_search_fn"]
        require(search in (None, "strong_wolfe"), self.name, "line_search_fn", search, "None or 'strong_wolfe'")

    def _rule(self, options: Mapping[str, Any], pieces: frozenset[str]) -> optax.GradientTransformation:
        return lbfgs_steps(
            options["lr"],
            max_iter=options["max_iter"],
            max_eval=options["max_eval"],
            tolerance_grad=options["tolerance_grad"],
            tolerance_change=options["tolerance_change"],
            history_size=options["history_size"],
            strong_wolfe=options["line_search_fn"] is not None,
            maximize=options["maximize"],
        )

    def update(self, grads: Any, opt_state: Any, params: Any, hyper: Any, **extra: Any) -> tuple[Any, Any]:
        """Turns gradients into updates; see `OptimizerHandle.update`.

        Raises:
            MisconfigurationException: If the step gives no `value` and `value_fn`.
        """
        if "value" not in extra or "value_fn" not in extra:
            raise MisconfigurationException(
                "LBFGS evaluates the loss several times per update, so it needs `value` and `value_fn`. Automatic "
                "optimization without a split step gives them, and `opt.step(closure)` in manual optimization."
            )
        return super().update(grads, opt_state, params, hyper, **extra)
