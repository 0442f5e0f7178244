"""Networks beyond Flax on a module: they train like in their own loop, and resume bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxlightning
from jaxlightning import ArrayLoader, LightningModule, PureNetwork, Trainer

QUIET = {"enable_progress_bar": False, "logger": False, "num_sanity_val_steps": 0, "enable_checkpointing": False}
TX = optax.adam(3e-2)


@pytest.fixture(autouse=True)
def _no_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSSIBLE_USER_WARNINGS", "off")


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(48, 6)).astype(np.float32)
    return x, (x[:, 0] > 0).astype(np.int32)


class Module(LightningModule):
    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    def logits(self, x: Any) -> Any:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        x, y = batch
        loss = optax.softmax_cross_entropy_with_integer_labels(self.logits(x), y).mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: Any) -> None:
        x, y = batch
        self.log("accuracy", jnp.mean(self.logits(x).argmax(-1) == y))

    def configure_optimizers(self) -> Any:
        return TX


def haiku_net(dropout: float = 0.3) -> Any:
    hk = pytest.importorskip("haiku")

    def forward(x: Any, is_training: bool) -> Any:
        x = hk.nets.MLP([8], activate_final=True, name="body")(x)
        x = hk.BatchNorm(True, True, 0.9)(x, is_training)
        if is_training:
            x = hk.dropout(hk.next_rng_key(), dropout, x)
        return hk.Linear(2)(x)

    return hk.transform_with_state(forward)


def equinox_module() -> Module:
    eqx = pytest.importorskip("equinox")

    class Net(eqx.Module):
        first: Any
        second: Any
        drop: Any
        name: str

        def __init__(self) -> None:
            a, b = jax.random.split(jax.random.key(4))
            self.first, self.second = eqx.nn.Linear(6, 8, key=a), eqx.nn.Linear(8, 2, key=b)
            self.drop, self.name = eqx.nn.Dropout(0.3), "net"

        def __call__(self, x: Any, key: Any = None) -> Any:
            return self.second(self.drop(jax.nn.relu(self.first(x)), key=key))

    class EquinoxModule(Module):
        def logits(self, x: Any) -> Any:
            return jax.vmap(self.net)(x, jax.random.split(self.next_rng(), len(x)))

    return EquinoxModule(Net())


def stax_pair() -> Any:
    from jax.example_libraries import stax

    init, apply = stax.serial(stax.Dense(8), stax.Relu, stax.Dense(2))
    return PureNetwork(init, apply, by_shape=True)


def pure_with_state() -> Any:
    def init(key: Any, x: Any) -> Any:
        return {"w": jax.random.normal(key, (x.shape[-1], 2))}, {"mean": jnp.zeros(x.shape[-1])}

    def apply(params: Any, state: Any, x: Any, train: bool, key: Any) -> Any:
        mean = 0.9 * state["mean"] + 0.1 * x.mean(0) if train else state["mean"]
        noise = jax.random.normal(key, x.shape) * 0.1 if train else 0.0
        return (x - mean + noise) @ params["w"], {"mean": mean}

    return PureNetwork(init, apply, has_state=True)


def haiku_module() -> Module:
    return Module(haiku_net())


MAKE: dict[str, Callable[[], Module]] = {
    "haiku": haiku_module,
    "equinox": equinox_module,
    "stax": lambda: Module(stax_pair()),
    "pure": lambda: Module(pure_with_state()),
}


def fit(module: Module, root: Path, epochs: int, **options: Any) -> Trainer:
    trainer = Trainer(max_epochs=epochs, default_root_dir=root, **{"enable_model_summary": False, **QUIET})
    loader = ArrayLoader(*data(), batch_size=8, shuffle=True, seed=3)
    trainer.fit(module, loader, ArrayLoader(*data(), batch_size=16), **options)
    return trainer


@pytest.mark.parametrize("name", list(MAKE))
def test_it_trains_and_a_resumed_run_is_bit_by_bit_the_same(name: str, tmp_path: Path) -> None:
    whole = fit(MAKE[name](), tmp_path / "a", 4)
    assert whole.callback_metrics["accuracy"] > 0.5
    half = fit(MAKE[name](), tmp_path / "b", 2)
    half.save_checkpoint(tmp_path / "half.ckpt")
    resumed = fit(MAKE[name](), tmp_path / "c", 4, ckpt_path=tmp_path / "half.ckpt")
    for tree in ("params", "variables", "opt_state"):
        ours, theirs = (jax.tree.leaves(getattr(each.state, tree)) for each in (whole, resumed))
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(a, b)
    assert whole.callback_metrics["loss"] == resumed.callback_metrics["loss"]


def test_a_haiku_network_trains_as_in_its_own_loop(tmp_path: Path) -> None:
    net = haiku_net(dropout=0.0)
    module = Module(net)
    module.init((data()[0][:8], data()[1][:8]))
    from jaxlightning.compile.foreign_networks import _flat_by_slash

    params = _flat_by_slash(module._require_engine().params["net"])
    assert set(params) == {"body/~/linear_0", "batch_norm", "linear"}
    state = _flat_by_slash(module._require_engine().variables["net"]["state"])
    opt = TX.init(params)

    @jax.jit
    def step(params: Any, state: Any, opt: Any, x: Any, y: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            logits, new = net.apply(params, state, jax.random.key(0), x, is_training=True)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), new

        grads, new = jax.grad(loss_fn, has_aux=True)(params)
        updates, opt = TX.update(grads, opt, params)
        return optax.apply_updates(params, updates), new, opt

    x, y = data()
    for start in range(0, 48, 8):
        params, state, opt = step(params, state, opt, x[start : start + 8], y[start : start + 8])
    trainer = Trainer(max_epochs=1, default_root_dir=tmp_path, enable_model_summary=False, **QUIET)
    trainer.fit(module, ArrayLoader(x, y, batch_size=8))
    got = _flat_by_slash(trainer.state.params["net"])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), got, dict(params))


def test_an_equinox_module_keeps_its_first_values_and_its_fields(tmp_path: Path) -> None:
    module = equinox_module()
    first = np.asarray(module.net.first.weight)
    module.init((data()[0][:8], data()[1][:8]))
    np.testing.assert_array_equal(module.net.first.weight, first)
    assert module.net.name == "net"
    fit(module, tmp_path, 1)
    assert not np.array_equal(module.net.first.weight, first)
    np.testing.assert_array_equal(module.net.first.weight, module._require_engine().params["net"]["first"]["weight"])
    module.eval()
    np.testing.assert_array_equal(module.net(data()[0][0]), module.net(data()[0][0]))  # no dropout now


def test_the_mode_reaches_the_network(tmp_path: Path) -> None:
    module = Module(pure_with_state())
    module.init((data()[0][:8], data()[1][:8]))
    x = data()[0]
    assert not np.array_equal(module.net(x), module.net(x))  # noise, a new key at every call
    module.eval()
    np.testing.assert_array_equal(module.net(x), module.net(x))


def test_networks_show_in_the_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = Trainer(max_epochs=1, default_root_dir=tmp_path, **QUIET)
    trainer.fit(Module(stax_pair()), ArrayLoader(*data(), batch_size=8))
    assert "74        Total params" in capsys.readouterr().out  # 6 * 8 + 8 + 8 * 2 + 2


def test_several_transformed_functions_in_one_are_refused() -> None:
    hk = pytest.importorskip("haiku")

    def f() -> Any:
        net = hk.Linear(2)
        return (lambda x: net(x)), ((lambda x: net(x)),) * 2

    module = Module(hk.multi_transform(f))
    with pytest.raises(TypeError, match="several functions"):
        module.init((data()[0][:8], data()[1][:8]))
    with pytest.raises(TypeError, match="two functions"):
        PureNetwork(1, 2)


def test_batches_of_jraph_graphs(tmp_path: Path) -> None:
    jraph = pytest.importorskip("jraph")
    rng = np.random.default_rng(0)

    def graph() -> Any:
        nodes = rng.normal(size=(5, 3)).astype(np.float32)
        senders, receivers = rng.integers(0, 5, (2, 7))
        return jraph.GraphsTuple(
            nodes=nodes,
            edges=np.ones((7, 1), np.float32),
            senders=senders,
            receivers=receivers,
            globals=np.zeros((1, 1), np.float32),
            n_node=np.array([5]),
            n_edge=np.array([7]),
        )

    batches = []
    for _ in range(6):
        graphs = [graph() for _ in range(4)]
        target = np.array([g.nodes[:, 0].sum() > 0 for g in graphs], np.int32)
        batches.append((jraph.pad_with_graphs(jraph.batch_np(graphs), 32, 40, 5), np.append(target, 0)))

    class GraphNet(nn.Module):
        @nn.compact
        def __call__(self, graph: Any) -> Any:
            net = jraph.GraphConvolution(update_node_fn=nn.Dense(8), add_self_edges=True)
            nodes = nn.relu(net(graph).nodes)
            index = jnp.repeat(jnp.arange(5), graph.n_node, total_repeat_length=len(nodes))
            return nn.Dense(2)(jraph.segment_sum(nodes, index, 5))

    class GraphModule(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = GraphNet()

        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            graph, target = batch
            real = jraph.get_graph_padding_mask(graph)
            losses = optax.softmax_cross_entropy_with_integer_labels(self.net(graph), target)
            loss = jnp.where(real, losses, 0).sum() / real.sum()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return TX

    class Loader:
        def __len__(self) -> int:
            return len(batches)

        def __iter__(self) -> Any:
            return iter(batches)

    def run(epochs: int, root: str, **options: Any) -> Trainer:
        trainer = Trainer(max_epochs=epochs, default_root_dir=tmp_path / root, enable_model_summary=False, **QUIET)
        trainer.fit(GraphModule(), Loader(), **options)
        return trainer

    first = run(1, "a").callback_metrics["loss"]
    whole = run(30, "b")
    assert whole.callback_metrics["loss"] < 0.6 * first
    run(15, "c").save_checkpoint(tmp_path / "half.ckpt")
    resumed = run(30, "d", ckpt_path=tmp_path / "half.ckpt")
    jax.tree.map(np.testing.assert_array_equal, whole.state.params, resumed.state.params)


def test_equinox_and_haiku_steps_run_through_fit_as_they_are(tmp_path: Path) -> None:
    eqx = pytest.importorskip("equinox")
    x, y = data()
    batches = [(x[i : i + 8], y[i : i + 8]) for i in range(0, 48, 8)]
    model = eqx.nn.MLP(6, 2, 8, 1, key=jax.random.key(0))

    def loss_fn(model: Any, batch: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(batch[0]), batch[1]).mean()

    def train_step(model: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = eqx.filter_value_and_grad(loss_fn)(model, batch)
        updates, opt_state = TX.update(grads, opt_state, model)
        return eqx.apply_updates(model, updates), opt_state, loss

    want, opt = model, TX.init(eqx.filter(model, eqx.is_inexact_array))
    for batch in batches:
        want, opt, _ = eqx.filter_jit(train_step)(want, opt, batch)
    options = {"num_epochs": 1, "enable_model_summary": False, **QUIET}
    for step in (train_step, eqx.filter_jit(train_step)):
        got = jaxlightning.fit(model, batches, train_step=step, optimizer=TX, default_root_dir=tmp_path, **options)
        arrays = zip(*(jax.tree.leaves(eqx.filter(m, eqx.is_array)) for m in (got, want)), strict=True)
        assert all(np.allclose(a, b, rtol=0, atol=1e-7) for a, b in arrays)
    got = jaxlightning.fit(model, batches, loss_fn=loss_fn, optimizer=TX, default_root_dir=tmp_path, **options)
    arrays = zip(*(jax.tree.leaves(eqx.filter(m, eqx.is_array)) for m in (got, want)), strict=True)
    assert all(np.allclose(a, b, rtol=0, atol=1e-6) for a, b in arrays)


def test_a_haiku_step_resumes_through_fit_bit_by_bit(tmp_path: Path) -> None:
    hk = pytest.importorskip("haiku")
    net = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([8, 2])(x)))
    x, y = data()
    batches = [(x[i : i + 8], y[i : i + 8]) for i in range(0, 48, 8)]
    params = net.init(jax.random.key(0), x[:8])
    assert "mlp/~/linear_0" in params

    @jax.jit
    def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            return optax.softmax_cross_entropy_with_integer_labels(net.apply(params, batch[0]), batch[1]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = TX.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    def run(epochs: int, **options: Any) -> Any:
        return jaxlightning.fit(
            params, batches, train_step=train_step, optimizer=TX, num_epochs=epochs, default_root_dir=tmp_path,
            enable_progress_bar=False, enable_model_summary=False, **options,
        )  # fmt: skip

    whole = run(4, log_name="whole")
    run(2, log_name="half")
    resumed = run(4, log_name="half", ckpt_path="last")
    jax.tree.map(np.testing.assert_array_equal, whole, resumed)
