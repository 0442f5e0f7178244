"""One scenario, run by PyTorch Lightning and by us: what it returns has to be equal.

A scenario is a function of a `Side`, which has the names that both libraries share; what it writes in a hook or a
callback is the same code on both sides. Only the tiny model and its loaders are made of torch here and of flax there.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "logger": False,
}


def rows(samples: int, dim: int = 4) -> np.ndarray[Any, Any]:
    """The data of both sides: every element of row i is i."""
    return np.repeat(np.arange(samples, dtype=np.float32)[:, None], dim, 1)


class Side:
    """One of the two libraries."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ours = name == "jaxlightning"
        self.pl = importlib.import_module(name)
        self.Callback = self.pl.Callback
        self.Tiny = _ours() if self.ours else _theirs()

    def get(self, path: str) -> Any:
        """An object by its path below the package: `callbacks.EarlyStopping`."""
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(f"{self.name}.{module}"), name)

    def trainer(self, **flags: Any) -> Any:
        """A quiet trainer of one epoch."""
        return self.pl.Trainer(**{**QUIET, "max_epochs": 1, **flags})

    def array(self, value: Any) -> Any:
        """A float32 array of this side."""
        if self.ours:
            import jax.numpy as jnp

            return jnp.asarray(value, jnp.float32)
        import torch

        return torch.as_tensor(np.asarray(value, np.float32))

    def loader(self, samples: int, batch_size: int = 2, shuffle: bool = False) -> Any:
        """A loader over `rows(samples)`: batches are (array,)."""
        if self.ours:
            return self.pl.ArrayLoader((rows(samples),), batch_size=batch_size, shuffle=shuffle)
        return torch_loader(samples, batch_size, shuffle)

    def sgd(self, module: Any, lr: float = 0.1) -> Any:
        """Plain gradient descent on all parameters."""
        if self.ours:
            return self.pl.optim.SGD(module.parameters(), lr=lr)
        import torch

        return torch.optim.SGD(module.parameters(), lr=lr)

    @contextlib.contextmanager
    def messages(self, level: int = logging.INFO) -> Iterator[list[str]]:
        """What the library says while inside."""
        found: list[str] = []

        class Handler(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                found.append(record.getMessage())

        logger = logging.getLogger("jaxlightning" if self.ours else "lightning.pytorch")
        before, handler = logger.level, Handler()
        logger.addHandler(handler)
        logger.setLevel(level)
        try:
            yield found
        finally:
            logger.removeHandler(handler)
            logger.setLevel(before)


def torch_loader(samples: int, batch_size: int = 2, shuffle: bool = False, **options: Any) -> Any:
    """A DataLoader over `rows(samples)`, which both sides take."""
    import torch

    data = torch.utils.data.TensorDataset(torch.from_numpy(rows(samples)))
    return torch.utils.data.DataLoader(data, batch_size=batch_size, shuffle=shuffle, **options)


class _Data:
    """Sizes and loaders of the tiny modules."""

    sizes: dict[str, int] = {"train": 6, "val": 4, "test": 4, "predict": 4}
    side: Side

    def train_dataloader(self) -> Any:
        return self.side.loader(self.sizes["train"])

    def val_dataloader(self) -> Any:
        return self.side.loader(self.sizes["val"])

    def test_dataloader(self) -> Any:
        return self.side.loader(self.sizes["test"])

    def predict_dataloader(self) -> Any:
        return self.side.loader(self.sizes["predict"])

    def loss(self, batch: Any) -> Any:
        return (self.layer(batch[0]) ** 2).mean()  # type: ignore[attr-defined]

    def forward(self, x: Any) -> Any:
        return self.layer(x)  # type: ignore[attr-defined]

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: Any) -> Any:
        return self.loss(batch)

    def test_step(self, batch: Any, batch_idx: Any) -> Any:
        return self.loss(batch)

    def predict_step(self, batch: Any, batch_idx: Any) -> Any:
        return self.layer(batch[0])  # type: ignore[attr-defined]

    def configure_optimizers(self) -> Any:
        return self.side.sgd(self, lr=0.0)


@functools.cache
def _ours() -> type:
    import flax.linen as nn

    import jaxlightning as pl

    class Tiny(_Data, pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Dense(2)

    return Tiny


@functools.cache
def _theirs() -> type:
    import lightning.pytorch as pl
    import torch

    class Tiny(_Data, pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 2)

    return Tiny


@functools.cache
def _side(name: str) -> Side:
    side = Side(name)
    side.Tiny.side = side
    return side


def sides() -> tuple[Side, Side]:
    """Lightning, and us."""
    return _side("lightning.pytorch"), _side("jaxlightning")


def both(scenario: Callable[..., Any], *arguments: Any) -> tuple[Any, Any]:
    """What a scenario returns with Lightning, and with us."""
    theirs, ours = sides()
    return plain(scenario(theirs, *arguments)), plain(scenario(ours, *arguments))


def same(scenario: Callable[..., Any], *arguments: Any) -> Any:
    """Run a scenario on both sides, compare, and return what came out so that a test can say more about it."""
    expected, got = both(scenario, *arguments)
    assert got == expected
    return got


def error(action: Callable[[], Any]) -> list[str] | Any:
    """The type and the first words of the exception that an action raises, or what it returns."""
    try:
        return action()
    except Exception as caught:
        return [type(caught).__name__, re.split(r"[`'.:\n]", str(caught))[0]]


@contextlib.contextmanager
def caught() -> Iterator[list[tuple[str, str]]]:
    """The warnings raised inside, as (category, text)."""
    found: list[tuple[str, str]] = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield found
    found += [(each.category.__name__, str(each.message)) for each in seen]


def plain(value: Any) -> Any:
    """Numbers and containers of Python, six digits."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, (str, bool, int)) or value is None:
        return value
    if isinstance(value, float):
        return round(value, 6)
    return plain(np.asarray(value.detach() if hasattr(value, "detach") else value).tolist())


def events_callback(side: Side, hooks: list[str], note: Callable[..., Any]) -> Any:
    """A callback whose hooks call `note(hook, trainer, module, *args)`."""

    def make(hook: str) -> Any:
        def run(self: Any, trainer: Any, module: Any, *args: Any, **kwargs: Any) -> None:
            note(hook, trainer, module, *args, **kwargs)

        return run

    return type("Noting", (side.Callback,), {hook: make(hook) for hook in hooks})()
