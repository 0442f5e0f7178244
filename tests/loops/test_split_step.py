"""The step in two halves: real gradients in the hooks, and the same numbers as the fused step."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from support.tracing import TinyModule, loader

import jaxlightning as pl

pytestmark = pytest.mark.filterwarnings("ignore::jaxlightning.utilities.warnings.PossibleUserWarning")


def fit(module: Any, samples: int = 10, **flags: Any) -> Any:
    trainer = pl.Trainer(
        **{
            "max_epochs": 2,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "limit_val_batches": 0,
            "accelerator": "cpu",
            **flags,
        }
    )
    trainer.fit(module, loader(samples))
    return trainer


def params(trainer: Any) -> Any:
    return jax.tree.map(np.asarray, trainer.state.params)


class Momentum(TinyModule):
    def configure_optimizers(self) -> Any:
        return pl.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


class Split(Momentum):
    def on_after_backward(self) -> None:
        pass


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"accumulate_grad_batches": 2},
        {"gradient_clip_val": 0.01},
        {"accumulate_grad_batches": 3, "gradient_clip_val": 0.01},
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"},
    ],
)
def test_two_halves_give_the_numbers_of_the_fused_step(flags: dict[str, Any]) -> None:
    fused, halves = fit(Momentum(), **flags), fit(Split(), **flags)
    assert fused.global_step == halves.global_step
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), params(fused), params(halves))


def test_hooks_see_the_gradients_and_may_replace_them() -> None:
    norms: list[float] = []

    class Zeroing(Momentum):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            grads = self._engine.grads
            norms.append(float(sum(abs(leaf).sum() for leaf in jax.tree.leaves(grads))))
            self._engine.grads = jax.tree.map(lambda leaf: leaf * 0, grads)

        def configure_optimizers(self) -> Any:
            return pl.optim.SGD(self.parameters(), lr=0.1)

    trainer = fit(Zeroing(), max_epochs=1)
    first = params(trainer)
    assert len(norms) == 5
    assert all(norm > 0 for norm in norms)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(trainer.lightning_module, loader(10))
    jax.tree.map(np.testing.assert_array_equal, first, params(trainer))


def test_the_window_that_the_epoch_cuts_short_is_divided_by_its_count() -> None:
    """DIFFERENCES, GA02: with the loss w and SGD(lr=1) every window moves w by exactly 1."""

    class Linear(TinyModule):
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            return self.layer(np.eye(4, dtype=np.float32)[:1]).sum()

        def configure_optimizers(self) -> Any:
            return pl.optim.SGD(self.parameters(), lr=1.0)

    class Watch(pl.Callback):
        def __init__(self) -> None:
            self.values: list[float] = []

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            self.values.append(float(trainer.state.params["layer"]["kernel"][0, 0]))

    class Hooked(Linear):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            pass

    for kind in (Linear, Hooked):
        watch = Watch()
        fit(kind(), samples=12, max_epochs=1, accumulate_grad_batches=4, callbacks=[watch])
        moves = np.diff([watch.values[2], watch.values[3], watch.values[5]])
        np.testing.assert_allclose(moves, [-1.0, -1.0], rtol=1e-6)


def test_a_zero_grad_hook_that_keeps_the_gradients_adds_them_up() -> None:
    sums: list[float] = []

    class Keeping(TinyModule):
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            return self.layer(np.eye(4, dtype=np.float32)[:1]).sum()

        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            if batch_idx % 2 == 0:
                optimizer.zero_grad()

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            sums.append(float(self._engine.grads["layer"]["kernel"][0, 0]))

    fit(Keeping(), samples=8, max_epochs=1)
    np.testing.assert_allclose(sums, [1.0, 2.0, 1.0, 2.0])


def test_an_optimizer_step_hook_decides_about_the_update() -> None:
    class Every2(TinyModule):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            if batch_idx % 2 == 1:
                optimizer.step(closure=optimizer_closure)
            else:
                optimizer_closure()

    seen: list[Any] = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            seen.append(params(trainer)["layer"]["kernel"])

    trainer = fit(Every2(), samples=8, max_epochs=1, callbacks=[Watch()])
    assert trainer.global_step == 4
    assert not np.array_equal(seen[0], seen[1])
    np.testing.assert_array_equal(seen[1], seen[2])
    assert not np.array_equal(seen[2], seen[3])


def test_outputs_are_the_loss_divided_by_the_window_and_the_extras() -> None:
    """HK11."""
    seen: list[Any] = []

    class Extra(TinyModule):
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            return {"loss": self.layer(batch[0]).sum() * 0 + 6.0, "z": 3}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append((float(outputs["loss"]), outputs["z"]))

    fit(Extra(), samples=4, max_epochs=1, accumulate_grad_batches=2)
    assert seen == [(3.0, 3), (3.0, 3)]


def test_a_step_that_returns_none_leaves_everything_alone() -> None:
    class Nothing(Split):
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            self.layer(batch[0])

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            assert outputs == {}

    class FusedNothing(Momentum):
        training_step = Nothing.training_step

    for kind in (Nothing, FusedNothing):
        with pytest.warns(UserWarning, match="`training_step` returned `None`"):
            trainer = fit(kind(), max_epochs=1)
        assert trainer.global_step == 5
        first = params(trainer)
        trainer.fit_loop.max_epochs = 2
        with pytest.warns(UserWarning, match="`training_step` returned `None`"):
            trainer.fit(trainer.lightning_module, loader(10))
        jax.tree.map(np.testing.assert_array_equal, first, params(trainer))


@pytest.mark.parametrize(("frequency", "expected"), [(1, [1, 2, 3, 4, 5, 6]), (2, [2, 4, 6]), (4, [4])])
def test_the_frequency_of_a_scheduler_counts_optimizer_steps_of_the_run(frequency: int, expected: list[int]) -> None:
    """DIFFERENCES, SC02: over the whole run, three steps an epoch."""
    steps: list[int] = []

    class Scheduled(TinyModule):
        def configure_optimizers(self) -> Any:
            optimizer = pl.optim.SGD(self.parameters(), lr=0.1)
            scheduler = pl.optim.lr_scheduler.StepLR(optimizer, 1)
            return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": frequency}]

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            steps.append(self.trainer.global_step)
            super().lr_scheduler_step(scheduler, metric)

    fit(Scheduled(), samples=12, accumulate_grad_batches=2)
    assert steps == expected
