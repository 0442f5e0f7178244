"""The same networks from the same weights on the same batches: every logged loss equals Lightning's."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import lightning.pytorch as reference
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from torch.utils.data import DataLoader, TensorDataset

import jaxlightning as pl

pytestmark = [
    pytest.mark.torch,
    pytest.mark.lightning,
    pytest.mark.filterwarnings("ignore::jaxlightning.utilities.warnings.PossibleUserWarning"),
]

STEPS = 50
SAMPLES, BATCH, CLASSES = 36, 8, 3  # five batches per epoch, the last one of four rows
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "log_every_n_steps": 1,
}


@functools.cache
def numbers(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Inputs in float64 and classes; images are channels first, as torch has them."""
    rng = np.random.default_rng(0)
    shape = (SAMPLES, 6) if kind == "mlp" else (SAMPLES, 3, 6, 6)
    return rng.standard_normal(shape), rng.integers(0, CLASSES, SAMPLES)


def data(kind: str, dtype: torch.dtype) -> DataLoader[Any]:
    inputs, classes = numbers(kind)
    table = TensorDataset(torch.from_numpy(inputs).to(dtype), torch.from_numpy(classes))
    return DataLoader(table, batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(5))


def torch_net(kind: str) -> torch.nn.Module:
    """The network in float64; its weights are the initial weights of both sides."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        if kind == "mlp":
            layers = [torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, CLASSES)]
        else:
            layers = [
                torch.nn.Conv2d(3, 4, 3, padding=1),
                torch.nn.ReLU(),
                torch.nn.Conv2d(4, 6, 3, stride=2, padding=1),
                torch.nn.ReLU(),
                torch.nn.AdaptiveAvgPool2d(1),
                torch.nn.Flatten(),
                torch.nn.Linear(6, CLASSES),
            ]
        return torch.nn.Sequential(*layers).double()


def initial(kind: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """Kernel and bias of every layer, in flax's order of axes."""
    out = []
    for layer in torch_net(kind):
        if isinstance(layer, (torch.nn.Linear, torch.nn.Conv2d)):
            kernel = layer.weight.detach().numpy()
            axes = (1, 0) if kernel.ndim == 2 else (2, 3, 1, 0)
            out.append((kernel.transpose(axes), layer.bias.detach().numpy()))
    return out


class Mlp(nn.Module):
    """The dense network, in linen."""

    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        weights = initial("mlp")
        for number, (kernel, bias) in enumerate(weights):
            x = nn.Dense(
                bias.size,
                param_dtype=self.dtype,
                kernel_init=lambda key, shape, dtype, value=kernel: jax.numpy.asarray(value, dtype),
                bias_init=lambda key, shape, dtype, value=bias: jax.numpy.asarray(value, dtype),
            )(x)
            x = nn.tanh(x) if number + 1 < len(weights) else x
        return x


class Cnn(nnx.Module):
    """The convolutional network, in nnx."""

    def __init__(self, dtype: Any) -> None:
        rngs = nnx.Rngs(0)
        self.conv1 = nnx.Conv(3, 4, (3, 3), padding=1, param_dtype=dtype, rngs=rngs)
        self.conv2 = nnx.Conv(4, 6, (3, 3), strides=2, padding=1, param_dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(6, CLASSES, param_dtype=dtype, rngs=rngs)
        for layer, (kernel, bias) in zip((self.conv1, self.conv2, self.head), initial("cnn"), strict=True):
            layer.kernel[...] = jax.numpy.asarray(kernel, dtype)
            layer.bias[...] = jax.numpy.asarray(bias, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.conv2(nnx.relu(self.conv1(x))))
        return self.head(x.mean((1, 2)))


class Reference(reference.LightningModule):
    def __init__(self, kind: str, optimizer: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.net = torch_net(kind).to(dtype)
        self.optimizer = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return {
            "sgd": lambda: torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9),
            "adam": lambda: torch.optim.Adam(self.parameters(), lr=0.01),
            "adamw": lambda: torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1),
        }[self.optimizer]()


class Ours(pl.LightningModule):
    def __init__(self, kind: str, optimizer: str, dtype: Any) -> None:
        super().__init__()
        self.net = Mlp(dtype) if kind == "mlp" else Cnn(dtype)
        self.optimizer = optimizer

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        loss = optax.softmax_cross_entropy_with_integer_labels(self.net(batch[0]), batch[1]).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return {
            "sgd": lambda: pl.optim.SGD(self.parameters(), lr=0.1, momentum=0.9),
            "adam": lambda: pl.optim.Adam(self.parameters(), lr=0.01),
            "adamw": lambda: pl.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1),
            "optax sgd": lambda: optax.sgd(0.1, momentum=0.9),
            "optax adam": lambda: optax.adam(0.01),
            "optax adamw": lambda: optax.adamw(0.01, weight_decay=0.1),
        }[self.optimizer]()


def recorder(base: type, losses: list[float]) -> Any:
    """A logger of either side that keeps the logged losses."""

    class Recorder(base):  # type: ignore[misc, valid-type]
        name = property(lambda self: "losses")
        version = property(lambda self: 0)

        def log_metrics(self, metrics: Any, step: Any = None) -> None:
            assert step == len(losses)
            losses.append(float(metrics["loss"]))

        def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
            pass

    return Recorder()


@functools.cache
def reference_losses(kind: str, optimizer: str, bits: int, steps: int) -> list[float]:
    from lightning.pytorch.loggers.logger import Logger

    dtype = torch.float64 if bits == 64 else torch.float32
    losses: list[float] = []
    trainer = reference.Trainer(max_steps=steps, logger=recorder(Logger, losses), **QUIET)
    trainer.fit(Reference(kind, optimizer, dtype), data(kind, dtype))
    assert len(losses) == steps
    return losses


def our_losses(kind: str, optimizer: str, bits: int, steps: int) -> list[float]:
    dtype = torch.float64 if bits == 64 else torch.float32
    losses: list[float] = []
    with jax.enable_x64(bits == 64):
        module = Ours(kind, optimizer, np.float64 if bits == 64 else np.float32)
        logger = recorder(pl.loggers.Logger, losses)
        trainer = pl.Trainer(max_steps=steps, logger=logger, channels_last=kind == "cnn", **QUIET)
        trainer.fit(module, data(kind, dtype))
    assert len(losses) == steps
    return losses


# The torch-named optimizers on both networks, optax's own on the small one; the rest of the grid is slow.
CASES = [
    pytest.param(kind, name, marks=[pytest.mark.slow] if kind == "cnn" and "optax" in name else [])
    for kind in ("mlp", "cnn")
    for name in ("sgd", "adam", "adamw", "optax sgd", "optax adam", "optax adamw")
]


@pytest.mark.parametrize(("kind", "optimizer"), CASES)
def test_in_float64_fifty_logged_losses_agree(kind: str, optimizer: str) -> None:
    expected = reference_losses(kind, optimizer.removeprefix("optax "), 64, STEPS)
    np.testing.assert_allclose(our_losses(kind, optimizer, 64, STEPS), expected, rtol=0, atol=1e-7)
    assert np.ptp(expected) > 0.1  # it trained, so the agreement means something


@pytest.mark.parametrize(("kind", "optimizer"), CASES)
def test_in_float32_ten_logged_losses_agree(kind: str, optimizer: str) -> None:
    expected = reference_losses(kind, optimizer.removeprefix("optax "), 32, 10)
    np.testing.assert_allclose(our_losses(kind, optimizer, 32, 10), expected, rtol=1e-4, atol=0)
