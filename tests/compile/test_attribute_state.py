"""Array attributes as state: buffers, own parameters, copies of networks, checkpoints, several devices."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.models import batches, make_engine, train
from support.verbatim import QUIET

import jaxlightning as pl
from jaxlightning.compile import functionalize

RNG = np.random.default_rng(0)
X = RNG.standard_normal((32, 6)).astype(np.float32)
Y = RNG.integers(0, 4, 32).astype(np.int32)


@dataclasses.dataclass
class Stats:
    mean: Any


class Net(pl.LightningModule):
    """Every kind of array attribute at once."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Dense(4)
        self.register_parameter("temperature", jnp.ones(()))
        self.register_parameter("shift", lambda key: 0.1 * jax.random.normal(key, (4,)))
        self.register_buffer("queue", np.zeros((2, 4), np.float32))
        self.register_buffer("scratch", jnp.zeros(3), persistent=False)
        self.stats = Stats(jnp.zeros(4))
        self.totals = {"n": 0, "sum": [jnp.zeros(4)]}
        self.ema = 0.0

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        logits = self.net(batch[0]) * self.temperature + self.shift
        mean = jax.lax.stop_gradient(logits).mean(0)
        self.queue = jnp.roll(self.queue, 1, 0).at[0].set(mean)
        self.stats.mean = 0.9 * self.stats.mean + mean
        self.totals["n"] += 1
        self.totals["sum"][0] = self.totals["sum"][0] + mean
        self.scratch = self.scratch + 1
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()
        loss = loss + 0.01 * ((logits.mean(0) - self.queue[1]) ** 2).sum()
        self.ema = 0.9 * self.ema + 0.1 * jax.lax.stop_gradient(loss)
        self.last = mean
        return loss

    def configure_optimizers(self) -> Any:
        return optax.adam(0.05)


def fit(module: Any, epochs: int, tmp_path: Path, *, save: str = "", devices: int = 1, **flags: Any) -> Any:
    """A trainer that has fitted the module."""
    options = {**QUIET, "devices": devices, "max_epochs": epochs, "default_root_dir": tmp_path}
    trainer = pl.Trainer(**{**options, **{k: v for k, v in flags.items() if k != "ckpt_path"}})
    loader = pl.ArrayLoader((X, Y), batch_size=8 // devices)
    trainer.fit(module, loader, ckpt_path=flags.get("ckpt_path"))
    if save:
        trainer.save_checkpoint(save)
    return trainer


def values(module: Any) -> dict[str, Any]:
    """What the module holds, as numpy arrays."""
    names = ("temperature", "shift", "queue", "totals", "ema", "last")
    return {"stats": np.asarray(module.stats.mean), **{n: jax.tree.map(np.asarray, getattr(module, n)) for n in names}}


def test_a_resumed_run_has_the_attributes_of_one_run(tmp_path: Path) -> None:
    whole = Net()
    trainer = fit(whole, 3, tmp_path)
    assert trainer._engine.trace_counts == {"train": 1}
    assert set(whole.state_dict()) == {"net.kernel", "net.bias", "temperature", "shift", "queue"}
    first, second = Net(), Net()
    fit(first, 1, tmp_path, save=str(tmp_path / "c.ckpt"))
    trainer = fit(second, 3, tmp_path, ckpt_path=str(tmp_path / "c.ckpt"))
    assert trainer._engine.trace_counts == {"train": 1}
    jax.tree.map(np.testing.assert_array_equal, values(whole), values(second))
    np.testing.assert_array_equal(second.scratch, [8, 8, 8])  # not persistent: it began anew
    loaded = Net.load_from_checkpoint(tmp_path / "c.ckpt")
    jax.tree.map(np.testing.assert_array_equal, values(first), values(loaded))


def test_a_buffer_of_another_shape_does_not_fit(tmp_path: Path) -> None:
    fit(Net(), 1, tmp_path, save=str(tmp_path / "c.ckpt"))

    class Wider(Net):
        def __init__(self) -> None:
            super().__init__()
            self.queue = jnp.zeros((5, 4))

    with pytest.raises(RuntimeError, match=r"buffer queue is \(2, 4\) in what is loaded, \(5, 4\) here"):
        Wider.load_from_checkpoint(tmp_path / "c.ckpt")


def test_eight_devices_carry_what_one_does(tmp_path: Path) -> None:
    one, eight, eager = Net(), Net(), Net()
    fit(one, 2, tmp_path)
    trainer = fit(eight, 2, tmp_path, devices=8)
    fit(eager, 2, tmp_path, jit=False)
    assert trainer._engine.trace_counts == {"train": 1}
    assert len(eight.queue.sharding.device_set) == 8
    state = eight._engine.tree
    kernel = jax.tree.leaves(state.params)[0]
    assert all(leaf.sharding == kernel.sharding for leaf in jax.tree.leaves(state.attributes))
    for other in (eight, eager):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5), values(one), values(other))


def test_buffers_have_torchs_rules() -> None:
    module = pl.LightningModule()
    module.register_buffer("mean", jnp.zeros(3))
    module.register_buffer("none", None)
    assert [name for name, _ in module.named_buffers()] == ["mean"]
    assert len(list(module.buffers())) == 1
    module.mean_ = 1
    with pytest.raises(KeyError, match="attribute 'mean_' already exists"):
        module.register_buffer("mean_", jnp.zeros(3))
    with pytest.raises(KeyError, match="buffer name can"):
        module.register_buffer("a.b", jnp.zeros(3))
    with pytest.raises(KeyError, match="empty string"):
        module.register_buffer("", jnp.zeros(3))
    with pytest.raises(TypeError, match="cannot assign 'str' object to buffer 'x'"):
        module.register_buffer("x", "text")
    with pytest.raises(TypeError, match="cannot assign 'str' object to parameter 'y'"):
        module.register_parameter("y", "text")


def test_an_integer_parameter_is_refused() -> None:
    class Whole(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_parameter("steps", jnp.zeros(3, jnp.int32))

    with pytest.raises(TypeError, match=r"`steps` has dtype int32.*register_buffer"):
        make_engine(Whole())


def test_own_parameters_can_be_read_set_and_chosen() -> None:
    class Chosen(Net):
        def configure_optimizers(self) -> Any:
            return {"optimizer": optax.sgd(0.1), "params": "temperature"}

    module = Chosen()
    assert float(module.temperature) == 1
    with pytest.raises(RuntimeError, match="`shift` has no value yet"):
        module.shift
    engine = make_engine(module)
    shift, kernel = np.asarray(module.shift), None
    module.temperature = 2.0
    train(engine, batches(), 1)
    kernel = np.asarray(module.state_dict()["net.kernel"])
    train(engine, batches(), 2)
    assert float(module.temperature) != 2
    np.testing.assert_array_equal(module.shift, shift)
    np.testing.assert_array_equal(module.state_dict()["net.kernel"], kernel)
    same = Chosen()
    make_engine(same)
    np.testing.assert_array_equal(same.shift, shift)


def test_state_dict_gives_and_takes_buffers() -> None:
    module = Net()
    engine = make_engine(module)
    train(engine, batches(), 2)
    saved = module.state_dict()
    other = Net()
    engine = make_engine(other)
    other.init(batches()[0])
    other.load_state_dict(saved)
    jax.tree.map(np.testing.assert_array_equal, other.state_dict(), saved)


def test_a_copy_of_a_network_starts_equal_even_when_only_its_parameters_are_read() -> None:
    class Teacher(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.student = nn.Dense(4)
            self.teacher = copy.deepcopy(self.student)

        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            self.teacher.params = jax.tree.map(lambda t, s: 0.5 * t + 0.5 * s, self.teacher.params, self.student.params)
            return self.student(batch[0]).mean()

        def configure_optimizers(self) -> Any:
            return {"optimizer": optax.sgd(0.1), "params": self.student}

    module = Teacher()
    engine = make_engine(module)
    module.init(batches()[0])
    start = engine.params
    jax.tree.map(np.testing.assert_array_equal, start["student"], start["teacher"])
    train(engine, batches(), 2)
    after = engine.params
    assert not np.allclose(after["teacher"]["kernel"], after["student"]["kernel"])
    assert not np.allclose(after["teacher"]["kernel"], start["teacher"]["kernel"])


def test_parameters_are_not_assigned_in_evaluation() -> None:
    class Bad(Net):
        def validation_step(self, batch: Any, batch_idx: Any) -> None:
            self.net.params = self.net.params

    engine = make_engine(Bad())
    train(engine, batches(), 1)
    with pytest.raises(RuntimeError, match=r"validate step assigns `self.net.params`.*on_validation_epoch_start"):
        engine.eval_step("validate", batches()[0], batch_idx=0)


def test_functionalize_carries_attributes_and_refuses_the_host() -> None:
    state, step, _, _ = functionalize(Net(), batches()[0])
    compiled = jax.jit(step)
    for batch in batches():
        state, _ = compiled(state, batch)
    module = Net()
    engine = make_engine(module)
    for i, batch in enumerate(batches()):
        engine.train_step(batch, batch_idx=0, micro_step=i, global_step=i)
    np.testing.assert_allclose(state.attributes["queue"], module.queue, rtol=1e-5, atol=1e-6)

    class Appends(Net):
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.print(loss)
            return loss

    state, step, _, _ = functionalize(Appends(), batches()[0])
    with pytest.raises(NotImplementedError, match=r"done on the host after each call:.*`self.print\(...\)`"):
        step(state, batches()[0])
