"""`Trainer(on_nonfinite=...)`: what becomes of updates that are not finite, how they are counted, logged and saved."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxlightning as pl
from jaxlightning.utilities.exceptions import MisconfigurationException

QUIET: dict[str, Any] = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)
BAD = (2, 5)


class Explodes(pl.LightningModule):
    """Its loss is NaN in two of eight batches."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Dense(1)
        self.weights: list[Any] = []

    def training_step(self, batch: Any, batch_idx: Any) -> jax.Array:
        return jnp.mean(self.net(batch) ** 2)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.weights.append(self.state_dict()["net.kernel"])

    def configure_optimizers(self) -> Any:
        return {"optimizer": optax.adam(lambda count: 0.1 / (1 + count))}


class Loader:
    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Any:
        for index in range(8):
            yield np.full((2, 3), np.nan if index in BAD else 1.0, np.float32)


def run(mode: str | None, **options: Any) -> tuple[Any, Explodes]:
    trainer = pl.Trainer(**{"max_epochs": 1, "on_nonfinite": mode, "log_every_n_steps": 1, **QUIET, **options})
    module = Explodes()
    trainer.fit(module, Loader())
    return trainer, module


def test_nothing_is_looked_at_by_default() -> None:
    trainer, module = run(None)
    assert np.isnan(module.weights[-1]).all()
    assert trainer.global_step == 8
    assert "nonfinite_updates" not in trainer.callback_metrics


def test_skip_leaves_parameters_and_state_and_goes_on() -> None:
    with pytest.warns(UserWarning, match="1 optimizer update had NaN or infinite gradients or loss, lastly number"):
        trainer, module = run("skip")
    assert trainer.global_step == 8
    for index in range(1, 8):
        assert np.array_equal(module.weights[index], module.weights[index - 1]) == (index in BAD)
    assert int(trainer.state.opt_state[0].count) == 6
    assert float(trainer.callback_metrics["nonfinite_updates"]) == 2.0
    # The schedule inside optax counts applied updates, and so does what is read of it.
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 / 7)
    assert trainer._engine.trace_counts["train"] == 1


def test_warn_applies_and_says_so() -> None:
    with pytest.warns(UserWarning, match="applied as they were"):
        trainer, module = run("warn")
    assert np.isnan(module.weights[-1]).all()
    assert float(trainer.callback_metrics["nonfinite_updates"]) == 6.0


def test_raise_stops_at_the_next_log_point_with_good_parameters() -> None:
    with pytest.raises(FloatingPointError, match=r"number 2 .*on_nonfinite=\"raise\""):
        run("raise")
    module = Explodes()
    with pytest.raises(FloatingPointError, match="2 optimizer updates"):  # without log points: at the epoch's end
        pl.Trainer(max_epochs=1, on_nonfinite="raise", log_every_n_steps=0, **QUIET).fit(module, Loader())
    assert np.isfinite(module.weights[-1]).all()


def test_split_steps_are_guarded_too() -> None:
    class Split(Explodes):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            pass

    trainer = pl.Trainer(max_epochs=1, on_nonfinite="skip", **QUIET)
    module = Split()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, Loader())
    assert np.isfinite(module.weights[-1]).all()
    assert int(trainer.state.opt_state[0].count) == 6


def test_counts_are_saved_and_restored(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer, _ = run("skip")
        trainer.save_checkpoint(tmp_path / "a.ckpt")
        again = pl.Trainer(max_epochs=2, on_nonfinite="skip", **QUIET)
        again.fit(Explodes(), Loader(), ckpt_path=tmp_path / "a.ckpt")
    assert float(again.callback_metrics["nonfinite_updates"]) == 4.0
    assert again.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 / 13)


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match="`on_nonfinite` must be one of"):
        pl.Trainer(on_nonfinite="explode", **QUIET)
