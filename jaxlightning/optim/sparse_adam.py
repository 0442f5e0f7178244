"""SparseAdam, which has no counterpart here."""

from __future__ import annotations

from typing import Any

from jaxlightning.utilities.exceptions import MisconfigurationException


class SparseAdam:
    """`torch.optim.SparseAdam`: refused, because JAX has no sparse gradients.

    Raises:
        MisconfigurationException: Always.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise MisconfigurationException(
            "SparseAdam updates only the rows whose gradients a sparse tensor holds, but gradients in JAX are always "
            "dense: the gradient of an embedding has zeros in the rows that were not used. Use `Adam`, or an optax "
            "transformation of your own that masks rows with a zero gradient."
        )
