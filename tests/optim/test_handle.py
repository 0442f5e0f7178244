"""The torch-named optimizers as host objects: groups, hyper-parameters, validation, state."""

from __future__ import annotations

import copy
import inspect
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlightning import optim
from jaxlightning.compile.selection import ParameterSelection
from jaxlightning.optim import lr_scheduler
from jaxlightning.utilities.exceptions import MisconfigurationException

NAMES = [
    "SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "Rprop", "ASGD", "Adafactor",
    "Muon", "LBFGS",
]  # fmt: skip


def _params() -> dict[str, Any]:
    return {"net": {"kernel": jnp.ones((2, 3)), "bias": jnp.zeros(3)}, "head": {"kernel": jnp.ones((3, 1))}}


def _grads() -> dict[str, Any]:
    return jax.tree.map(lambda p: jnp.full(p.shape, 0.5), _params())


def _hyper(optimizer: Any) -> np.ndarray[Any, Any]:
    return np.asarray(optimizer.host_hyper(), np.float32)


# --- groups and selections ---------------------------------------------------------------------------------------


def test_a_pattern_selects_what_is_below_it() -> None:
    optimizer = optim.SGD("net")
    assert optimizer.owns is not None
    assert optimizer.owns.matches("net/kernel")
    assert not optimizer.owns.matches("network/kernel")


@pytest.mark.parametrize(
    "params",
    [
        "net/*",
        ["net/kernel", "net/bias"],
        lambda path: path.startswith("net/"),
        ParameterSelection(("net",)),
        [ParameterSelection(("net/kernel",)), "net/bias"],
        (p for p in ["net/kernel", "net/bias"]),
        [("net/kernel", ParameterSelection(("net/kernel",))), ("net/bias", ParameterSelection(("net/bias",)))],
    ],
    ids=["pattern", "patterns", "function", "selection", "mixed", "generator", "named_parameters"],
)
def test_every_way_to_name_parameters(params: Any) -> None:
    optimizer = optim.SGD(params, lr=1.0)
    mine = {"net": _params()["net"]}
    updates, _ = optimizer.update(mine, optimizer.init(mine), mine, _hyper(optimizer))
    assert jax.tree.structure(updates) == jax.tree.structure(mine)
    assert optimizer.owns is not None
    assert not optimizer.owns.matches("head/kernel")


def test_an_object_with_parameters_selects_them() -> None:
    class Net:
        def parameters(self) -> ParameterSelection:
            return ParameterSelection(("net",))

    owns = optim.Adam(Net()).owns
    assert owns is not None
    assert owns.matches("net/bias")


def test_groups_have_their_own_values() -> None:
    optimizer = optim.SGD([{"params": "net/kernel"}, {"params": ["*/bias", "head"], "lr": 0.5, "name": "rest"}], lr=0.1)
    params, grads = _params(), _grads()
    assert optimizer.hyper_names[0] == "0.lr"
    updates, state = optimizer.update(grads, optimizer.init(params), params, _hyper(optimizer))
    np.testing.assert_allclose(updates["net"]["kernel"], -0.05)
    np.testing.assert_allclose(updates["net"]["bias"], -0.25)
    np.testing.assert_allclose(updates["head"]["kernel"], -0.25)
    assert len(state) == 2
    assert optimizer.param_groups[1]["name"] == "rest"


def test_a_parameter_in_two_groups_is_an_error() -> None:
    optimizer = optim.SGD([{"params": "net"}, {"params": "*/bias"}])
    with pytest.raises(ValueError, match=r"more than one parameter group: net/bias \(groups 0, 1\)"):
        optimizer.init({"net": _params()["net"]})


def test_an_unowned_parameter_in_the_tree_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"in none of its parameter groups: head/kernel"):
        optim.SGD("net").init(_params())


def test_an_optimizer_over_no_parameters_is_an_error() -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        optim.SGD([])
    with pytest.raises(ValueError, match="empty parameter list"):
        optim.SGD("net").init({})


def test_arrays_are_refused_with_the_way_out() -> None:
    with pytest.raises(TypeError, match=r"array \(shape \(2, 3\).*self.parameters\(\)"):
        optim.SGD([jnp.ones((2, 3))])


@pytest.mark.parametrize("params", [{"params": "net"}, 3, None, [{"params": "net"}, "head"]])
def test_what_names_no_parameters_is_refused(params: Any) -> None:
    with pytest.raises(TypeError):
        optim.SGD(params)


def test_ownership_finds_unowned_shared_and_idle() -> None:
    handles = [optim.SGD("net"), optim.Adam("*/kernel"), optim.SGD("nothing")]
    found = optim.find_ownership(handles, ["net/kernel", "net/bias", "head/scale"])
    assert found.shared == ("net/kernel",)
    assert found.unowned == ("head/scale",)
    assert found.idle == (2,)
    with pytest.raises(ValueError, match=r"empty parameter list: SGD \(number 2"):
        optim.check_ownership(handles, ["net/kernel"])


# --- hyper-parameters --------------------------------------------------------------------------------------------


def test_nothing_is_compiled_again_when_numbers_change() -> None:
    optimizer = optim.Adam("*", lr=0.1, weight_decay=0.0)
    step_lr = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=60)
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    params = _params()
    state = jax.jit(optimizer.init)(params)
    traces = 0

    @jax.jit
    def step(p: Any, s: Any, hyper: Any) -> Any:
        nonlocal traces
        traces += 1
        updates, s = optimizer.update(_grads(), s, p, hyper)
        return optax.apply_updates(p, updates), s

    for _ in range(50):
        params, state = step(params, state, _hyper(optimizer))
        step_lr.step()
    plateau.step(1.0)
    plateau.step(2.0)
    params, state = step(params, state, _hyper(optimizer))
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.param_groups[0]["weight_decay"] = 0.3
    optimizer.param_groups[0]["betas"] = (0.5, 0.9)
    step(params, state, _hyper(optimizer))
    assert traces == 1


def test_the_vector_is_cached_until_a_group_changes() -> None:
    optimizer = optim.SGD("*", lr=0.1)
    first = optimizer.host_hyper()
    assert optimizer.host_hyper() is first
    optimizer.param_groups[0]["note"] = "free"
    assert optimizer.host_hyper() is first
    optimizer.param_groups[0].update(lr=0.2)
    assert optimizer.host_hyper()[0] == 0.2


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_learning_rate_that_is_not_finite_is_refused(value: float) -> None:
    optimizer = optim.SGD("*")
    with pytest.raises(ValueError, match="must be finite"):
        optimizer.param_groups[0]["lr"] = value


def test_a_rule_cannot_change_during_a_run() -> None:
    optimizer = optim.SGD("*", momentum=0.9)
    optimizer.param_groups[0]["nesterov"] = True
    optimizer.init(_params())
    with pytest.raises(MisconfigurationException, match="'nesterov' is part of the compiled update rule"):
        optimizer.param_groups[0]["nesterov"] = False
    assert optimizer.param_groups[0]["nesterov"] is True
    optimizer.param_groups[0]["momentum"] = 0.0


def test_momentum_that_was_zero_cannot_grow_without_buffers() -> None:
    optimizer = optim.SGD("*")
    optimizer.init(_params())
    with pytest.raises(MisconfigurationException, match="momentum buffers"):
        optimizer.param_groups[0]["momentum"] = 0.9


def test_low_precision_state_keeps_its_dtype() -> None:
    optimizer = optim.Adam("*", lr=0.1)
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), _params())
    state = optimizer.init(params)
    updates, new = optimizer.update(params, state, params, _hyper(optimizer))
    assert [leaf.dtype for leaf in jax.tree.leaves(new)] == [leaf.dtype for leaf in jax.tree.leaves(state)]
    assert optax.apply_updates(params, updates)["net"]["bias"].dtype == jnp.bfloat16


def test_states_share_no_buffers_and_hold_no_weak_types() -> None:
    """Every leaf is donated to the step, and a weak type that turns strong would compile it twice."""
    for name in NAMES:
        params = {"net": {"kernel": jnp.ones((2, 3))}}
        leaves = jax.tree.leaves(getattr(optim, name)("*").init(params))
        pointers = [leaf.unsafe_buffer_pointer() for leaf in leaves if leaf.size]
        assert len(pointers) == len(set(pointers)), name
        assert not any(leaf.weak_type for leaf in leaves), name


# --- state -------------------------------------------------------------------------------------------------------


def test_state_dict_survives_json() -> None:
    optimizer = optim.Adam([{"params": "net"}, {"params": "head", "lr": 0.5}], lr=0.1)
    optimizer.param_groups[0]["lr"] = 0.03
    optimizer.record_update(7)
    saved = json.loads(json.dumps(optimizer.state_dict()))
    other = optim.Adam([{"params": "net"}, {"params": "head"}])
    other.load_state_dict(saved)
    assert other.host_hyper() == optimizer.host_hyper()
    assert other.param_groups[0]["betas"] == (0.9, 0.999)
    assert other.updates == 7
    with pytest.raises(ValueError, match="has 2 parameter groups, but Adam has 1"):
        optim.Adam("net").load_state_dict(saved)


def test_an_added_group_keeps_the_state_of_the_rest() -> None:
    optimizer = optim.Adam("head", lr=0.1)
    mine = {"head": _params()["head"]}
    _, state = optimizer.update(mine, optimizer.init(mine), mine, _hyper(optimizer))
    version = optimizer.structure_version
    optimizer.add_param_group({"params": "net", "lr": 0.01})
    assert optimizer.structure_version == version + 1
    grown = optimizer.extend(state, _params())
    np.testing.assert_array_equal(
        optax.tree.get(grown[0], "mu")["head"]["kernel"], optax.tree.get(state, "mu")["head"]["kernel"]
    )
    assert int(optax.tree.get(grown[0], "count")) == 1
    assert int(optax.tree.get(grown[1], "count")) == 0
    optimizer.update(_grads(), grown, _params(), _hyper(optimizer))


def test_words_of_a_run_say_where_they_belong() -> None:
    optimizer = optim.SGD("*")
    with pytest.raises(RuntimeError, match="training_step"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="training_step"):
        optimizer.zero_grad()
    with pytest.raises(MisconfigurationException, match="wants a function"):
        optimizer.step(3)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError), optimizer.toggle_model():
        pass
    assert optimizer.state == {}
    calls: list[Any] = []
    optimizer.bind(
        step=lambda closure, **k: closure(),
        zero_grad=lambda: calls.append("zero"),
        toggle=lambda *a: calls.append(a[1]),
    )
    assert optimizer.step(lambda: 5) == 5
    optimizer.zero_grad()
    with optimizer.toggle_model():
        pass
    assert calls == ["zero", True, False]


def test_groups_copy_as_plain_dictionaries() -> None:
    group = optim.SGD("*").param_groups[0]
    assert type(copy.deepcopy(group)) is dict
    assert {**group}["lr"] == 1e-3


def test_repr_lists_the_groups() -> None:
    assert "Parameter Group 0" in repr(optim.SGD("*"))
    assert "lr: 0.001" in repr(optim.SGD("*"))


# --- arguments ---------------------------------------------------------------------------------------------------


@pytest.mark.torch
@pytest.mark.parametrize("name", NAMES)
def test_arguments_and_defaults_are_torchs(name: str) -> None:
    import torch

    theirs = inspect.signature(getattr(torch.optim, name).__init__).parameters
    ours = inspect.signature(getattr(optim, name).__init__).parameters
    assert list(ours) == list(theirs)
    assert {k: (p.default, p.kind) for k, p in ours.items()} == {k: (p.default, p.kind) for k, p in theirs.items()}
    parameter = torch.nn.Parameter(torch.zeros(2, 2))
    expected, got = getattr(torch.optim, name)([parameter]).defaults, getattr(optim, name)("*").defaults
    assert got.keys() == expected.keys() - {"decoupled_weight_decay"} | (got.keys() & {"decoupled_weight_decay"})


@pytest.mark.torch
def test_every_optimizer_of_torch_is_here() -> None:
    import torch

    names = {name for name in dir(torch.optim) if isinstance(getattr(torch.optim, name), type)}
    assert names <= set(dir(optim))


BAD: list[tuple[str, dict[str, Any]]] = [
    *((name, {"lr": -1.0}) for name in NAMES),
    *((name, {"weight_decay": -1.0}) for name in NAMES if name not in ("Rprop", "LBFGS")),
    *((name, {"betas": (1.0, 0.9)}) for name in ("Adam", "AdamW", "Adamax", "NAdam", "RAdam")),
    *((name, {"betas": (0.9, -0.1)}) for name in ("Adam", "AdamW", "Adamax", "NAdam", "RAdam")),
    *(
        (name, {"eps": -1.0})
        for name in ("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta")
    ),
    ("SGD", {"momentum": -0.1}),
    ("SGD", {"nesterov": True}),
    ("SGD", {"nesterov": True, "momentum": 0.9, "dampening": 0.1}),
    ("NAdam", {"momentum_decay": -1.0}),
    ("RMSprop", {"momentum": -1.0}),
    ("RMSprop", {"alpha": -1.0}),
    ("Adagrad", {"lr_decay": -1.0}),
    ("Adagrad", {"initial_accumulator_value": -1.0}),
    ("Adadelta", {"rho": 1.5}),
    ("Rprop", {"etas": (1.1, 1.2)}),
    ("Adafactor", {"beta2_decay": 0.5}),
    ("Adafactor", {"eps": (-1.0, 1e-3)}),
    ("Adafactor", {"eps": (None, -1e-3)}),
    ("Adafactor", {"d": 0.5}),
    ("Muon", {"momentum": -1.0}),
    ("Muon", {"adjust_lr_fn": "nothing"}),
]


@pytest.mark.torch
@pytest.mark.parametrize(("name", "options"), BAD, ids=lambda v: str(v))
def test_what_torch_refuses_is_refused_with_the_same_type(name: str, options: dict[str, Any]) -> None:
    import torch

    with pytest.raises(ValueError):
        getattr(torch.optim, name)([torch.nn.Parameter(torch.zeros(2, 2))], **options)
    with pytest.raises(ValueError, match=rf"{name}: "):
        getattr(optim, name)("*", **options)


@pytest.mark.parametrize("option", ["foreach", "fused", "capturable", "differentiable"])
def test_options_of_torchs_kernels_are_refused_with_the_reason(option: str) -> None:
    optim.Adam("*", **{option: False})  # type: ignore[arg-type]
    with pytest.raises(MisconfigurationException, match=f"Adam\\({option}=True\\).*leave it out"):
        optim.Adam("*", **{option: True})  # type: ignore[arg-type]


def test_sparse_adam_is_refused_with_the_reason() -> None:
    with pytest.raises(MisconfigurationException, match="gradients in JAX are always dense"):
        optim.SparseAdam("*")


def test_muon_takes_matrices_only() -> None:
    with pytest.raises(ValueError, match=r"only supports matrices.*bias.*\(3,\)"):
        optim.Muon("*").init(_params())


def test_rprop_and_asgd_take_the_learning_rate_of_the_first_step() -> None:
    """A warm-up changes it between the making of the optimizer and its first update."""
    optimizer = optim.Rprop("*", lr=0.5)
    params = {"net": {"kernel": jnp.ones((2, 2))}}
    state = optimizer.init(params)
    optimizer.param_groups[0]["lr"] = 0.1
    updates, _ = optimizer.update(params, state, params, _hyper(optimizer))
    np.testing.assert_allclose(updates["net"]["kernel"], -0.1)
