"""Networks on a module: found, created, tied, copied, called."""

from __future__ import annotations

import copy
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support.models import Classifier, LinenNet, batches, make_engine, train

from jaxlightning import LightningModule


class Several(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Dense(4)
        self.tied = self.first
        self.twin = copy.deepcopy(self.first)
        self.other = nn.Dense(4)
        self.blocks = [nn.Dense(6), nn.Dense(6)]
        self.heads = {"a": nn.Dense(4)}

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        x, _ = batch
        for block in self.blocks:
            x = block(x)
        out = self.first(x) + self.tied(x) + self.twin(x) + self.other(x) + self.heads["a"](x)
        return (out**2).mean()

    def configure_optimizers(self) -> Any:
        return optax.sgd(0.1)


def test_networks_are_found_in_attributes_lists_and_dicts() -> None:
    module = Several()
    engine = make_engine(module)
    train(engine, batches(), 1)
    assert set(engine.params) == {"first", "twin", "other", "blocks.0", "blocks.1", "heads.a"}
    assert [info.name for info in engine.networks()] == ["first", "twin", "other", "blocks.0", "blocks.1", "heads.a"]


def test_a_deep_copy_starts_equal_and_a_second_network_does_not() -> None:
    module = Several().init(batches()[0])
    assert np.array_equal(module.first.params["kernel"], module.twin.params["kernel"])
    assert not np.array_equal(module.first.params["kernel"], module.other.params["kernel"])


def test_a_shared_network_stays_tied() -> None:
    module = Several()
    engine = make_engine(module)
    train(engine, batches(), 2)
    assert module.tied is module.first
    assert "tied" not in engine.params


def test_a_copy_of_a_network_with_variables_has_its_values() -> None:
    module = Several()
    engine = make_engine(module)
    train(engine, batches(), 3)
    module.teacher = copy.deepcopy(module.first)
    for mine, theirs in zip(jax.tree.leaves(module.teacher.params), jax.tree.leaves(module.first.params), strict=True):
        assert np.array_equal(mine, theirs)
    train(engine, batches(), 1)
    assert "teacher" in engine.params


def test_a_network_inside_a_network_sees_plain_flax() -> None:
    class Outer(nn.Module):
        inner: nn.Module

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.Dense(4)(self.inner(x))

    class Nested(Classifier):
        def __init__(self) -> None:
            inner = nn.Dense(5)
            super().__init__(Outer(inner))
            self.inner = inner

        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            return self.net(batch[0]).mean()

    engine = make_engine(Nested())
    train(engine, batches(), 1)
    assert set(engine.params["net"]) == {"inner", "Dense_0"}


def test_methods_fields_and_keyword_pass_through() -> None:
    class Coder(nn.Module):
        width: int = 3

        def setup(self) -> None:
            self.down = nn.Dense(self.width)
            self.up = nn.Dense(6)

        def encode(self, x: jax.Array) -> jax.Array:
            return self.down(x)

        def decode(self, z: jax.Array) -> jax.Array:
            return self.up(z)

    class Auto(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.coder = Coder()

        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            x, _ = batch
            z = self.coder.encode(x)
            assert z.shape[-1] == self.coder.width
            return ((self.coder(z, method="decode") - x) ** 2).mean()

        def configure_optimizers(self) -> Any:
            return optax.sgd(0.1)

    engine = make_engine(Auto())
    losses = train(engine, batches(1), 10)
    assert losses[-1] < losses[0]
    assert set(engine.params["coder"]) == {"down", "up"}


def test_mutable_collections_can_be_asked_for() -> None:
    seen = []

    class Asks(Classifier):
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            logits, updates = self.net(batch[0], mutable=["batch_stats"])
            seen.append(sorted(updates))
            return logits.mean()

    train(make_engine(Asks()), batches(), 1)
    assert seen[-1] == ["batch_stats"]


def test_own_rngs_are_used() -> None:
    class Fixed(Classifier):
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            key = jax.random.key(3)
            same = self.net(batch[0], rngs={"dropout": key}) - self.net(batch[0], rngs={"dropout": key})
            other = self.net(batch[0]) - self.net(batch[0])
            return {"loss": self.net(batch[0]).mean(), "same": jnp.abs(same).max(), "other": jnp.abs(other).max()}

    engine = make_engine(Fixed(LinenNet(dropout=0.5)))
    out = engine.train_step(batches()[0], batch_idx=0, want_outputs=True).outputs
    assert float(out["same"]) == 0
    assert float(out["other"]) > 0


def test_batch_statistics_move_in_training_only() -> None:
    engine = make_engine(module := Classifier())
    module.init(batches()[0])
    before = engine.variables["net"]["batch_stats"]["BatchNorm_0"]["mean"]
    assert not np.any(before)
    train(engine, batches(), 1)
    after = engine.variables["net"]["batch_stats"]["BatchNorm_0"]["mean"]
    assert np.any(after)
    module.eval()
    engine.eval_step("validate", batches()[1], batch_idx=0)
    assert np.array_equal(engine.variables["net"]["batch_stats"]["BatchNorm_0"]["mean"], after)


def test_values_do_not_depend_on_which_step_creates_them() -> None:
    first, second = Classifier(), Classifier()
    train_first = make_engine(first)
    train_first.ensure_created("train", batches()[0], _zeros())
    eval_first = make_engine(second)
    second.eval()
    eval_first.ensure_created("validate", batches()[0], _zeros())
    for a, b in zip(jax.tree.leaves(train_first.params), jax.tree.leaves(eval_first.params), strict=True):
        assert np.array_equal(a, b)


def _zeros() -> Any:
    from jaxlightning.compile.trace import Scalars

    return Scalars(0, 0, 0, 0)


def test_calling_before_variables_exist_names_init() -> None:
    with pytest.raises(RuntimeError, match=r"init\(batch\)"):
        Classifier()(jnp.ones((2, 6)))


def test_calling_outside_a_step_uses_current_variables() -> None:
    module = Classifier()
    engine = make_engine(module)
    train(engine, batches(), 2)
    module.eval()
    x = batches()[0][0]
    expected = LinenNet().apply({"params": engine.params["net"], **engine.variables["net"]}, x, train=False)
    np.testing.assert_array_equal(module(x), expected)


def test_a_later_network_is_added_and_optimizer_state_grows() -> None:
    class Later(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.critic = nn.Dense(1)

        def validation_step(self, batch: Any, batch_idx: Any) -> Any:
            self.critic(self.net(batch[0]))

    module = Later()
    engine = make_engine(module)
    train(engine, batches(), 2)
    moments = jax.tree.leaves(engine.opt_state[0].mu["net"])
    module.eval()
    engine.eval_step("validate", batches()[0], batch_idx=0)
    module.train()
    assert "critic" in engine.params
    kept = engine.opt_state[0].mu["net"]
    assert all(np.array_equal(a, b) for a, b in zip(moments, jax.tree.leaves(kept), strict=True))
    train(engine, batches(), 1)
    assert set(engine.opt_state[0].mu) == {"net", "critic"}


def test_images_with_channels_first_are_refused_with_both_ways_out() -> None:
    class Conv(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.Dense(4)(nn.Conv(4, (3, 3))(x).mean((1, 2)))

    engine = make_engine(Classifier(Conv()))
    with pytest.raises(ValueError, match=r"axis 1 has 3 channels.*channels_last=True.*transpose"):
        engine.train_step((np.zeros((2, 3, 8, 8), np.float32), np.zeros(2, np.int32)), batch_idx=0)
    engine.train_step((np.zeros((2, 8, 8, 3), np.float32), np.zeros(2, np.int32)), batch_idx=0)


def test_another_input_shape_names_the_network() -> None:
    module = Classifier()
    engine = make_engine(module)
    train(engine, batches(), 1)
    with pytest.raises(Exception, match=r"Dense_0|shape") as caught:
        train(engine, batches(features=7), 1)
    assert any("`self.net`" in note for note in caught.value.__notes__)


class NnxNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, rate: float = 0.0) -> None:
        self.inner = nnx.Linear(6, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(16, 4, rngs=rngs)])

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.blocks[0](self.drop(nnx.relu(self.norm(self.inner(x)))))


def test_nnx_networks_train_and_the_users_object_follows() -> None:
    net = NnxNet(nnx.Rngs(0), 0.1)
    start = np.array(net.inner.kernel[...])
    module = Classifier(net)
    engine = make_engine(module)
    losses = train(engine, batches(1), 20)
    assert losses[-1] < losses[0]
    assert engine.trace_counts == {"train": 1}
    assert module.net is net
    assert not np.array_equal(net.inner.kernel[...], start)
    np.testing.assert_array_equal(net.inner.kernel[...], engine.params["net"]["inner"]["kernel"])
    assert np.any(net.norm.mean[...])


def test_a_change_of_an_nnx_object_in_a_hook_is_seen() -> None:
    module = Classifier(NnxNet(nnx.Rngs(0)))
    engine = make_engine(module)
    train(engine, batches(), 2)
    module.net.inner.kernel[...] = jnp.zeros((6, 16))
    module.eval()
    engine.eval_step("validate", batches()[0], batch_idx=0)
    assert not np.any(engine.params["net"]["inner"]["kernel"])
    assert engine.trace_counts["train"] == 1


def test_shared_nnx_modules_stay_tied() -> None:
    net = NnxNet(nnx.Rngs(0))

    class Shared(Classifier):
        def __init__(self) -> None:
            super().__init__(net)
            self.again = [net]

        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            return (self.net(batch[0]) + self.again[0](batch[0])).mean()

    engine = make_engine(Shared())
    train(engine, batches(), 2)
    assert sum(bool(tree) for tree in engine.params.values()) == 1


def test_nnx_dropout_changes_with_the_step_and_repeats_with_the_seed() -> None:
    def masks(seed: int) -> list[float]:
        class Noise(Classifier):
            def training_step(self, batch: Any, batch_idx: Any) -> Any:
                return self.net.drop(jnp.ones((64,))).reshape(8, 8)[0].sum() + 0 * self.net(batch[0]).mean()

        return train(make_engine(Noise(NnxNet(nnx.Rngs(0), 0.5)), seed=seed), batches(), 4)

    assert masks(0) == masks(0)
    assert len(set(masks(0))) > 1


def test_reading_a_list_of_nnx_networks_does_not_compile_again() -> None:
    class Listed(Classifier):
        def __init__(self) -> None:
            super().__init__(NnxNet(nnx.Rngs(0)))
            self.nets = [NnxNet(nnx.Rngs(1))]

        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            return (self.net(batch[0]) + self.nets[0](batch[0])).mean()

    engine = make_engine(Listed())
    train(engine, batches(), 1)
    engine.check_constants()
    train(engine, batches(), 1)
    assert engine.trace_counts == {"train": 1}


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_networks_of_child_modules_are_trained_too(kind: str) -> None:
    class Child(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Dense(5) if kind == "linen" else nnx.Linear(6, 5, rngs=nnx.Rngs(0))
            self.scale = 2.0

        def forward(self, x: jax.Array) -> jax.Array:
            return self.body(x) * self.scale

    class Parent(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.child = Child()
            self.head = nn.Dense(4)

        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            logits = self.head(self.child(batch[0]))
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

        def configure_optimizers(self) -> Any:
            return optax.adam(1e-2)

    module = Parent()
    engine = make_engine(module)
    losses = train(engine, batches(1), 10)
    assert losses[-1] < losses[0]
    assert set(engine.params) == {"child.body", "head"}
    module.eval()
    assert not module.child.training
    module.train()
    module.child.scale = 3.0
    engine.check_constants()
    train(engine, batches(1), 1)
    assert engine.trace_counts == {"train": 2}


def test_a_network_among_the_hyper_parameters_is_not_counted_twice() -> None:
    class Saves(Classifier):
        def __init__(self, net: Any) -> None:
            super().__init__(net)
            self.save_hyperparameters(ignore=["net"])

    engine = make_engine(Saves(LinenNet()))
    train(engine, batches(), 1)
    assert set(engine.params) == {"net"}


def test_structure_changes_of_an_nnx_network_in_a_step_are_refused() -> None:
    class Grows(Classifier):
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            self.net.extra = 3
            return self.net(batch[0]).mean()

    with pytest.raises(RuntimeError, match="structure of an NNX network"):
        train(make_engine(Grows(NnxNet(nnx.Rngs(0)))), batches(), 1)


class _WithConstants(nnx.Module):
    def __init__(self) -> None:
        self.linear = nnx.Linear(6, 4, rngs=nnx.Rngs(0))
        self.mean = np.full(6, 0.5, np.float32)
        self.std = nnx.data(jnp.full(6, 2.0)) if hasattr(nnx, "data") else jnp.full(6, 2.0)

    def __call__(self, x: Any) -> Any:
        return self.linear((x - self.mean) / self.std)


def test_bare_arrays_on_an_nnx_module_are_part_of_its_state() -> None:
    module = Classifier(_WithConstants())
    losses = train(make_engine(module), batches(), 3)
    assert losses[0] != losses[2]
    np.testing.assert_array_equal(module.state_dict()["net.mean"], np.full(6, 0.5))
    np.testing.assert_array_equal(module.net.std, np.full(6, 2.0))


@pytest.mark.parametrize(
    "nets",
    [
        lambda: {0: nn.Dense(4), "0": nn.Dense(4)},
        lambda: {"a.b": nn.Dense(4), "a": {"b": nn.Dense(4)}},
        lambda: {1: nnx.Linear(2, 2, rngs=nnx.Rngs(0)), "1": nnx.Linear(2, 2, rngs=nnx.Rngs(0))},
    ],
)
def test_two_networks_of_one_path_are_refused(nets: Any) -> None:
    with pytest.raises(ValueError, match=r"Two networks have the same path `self\.net\.[01a]"):
        make_engine(Classifier(nets()))


def test_a_layer_that_changes_statistics_in_evaluation_changes_nothing() -> None:
    class AlwaysBatch(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.Dense(4)(nn.BatchNorm(use_running_average=False)(x))

    module = Classifier(AlwaysBatch())
    engine, data = make_engine(module), batches()
    train(engine, data, 2)
    before = {name: np.array(value) for name, value in module.state_dict().items()}
    module.eval()
    with pytest.warns(UserWarning, match=r"`self\.net` changes its collections \['batch_stats'\] in evaluation"):
        logits = module.net(data[0][0])
    x = data[0][0]
    normal = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5)
    normal = normal * before["net.BatchNorm_0.scale"] + before["net.BatchNorm_0.bias"]
    expected = normal @ before["net.Dense_0.kernel"] + before["net.Dense_0.bias"]
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)  # float32 sums in another order
    engine.eval_step("validate", data[0], batch_idx=0, current_epoch=0, global_step=0)
    for name, value in module.state_dict().items():
        np.testing.assert_array_equal(value, before[name])


def test_a_network_that_is_not_on_the_module_is_explained() -> None:
    class Holder:
        net = nn.Dense(4)

    class Hidden(Classifier):
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            return (self.holder.net(batch[0]) ** 2).mean()

    module = Hidden()
    module.holder = Holder()
    with pytest.raises(Exception, match="unbound modules") as caught:
        train(make_engine(module), batches(), 1)
    assert any("attributes of the LightningModule itself" in note for note in caught.value.__notes__)
