"""Steps of the engine: compiled once, exact, refusing what they cannot repeat."""

from __future__ import annotations

import logging
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.models import Classifier, LinenNet, batches, make_engine, train

from jaxlightning import LightningModule
from jaxlightning.compile.paths import flatten
from jaxlightning.optim import parse_optimizers


def _trainable(params: Any) -> list[Any]:
    """Leaves without the bias before the normalisation: its true gradient is zero, Adam turns rounding into steps."""
    return [leaf for path, leaf in flatten(params).items() if path != "net/Dense_0/bias"]


def test_constant_shapes_compile_each_step_once() -> None:
    module = Classifier()
    engine = make_engine(module)
    for _ in range(2):
        train(engine, batches(), 4)
        module.eval()
        for i, batch in enumerate(batches(2)):
            engine.eval_step("validate", batch, batch_idx=i)
        module.train()
    assert engine.trace_counts == {"train": 1, "validate": 1}


def test_a_short_last_batch_costs_one_more_compile() -> None:
    engine = make_engine(Classifier())
    data = [*batches(2), tuple(leaf[:3] for leaf in batches()[0])]
    train(engine, data, 6)
    assert engine.trace_counts == {"train": 2}


def test_training_equals_a_hand_written_loop() -> None:
    engine = make_engine(Classifier())
    data = batches()
    engine.module.init(data[0])
    params, stats = engine.params["net"], engine.variables["net"]
    tx = optax.adam(1e-2)
    state = tx.init(params)

    @jax.jit
    def step(params: Any, stats: Any, state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            logits, updates = LinenNet().apply(
                {"params": params, **stats}, batch[0], train=True, mutable=["batch_stats"]
            )
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean(), updates

        (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), stats, state, loss

    losses = []
    for i in range(12):
        params, stats, state, loss = step(params, stats, state, data[i % 4])
        losses.append(float(loss))
    np.testing.assert_allclose(train(engine, data, 12), losses, rtol=1e-6)


def test_the_same_seed_gives_identical_parameters() -> None:
    def run(seed: int) -> Any:
        engine = make_engine(Classifier(LinenNet(dropout=0.3)), seed=seed)
        train(engine, batches(), 8)
        return jax.tree.leaves(engine.params)

    first, second, other = run(3), run(3), run(4)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_eager_steps_equal_compiled_ones_in_float64() -> None:
    with jax.enable_x64(True):
        data = batches(dtype=np.float64)
        results = []
        for jit in (True, False):
            engine = make_engine(Classifier(LinenNet(dtype=jnp.float64, dropout=0.2)), jit=jit)
            results.append((train(engine, data, 5), engine.params))
        np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-8)
        for a, b in zip(*(_trainable(params) for _, params in results), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-8)


def test_a_breakpoint_in_an_eager_step_sees_numbers() -> None:
    seen = []

    class Looks(Classifier):
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            loss = super().training_step(batch, batch_idx)
            if not isinstance(loss, jax.core.Tracer):
                seen.append((batch_idx, float(loss)))
            return loss

    engine = make_engine(Looks(), jit=False)
    losses = train(engine, batches(), 3)
    assert [i for i, _ in seen[-3:]] == [0, 1, 2]
    np.testing.assert_allclose([value for _, value in seen[-3:]], losses, rtol=1e-6)


def test_eager_steps_may_decide_by_host_numbers_from_the_first_batch() -> None:
    class Decides(Classifier):
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            loss = self.net(batch[0]).mean()
            return -loss if batch_idx % 2 == 0 and self.current_epoch == 0 else loss

    engine = make_engine(Decides(), jit=False)
    signs = [np.sign(loss) for loss in train(engine, batches(1), 2)]
    assert len(signs) == 2


def test_next_rng_is_distinct_per_call_and_step() -> None:
    class Draws(Classifier):
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            a, b = jax.random.uniform(self.next_rng()), jax.random.uniform(self.next_rng())
            return {"loss": self.net(batch[0]).mean(), "a": a, "b": b}

    engine = make_engine(Draws())
    values = []
    for i in range(5):
        out = engine.train_step(batches()[0], batch_idx=i, micro_step=i, want_outputs=True).outputs
        values += [float(out["a"]), float(out["b"])]
    assert len(set(values)) == 10


def test_host_numbers_follow_without_recompiling() -> None:
    class Reads(Classifier):
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            total = batch_idx + 10 * self.current_epoch + 100 * self.global_step
            return {"loss": self.net(batch[0]).mean(), "total": total * jnp.ones((), jnp.bfloat16), "idx": batch_idx}

    engine = make_engine(Reads())
    for i in range(3):
        out = engine.train_step(
            batches()[0], batch_idx=i, current_epoch=1, global_step=2, micro_step=i, want_outputs=True
        ).outputs
        assert float(out["total"]) == i + 210
        assert out["total"].dtype == jnp.bfloat16
        assert int(out["idx"]) == i
    assert engine.trace_counts == {"train": 1}


Pair = namedtuple("Pair", ["x", "y"])


@jax.tree_util.register_dataclass
@dataclass
class Record:
    x: Any
    y: Any


@pytest.mark.parametrize(
    "make", [tuple, list, lambda p: {"x": p[0], "y": p[1]}, lambda p: Pair(*p), lambda p: Record(*p)]
)
def test_batches_keep_their_container(make: Any) -> None:
    batch = make(batches()[0])
    kind = type(batch)

    class Any_(Classifier):
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            assert type(batch) is kind
            x = batch["x"] if isinstance(batch, dict) else getattr(batch, "x", None)
            return self.net(batch[0] if x is None else x).mean()

    make_engine(Any_()).train_step(batch, batch_idx=0)


def test_host_leaves_are_ignored_until_the_step_uses_them() -> None:
    class Ignores(Classifier):
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            return self.net(batch["x"]).mean()

    class Uses(Classifier):
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            return self.net(batch["x"]).mean() * len(batch["name"])

    batch = {"x": batches()[0][0], "name": ["a", "b"], "id": np.array(["u", "v"])}
    make_engine(Ignores()).train_step(batch, batch_idx=0)
    batch["name"] = "text"
    with pytest.raises(TypeError, match=r"batch leaf .*name.*a str that JAX cannot hold"):
        make_engine(Uses()).train_step(batch, batch_idx=0)


@pytest.mark.parametrize(
    ("returned", "error", "match"),
    [
        (lambda self, x: self.net(x), RuntimeError, r"loss of shape \(8, 4\).*loss.mean\(\)"),
        (lambda self, x: {"accuracy": self.net(x).mean()}, Exception, "without the key 'loss'"),
        (lambda self, x: 1.0, Exception, "must return a scalar array.*float"),
        (lambda self, x: "loss", Exception, "must return a scalar array.*str"),
        (lambda self, x: self.net(x).argmax(-1).sum(), RuntimeError, "dtype int"),
    ],
)
def test_a_step_without_a_usable_loss_is_refused(returned: Any, error: type[Exception], match: str) -> None:
    class Bad(Classifier):
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            return returned(self, batch[0])

    with pytest.raises(error, match=match):
        make_engine(Bad()).train_step(batches()[0], batch_idx=0)


def test_writes_that_cannot_be_repeated_are_refused_by_name_and_line_and_undone() -> None:
    class Phase:
        name = "warm"

    class Writes(Classifier):
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            loss = self.net(batch[0]).mean()
            if self.mode == "first":
                self.mode = "second"
            self.phase.seen = loss
            self.table[0] = 1.0
            return loss

    module = Writes()
    module.mode, module.phase, module.table = "first", Phase(), np.zeros(3)
    with pytest.raises(RuntimeError) as raised:
        make_engine(module).train_step(batches()[0], batch_idx=0)
    text = str(raised.value)
    assert "`self.mode` (it was read and then set to 'second', test_engine.py:" in text
    assert "`self.table` (a numpy array changed in place" in text
    assert "jit=False" in text
    assert module.mode == "first"
    assert vars(module.phase) == {}
    assert module.table.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("draw", ["random", "numpy"])
def test_host_random_draws_are_refused(draw: str) -> None:
    import random

    class Frozen(Classifier):
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            number = random.random() if draw == "random" else np.random.beta(1, 1)
            return self.net(batch[0]).mean() * number

    with pytest.raises(RuntimeError, match=r"drew random numbers from .*next_rng"):
        make_engine(Frozen()).train_step(batches()[0], batch_idx=0)


@pytest.mark.parametrize(
    ("body", "advice"),
    [
        (lambda x: x if x.sum() > 0 else -x, "jnp.where"),
        (lambda x: x * float(x.sum()), "it cannot become a"),
        (lambda x: x * x.sum().item(), "it cannot become a"),
        (lambda x: x * np.asarray(x), "it cannot become a"),
        (lambda x: x[x > 0], "do not depend on values"),
    ],
)
def test_jax_traps_come_with_advice(body: Any, advice: str) -> None:
    class Trap(Classifier):
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            return body(self.net(batch[0])).mean()

    with pytest.raises(Exception, match=r".") as caught:
        make_engine(Trap()).train_step(batches()[0], batch_idx=0)
    notes = " ".join(caught.value.__notes__)
    assert advice in notes
    assert "Trap.training_step" in notes


def test_an_in_place_write_comes_with_advice() -> None:
    class Trap(Classifier):
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            x = self.net(batch[0])
            x[0] = 1.0
            return x.mean()

    with pytest.raises(TypeError) as caught:
        make_engine(Trap()).train_step(batches()[0], batch_idx=0)
    assert ".at[i].set(v)" in " ".join(caught.value.__notes__)


@pytest.mark.torch
def test_a_torch_tensor_inside_a_step_comes_with_advice() -> None:
    import torch

    class Mixed(Classifier):
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            return torch.nn.functional.relu(self.net(batch[0]))

    class Returned(Classifier):
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            return torch.zeros(())

    with pytest.raises(TypeError) as caught:
        make_engine(Mixed()).train_step(batches()[0], batch_idx=0)
    assert "keep torch in the data loader" in " ".join(caught.value.__notes__)
    with pytest.raises(TypeError, match="returned a torch tensor"):
        make_engine(Returned()).train_step(batches()[0], batch_idx=0)


def test_effects_inside_a_transform_of_the_user_are_refused() -> None:
    class Logs(Classifier):
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            def inner(x: Any) -> Any:
                self.log("inner", x.sum())
                return x.sum()

            return jax.grad(inner)(batch[0]).sum() + self.net(batch[0]).mean()

    class Norm(Classifier):
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            return jax.grad(lambda x: self.net(x).sum())(batch[0]).sum() + self.net(batch[0]).mean()

    with pytest.raises(RuntimeError, match=r"self.log\('inner'.*inside a JAX transform"):
        make_engine(Logs()).train_step(batches()[0], batch_idx=0)
    with pytest.raises(RuntimeError, match=r"batch_stats.*inside a JAX transform"):
        make_engine(Norm()).train_step(batches()[0], batch_idx=0)


def test_a_changed_attribute_recompiles_once_and_is_never_stale(caplog: pytest.LogCaptureFixture) -> None:
    class Scaled(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.scale = 1.0
            self.config = {"power": [1, 2]}

        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            return {"loss": self.net(batch[0]).mean(), "scale": jnp.float32(self.scale * self.config["power"][0])}

    module = Scaled()
    engine = make_engine(module)
    step = lambda: float(engine.train_step(batches()[0], batch_idx=0, want_outputs=True).outputs["scale"])  # noqa: E731
    assert step() == 1.0
    module.scale = 5.0
    with caplog.at_level(logging.INFO, "jaxlightning"):
        assert step() == 5.0
    assert "self.scale changed" in caplog.text
    module.unrelated = 3
    assert step() == 5.0
    module.config["power"][0] = 2
    engine.check_constants()
    assert step() == 10.0
    assert engine.trace_counts == {"train": 3}


def test_none_skips_the_update_and_leaves_the_optimizer_alone() -> None:
    class Skips(Classifier):
        skip = False

        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            loss = super().training_step(batch, batch_idx)
            return None if self.skip else loss

    module = Skips()
    engine = make_engine(module)
    train(engine, batches(), 2)
    params, state = engine.params, engine.opt_state
    module.skip = True
    out = engine.train_step(batches()[0], batch_idx=2, want_outputs=True)
    assert out.skipped
    assert out.outputs == {}
    for before, after in zip(
        jax.tree.leaves((params, state)), jax.tree.leaves((engine.params, engine.opt_state)), strict=True
    ):
        np.testing.assert_array_equal(before, after)


class Ramp(LightningModule):
    """d(loss)/dw = the batch's number."""

    def __init__(self) -> None:
        super().__init__()
        import flax.linen as nn

        self.net = nn.Dense(1, use_bias=False, kernel_init=nn.initializers.zeros)

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        return self.net(batch).sum()

    def configure_optimizers(self) -> Any:
        return optax.sgd(1.0)


def _weight(engine: Any) -> float:
    return float(engine.params["net"]["kernel"][0, 0])


def test_accumulation_is_the_mean_over_the_real_count() -> None:
    engine = make_engine(Ramp())
    one = np.ones((1, 1), np.float32)
    for i in range(4):
        engine.train_step(one, batch_idx=i, accumulate=4, window_start=i == 0, apply=i == 3, window_count=i + 1)
    assert _weight(engine) == -1.0
    for i in range(2):
        engine.train_step(one, batch_idx=i, accumulate=4, window_start=i == 0, apply=i == 1, window_count=i + 1)
    assert _weight(engine) == -2.0


def test_clipping_works_on_the_accumulated_gradient() -> None:
    engine = make_engine(Ramp())
    for i, value in enumerate((10.0, -9.0)):
        engine.train_step(
            np.full((1, 1), value, np.float32), batch_idx=i, accumulate=2, window_start=i == 0, apply=i == 1,
            window_count=i + 1, clip=(1.0, "norm"),
        )  # fmt: skip
    assert _weight(engine) == pytest.approx(-0.5)


def test_the_split_path_gives_and_takes_real_gradients() -> None:
    fused, split = make_engine(Classifier()), make_engine(Classifier())
    for i, batch in enumerate(batches()):
        fused.train_step(batch, batch_idx=i, micro_step=i)
        split.grad_step(batch, batch_idx=i, micro_step=i)
        assert jax.tree.structure(split.grads) == jax.tree.structure(split.params)
        split.update_step()
    for a, b in zip(_trainable(fused.params), _trainable(split.params), strict=True):
        # float32, four Adam steps: XLA fuses the two programs differently
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    split.grad_step(batches()[0], batch_idx=0)
    before = split.params
    split.grads = jax.tree.map(jnp.zeros_like, split.grads)
    split.opt_state = optax.adam(1e-2).init(before)
    split.update_step()
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(split.params), strict=True):
        np.testing.assert_array_equal(a, b)


def test_detect_anomaly_names_the_leaf_and_keeps_the_parameters() -> None:
    class Explodes(Classifier):
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            return jnp.sqrt(self.net(batch[0]) * 0.0).sum()

    engine = make_engine(Explodes(), detect_anomaly=True)
    engine.module.init(batches()[0])
    before = jax.tree.leaves(engine.params)
    with pytest.raises(RuntimeError, match=r"the gradient of net/.* is not finite in training batch 7"):
        engine.train_step(batches()[0], batch_idx=0, micro_step=7)
    for a, b in zip(before, jax.tree.leaves(engine.params), strict=True):
        np.testing.assert_array_equal(a, b)


def test_views_can_be_read_and_set_between_steps() -> None:
    engine = make_engine(Classifier())
    train(engine, batches(), 1)
    held = engine.params
    train(engine, batches(), 1)
    jax.block_until_ready(jax.tree.map(lambda leaf: leaf + 1, held))  # a view outlives later steps
    engine.params = jax.tree.map(jnp.zeros_like, held)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(engine.params))
    with pytest.raises(ValueError, match=r"missing net/"):
        engine.params = {"net": {}}
    with pytest.raises(ValueError, match=r"shape \(2,\) instead of"):
        engine.params = jax.tree.map(lambda leaf: np.zeros(2), held)


def test_the_state_dict_round_trips_and_lists_differences() -> None:
    engine = make_engine(Classifier())
    train(engine, batches(), 3)
    saved = engine.state_dict()
    expected = train(engine, batches(), 3)
    fresh = make_engine(Classifier())
    fresh.load_state_dict(saved)
    assert train(fresh, batches(), 3) == expected
    other = make_engine(Classifier(LinenNet()))
    train(other, batches(features=9), 1)
    with pytest.raises(
        RuntimeError, match=r"differing: params/net/Dense_0/kernel is \(6, 16\) in the checkpoint, \(9, 16\) here"
    ):
        other.load_state_dict(saved)
    sgd = Classifier()
    sgd.configure_optimizers = lambda: optax.sgd(0.1, momentum=0.9)  # type: ignore[method-assign]
    reloaded = make_engine(sgd)
    with pytest.raises(RuntimeError, match=r"does not fit the optimizer"):
        reloaded.load_state_dict(saved)


def test_more_keys_than_a_block_are_all_kept() -> None:
    class Many(Classifier):
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            loss = self.net(batch[0]).mean()
            for i in range(40):
                self.log(f"k{i}", loss * 0 + i, on_epoch=True, reduce_fx=("mean", "sum", "min", "max")[i % 4])
            return loss

    engine = make_engine(Many())
    for i in range(3):
        out = engine.train_step(batches()[i], batch_idx=i, micro_step=i)
    values, acc, slots = np.asarray(out.values), engine.read_accumulators("train"), engine.slots("train")
    for i in range(40):
        slot, meta = slots["training_step", f"k{i}", None]
        assert values[slot] == i
        assert acc[0, slot] == (i if meta.reduce_fx in ("min", "max") else 3 * i)
        assert acc[1, slot] == 3
    engine.reset_accumulators("train")
    assert not engine.read_accumulators("train")[1].any()
    assert engine.trace_counts == {"train": 1}


def test_compiled_text_jaxpr_and_costs_can_be_had() -> None:
    engine = make_engine(Classifier())
    train(engine, batches(), 1)
    step = engine.compiled["train"]
    assert "dot" in step.as_text()
    assert step.jaxpr.jaxpr.eqns
    assert "stablehlo" in step.lower().as_text()
    assert step.cost_analysis()["flops"] > 0
    eager = make_engine(Classifier(), jit=False)
    train(eager, batches(), 1)
    with pytest.raises(RuntimeError, match="jit=False"):
        eager.compiled["train"].as_text()


def test_a_user_exception_keeps_its_type_and_line() -> None:
    class Raises(Classifier):
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        make_engine(Raises()).train_step(batches()[0], batch_idx=0)
    assert caught.traceback[-1].name == "training_step"


def test_a_forgotten_super_init_is_named() -> None:
    class Forgets(LightningModule):
        def __init__(self) -> None:
            self.x = 1

    with pytest.raises(RuntimeError, match=r"`Forgets.__init__` does not call `super\(\).__init__\(\)`"):
        _ = Forgets().training


def test_parameters_can_be_selected_before_they_exist() -> None:
    module = Classifier()
    selection = module.parameters()
    assert selection.matches("net/Dense_0/kernel")
    with pytest.raises(RuntimeError, match=r"init\(batch\)"):
        list(selection)
    module.init(batches()[0])
    assert len(list(selection)) == 6
    assert parse_optimizers(module, module.configure_optimizers()).optimizers
