"""The two libraries behind one interface: how each makes its network, optimizer, batches, callbacks and trainer."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from conformance.differential.behaviour import Probe

WEIGHTS = (1.0, -0.5)


class Side:
    """What both sides have.

    Attributes:
        name: For messages.
        pl: The library's namespace.
        lr_scheduler: Where its schedulers are.
    """

    name: str
    pl: Any
    lr_scheduler: Any

    def combined(self, loaders: Any, mode: str) -> Any:
        """Make a CombinedLoader."""
        raise NotImplementedError

    def recording_logger(self, probe: Probe) -> Any:
        """Make a logger that records its calls as events."""

        class Recording(self.logger_base()):  # type: ignore[misc]
            name = property(lambda self: "record")
            version = property(lambda self: 0)

            def log_metrics(self, metrics: Any, step: Any = None) -> None:
                probe.add(f"logger.log_metrics step={step}", **metrics)

            def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
                probe.add(f"logger.log_hyperparams {dict(params)}")

            def log_graph(self, *args: Any, **kwargs: Any) -> None:
                probe.add("logger.log_graph")

            def save(self) -> None:
                probe.add("logger.save")

            def finalize(self, status: str) -> None:
                probe.add(f"logger.finalize {status}")

            def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
                probe.add("logger.after_save_checkpoint")

        return Recording()

    def logger_base(self) -> Any:
        """Return the base class of loggers."""
        raise NotImplementedError

    def network(self) -> Any:
        """Make the network: rows `[n, 2]` to `[n]`, with the weights `WEIGHTS`."""
        raise NotImplementedError

    def sgd(self, network: Any, **options: Any) -> Any:
        """Make the optimizer of a network, or of a module's networks."""
        raise NotImplementedError

    def convert(self, rows: np.ndarray) -> Any:
        """Make a batch."""
        raise NotImplementedError

    def weights(self, module: Any) -> list[float] | None:
        """Return the weights after the run, None when they were never made."""
        raise NotImplementedError


class LightningSide(Side):
    """The reference."""

    name = "lightning"

    def __init__(self) -> None:
        import lightning.pytorch as pl
        import torch

        torch.set_num_threads(1)
        self.pl, self.torch, self.lr_scheduler = pl, torch, torch.optim.lr_scheduler

    def combined(self, loaders: Any, mode: str) -> Any:
        from lightning.pytorch.utilities import CombinedLoader

        return CombinedLoader(loaders, mode)  # type: ignore[arg-type]

    def logger_base(self) -> Any:
        from lightning.pytorch.loggers.logger import Logger

        return Logger

    def network(self) -> Any:
        torch = self.torch

        class Net(torch.nn.Module):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.w = torch.nn.Parameter(torch.tensor(WEIGHTS))

            def forward(self, x: Any) -> Any:
                return (x * self.w).sum(-1)

        return Net()

    def sgd(self, network: Any, **options: Any) -> Any:
        return self.torch.optim.SGD(network.parameters(), **options)

    def convert(self, rows: np.ndarray) -> Any:
        return self.torch.from_numpy(rows)

    def weights(self, module: Any) -> list[float] | None:
        return [float(each) for weights in module.parameters() for each in weights]


class OurSide(Side):
    """The library under test."""

    name = "jaxlightning"

    def __init__(self) -> None:
        import jaxlightning as pl

        self.pl, self.lr_scheduler = pl, pl.optim.lr_scheduler

    def combined(self, loaders: Any, mode: str) -> Any:
        from jaxlightning.utilities.combined_loader import CombinedLoader

        return CombinedLoader(loaders, mode)

    def logger_base(self) -> Any:
        return self.pl.loggers.Logger

    def network(self) -> Any:
        return _net_class()()

    def sgd(self, network: Any, **options: Any) -> Any:
        return self.pl.optim.SGD(network.parameters(), **options)

    def convert(self, rows: np.ndarray) -> Any:
        return rows

    def weights(self, module: Any) -> list[float] | None:
        state = module.state_dict()
        found = [float(each) for name in sorted(state) if name.endswith("w") for each in state[name]]
        return found or None


@functools.cache
def _net_class() -> type:
    import flax.linen as nn
    import jax.numpy as jnp

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return (x * self.param("w", lambda key: jnp.array(WEIGHTS, jnp.float32))).sum(-1)

    return Net
