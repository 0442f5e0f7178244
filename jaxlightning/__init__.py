"""PyTorch Lightning's way of working on JAX.

`import jaxlightning as pl` reads like Lightning: `pl.LightningModule`, `pl.Trainer`, `pl.Callback`, ... Names are
loaded
when they are first used, so that importing the package loads neither torch, TensorFlow, tensorboardX, orbax nor tqdm.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "ArrayLoader": "jaxlightning.adapters",
    "Callback": "jaxlightning.callbacks",
    "JaxLightningModule": "jaxlightning.module",
    "LightningDataModule": "jaxlightning.datamodule",
    "LightningModule": "jaxlightning.module",
    "PureNetwork": "jaxlightning.compile",
    "TrainState": "jaxlightning.functional",
    "Trainer": "jaxlightning.trainer",
    "fit": "jaxlightning.functional",
    "functionalize": "jaxlightning.compile",
    "lr_schedule": "jaxlightning.optim",
    "seed_everything": "jaxlightning.utilities",
}
_MODULES = (
    "adapters",
    "callbacks",
    "checkpoint",
    "export",
    "functional",
    "loggers",
    "metrics",
    "optim",
    "plugins",
    "profilers",
    "utilities",
)

if TYPE_CHECKING:
    from jaxlightning import adapters as adapters
    from jaxlightning import callbacks as callbacks
    from jaxlightning import checkpoint as checkpoint
    from jaxlightning import export as export
    from jaxlightning import functional as functional
    from jaxlightning import loggers as loggers
    from jaxlightning import metrics as metrics
    from jaxlightning import optim as optim
    from jaxlightning import plugins as plugins
    from jaxlightning import profilers as profilers
    from jaxlightning import utilities as utilities
    from jaxlightning.adapters import ArrayLoader as ArrayLoader
    from jaxlightning.callbacks import Callback as Callback
    from jaxlightning.compile import PureNetwork as PureNetwork
    from jaxlightning.compile import functionalize as functionalize
    from jaxlightning.datamodule import LightningDataModule as LightningDataModule
    from jaxlightning.functional import TrainState as TrainState
    from jaxlightning.functional import fit as fit
    from jaxlightning.module import JaxLightningModule as JaxLightningModule
    from jaxlightning.module import LightningModule as LightningModule
    from jaxlightning.optim import lr_schedule as lr_schedule
    from jaxlightning.trainer import Trainer as Trainer
    from jaxlightning.utilities import seed_everything as seed_everything

__all__ = [*sorted(_EXPORTS), *_MODULES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        module = importlib.import_module(_EXPORTS[name])
        value = getattr(module, name)
    elif name in _MODULES:
        value = importlib.import_module(f"jaxlightning.{name}")
    else:
        raise AttributeError(f"module 'jaxlightning' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
