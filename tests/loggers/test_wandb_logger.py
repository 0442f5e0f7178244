"""Weights & Biases offline, by one argument; in a process of its own, because its service outlives a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxlightning.loggers import WandbLogger

SCRIPT = """
import jax, jax.numpy as jnp, numpy as np, optax
import jaxlightning
from jaxlightning.loggers import WandbLogger
from jaxlightning import TrainState

state = TrainState.create(apply_fn=None, params={"w": jnp.ones(3)}, tx=optax.sgd(0.1))

@jax.jit
def train_step(state, batch):
    loss, grads = jax.value_and_grad(lambda p: jnp.square(batch @ p["w"]).mean())(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}

logger = WandbLogger(offline=True, save_dir="here", project="p", name="n")
batches = [np.ones((4, 3), np.float32)] * 4
jaxlightning.fit(state, batches, batches, train_step=train_step, eval_step=lambda state, batch: batch.mean(),
                 num_epochs=2, log_every_n_steps=1, hparams={"lr": 0.1}, logger=logger, enable_progress_bar=False,
                 enable_model_summary=False)
run = logger.experiment
print("config", dict(run.config))
summary = {key: run.summary[key] for key in ("loss", "learning_rate", "accuracy", "trainer/global_step")}
print("summary", sorted(summary), summary["accuracy"])
run.finish()
"""


@pytest.mark.slow
def test_a_run_is_recorded_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    env = {**os.environ, "WANDB_SILENT": "true", "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "config {'lr': 0.1}" in done.stdout
    assert "summary ['accuracy', 'learning_rate', 'loss', 'trainer/global_step'] 1" in done.stdout
    (file,) = (tmp_path / "here").rglob("*.wandb")
    assert file.stat().st_size > 0


def test_without_the_package_the_way_to_get_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    logger = WandbLogger(offline=True, project="p")
    assert logger.name == "p"
    assert logger.version is None
    with pytest.raises(ModuleNotFoundError, match=r"jaxlightning\[wandb\]"):
        logger.log_metrics({"loss": 1.0}, step=0)


def test_a_model_cannot_be_uploaded_offline() -> None:
    with pytest.raises(ValueError, match="nowhere to upload"):
        WandbLogger(offline=True, log_model=True)
