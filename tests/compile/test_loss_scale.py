"""The loss scale of float16: skipped updates, what is logged and saved, the numbers of torch's scaler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.models import Loader, make_engine

import jaxlightning as pl
from jaxlightning.compile.precision import ScalerState, finish_update, scale_loss, unscale
from jaxlightning.plugins import GradScaler, MixedPrecision

QUIET: dict[str, Any] = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)


class Overflows(pl.LightningModule):
    """Its gradient overflows float16 in the batches whose first number is large."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Dense(1, use_bias=False)

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        return self.net(batch).mean()

    def configure_optimizers(self) -> Any:
        return optax.inject_hyperparams(optax.adam)(0.1)


def test_an_overflow_skips_the_update_and_halves_the_scale() -> None:
    policy = MixedPrecision("16-mixed", scaler=GradScaler(init_scale=1024.0, growth_interval=3))
    engine = make_engine(Overflows(), precision=policy)
    good, bad = np.ones((2, 4), np.float32), np.full((2, 4), 6e4, np.float32)
    scales, counts, weights = [], [], []
    for i, batch in enumerate([good, bad, good, good, good, bad]):
        engine.train_step(batch, batch_idx=i, micro_step=i)
        state = engine.tree
        scales.append(float(state.scaler.scale))
        counts.append(int(state.opt_state[0].inner_state[0].count))
        weights.append(np.asarray(state.params["net"]["kernel"]).copy())
    assert scales == [1024.0, 512.0, 512.0, 512.0, 1024.0, 512.0]
    assert counts == [1, 1, 2, 3, 4, 4]
    assert np.array_equal(weights[0], weights[1])
    assert np.array_equal(weights[4], weights[5])
    assert not np.array_equal(weights[1], weights[2])
    assert engine.skipped_updates() == 2
    assert engine.trace_counts["train"] == 1


@pytest.mark.catalogue("PN02", adaptation="the loss scale lives in the device state; skipped updates are masked")
def test_a_skipped_update_counts_as_a_step_as_in_lightning_and_the_scale_is_logged_and_saved(tmp_path: Path) -> None:
    def policy() -> MixedPrecision:
        return MixedPrecision("16-mixed", "cpu", GradScaler(init_scale=1024.0, growth_interval=3))

    seen = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append((trainer.global_step, float(trainer.callback_metrics["loss_scale"])))

    good, bad = np.ones((2, 4), np.float32), np.full((2, 4), 6e4, np.float32)
    data = Loader([good, bad, good])
    options = {**QUIET, "default_root_dir": tmp_path}
    trainer = pl.Trainer(max_epochs=1, plugins=policy(), callbacks=Watch(), log_every_n_steps=1, **options)
    trainer.fit(Overflows(), data)
    # What is logged is the scale with which the batch was computed.
    assert seen == [(1, 1024.0), (2, 1024.0), (3, 512.0)]
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    saved = trainer._checkpoint_connector.dump_checkpoint()["MixedPrecision"]
    assert saved == {
        "scale": 512.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3, "_growth_tracker": 1,
        "skipped": 1,
    }  # fmt: skip
    again = pl.Trainer(max_epochs=2, plugins=policy(), **options)
    again.fit(Overflows(), data, ckpt_path=tmp_path / "a.ckpt")
    # good: tracker 2; overflow: halved, tracker 0; good: tracker 1
    assert float(again._engine.tree.scaler.scale) == 256.0
    assert again._engine.skipped_updates() == 2


def test_hooks_between_the_halves_see_unscaled_gradients() -> None:
    norms = []

    class Hooked(Overflows):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            norms.append(float(jnp.abs(self._engine.grads["net"]["kernel"]).max()))

    policy = MixedPrecision("16-mixed", scaler=GradScaler(init_scale=256.0))
    pl.Trainer(max_epochs=1, plugins=policy, **QUIET).fit(Hooked(), Loader([np.ones((2, 4), np.float32)] * 2))
    assert norms == [1.0, 1.0]


def test_the_scale_grows_as_torchs() -> None:
    torch = pytest.importorskip("torch")
    theirs = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)
    ours = GradScaler(init_scale=16.0, growth_interval=2)
    state = ours.init()
    rng = np.random.default_rng(0)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    for _ in range(60):
        finite = bool(rng.random() < 0.6)
        parameter.grad = None
        theirs.scale(parameter.sum() * (1.0 if finite else float("inf"))).backward()
        theirs.step(optimizer)
        theirs.update()
        state = ours.update(state, jnp.asarray(finite))
        assert float(state.scale) == theirs.get_scale()
        assert int(state.growth_tracker) == theirs.state_dict()["_growth_tracker"]


def test_the_parts_of_a_scaled_update_work_by_themselves() -> None:
    scaler = GradScaler(init_scale=8.0)
    state = scaler.init()
    params = jnp.array([1.0, 2.0])
    grads = unscale(state, jax.grad(lambda p: scale_loss(state, (p**2).sum()))(params))
    np.testing.assert_array_equal(grads, 2 * params)
    kept, after = finish_update(scaler, state, grads, params - grads, params)
    np.testing.assert_array_equal(kept, -params)
    assert int(after.growth_tracker) == 1
    kept, after = finish_update(scaler, state, grads * jnp.inf, params - grads, params)
    np.testing.assert_array_equal(kept, params)
    assert isinstance(after, ScalerState)
    assert float(after.scale) == 4.0
    assert finish_update(None, None, grads, 1, 2) == (1, None)
