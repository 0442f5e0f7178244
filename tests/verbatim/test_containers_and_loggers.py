"""Lists and dictionaries on the module that steps fill, and loggers called from steps, as people write them."""

from __future__ import annotations

import collections
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.verbatim import QUIET, batches, check, equal, run

import jaxlightning as pl
from jaxlightning.loggers import Logger

pytestmark = [pytest.mark.slow]

RNG = np.random.RandomState(0)
X = RNG.randn(32, 6)
Y = RNG.randint(0, 3, 32).astype(np.int32)
DATA = (X, Y)


class Body(pl.LightningModule):
    """A classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Dense(3)

    def losses(self, batch: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        loss = self.losses(batch).mean()
        self.effect(loss, batch, batch_idx)
        self.log("loss", loss)
        return loss

    def effect(self, loss: Any, batch: Any, batch_idx: Any) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return optax.sgd(0.1)


def test_step_outputs_collected_and_cleared_at_the_epoch_end() -> None:
    class Documented(Body):
        def __init__(self) -> None:
            super().__init__()
            self.training_step_outputs: list[Any] = []
            self.validation_step_outputs: list[Any] = []

        def effect(self, loss: Any, batch: Any, batch_idx: Any) -> None:
            self.training_step_outputs.append(loss)

        def on_train_epoch_end(self) -> None:
            assert len(self.training_step_outputs) == 8
            self.log("epoch mean", jnp.stack(self.training_step_outputs).mean())
            self.training_step_outputs.clear()

        def validation_step(self, batch: Any, batch_idx: Any) -> Any:
            loss = self.losses(batch).mean()
            self.validation_step_outputs.append(loss)
            return loss

        def on_validation_epoch_end(self) -> None:
            self.log("val mean", jnp.stack(self.validation_step_outputs).mean())
            self.validation_step_outputs.clear()

    out = check(Documented, DATA, val_data=DATA)
    assert out.trainer._engine.trace_counts == {"train": 1, "validate": 1}
    assert out.module.training_step_outputs == []


class _Val(pl.Callback):
    """Gives the module what it validated with, for a comparison."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        self.seen.append(module.collected)
        module.reset()


@pytest.mark.parametrize("kind", ["lists", "defaultdict", "dict"])
def test_outputs_of_several_validation_loaders(kind: str) -> None:
    class Several(Body):
        def __init__(self) -> None:
            super().__init__()
            self.reset()

        def reset(self) -> None:
            made = {"lists": [[], []], "defaultdict": collections.defaultdict(list), "dict": {}}
            self.collected: Any = made[kind]

        def validation_step(self, batch: Any, batch_idx: Any, dataloader_idx: int = 0) -> None:
            entry = {"y": batch[1], "loss": self.losses(batch)}
            if kind == "dict":
                self.collected.setdefault(dataloader_idx, []).append(entry)
            else:
                self.collected[dataloader_idx].append(entry)

    seen = []
    for jit in (True, False):
        callback = _Val()
        module = Several()
        loaders = [batches(DATA, 4, "float32"), batches((X[:12], Y[:12]), 4, "float32")]
        trainer = pl.Trainer(**{**QUIET, "max_epochs": 2, "jit": jit, "callbacks": [callback]})
        trainer.fit(module, batches(DATA, 4, "float32"), loaders)
        seen.append([[found[i] for i in range(2)] for found in callback.seen if found])
        if jit:
            assert trainer._engine.trace_counts["validate"] == 2  # one for each loader
    assert [len(part) for part in seen[0][-1]] == [8, 3]
    assert list(seen[0][-1][0][0]) == ["y", "loss"]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), *seen)


def test_items_written_to_a_dict_and_strings_of_the_batch_number() -> None:
    class Latest(Body):
        def __init__(self) -> None:
            super().__init__()
            self.latest: dict[str, Any] = {}
            self.numbers: list[Any] = []

        def effect(self, loss: Any, batch: Any, batch_idx: Any) -> None:
            self.latest["loss"] = loss
            self.latest.update(mean=batch[0].mean(), size=len(batch[0]))
            self.numbers.append((batch_idx, self.global_step))

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.log("kept", self.latest["loss"])

    out = check(Latest, DATA)
    assert list(out.module.latest) == ["loss", "mean", "size"]
    assert out.module.latest["size"] == 4
    assert out.module.numbers[:10] == [(i % 8, i) for i in range(10)]
    assert out.trainer._engine.trace_counts == {"train": 1}


def test_a_few_first_images_are_kept() -> None:
    class Few(Body):
        def __init__(self) -> None:
            super().__init__()
            self.images: list[Any] = []

        def effect(self, loss: Any, batch: Any, batch_idx: Any) -> None:
            if len(self.images) < 2:
                self.images.append(batch[0][0])

    out = check(Few, DATA)
    assert len(out.module.images) == 2
    np.testing.assert_allclose(out.module.images, X[[0, 4]], rtol=1e-12)


class Recorder(Logger):
    """Keeps every call, with plain numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    name = "recorder"
    version = 3

    @property
    def experiment(self) -> Any:
        return _Writer(self.calls)

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.calls.append(("log_metrics", {name: float(value) for name, value in metrics.items()}, step))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        pass


class _Writer:
    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> None:
            plain = jax.tree.map(lambda a: np.asarray(a).tolist() if hasattr(a, "shape") else a, (args, kwargs))
            self.calls.append((name, *plain))

        return call


def test_calls_of_loggers_happen_at_every_step_in_order_with_values(capsys: pytest.CaptureFixture[str]) -> None:
    class Talks(Body):
        def effect(self, loss: Any, batch: Any, batch_idx: Any) -> None:
            board = self.logger.experiment
            board.add_scalar("a/loss", loss, self.global_step)
            if batch_idx % 4 == 0:
                board.add_histogram("weights", self.net.params["kernel"], global_step=self.global_step)
                board.add_image("image", batch[0][:1, None], self.global_step)
                board.add_figure("figure", "a figure", self.global_step)
            self.logger.log_metrics({"z": loss * 2, "a": batch_idx}, step=self.global_step)
            for logger in self.loggers:
                logger.experiment.add_text("name", f"{logger.name} {logger.version}")
            self.print("batch", batch_idx, "of", self.current_epoch)

    runs, texts = [], []
    for jit in (True, False):
        logger = Recorder()
        out = run(Talks, DATA, jit=jit, dtype="float32", logger=logger, log_every_n_steps=4)
        runs.append((out, [call for call in logger.calls if call[0] != "log_metrics" or "z" in call[1]]))
        texts.append([line for line in capsys.readouterr().out.splitlines() if line.startswith("batch")])
    equal(runs[0][0], runs[1][0], 1e-5)
    assert texts[0] == texts[1] == [f"batch {i} of {epoch}" for epoch in range(3) for i in range(8)]
    ours, eager = runs[0][1], runs[1][1]
    assert [call[0] for call in ours] == [call[0] for call in eager]
    assert [call[2] for call in ours if call[0] == "log_metrics"] == list(range(24))
    assert list(ours[4][1]) == ["z", "a"]
    for mine, other in zip(ours, eager, strict=True):
        left, right = jax.tree.leaves(mine[1:]), jax.tree.leaves(other[1:])
        for a, b in zip(left, right, strict=True):
            assert a == b if isinstance(a, str) else a == pytest.approx(b, rel=1e-4, abs=1e-5)
    assert runs[0][0].trainer._engine.trace_counts == {"train": 2}


def test_a_result_of_a_logger_that_the_step_uses_is_refused() -> None:
    class Asks(Body):
        def effect(self, loss: Any, batch: Any, batch_idx: Any) -> None:
            if self.logger.experiment.get_step() > 3:
                self.print("late")

    with pytest.raises(RuntimeError, match=r"uses what `self.logger.experiment.get_step\(...\)` returns"):
        run(Asks, DATA, dtype="float32", logger=Recorder(), log_every_n_steps=4)


def test_a_step_with_and_without_a_logger() -> None:
    class Maybe(Body):
        def effect(self, loss: Any, batch: Any, batch_idx: Any) -> None:
            if self.logger is not None:
                self.logger.experiment.add_scalar("loss", loss, batch_idx)

    check(Maybe, DATA)
    logger = Recorder()
    run(Maybe, DATA, dtype="float32", logger=logger, log_every_n_steps=4)
    assert len([call for call in logger.calls if call[0] == "add_scalar"]) == 24
