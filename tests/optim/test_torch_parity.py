"""Every optimizer against `torch.optim`: 200 updates on the same gradients, in float64 and in float32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
import pytest

from jaxlightning import optim

pytestmark = pytest.mark.torch

UPDATES = 200
SHAPES = {"net/a": (3, 4), "net/b": (5,)}
SHAPES_OF = {
    "Muon": {"net/a": (4, 3), "net/b": (2, 4)},
    "Adafactor": {"net/a": (3, 4), "net/b": (5,), "net/c": (2, 3, 2)},
}
# name, options; "groups" splits the parameters into two groups with options of their own
CASES: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {}),
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    ("SGD", {"lr": 0.1, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1, "maximize": True}),
    ("SGD", {"lr": 0.01, "maximize": True}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "groups": [{}, {"lr": 0.02, "weight_decay": 0.3, "momentum": 0}]}),
    ("Adam", {}),
    ("Adam", {"lr": 0.01, "betas": (0.5, 0.9)}),
    ("Adam", {"lr": 0.01, "eps": 1e-3}),
    ("Adam", {"lr": 0.01, "weight_decay": 0.1}),
    ("Adam", {"lr": 0.01, "amsgrad": True}),
    ("Adam", {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1, "maximize": True}),
    ("Adam", {"lr": 0.01, "maximize": True}),
    ("Adam", {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("Adam", {"lr": 0.01, "groups": [{"betas": (0.8, 0.99)}, {"lr": 0.003, "weight_decay": 0.3, "amsgrad": True}]}),
    ("AdamW", {}),
    ("AdamW", {"lr": 0.01, "weight_decay": 0.2}),
    ("AdamW", {"lr": 0.01, "amsgrad": True}),
    ("AdamW", {"lr": 0.01, "betas": (0.7, 0.95), "eps": 1e-4}),
    ("AdamW", {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1, "maximize": True}),
    ("AdamW", {"lr": 0.01, "groups": [{}, {"weight_decay": 0.0}]}),
    ("Adamax", {}),
    ("Adamax", {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-4}),
    ("Adamax", {"lr": 0.01, "weight_decay": 0.1}),
    ("Adamax", {"lr": 0.01, "weight_decay": 0.1, "maximize": True}),
    ("NAdam", {}),
    ("NAdam", {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-5}),
    ("NAdam", {"lr": 0.01, "momentum_decay": 0.1}),
    ("NAdam", {"lr": 0.01, "weight_decay": 0.1}),
    ("NAdam", {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("NAdam", {"lr": 0.01, "maximize": True}),
    ("RAdam", {}),
    ("RAdam", {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-4}),
    ("RAdam", {"lr": 0.01, "weight_decay": 0.1}),
    ("RAdam", {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("RAdam", {"lr": 0.01, "maximize": True}),
    ("RMSprop", {}),
    ("RMSprop", {"alpha": 0.9, "eps": 1e-4}),
    ("RMSprop", {"centered": True}),
    ("RMSprop", {"momentum": 0.9}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("RMSprop", {"weight_decay": 0.1, "momentum": 0.5, "centered": True, "maximize": True}),
    ("Adagrad", {}),
    ("Adagrad", {"lr": 0.1, "lr_decay": 0.1}),
    ("Adagrad", {"lr": 0.1, "initial_accumulator_value": 0.5, "eps": 1e-4}),
    ("Adagrad", {"lr": 0.1, "weight_decay": 0.1}),
    ("Adagrad", {"lr": 0.1, "lr_decay": 0.01, "weight_decay": 0.1, "maximize": True}),
    ("Adadelta", {}),
    ("Adadelta", {"lr": 0.5, "rho": 0.7, "eps": 1e-4}),
    ("Adadelta", {"weight_decay": 0.1}),
    ("Adadelta", {"maximize": True}),
    ("Rprop", {}),
    ("Rprop", {"lr": 0.1, "etas": (0.3, 1.4)}),
    ("Rprop", {"step_sizes": (1e-4, 0.02)}),
    ("Rprop", {"lr": 1.0, "step_sizes": (1e-3, 0.1), "maximize": True}),
    ("ASGD", {}),
    ("ASGD", {"lambd": 0.01, "alpha": 0.5}),
    ("ASGD", {"t0": 20, "weight_decay": 0.1}),
    ("ASGD", {"lr": 0.1, "t0": 5, "maximize": True}),
    ("Adafactor", {}),
    ("Adafactor", {"lr": 0.1, "beta2_decay": -0.5}),
    ("Adafactor", {"lr": 0.1, "eps": (1e-6, 1e-2), "d": 2.0}),
    ("Adafactor", {"lr": 0.1, "weight_decay": 0.1}),
    ("Adafactor", {"lr": 0.1, "maximize": True}),
    ("Muon", {}),
    ("Muon", {"lr": 0.01, "nesterov": False, "momentum": 0.8}),
    ("Muon", {"lr": 0.01, "weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"}),
    ("Muon", {"lr": 0.01, "ns_steps": 3, "adjust_lr_fn": "spectral_unclamped"}),
]


def _label(case: Any) -> str:
    if isinstance(case, dict):
        return ",".join(f"{key}={value}" for key, value in case.items()).replace(" ", "") or "defaults"
    return str(case)


@pytest.fixture
def torch_scalars_as(request: pytest.FixtureRequest) -> Iterator[str]:
    """Torch keeps some scalars of an optimizer's state in the default dtype."""
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, request.param))
    yield request.param
    torch.set_default_dtype(before)


def _problem(name: str, dtype: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    rng = np.random.default_rng(7)
    shapes = SHAPES_OF.get(name, SHAPES)
    params = {path: rng.normal(size=shape).astype(dtype) for path, shape in shapes.items()}
    grads = [
        {path: (rng.normal(size=shape) + 0.3).astype(dtype) for path, shape in shapes.items()} for _ in range(UPDATES)
    ]
    return params, grads


def _tree(flat: dict[str, Any]) -> dict[str, Any]:
    return {"net": {path.removeprefix("net/"): value for path, value in flat.items()}}


def _groups(options: dict[str, Any], paths: list[Any]) -> tuple[list[Any], dict[str, Any]]:
    options = dict(options)
    groups = options.pop("groups", None)
    if groups is None:
        return paths, options
    return [{"params": paths[:1], **groups[0]}, {"params": paths[1:], **groups[1]}], options


def _ours(name: str, options: dict[str, Any], params: dict[str, Any], grads: list[Any], dtype: str) -> dict[str, Any]:
    which, options = _groups(options, list(params))
    optimizer = getattr(optim, name)(which, **options)
    tree = _tree(params)
    hyper = np.asarray(optimizer.host_hyper(), dtype)
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *[_tree(g) for g in grads])

    def step(carry: Any, g: Any) -> tuple[Any, None]:
        p, state = carry
        updates, state = optimizer.update(g, state, p, hyper)
        return (optax.apply_updates(p, updates), state), None

    (tree, _), _ = jax.jit(lambda p, g: jax.lax.scan(step, (p, optimizer.init(p)), g))(tree, stacked)
    return {f"net/{key}": np.asarray(value) for key, value in tree["net"].items()}


def _theirs(name: str, options: dict[str, Any], params: dict[str, Any], grads: list[Any]) -> dict[str, Any]:
    import torch

    tensors = {path: torch.nn.Parameter(torch.tensor(value)) for path, value in params.items()}
    which, options = _groups(options, list(tensors.values()))
    optimizer = getattr(torch.optim, name)(which, **options)
    for g in grads:
        for path, tensor in tensors.items():
            tensor.grad = torch.tensor(g[path])
        optimizer.step()
    return {path: tensor.detach().numpy() for path, tensor in tensors.items()}


@pytest.mark.parametrize(("name", "options"), CASES, ids=_label)
@pytest.mark.parametrize("torch_scalars_as", ["float64", "float32"], indirect=True)
def test_200_updates_equal_torch(name: str, options: dict[str, Any], torch_scalars_as: str) -> None:
    dtype = torch_scalars_as
    params, grads = _problem(name, dtype)
    with jax.enable_x64(dtype == "float64"):
        ours = _ours(name, options, params, grads, dtype)
    theirs = _theirs(name, options, params, grads)
    tolerance = 1e-10 if dtype == "float64" else 1e-5
    for path, value in theirs.items():
        assert ours[path].dtype == value.dtype
        assert not np.allclose(value, params[path], atol=1e-4), "the case moves nothing"
        np.testing.assert_allclose(ours[path], value, rtol=tolerance, atol=tolerance, err_msg=path)


def test_there_are_at_least_60_option_combinations() -> None:
    assert len(CASES) >= 60
    assert len({(name, _label(options)) for name, options in CASES}) == len(CASES)
