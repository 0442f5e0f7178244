"""The training state of a hand-written step: Flax's, with batch statistics and a random key."""

from __future__ import annotations

from typing import Any

import jax
from flax.training import train_state

from jaxlightning.utilities.seed import global_seed

__all__ = ["TrainState"]


class TrainState(train_state.TrainState):  # type: ignore[misc]
    """Flax's `TrainState` with two fields that nearly every script adds to it.

    Attributes:
        batch_stats: The running statistics of BatchNorm layers, None for a network without any.
        key: The random key of the run; derive the keys of a step from it with `step_key`.

    Example:
        ```python
        state = TrainState.create(
            apply_fn=model.apply, params=variables["params"], batch_stats=variables["batch_stats"], tx=optax.adam(1e-3)
        )
        ```
    """

    batch_stats: Any = None
    key: Any = None

    @classmethod
    def create(
        cls, *, apply_fn: Any, params: Any, tx: Any, batch_stats: Any = None, key: Any = None, **fields: Any
    ) -> Any:
        """Makes a state with a fresh optimizer state.

        Args:
            apply_fn: Usually `model.apply`.
            params: The parameters.
            tx: An optax transformation.
            batch_stats: The collection of that name.
            key: A JAX key of either kind; by default one made of the seed of `seed_everything`, else of 0.
            **fields: Fields of a subclass.

        Returns:
            The state.
        """
        if key is None:
            key = jax.random.key(global_seed())
        return super().create(apply_fn=apply_fn, params=params, tx=tx, batch_stats=batch_stats, key=key, **fields)

    def step_key(self, salt: int = 0) -> jax.Array:
        """A key that is another one at every step, the same again after a resume.

        Args:
            salt: Tells several keys of one step apart.

        Returns:
            `fold_in(key, step)`, and once more with `salt` unless that is 0.
        """
        key = jax.random.fold_in(self.key, self.step)
        return jax.random.fold_in(key, salt) if salt else key
