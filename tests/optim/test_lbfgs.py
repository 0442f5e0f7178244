"""L-BFGS: torch's iterates without a line search, torch's minimum with one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlightning import optim
from jaxlightning.utilities.exceptions import MisconfigurationException

RNG = np.random.default_rng(0)
FEATURES, TARGETS, START = RNG.normal(size=(20, 6)), RNG.normal(size=20), RNG.normal(size=6)
STEPS = 5


def _loss(params: Any) -> jax.Array:
    rest = FEATURES @ params["net"]["x"] - TARGETS
    return jnp.sum(jnp.logaddexp(0.0, rest)) + 0.1 * jnp.sum(params["net"]["x"] ** 2)


def _ours(options: dict[str, Any]) -> list[np.ndarray[Any, Any]]:
    sign = -1.0 if options.get("maximize") else 1.0
    optimizer = optim.LBFGS("*", **options)
    traces = 0

    def objective(params: Any) -> Any:
        return sign * _loss(params)

    @jax.jit
    def step(params: Any, state: Any, hyper: Any) -> Any:
        nonlocal traces
        traces += 1
        value, grads = jax.value_and_grad(objective)(params)
        updates, state = optimizer.update(grads, state, params, hyper, value=value, grad=grads, value_fn=objective)
        return optax.apply_updates(params, updates), state

    params = {"net": {"x": jnp.asarray(START)}}
    state, rows = optimizer.init(params), []
    for _ in range(STEPS):
        params, state = step(params, state, np.asarray(optimizer.host_hyper()))
        rows.append(np.asarray(params["net"]["x"]))
    assert traces == 1
    return rows


def _theirs(options: dict[str, Any]) -> list[np.ndarray[Any, Any]]:
    import torch

    sign = -1.0 if options.get("maximize") else 1.0
    features, targets = torch.tensor(FEATURES), torch.tensor(TARGETS)
    x = torch.nn.Parameter(torch.tensor(START))
    optimizer = torch.optim.LBFGS([x], **options)

    def closure() -> Any:
        optimizer.zero_grad()
        rest = features @ x - targets
        loss = sign * (torch.logaddexp(torch.zeros((), dtype=torch.float64), rest).sum() + 0.1 * (x**2).sum())
        loss.backward()
        return loss

    rows = []
    for _ in range(STEPS):
        optimizer.step(closure)
        rows.append(x.detach().numpy().copy())
    return rows


@pytest.mark.torch
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_iter": 3, "lr": 0.5},
        {"max_iter": 2, "history_size": 3},
        {"max_iter": 1},
        {"max_iter": 6, "max_eval": 3},
        {"max_iter": 4, "maximize": True},
        {"tolerance_grad": 0.5},
        {"tolerance_change": 0.05, "max_iter": 5},
    ],
    ids=str,
)
def test_iterates_are_torchs(options: dict[str, Any]) -> None:
    with jax.enable_x64(True):
        ours = _ours(options)
    np.testing.assert_allclose(ours, _theirs(options), rtol=1e-10, atol=1e-10)


@pytest.mark.torch
def test_the_line_search_reaches_the_same_minimum() -> None:
    with jax.enable_x64(True):
        ours = _ours({"line_search_fn": "strong_wolfe"})
    np.testing.assert_allclose(ours[-1], _theirs({"line_search_fn": "strong_wolfe"})[-1], atol=1e-5)


def test_it_needs_the_loss_as_a_function() -> None:
    optimizer = optim.LBFGS("*")
    params = {"net": {"x": jnp.ones(2)}}
    assert optimizer.needs_value_fn
    with pytest.raises(MisconfigurationException, match="needs `value` and `value_fn`"):
        optimizer.update(params, optimizer.init(params), params, [1.0])


def test_groups_and_unknown_searches_are_refused() -> None:
    with pytest.raises(ValueError, match="no parameter groups, but got 2"):
        optim.LBFGS([{"params": "a"}, {"params": "b"}])
    with pytest.raises(ValueError, match="'strong_wolfe'"):
        optim.LBFGS("*", line_search_fn="armijo")
