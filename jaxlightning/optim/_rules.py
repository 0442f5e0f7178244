"""Pieces of torch's update rules that optax has not: each a small optax transformation."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


def negate_if(condition: bool) -> optax.GradientTransformation:
    """Flips the sign of the gradients (torch's `maximize=True`)."""
    return optax.scale(-1.0) if condition else optax.identity()


def decouple_decay(lr: Any, weight_decay: Any) -> optax.GradientTransformation:
    """Shrinks the parameters by the factor `1 - lr * weight_decay`, as the last link of a chain.

    Equal to `optax.add_decayed_weights` before the learning rate, but rounded as torch rounds: the factor, once. In
    float32 the difference grows with every step.

    Args:
        lr: Learning rate.
        weight_decay: Decay per unit of learning rate.

    Returns:
        The transformation.
    """
    factor = 1.0 - lr * weight_decay

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return jax.tree.map(lambda u, p: (factor * p - p) + u, updates, params), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def decayed_chain(
    rule: optax.GradientTransformation,
    *,
    lr: Any,
    weight_decay: Any,
    decoupled: bool = False,
    maximize: bool = False,
) -> optax.GradientTransformation:
    """The frame that most of torch's rules share: sign, weight decay, the rule itself, learning rate.

    Args:
        rule: Turns gradients into a direction.
        lr: Learning rate.
        weight_decay: L2 penalty, or the decoupled decay.
        decoupled: Whether the decay acts on the parameters directly (AdamW) and not through the gradient.
        maximize: Whether to climb.

    Returns:
        The chain.
    """
    step = optax.scale_by_learning_rate(lr)
    if decoupled:
        return optax.chain(negate_if(maximize), rule, step, decouple_decay(lr, weight_decay))
    return optax.chain(negate_if(maximize), optax.add_decayed_weights(weight_decay), rule, step)


class DampenedTraceState(NamedTuple):
    """State of `dampened_trace`.

    Attributes:
        count: Updates so far, int32, shape ().
        trace: The momentum buffers, the parameters' shapes.
    """

    count: Any
    trace: Any


def dampened_trace(decay: Any, dampening: Any, nesterov: bool = False) -> optax.GradientTransformation:
    """Momentum with dampening: `b = decay * b + (1 - dampening) * g`, except that the first buffer is `g` itself.

    Args:
        decay: Momentum, in [0, 1].
        dampening: How much of each gradient after the first is left out.
        nesterov: Whether to return `g + decay * b` in place of `b`.

    Returns:
        The transformation.
    """

    def init(params: Any) -> DampenedTraceState:
        return DampenedTraceState(count=jnp.zeros([], jnp.int32), trace=jax.tree.map(jnp.zeros_like, params))

    def update(grads: Any, state: DampenedTraceState, params: Any = None) -> tuple[Any, DampenedTraceState]:
        share = jnp.where(state.count == 0, 1.0, 1.0 - dampening)
        trace = jax.tree.map(lambda g, b: decay * b + share * g, grads, state.trace)
        out = jax.tree.map(lambda g, b: g + decay * b, grads, trace) if nesterov else trace
        return out, DampenedTraceState(count=optax.safe_increment(state.count), trace=trace)

    return optax.GradientTransformation(init, update)


class AmsgradState(NamedTuple):
    """State of `scale_by_torch_amsgrad`.

    Attributes:
        count: Updates so far, int32, shape ().
        mu: First moments.
        nu: Second moments.
        nu_max: Largest second moments so far, before the bias correction.
    """

    count: Any
    mu: Any
    nu: Any
    nu_max: Any


def scale_by_torch_amsgrad(b1: Any, b2: Any, eps: Any) -> optax.GradientTransformation:
    """AMSGrad as torch computes it: the maximum is taken before the bias correction (optax takes it after).

    Args:
        b1: Decay of the first moment.
        b2: Decay of the second moment.
        eps: Added to the denominator.

    Returns:
        The transformation.
    """

    def init(params: Any) -> AmsgradState:
        # Three trees of their own: the engine donates every leaf, so none may share a buffer.
        mu, nu, nu_max = (jax.tree.map(jnp.zeros_like, params) for _ in range(3))
        return AmsgradState(count=jnp.zeros([], jnp.int32), mu=mu, nu=nu, nu_max=nu_max)

    def update(grads: Any, state: AmsgradState, params: Any = None) -> tuple[Any, AmsgradState]:
        count = optax.safe_increment(state.count)
        mu = optax.tree.update_moment(grads, state.mu, b1, 1)
        nu = optax.tree.update_moment_per_elem_norm(grads, state.nu, b2, 2)
        nu_max = jax.tree.map(jnp.maximum, state.nu_max, nu)
        mu_hat = optax.tree.bias_correction(mu, b1, count)
        nu_hat = optax.tree.bias_correction(nu_max, b2, count)
        out = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), mu_hat, nu_hat)
        return out, AmsgradState(count=count, mu=mu, nu=nu, nu_max=nu_max)

    return optax.GradientTransformation(init, update)
