"""Arrays and containers on a module: carried from step to step, filled by steps, seen by hooks."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.models import batches, make_engine, train

import jaxlightning as pl
from jaxlightning import ArrayLoader, LightningModule

DATA = batches()


def both(make: Any, steps: int = 6, shown: tuple[str, ...] = ()) -> tuple[Any, Any]:
    """Trains a module compiled and eagerly; what they show afterwards must be equal."""
    modules, counts = [], {}
    for jit in (True, False):
        module = make()
        engine = make_engine(module, jit=jit)
        train(engine, DATA, steps)
        counts = engine.trace_counts if jit else counts
        modules.append(module)
    for name in shown:
        same(getattr(modules[0], name), getattr(modules[1], name))
    return modules[0], counts


def same(a: Any, b: Any) -> None:
    """Equal structure, equal arrays up to rounding."""
    if dataclasses.is_dataclass(a):
        a, b = vars(a), vars(b)
    if isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, list | tuple | collections.deque):
        assert type(a) is type(b)
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    elif isinstance(a, str):
        assert a == b
    else:
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


class Step(LightningModule):
    """Calls `step` for whatever the test does to the module."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Dense(4)

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        logits = self.net(batch[0])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()
        return loss + self.step(logits, loss, batch_idx)

    def step(self, logits: Any, loss: Any, batch_idx: Any) -> Any:
        return 0.0

    def configure_optimizers(self) -> Any:
        return optax.sgd(0.1)


def test_an_array_attribute_is_carried_and_compiled_once() -> None:
    class Net(Step):
        def __init__(self) -> None:
            super().__init__()
            self.queue = jnp.zeros((3, 4))

        def step(self, logits: Any, loss: Any, batch_idx: Any) -> Any:
            gap = ((logits.mean(0) - self.queue[0]) ** 2).sum()
            self.queue = jnp.roll(self.queue, 1, 0).at[0].set(jax.lax.stop_gradient(logits.mean(0)))
            return gap

    module, counts = both(Net, shown=("queue",))
    assert counts == {"train": 1}
    assert module.queue.shape == (3, 4)


def test_a_number_that_becomes_an_array_settles_with_one_compile() -> None:
    class Net(Step):
        def __init__(self) -> None:
            super().__init__()
            self.ema = 0.0

        def step(self, logits: Any, loss: Any, batch_idx: Any) -> Any:
            self.ema = 0.9 * self.ema + 0.1 * jax.lax.stop_gradient(loss)
            return 0.1 * self.ema

    assert both(Net, shown=("ema",))[1] == {"train": 1}


def test_an_attribute_made_in_the_step_and_guarded_by_hasattr_is_exact() -> None:
    class Net(Step):
        def step(self, logits: Any, loss: Any, batch_idx: Any) -> Any:
            if not hasattr(self, "mean"):
                self.mean = logits.mean(0)
            else:
                self.mean = 0.5 * self.mean + 0.5 * logits.mean(0)
            previous = getattr(self, "previous", None)
            self.previous = logits.sum()
            return 0.0 if previous is None else 1e-3 * previous

    assert both(Net, shown=("mean", "previous"))[1] == {"train": 2}


def test_appends_arrive_concrete_after_every_step() -> None:
    class Net(Step):
        def __init__(self) -> None:
            super().__init__()
            self.losses: list[Any] = []
            self.rows: list[Any] = []
            self.by_parity: Any = collections.defaultdict(list)
            self.last: dict[str, Any] = {}
            self.recent: Any = collections.deque(maxlen=2)

        def step(self, logits: Any, loss: Any, batch_idx: Any) -> Any:
            self.losses.append(loss)
            self.rows += [{"z": logits, "a": loss}, (batch_idx, "text")]
            self.by_parity["even"].append(loss)
            self.last["loss"] = loss
            self.last.update(z=logits)
            self.recent.append(loss)
            return 0.0

    module, counts = both(Net, shown=("losses", "by_parity", "last", "recent"))
    assert counts == {"train": 1}
    assert len(module.losses) == 6
    assert all(isinstance(loss, jax.Array) for loss in module.losses)
    assert list(module.rows[0]) == ["z", "a"]
    assert [row for row in module.rows if isinstance(row, tuple)] == [(i, "text") for i in range(6)]
    assert len(module.recent) == 2


def test_a_filled_list_holds_no_more_than_its_items() -> None:
    class Net(Step):
        def __init__(self) -> None:
            super().__init__()
            self.outputs: list[Any] = []

        def step(self, logits: Any, loss: Any, batch_idx: Any) -> Any:
            self.outputs.append(logits)
            return 0.0

    module = Net()
    engine = make_engine(module)
    train(engine, DATA, 4)
    alive = len(jax.live_arrays())
    train(engine, DATA, 20)
    assert len(jax.live_arrays()) == alive + 20
    module.outputs.clear()
    assert len(jax.live_arrays()) == alive - 4


def test_an_appended_state_array_outlives_the_next_step() -> None:
    class Net(Step):
        def __init__(self) -> None:
            super().__init__()
            self.queue = jnp.zeros(4)
            self.fixed = jnp.arange(3.0)
            self.seen: list[Any] = []

        def step(self, logits: Any, loss: Any, batch_idx: Any) -> Any:
            self.queue = self.queue + 1
            self.seen.append((self.queue, self.fixed))
            return 0.0

    module, _ = both(Net, shown=("seen", "queue"))
    assert [float(queue[0]) for queue, _ in module.seen] == [1, 2, 3, 4, 5, 6]
    np.testing.assert_array_equal(module.seen[0][1], [0, 1, 2])


@pytest.mark.parametrize("kind", ["dict", "dataclass", "struct", "tuple", "nested"])
def test_containers_of_arrays_are_carried(kind: str) -> None:
    import flax.struct

    @dataclasses.dataclass
    class Stats:
        mean: Any
        count: Any

    @flax.struct.dataclass
    class Frozen:
        mean: Any
        count: Any

    zero = jnp.zeros(4)

    class Net(Step):
        def __init__(self) -> None:
            super().__init__()
            self.stats: Any = {
                "dict": {"mean": zero, "count": 0},
                "dataclass": Stats(zero, jnp.zeros(())),
                "struct": Frozen(zero, jnp.zeros(())),
                "tuple": (zero, jnp.zeros(())),
                "nested": [{"a": [zero, (zero, 1.5)]}, "text"],
            }[kind]

        def step(self, logits: Any, loss: Any, batch_idx: Any) -> Any:
            mean = jax.lax.stop_gradient(logits.mean(0))
            s = self.stats
            if kind == "dict":
                s["mean"] = 0.5 * s["mean"] + mean
                s["count"] += 1
                return s["mean"].sum() * 1e-3
            if kind == "dataclass":
                s.mean, s.count = 0.5 * s.mean + mean, s.count + 1
                return s.mean.sum() * 1e-3
            if kind == "struct":
                self.stats = s.replace(mean=0.5 * s.mean + mean, count=s.count + 1)
                return self.stats.mean.sum() * 1e-3
            if kind == "tuple":
                self.stats = (0.5 * s[0] + mean, s[1] + 1)
                return self.stats[0].sum() * 1e-3
            s[0]["a"][0] = s[0]["a"][0] + mean * s[0]["a"][1][1]
            return s[0]["a"][0].sum() * 1e-3

    assert both(Net, shown=("stats",))[1] == {"train": 1}


def test_a_list_that_the_step_reads_is_carried_and_a_growing_one_is_refused() -> None:
    class Window(Step):
        def __init__(self) -> None:
            super().__init__()
            self.window: list[Any] = []

        def step(self, logits: Any, loss: Any, batch_idx: Any) -> Any:
            self.window.append(jax.lax.stop_gradient(loss))
            if len(self.window) > 3:
                self.window.pop(0)
            return jnp.stack(self.window).mean()

    assert both(Window, steps=10, shown=("window",))[1] == {"train": 4}

    class Growing(Step):
        def __init__(self) -> None:
            super().__init__()
            self.history = jnp.zeros((0,))

        def step(self, logits: Any, loss: Any, batch_idx: Any) -> Any:
            self.history = jnp.concatenate([self.history, loss[None]])
            return self.history.sum()

    with pytest.raises(RuntimeError, match=r"`self.history` changes its shape or dtype.*ring buffer"):
        train(make_engine(Growing()), DATA, 8)


def test_hooks_read_and_assign_carried_attributes() -> None:
    class Net(Step):
        def __init__(self) -> None:
            super().__init__()
            self.scale = jnp.ones(())
            self.stats = {"sum": jnp.zeros(())}

        def step(self, logits: Any, loss: Any, batch_idx: Any) -> Any:
            self.stats["sum"] = self.stats["sum"] + self.scale
            return 0.0 * self.scale

    results = []
    for jit in (True, False):
        module = Net()
        engine = make_engine(module, jit=jit)
        train(engine, DATA, 2)
        held = module.scale
        module.scale = 10.0 * module.scale
        train(engine, DATA, 2)
        module.stats["sum"] = module.stats["sum"] + 100.0
        train(engine, DATA, 1)
        results.append((float(held), float(module.scale), float(module.stats["sum"])))
        assert not jit or engine.trace_counts == {"train": 1}
        module.scale = None
        assert module.scale is None
    assert results == [(1.0, 10.0, 132.0)] * 2


def test_evaluation_steps_write_back_too() -> None:
    class Net(Step):
        def __init__(self) -> None:
            super().__init__()
            self.confusion = jnp.zeros((4, 4))
            self.outputs: list[list[Any]] = [[], []]

        def validation_step(self, batch: Any, batch_idx: Any, dataloader_idx: int = 0) -> None:
            predicted = self.net(batch[0]).argmax(-1)
            self.confusion = self.confusion.at[batch[1], predicted].add(1)
            self.outputs[dataloader_idx].append(predicted)

    results = []
    for jit in (True, False):
        module = Net()
        engine = make_engine(module, jit=jit)
        train(engine, DATA, 1)
        for loader in range(2):
            for i, batch in enumerate(DATA):
                engine.eval_step("validate", batch, batch_idx=i, dataloader_idx=loader)
        assert float(module.confusion.sum()) == 64
        assert [len(part) for part in module.outputs] == [4, 4]
        results.append((module.confusion, module.outputs))
        if jit:
            assert engine.trace_counts == {"train": 1, "validate": 2}
    same(*results)


def test_strings_and_flags_that_are_only_written_are_set_after_the_step() -> None:
    class Net(Step):
        def step(self, logits: Any, loss: Any, batch_idx: Any) -> Any:
            self.phase = "trained"
            self.nothing = None
            return 0.0

    module, counts = both(Net)
    assert (module.phase, module.nothing, counts) == ("trained", None, {"train": 1})


@pytest.mark.parametrize("value", [None, "text"])
def test_a_carried_attribute_stays_an_array(value: Any) -> None:
    class Net(Step):
        def __init__(self) -> None:
            super().__init__()
            self.scale = jnp.ones(())

        def step(self, logits: Any, loss: Any, batch_idx: Any) -> Any:
            scale = self.scale
            self.scale = value
            return scale

    module = Net()
    with pytest.raises(RuntimeError, match=r"`self.scale` \(it was read and then set to (None|'text')"):
        make_engine(module).train_step(DATA[0], batch_idx=0)
    assert float(module.scale) == 1


def test_another_trainer_takes_over_what_steps_changed() -> None:
    class Counts(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Dense(2)
            self.register_buffer("seen", jnp.zeros((), jnp.int32))
            self.center, self.recent = jnp.zeros(2), {"last": jnp.zeros(2)}

        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            self.seen = self.seen + 1
            self.center = self.center + 1.0
            self.recent["last"] = self.recent["last"] + self.center
            return (self.net(batch) ** 2).mean()

        def predict_step(self, batch: Any, batch_idx: Any) -> Any:
            return self.net(batch) * 0 + self.center + self.recent["last"]

        def configure_optimizers(self) -> Any:
            return optax.sgd(0.1)

    def trainer() -> pl.Trainer:
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        return pl.Trainer(max_epochs=1, **quiet)

    module, loader = Counts(), ArrayLoader(np.ones((4, 4), np.float32), batch_size=2)
    trainer().fit(module, loader)
    other = trainer()
    np.testing.assert_array_equal(other.predict(module, loader)[0], np.full((2, 2), 5.0))
    other.fit(module, loader)
    assert (int(module.seen), float(module.center[0]), float(module.recent["last"][0])) == (4, 4.0, 10.0)
    assert {name: int(value) for name, value in module.state_dict().items() if name == "seen"} == {"seen": 4}


def test_a_counter_in_a_container_is_an_array() -> None:
    class Net(Step):
        def __init__(self) -> None:
            super().__init__()
            self.counts = {"n": 0}

        def step(self, logits: Any, loss: Any, batch_idx: Any) -> Any:
            self.counts["n"] += 1
            return loss if self.counts["n"] % 2 == 0 else 0.0

    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        both(Net)
    assert "`self.count`; numbers in a dict" in "".join(caught.value.__notes__)


def test_a_write_around_the_module_is_refused() -> None:
    class Net(Step):
        def __init__(self) -> None:
            super().__init__()
            self.seen = 0

        def step(self, logits: Any, loss: Any, batch_idx: Any) -> Any:
            self.__dict__["seen"] = self.seen + 1
            return 0.0

    with pytest.raises(RuntimeError, match=r"self\.seen"):
        both(Net)
