"""One training run that can be stopped after any batch, with everything about it that has to come back.

`run` trains; with `keep` it leaves after every batch a copy of the run's directory, as a process that was killed there
would. Resuming in such a copy and comparing with a run that was never stopped is the whole test.
"""

from __future__ import annotations

import random
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import jaxlightning as pl
from jaxlightning.callbacks import Checkpoint, EarlyStopping, LearningRateMonitor, ModelCheckpoint
from jaxlightning.loggers import CSVLogger
from jaxlightning.optim import SGD, Adam
from jaxlightning.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from support.checkpoints import QUIET
from support.resume_data import BATCH, CLASSES, FEATURES, SAMPLES, SOURCES, X, Y
from support.tracing import RecordingLogger

EPOCHS, BATCHES = 2, SAMPLES // BATCH


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(CLASSES)(nn.relu(nn.Dense(8)(x)))


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        x = nn.Conv(4, (3,))(x[..., None])
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
        x = nn.Dropout(0.3, deterministic=not train)(x.reshape(x.shape[0], -1))
        return nn.Dense(CLASSES)(x)


class Classifier(pl.LightningModule):
    """Draws from every stream of the host for each batch, logs in every way, steps a scheduler per batch."""

    network: type[nn.Module] = MLP

    def __init__(self) -> None:
        super().__init__()
        self.net = self.network()

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = (np.asarray(part) for part in batch)
        noise = np.random.randn(*x.shape) * 0.1 * random.random()
        torch = sys.modules.get("torch")
        extra = 0.0 if torch is None else float(torch.rand(()))
        return (x + noise + 0.01 * extra).astype(np.float32), y

    def loss(self, batch: Any) -> Any:
        logits = jax.nn.log_softmax(self.net(batch[0]).astype(jnp.float32))
        return -jnp.mean(jnp.take_along_axis(logits, batch[1][:, None], 1))

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("peak", jnp.max(batch[0]), on_epoch=True, on_step=False, reduce_fx="max")
        return loss

    def validation_step(self, batch: Any, batch_idx: Any) -> None:
        self.log("vl", self.loss(batch), on_step=True, on_epoch=True)

    def configure_optimizers(self) -> Any:
        optimizer = Adam(self.parameters(), lr=0.05)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 3, 0.5), "interval": "step"}}


class Convolutional(Classifier):
    network = CNN

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.1, momentum=0.9)
        plateau = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "vl_epoch"}}


class GAN(Classifier):
    """Two optimizers in one step, the generator's in every second one; written as for Lightning."""

    def __init__(self) -> None:
        pl.LightningModule.__init__(self)
        self.automatic_optimization = False
        self.generator, self.critic = nn.Dense(FEATURES), MLP()

    def training_step(self, batch: Any, batch_idx: Any) -> None:
        real, _ = batch
        opt_g, opt_d = self.optimizers()
        fake = self.generator(real[:, ::-1])
        d_loss = jnp.mean(nn.softplus(self.critic(jax.lax.stop_gradient(fake)))) + jnp.mean(
            nn.softplus(-self.critic(real))
        )
        opt_d.zero_grad()
        self.manual_backward(d_loss)
        opt_d.step()
        g_loss = jnp.mean(nn.softplus(-self.critic(self.generator(real[:, ::-1]))))
        self.manual_backward(g_loss)
        if (batch_idx + 1) % 2 == 0:  # its gradients live over two batches
            opt_g.step()
            opt_g.zero_grad()
        self.log_dict({"g": g_loss, "d": d_loss}, on_step=True, on_epoch=True)

    def validation_step(self, batch: Any, batch_idx: Any) -> None:
        self.log("vl", jnp.mean(self.critic(self.generator(batch[0])) ** 2), on_step=True, on_epoch=True)

    def configure_optimizers(self) -> Any:
        return Adam(self.generator.parameters(), lr=0.02), SGD(self.critic.parameters(), lr=0.05, momentum=0.9)


class Counting(pl.Callback):
    """Keeps a state, and logs from the host."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches += 1
        module.log("host", float(self.batches), on_step=False, on_epoch=True)

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches = state["batches"]


class KeepEveryStop(Checkpoint):
    """At every call of a hook: a checkpoint, and a copy of the run's directory.

    A checkpoint callback, so that it comes last: what runs after a save in its hook is not run again after a resume.
    """

    def __init__(self, root: Path, hook: str, calls: list[Any]) -> None:
        self.root, self.calls = root, calls
        self.rows: dict[int, int] = {}
        setattr(self, hook, self._keep)

    def _keep(self, trainer: Any, *arguments: Any) -> None:
        stop = len(self.rows)
        trainer.save_checkpoint(self.root / "run" / "stop.ckpt")
        trainer._checkpoint_connector.writer.wait()
        shutil.copytree(self.root / "run", self.root / str(stop))
        self.rows[stop] = len(rows(self.calls))


#: Name to the module and the Trainer's flags.
MODELS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "MLP": (Classifier, {}),
    "CNN with BatchNorm and dropout": (Convolutional, {}),
    "accumulation 3": (Classifier, {"accumulate_grad_batches": 3}),
    "GAN with manual optimization": (GAN, {}),
    "bf16-mixed": (Convolutional, {"precision": "bf16-mixed"}),
}
#: Further configurations; slow, on arrays only.
FURTHER: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "16-mixed": (Classifier, {"precision": "16-mixed"}),
    "validation in the epoch": (Classifier, {"val_check_interval": 2}),
    "validation in a window": (Classifier, {"val_check_interval": 2, "accumulate_grad_batches": 3}),
    "validation over epochs": (Classifier, {"val_check_interval": 3, "check_val_every_n_epoch": None}),
}


def rows(calls: list[Any]) -> list[Any]:
    return [(call["step"], call["metrics"]) for call in calls if call["hook"] == "log_metrics"]


def run(
    root: Path,
    model: str,
    source: str,
    *,
    ckpt_path: Any = None,
    keep: str | None = None,
    stop: Any = None,
    **more: Any,
) -> Any:
    """Train for two epochs.

    Args:
        root: With `keep` the folder of all copies, whose `run` is the run's; else the run's own.
        model: One of `MODELS`.
        source: One of `SOURCES`.
        ckpt_path: Where to continue.
        keep: The hook in which to keep a copy.
        stop: A callback that ends the run.
        **more: Further flags.

    Returns:
        Everything that has to be equal, and the number of rows that the loggers had at each stop.
    """
    make, flags = {**MODELS, **FURTHER}[model]
    loader = SOURCES[source]()  # imports its framework, whose streams are seeded below
    home = root / "run" if keep else root
    # A process that resumes has drawn other numbers before.
    random.seed(99 if ckpt_path else 1)
    np.random.seed(99 if ckpt_path else 1)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(99 if ckpt_path else 1)
    calls: list[dict[str, Any]] = []
    module, keeping = make(), KeepEveryStop(root, keep or "none", calls)
    callbacks = [
        EarlyStopping("vl", patience=10),
        ModelCheckpoint(home / "top", monitor="vl", save_top_k=2, filename="{epoch}-{step}-{vl:.6f}"),
        LearningRateMonitor(),
        Counting(),
        *([keeping] if keep else []),
        *([stop] if stop else []),
    ]
    trainer = pl.Trainer(
        default_root_dir=home,
        logger=[CSVLogger(home, version=0), RecordingLogger(calls)],
        log_every_n_steps=1,
        callbacks=callbacks,
        num_sanity_val_steps=1,
        **{**QUIET, "max_epochs": EPOCHS, **flags, **more},
    )
    with warnings.catch_warnings():
        for message in ("Checkpoint directory", "Be aware that when using `ckpt_path`", ".*many workers", "Experiment"):
            warnings.filterwarnings("ignore", message=message)
        trainer.fit(module, loader, pl.ArrayLoader((X[:6], Y[:6]), batch_size=2), ckpt_path=ckpt_path)
    state = module._engine.state_dict()
    found = {
        **{name: state[name] for name in ("params", "variables", "optimizer_states")},
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "callbacks": _without(
            home, {each.state_key: each.state_dict() for each in callbacks if each not in (keeping, stop)}
        ),
        "loops": {k: v for k, v in trainer.fit_loop.state_dict().items() if "progress" in k},
        "step": (trainer.global_step, trainer.current_epoch),
        "metrics": [
            {k: float(v) for k, v in each.items()} for each in (trainer.callback_metrics, trainer.logged_metrics)
        ],
        "streams": _streams(),
        "csv": (home / "lightning_logs" / "version_0" / "metrics.csv").read_bytes(),
        "files": sorted(path.name for path in (home / "top").iterdir()),
        "rows": rows(calls),
    }
    return found, keeping.rows


def differing(got: dict[str, Any], want: dict[str, Any]) -> list[str]:
    """Return the names of what is not the same, bit for bit."""
    return [name for name in want if _differs(got[name], want[name])]


def _differs(a: Any, b: Any) -> bool:
    leaves_a, leaves_b = (jax.tree_util.tree_flatten_with_path(each)[0] for each in (a, b))
    return [(path, _bits(leaf)) for path, leaf in leaves_a] != [(path, _bits(leaf)) for path, leaf in leaves_b]


def _bits(leaf: Any) -> Any:
    return leaf if isinstance(leaf, (str, bytes)) else (np.asarray(leaf).dtype.name, np.asarray(leaf).tobytes())


def _without(home: Path, value: Any) -> Any:
    if isinstance(value, dict):
        return {_without(home, key): _without(home, item) for key, item in value.items()}
    return value.replace(str(home.resolve()), "HOME") if isinstance(value, str) else value


def _streams() -> list[Any]:
    torch = sys.modules.get("torch")
    drawn = [random.random(), float(np.random.rand())]
    return drawn if torch is None else [*drawn, float(torch.rand(()))]
