"""Small modules for the engine's tests."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxlightning import LightningModule
from jaxlightning.compile import Engine
from jaxlightning.optim import parse_optimizers


class LinenNet(nn.Module):
    """Dense, BatchNorm, dropout, dense."""

    dropout: float = 0.0
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        x = nn.Dense(16, param_dtype=self.dtype)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9, param_dtype=self.dtype)(x)
        x = nn.Dropout(self.dropout, deterministic=not train)(nn.relu(x))
        return nn.Dense(4, param_dtype=self.dtype)(x)


class Classifier(LightningModule):
    """Cross-entropy of one network."""

    def __init__(self, net: Any = None, lr: float = 1e-2) -> None:
        super().__init__()
        self.net = LinenNet() if net is None else net
        self.lr = lr

    def forward(self, x: jax.Array) -> jax.Array:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        x, y = batch
        loss = optax.softmax_cross_entropy_with_integer_labels(self.net(x), y).mean()
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=x.shape[0])
        return loss

    def validation_step(self, batch: Any, batch_idx: Any) -> Any:
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(-1) == y).mean(), on_epoch=True)

    def configure_optimizers(self) -> Any:
        return optax.adam(self.lr)


def batches(n: int = 4, size: int = 8, features: int = 6, dtype: Any = np.float32) -> list[tuple[Any, Any]]:
    """Random batches, the same at every call."""
    rng = np.random.default_rng(0)
    return [
        (rng.standard_normal((size, features)).astype(dtype), rng.integers(0, 4, size).astype(np.int32))
        for _ in range(n)
    ]


def make_engine(module: Any, **options: Any) -> Engine:
    """An attached engine with the module's optimizer."""
    engine = Engine(module, **options)
    engine.attach()
    engine.set_optimizers(parse_optimizers(module, module.configure_optimizers()).optimizers)
    return engine


def train(engine: Engine, data: list[Any], steps: int) -> list[float]:
    """Losses of some steps."""
    outputs = [
        engine.train_step(data[i % len(data)], batch_idx=i, micro_step=i, global_step=i, want_outputs=True).outputs
        for i in range(steps)
    ]
    return [float(out["loss"]) for out in outputs]


class Loader:
    """Batches in their order."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        return iter(self.batches)
