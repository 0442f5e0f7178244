"""Copies of a module: independent ones, with the weights that it has."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jaxlightning as pl
from jaxlightning.utilities.exceptions import MisconfigurationException

X = np.arange(8, dtype=np.float32).reshape(2, 4)


class Head(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.out = nnx.Linear(3, 2, rngs=nnx.Rngs(0))


class Several(pl.LightningModule):
    """A linen network twice, an NNX network in a child module, a parameter, a buffer and a carried array."""

    def __init__(self) -> None:
        super().__init__()
        tied = nn.BatchNorm()
        self.nets = {"in": nn.Dense(3), "norm": tied, "again": tied}
        self.head = Head()
        self.register_parameter("scale", jnp.ones(2))
        self.register_buffer("seen", jnp.zeros((), jnp.int32))
        self.center = jnp.zeros(3)

    def forward(self, x: Any) -> Any:
        hidden = self.nets["again"](self.nets["norm"](self.nets["in"](x)))
        return self.head.out(hidden - self.center) * self.scale

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        self.seen = self.seen + 1
        self.center = 0.5 * self.center + 0.5 * self.nets["in"](batch[0]).mean(0)
        return (self.forward(batch[0]) ** 2).mean()

    def predict_step(self, batch: Any, batch_idx: Any) -> Any:
        return self.forward(batch[0])

    def configure_optimizers(self) -> Any:
        return optax.sgd(0.05)


class OnlyNnx(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nnx.Linear(4, 2, rngs=nnx.Rngs(0))

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        return (self.net(batch[0]) ** 2).mean()

    def predict_step(self, batch: Any, batch_idx: Any) -> Any:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return optax.sgd(0.05)


def _trainer(**options: Any) -> pl.Trainer:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return pl.Trainer(**{**quiet, "max_epochs": 1, **options})


def _loader() -> Any:
    return pl.ArrayLoader((np.concatenate([X, X + 1]),), batch_size=2)


def _values(module: Any) -> dict[str, Any]:
    return {name: np.array(value) for name, value in module.state_dict().items()}


def _equal(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return set(left) == set(right) and all(np.array_equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("make", [copy.deepcopy, copy.copy])
def test_a_copy_of_a_trained_module_has_its_weights_and_goes_its_own_way(make: Any) -> None:
    module = Several()
    _trainer().fit(module, _loader())
    before = _values(module)
    duplicate = make(module)
    assert duplicate._trainer is None
    expected = _trainer().predict(module, _loader())
    np.testing.assert_array_equal(_trainer().predict(duplicate, _loader()), expected)
    assert _equal(_values(duplicate), before)
    _trainer().fit(duplicate, _loader())
    assert int(duplicate.seen) == 4
    assert not np.array_equal(_values(duplicate)["nets.in.kernel"], before["nets.in.kernel"])
    if make is copy.deepcopy:
        assert _equal(_values(module), before)
        assert int(module.seen) == 2


def test_a_copied_child_is_a_module_of_its_own() -> None:
    module = Several()
    _trainer().fit(module, _loader())
    child = copy.deepcopy(module.head)
    np.testing.assert_array_equal(_values(child)["out.kernel"], _values(module)["head.out.kernel"])
    other = Several()
    other.head = copy.deepcopy(module.head)
    other.init((X,))
    assert set(_values(other.head)) == {"out.kernel", "out.bias"}
    other.head.load_state_dict({name: value + 1 for name, value in _values(child).items()})
    np.testing.assert_array_equal(_values(other)["head.out.kernel"], _values(module)["head.out.kernel"] + 1)
    other.head.load_state_dict(_values(child))
    np.testing.assert_array_equal(_values(other)["head.out.kernel"], _values(module)["head.out.kernel"])


def test_a_trained_module_can_be_pickled() -> None:
    module = OnlyNnx()
    _trainer().fit(module, _loader())
    again = pickle.loads(pickle.dumps(module))
    assert _equal(_values(again), _values(module))
    np.testing.assert_array_equal(_trainer().predict(again, _loader()), _trainer().predict(module, _loader()))


def test_a_run_inside_of_training_is_refused_and_a_copy_may_be_used() -> None:
    shapes, errors = [], []

    class Looks(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            for verb in (trainer.predict, _trainer().predict):
                with pytest.raises(MisconfigurationException, match=r"inside of a running `fit`.*deepcopy") as caught:
                    verb(module, _loader())
                errors.append(str(caught.value))
            shapes.append(_trainer().predict(copy.deepcopy(module), _loader())[0].shape)

        def on_fit_end(self, trainer: Any, module: Any) -> None:
            shapes.append(_trainer().predict(module, _loader())[0].shape)

    module = Several()
    trainer = _trainer(max_epochs=2, callbacks=[Looks()])
    trainer.fit(module, _loader())
    assert shapes == [(2, 2)] * 3
    assert len(errors) == 4
    assert trainer.global_step == int(module.seen) == 4


class Child(pl.LightningModule):
    """Trains alone, or as a part of `Parent`."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Dense(2)
        self.calls = jnp.zeros((), jnp.int32)

    def forward(self, x: Any) -> Any:
        self.calls = self.calls + 1
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        return (self.forward(batch[0]) ** 2).mean()

    def predict_step(self, batch: Any, batch_idx: Any) -> Any:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return optax.sgd(0.01)


class Parent(pl.LightningModule):
    def __init__(self, child: Child) -> None:
        super().__init__()
        self.child = child

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        return (self.child(batch[0]) ** 2).mean()

    def predict_step(self, batch: Any, batch_idx: Any) -> Any:
        return self.child.net(batch[0])

    def configure_optimizers(self) -> Any:
        return optax.sgd(0.01)


def test_a_module_trained_alone_is_the_same_as_a_part_of_another_and_back(tmp_path: Any) -> None:
    child = Child()
    alone = _trainer()
    alone.fit(child, _loader())
    alone.save_checkpoint(tmp_path / "child.ckpt")
    trained = alone.predict(child, _loader())
    parent, trainer = Parent(child), _trainer()
    np.testing.assert_array_equal(trainer.predict(parent, _loader()), trained)
    loaded = Parent(Child.load_from_checkpoint(tmp_path / "child.ckpt"))
    np.testing.assert_array_equal(_trainer().predict(loaded, _loader()), trained)

    trainer.fit(parent, _loader())
    together = trainer.predict(parent, _loader())
    assert not np.array_equal(together, trained)
    np.testing.assert_array_equal(_trainer().predict(child, _loader()), together)
    assert int(child.calls) == 4
    alone = _trainer()
    alone.fit(child, _loader())
    assert int(child.calls) == 6
    np.testing.assert_array_equal(trainer.predict(parent, _loader()), alone.predict(child, _loader()))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(parent, _loader())
    assert int(child.calls) == 8


def test_pure_functions_of_a_trained_module_begin_with_its_weights_and_leave_it_alone() -> None:
    module = OnlyNnx()
    linen = Child()
    for each in (module, linen):
        _trainer().fit(each, _loader())
        before = _values(each)
        state = pl.functionalize(each, (X,), seed=3).state
        held = {leaf.shape: np.asarray(leaf) for leaf in jax.tree.leaves(state.params)}
        np.testing.assert_array_equal(held[(4, 2)], before["net.kernel"])
        np.testing.assert_array_equal(_values(each)["net.kernel"], before["net.kernel"])
    fresh = Child()
    first, second = (pl.functionalize(fresh, (X,), seed=seed).state.params for seed in (0, 1))
    assert not np.array_equal(first["net"]["kernel"], second["net"]["kernel"])
