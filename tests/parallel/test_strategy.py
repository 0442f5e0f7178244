"""Strategies: which devices, and the same numbers on eight as on one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.models import Classifier, LinenNet, batches, make_engine, train

from jaxlightning.parallel import DataParallelStrategy, SingleDeviceStrategy, make_strategy
from jaxlightning.utilities.exceptions import MisconfigurationException


def test_auto_is_one_device_on_a_cpu() -> None:
    strategy = make_strategy()
    assert isinstance(strategy, SingleDeviceStrategy)
    assert strategy.batches_per_step == 1


@pytest.mark.parametrize(("devices", "count"), [(2, 2), (-1, 8), ([1, 3], 2), ("3", 3), ("0,2", 2)])
def test_several_devices_are_data_parallel(devices: Any, count: int) -> None:
    strategy = make_strategy("ddp", "cpu", devices)
    assert isinstance(strategy, DataParallelStrategy)
    assert len(strategy.devices) == strategy.batches_per_step == count


@pytest.mark.parametrize("devices", [9, [8], 0, [], True])
def test_devices_that_do_not_exist_are_refused(devices: Any) -> None:
    with pytest.raises(MisconfigurationException, match="devices="):
        make_strategy("auto", "cpu", devices)


def test_other_refusals_name_what_is_possible() -> None:
    with pytest.raises(ValueError, match="'auto', 'single_device', 'ddp'"):
        make_strategy("fsdp", "cpu", 2)
    with pytest.raises(MisconfigurationException, match=r"finds no such device.*cpu"):
        make_strategy("auto", "tpu", 1)
    with pytest.raises(MisconfigurationException, match="one device"):
        make_strategy("single_device", "cpu", 2)


def _run(strategy: Any, dtype: Any) -> tuple[list[float], Any]:
    engine = make_engine(Classifier(LinenNet(dtype=dtype)), strategy=strategy)
    losses = train(engine, batches(size=32, dtype=np.dtype(dtype)), 20)
    return losses, engine.params


def _compare(dtype: Any, loss_tolerance: float, tolerance: float) -> None:
    one, params_one = _run(make_strategy(), dtype)
    eight, params_eight = _run(make_strategy("ddp", "cpu", 8), dtype)
    np.testing.assert_allclose(eight, one, rtol=loss_tolerance)
    flat = jax.tree_util.tree_flatten_with_path(params_one)[0]
    for (path, a), b in zip(flat, jax.tree.leaves(params_eight), strict=True):
        if "Dense_0']['bias" not in jax.tree_util.keystr(path):  # before a normalisation: its true gradient is zero
            np.testing.assert_allclose(b, a, atol=tolerance)


def test_eight_devices_agree_with_one_in_float32() -> None:
    _compare(jnp.float32, 1e-5, 1e-4)


def test_eight_devices_agree_with_one_in_float64() -> None:
    with jax.enable_x64(True):
        _compare(jnp.float64, 1e-8, 1e-8)


def test_a_batch_that_does_not_divide_is_computed_everywhere() -> None:
    engine = make_engine(Classifier(), strategy=make_strategy("ddp", "cpu", 8))
    single = make_engine(Classifier())
    data = [*batches(1, size=16), *batches(1, size=5)]
    np.testing.assert_allclose(train(engine, data, 4), train(single, data, 4), rtol=1e-5)
