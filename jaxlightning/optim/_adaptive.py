"""Torch's adaptive rules where optax has no piece or another formula: NAdam, RAdam, Adagrad, Rprop, ASGD."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


def _zeros(params: Any) -> Any:
    return jax.tree.map(jnp.zeros_like, params)


def _no_updates() -> jax.Array:
    return jnp.zeros([], jnp.int32)


def _scalar(value: Any) -> jax.Array:
    """A scalar of the default float dtype: float64 where x64 is on, float32 otherwise, as torch keeps its own."""
    return jnp.asarray(value, dtype=jnp.result_type(float))


class NadamState(NamedTuple):
    """State of `scale_by_torch_nadam`.

    Attributes:
        count: Updates so far, int32, shape ().
        mu: First moments.
        nu: Second moments.
        product: Product of the momenta so far, float, shape ().
    """

    count: Any
    mu: Any
    nu: Any
    product: Any


def scale_by_torch_nadam(b1: Any, b2: Any, eps: Any, momentum_decay: Any) -> optax.GradientTransformation:
    """NAdam with the momentum schedule of Dozat (2016), which `optax.scale_by_adam(nesterov=True)` leaves out.

    Args:
        b1: Decay of the first moment.
        b2: Decay of the second moment.
        eps: Added to the denominator.
        momentum_decay: How fast the momentum schedule rises.

    Returns:
        The transformation.
    """

    def momentum(step: Any) -> Any:
        return b1 * (1.0 - 0.5 * 0.96 ** (step * momentum_decay))

    def init(params: Any) -> NadamState:
        return NadamState(_no_updates(), _zeros(params), _zeros(params), _scalar(1.0))

    def update(grads: Any, state: NadamState, params: Any = None) -> tuple[Any, NadamState]:
        count = optax.safe_increment(state.count)
        now, following = momentum(count), momentum(count + 1)
        product = state.product * now
        mu = optax.tree.update_moment(grads, state.mu, b1, 1)
        nu = optax.tree.update_moment_per_elem_norm(grads, state.nu, b2, 2)
        nu_hat = optax.tree.bias_correction(nu, b2, count)
        of_grad, of_mean = (1.0 - now) / (1.0 - product), following / (1.0 - product * following)
        out = jax.tree.map(lambda g, m, v: (of_grad * g + of_mean * m) / (jnp.sqrt(v) + eps), grads, mu, nu_hat)
        return out, NadamState(count, mu, nu, product)

    return optax.GradientTransformation(init, update)


class RadamState(NamedTuple):
    """State of `scale_by_torch_radam`.

    Attributes:
        count: Updates so far, int32, shape ().
        mu: First moments.
        nu: Second moments.
        weight: Sum of `b2 ** k` over the updates so far, float, shape ().
        age: Sum of `(k + 1) * b2 ** k`, float, shape ().
    """

    count: Any
    mu: Any
    nu: Any
    weight: Any
    age: Any


def scale_by_torch_radam(b1: Any, b2: Any, eps: Any) -> optax.GradientTransformation:
    """RAdam with torch's threshold and place of `eps`.

    The length of the approximated average, `rho_inf - 2 t b2^t / (1 - b2^t)`, is the difference of two numbers near
    2000, which float32 cannot tell apart around the threshold; `2 * age / weight - 1` is the same without a difference.

    Args:
        b1: Decay of the first moment.
        b2: Decay of the second moment.
        eps: Added to the denominator.

    Returns:
        The transformation.
    """

    def init(params: Any) -> RadamState:
        return RadamState(_no_updates(), _zeros(params), _zeros(params), _scalar(0.0), _scalar(0.0))

    def update(grads: Any, state: RadamState, params: Any = None) -> tuple[Any, RadamState]:
        count = optax.safe_increment(state.count)
        mu = optax.tree.update_moment(grads, state.mu, b1, 1)
        nu = optax.tree.update_moment_per_elem_norm(grads, state.nu, b2, 2)
        weight = 1.0 + b2 * state.weight
        age = weight + b2 * state.age
        rho, rho_inf = 2.0 * age / weight - 1.0, 2.0 / (1.0 - b2) - 1.0
        trusted = rho > 5.0
        safe = jnp.where(trusted, rho, 6.0)  # keeps the root real where it is not used
        rectified = jnp.sqrt((safe - 4) * (safe - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * safe))
        root = jnp.sqrt((1.0 - b2) * weight)  # of the bias correction of the second moment
        mu_hat = optax.tree.bias_correction(mu, b1, count)
        out = jax.tree.map(lambda m, v: jnp.where(trusted, m * rectified * root / (jnp.sqrt(v) + eps), m), mu_hat, nu)
        return out, RadamState(count, mu, nu, weight, age)

    return optax.GradientTransformation(init, update)


class SumOfSquaresState(NamedTuple):
    """State of `scale_by_torch_rss`.

    Attributes:
        total: Sums of squared gradients.
    """

    total: Any


def scale_by_torch_rss(initial: float, eps: Any) -> optax.GradientTransformation:
    """Divides by `sqrt(sum of squares) + eps` (optax puts `eps` into the root).

    Args:
        initial: Where the sums begin.
        eps: Added to the denominator.

    Returns:
        The transformation.
    """

    def init(params: Any) -> SumOfSquaresState:
        return SumOfSquaresState(jax.tree.map(lambda p: jnp.full_like(p, initial), params))

    def update(grads: Any, state: SumOfSquaresState, params: Any = None) -> tuple[Any, SumOfSquaresState]:
        total = jax.tree.map(lambda g, t: t + g * g, grads, state.total)
        return jax.tree.map(lambda g, t: g / (jnp.sqrt(t) + eps), grads, total), SumOfSquaresState(total)

    return optax.GradientTransformation(init, update)


class CountState(NamedTuple):
    """State of a rule that only counts.

    Attributes:
        count: Updates so far, int32, shape ().
    """

    count: Any


def scale_by_inverse_time(decay: Any) -> optax.GradientTransformation:
    """Multiplies with `1 / (1 + n * decay)` in update number `n`, counted from 0.

    Args:
        decay: How fast the factor falls.

    Returns:
        The transformation.
    """

    def update(grads: Any, state: CountState, params: Any = None) -> tuple[Any, CountState]:
        factor = 1.0 / (1.0 + state.count * decay)
        return jax.tree.map(lambda g: g * factor, grads), CountState(optax.safe_increment(state.count))

    return optax.GradientTransformation(lambda params: CountState(_no_updates()), update)


class RpropState(NamedTuple):
    """State of `scale_by_torch_rprop`.

    Attributes:
        count: Updates so far, int32, shape ().
        previous: Last gradients, 0 where the sign had changed.
        sizes: Step sizes.
    """

    count: Any
    previous: Any
    sizes: Any


def scale_by_torch_rprop(lr: Any, etas: tuple[Any, Any], bounds: tuple[Any, Any]) -> optax.GradientTransformation:
    """Rprop: a step of its own for every number, longer while the gradient keeps its sign, shorter when it turns.

    Args:
        lr: The first step size.
        etas: Factors at a change of sign and without one.
        bounds: Smallest and largest step.

    Returns:
        The transformation; the update has the gradient's sign.
    """

    def init(params: Any) -> RpropState:
        return RpropState(_no_updates(), _zeros(params), _zeros(params))

    def update(grads: Any, state: RpropState, params: Any = None) -> tuple[Any, RpropState]:
        def size(g: Any, before: Any, old: Any) -> Any:
            old = jnp.where(state.count == 0, lr, old)
            turn = jnp.sign(g * before)
            factor = jnp.where(turn > 0, etas[1], jnp.where(turn < 0, etas[0], 1.0))
            return jnp.clip(old * factor, bounds[0], bounds[1])

        sizes = jax.tree.map(size, grads, state.previous, state.sizes)
        kept = jax.tree.map(lambda g, before: jnp.where(g * before < 0, jnp.zeros_like(g), g), grads, state.previous)
        out = jax.tree.map(lambda g, s: jnp.sign(g) * s, kept, sizes)
        return out, RpropState(optax.safe_increment(state.count), kept, sizes)

    return optax.GradientTransformation(init, update)


class AveragedSgdState(NamedTuple):
    """State of `averaged_sgd`.

    Attributes:
        count: Updates so far, int32, shape ().
        eta: The next step size, float, shape ().
        mu: Weight of the next parameters in the average, float, shape ().
        ax: Averaged parameters.
    """

    count: Any
    eta: Any
    mu: Any
    ax: Any


def averaged_sgd(lr: Any, lambd: Any, alpha: Any, t0: Any) -> optax.GradientTransformation:
    """Averaged SGD (Polyak and Juditsky, 1992) as torch computes it, learning rate included.

    Args:
        lr: Learning rate.
        lambd: Decay term.
        alpha: Power of the falling step.
        t0: Update at which averaging begins.

    Returns:
        The transformation.
    """

    def init(params: Any) -> AveragedSgdState:
        return AveragedSgdState(_no_updates(), _scalar(0.0), _scalar(1.0), _zeros(params))

    def update(grads: Any, state: AveragedSgdState, params: Any = None) -> tuple[Any, AveragedSgdState]:
        count = optax.safe_increment(state.count)
        eta = jnp.where(state.count == 0, lr, state.eta)
        factor = 1.0 - lambd * eta
        out = jax.tree.map(lambda g, p: (factor * p - p) - eta * g, grads, params)
        new = jax.tree.map(lambda p, u: p + u, params, out)
        ax = jax.tree.map(lambda a, p: jnp.where(state.mu == 1, p, a + state.mu * (p - a)), state.ax, new)
        next_eta = lr / (1.0 + lambd * lr * count) ** alpha
        return out, AveragedSgdState(count, next_eta, 1.0 / jnp.maximum(1.0, count - t0), ax)

    return optax.GradientTransformation(init, update)
