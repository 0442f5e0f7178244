"""Clipping, gradient norms, non-finite updates and our schedule: pure functions."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlightning import utilities
from jaxlightning.optim import _nonfinite as nonfinite
from jaxlightning.optim import clip_gradients, grad_norm, lr_schedule
from jaxlightning.optim._clip import check_clip
from jaxlightning.utilities.exceptions import MisconfigurationException


def _grads(scale: float = 1.0) -> dict[str, Any]:
    rng = np.random.default_rng(3)
    return {
        "net": {"kernel": jnp.asarray(scale * rng.normal(size=(3, 4)), jnp.float32), "bias": jnp.zeros(4)},
        "head": {"kernel": jnp.asarray(scale * rng.normal(size=(4, 1)), jnp.float32)},
    }


def _torch_grads(grads: Any) -> list[Any]:
    import torch

    tensors = []
    for leaf in jax.tree.leaves(grads):
        tensor = torch.nn.Parameter(torch.zeros(leaf.shape))
        tensor.grad = torch.tensor(np.array(leaf))
        tensors.append(tensor)
    return tensors


# --- clipping ----------------------------------------------------------------------------------------------------


@pytest.mark.torch
@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
@pytest.mark.parametrize(("value", "algorithm"), [(0.5, "norm"), (2, None), (0.1, "value"), (0.5, "NORM")])
def test_clipping_is_torchs(scale: float, value: float, algorithm: str | None) -> None:
    import torch

    grads = _grads(scale)
    tensors = _torch_grads(grads)
    if algorithm == "value":
        torch.nn.utils.clip_grad_value_(tensors, value)
    else:
        torch.nn.utils.clip_grad_norm_(tensors, value)
    clipped = jax.jit(lambda g: clip_gradients(g, value, algorithm))(grads)
    for leaf, tensor in zip(jax.tree.leaves(clipped), tensors, strict=True):
        np.testing.assert_allclose(leaf, tensor.grad.numpy(), rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize("value", [None, 0, 0.0])
def test_no_limit_means_no_clipping(value: Any) -> None:
    grads = _grads()
    assert clip_gradients(grads, value) is grads


def test_half_precision_does_not_overflow_in_the_norm_and_keeps_its_dtype() -> None:
    grads = {"a": jnp.full(4, 300.0, jnp.float16)}
    clipped = clip_gradients(grads, 1.0)["a"]
    assert clipped.dtype == jnp.float16
    np.testing.assert_allclose(clipped, 0.5, rtol=1e-3)


@pytest.mark.parametrize(
    ("value", "algorithm", "error"),
    [
        (-1.0, "norm", MisconfigurationException),
        (float("nan"), "norm", MisconfigurationException),
        ("1", "norm", TypeError),
        (True, "norm", TypeError),
        (1.0, "norm2", MisconfigurationException),
    ],
)
def test_bad_clipping_options_are_refused(value: Any, algorithm: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        clip_gradients(_grads(), value, algorithm)
    with pytest.raises(error):
        check_clip(value, algorithm)


# --- norms -------------------------------------------------------------------------------------------------------


@pytest.mark.lightning
@pytest.mark.parametrize("norm_type", [1, 2, 3.5, "inf"])
def test_gradient_norms_are_lightnings(norm_type: Any) -> None:
    import torch
    from lightning.pytorch.utilities import grad_norm as theirs

    module = torch.nn.Module()
    grads = _grads()
    for name, tree in grads.items():
        part = torch.nn.Module()
        setattr(module, name, part)
        for key, leaf in tree.items():
            parameter = torch.nn.Parameter(torch.zeros(leaf.shape))
            parameter.grad = torch.tensor(np.array(leaf))
            setattr(part, key, parameter)
    for separator in ("/", "_"):
        expected = theirs(module, norm_type, separator)
        got = grad_norm(grads, norm_type, separator)
        assert got.keys() == expected.keys()
        for key, value in expected.items():
            np.testing.assert_allclose(got[key], float(value), rtol=1e-5)


def test_gradient_norms_stay_on_the_device_and_read_a_module() -> None:
    class Engine:
        grads = _grads()

    class Module:
        _engine = Engine()

    got = jax.jit(lambda g: grad_norm(g, 2))(_grads())
    assert "grad_2.0_norm/net.kernel" in got
    np.testing.assert_allclose(grad_norm(Module(), 2)["grad_2.0_norm_total"], got["grad_2.0_norm_total"], rtol=1e-6)
    assert grad_norm({}, 2) == {}
    assert utilities.grad_norm is grad_norm
    with pytest.raises(TypeError, match="got object"):
        grad_norm(object(), 2)


@pytest.mark.parametrize("norm_type", [0, -1, float("nan")])
def test_a_norm_type_must_be_positive(norm_type: float) -> None:
    with pytest.raises(ValueError, match="positive number or 'inf'"):
        grad_norm(_grads(), norm_type)


# --- non-finite updates ------------------------------------------------------------------------------------------


def _guarded(mode: str | None, values: list[float]) -> tuple[list[float], Any]:
    @jax.jit
    def step(weight: Any, state: Any, g: Any) -> Any:
        kept, state, _ = nonfinite.guard(mode, state, [g], weight - g, weight)
        return kept, state

    weight, state, out = jnp.zeros([]), nonfinite.init_nonfinite(), []
    for value in values:
        weight, state = step(weight, state, jnp.asarray(value, jnp.float32))
        out.append(float(weight))
    return out, state


def test_skip_leaves_everything_as_it_was_and_counts() -> None:
    out, state = _guarded("skip", [1.0, float("nan"), 1.0, float("inf"), 1.0])
    assert out == [-1.0, -1.0, -2.0, -2.0, -3.0]
    assert (int(state.count), int(state.last), int(state.updates)) == (2, 3, 5)


def test_warn_lets_it_through_and_counts() -> None:
    out, state = _guarded("warn", [1.0, float("nan"), 1.0])
    assert np.isnan(out[1:]).all()
    assert int(state.count) == 1
    with pytest.warns(UserWarning, match="lastly number 1.*applied as they were"):
        nonfinite.report("warn", 1, 1)


def test_raise_keeps_the_parameters_from_before() -> None:
    out, state = _guarded("raise", [1.0, float("nan")])
    assert out == [-1.0, -1.0]
    with pytest.raises(FloatingPointError, match="lastly number 1"):
        nonfinite.report("raise", int(state.count), int(state.last))


def test_without_a_mode_nothing_is_looked_at() -> None:
    out, state = _guarded(None, [1.0, float("nan")])
    assert np.isnan(out[1])
    assert (int(state.count), int(state.updates)) == (0, 0)


def test_a_report_speaks_only_of_what_is_new() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nonfinite.report("raise", 3, 9, before=3)
        nonfinite.report(None, 3, 9)
    with pytest.warns(UserWarning, match=r"2 optimizer updates .*left out \(3 in this run\)"):
        nonfinite.report("skip", 3, 9, before=1)
    with pytest.raises(MisconfigurationException, match="on_nonfinite"):
        nonfinite.check_mode("ignore")


# --- the schedule ------------------------------------------------------------------------------------------------


def test_lr_schedule_warms_up_in_a_line_and_decays_in_a_cosine() -> None:
    schedule = lr_schedule(0.1, steps_per_epoch=10, epochs=5, warmup_epochs=1)
    values = [float(schedule(step)) for step in range(51)]
    np.testing.assert_allclose(values[:11], np.linspace(0.01, 0.1, 11), rtol=1e-5)
    np.testing.assert_allclose(values[10:], 0.05 * (1 + np.cos(np.pi * np.arange(41) / 40)), atol=1e-7)
    assert max(values) == values[10]


def test_lr_schedule_without_warm_up_and_with_a_floor() -> None:
    schedule = lr_schedule(0.1, 10, 2, 0, final_lr=0.01)
    assert float(schedule(0)) == pytest.approx(0.1)
    assert float(schedule(20)) == pytest.approx(0.01)
    assert float(schedule(1000)) == pytest.approx(0.01)
    assert float(lr_schedule(0.1, 10, 2, 2)(19)) < 0.1


@pytest.mark.parametrize(
    "arguments", [(0.0, 10, 2, 0), (0.1, 0, 2, 0), (0.1, 10, 0, 0), (0.1, 10, 2, 3), (0.1, 10, 2, -1)]
)
def test_lr_schedule_refuses_nonsense(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="lr_schedule: "):
        lr_schedule(*arguments)
