"""Where a step runs: a strategy owns the devices, the shardings and the jit call; nothing else knows the difference.

Making a strategy starts a JAX backend, so the trainer does it inside `fit` / `validate` / `test` / `predict`, after
`jax.distributed.initialize()` and XLA flags of the user's script.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxlightning.utilities.exceptions import MisconfigurationException

__all__ = ["DataParallelStrategy", "SingleDeviceStrategy", "Strategy", "make_strategy"]

_PLATFORMS = {"cpu": "cpu", "gpu": "gpu", "cuda": "gpu", "tpu": "tpu"}


class Strategy:
    """Base class: the devices of a run and how steps are compiled for them.

    Attributes:
        devices: The JAX devices of this run.
        batches_per_step: How many batches of the loader make one global batch (as in Lightning, `batch_size` is per
            device).
    """

    name = "single_device"

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        self.devices = list(devices)
        self.batches_per_step = 1

    @property
    def root_device(self) -> jax.Device:
        """The first device."""
        return self.devices[0]

    def put(self, tree: Any) -> Any:
        """Places values that every device needs (state, hyper-parameters)."""
        raise NotImplementedError

    def jit(
        self,
        function: Callable[..., Any],
        example: tuple[Any, ...],
        *,
        donate: tuple[int, ...],
        batch: int | None,
        axis: int = 0,
    ) -> Any:
        """A jitted function for this strategy's devices.

        Args:
            function: A pure function of pytrees.
            example: Arguments of the shapes that it will get.
            donate: Indices of arguments whose buffers may be reused.
            batch: Index of the argument that holds the batch's arrays, or None.
            axis: Axis of these arrays along which the batch lies.
        """
        raise NotImplementedError


class SingleDeviceStrategy(Strategy):
    """One device; arrays go straight into the compiled call."""

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        super().__init__(devices[:1])
        self._default = self.devices[0] == jax.devices()[0]

    def put(self, tree: Any) -> Any:
        # Uncommitted where possible: a committed array would be another entry of every jit cache.
        return jax.device_put(tree) if self._default else jax.device_put(tree, self.devices[0])

    def jit(
        self,
        function: Callable[..., Any],
        example: tuple[Any, ...],
        *,
        donate: tuple[int, ...],
        batch: int | None,
        axis: int = 0,
    ) -> Any:
        if self._default:
            return jax.jit(function, donate_argnums=donate)
        sharding = jax.sharding.SingleDeviceSharding(self.devices[0])
        return jax.jit(function, donate_argnums=donate, in_shardings=sharding, out_shardings=sharding)


class DataParallelStrategy(Strategy):
    """Data parallelism over the local devices: batches are split along axis 0, everything else is replicated.

    The mesh has Auto axes: with JAX's newer default (Explicit) the gradient of an ordinary dense layer raises.
    """

    name = "ddp"

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        super().__init__(devices)
        self.batches_per_step = len(self.devices)
        self.mesh = jax.sharding.Mesh(np.array(self.devices), ("data",))
        self._everywhere = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec())  # type: ignore[no-untyped-call]
        self._splits = [
            jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec(*before, "data"))  # type: ignore[no-untyped-call]
            for before in ((), (None,))
        ]

    def put(self, tree: Any) -> Any:
        return jax.device_put(tree, self._everywhere)

    def batch_sharding(self, leaf: Any, axis: int = 0) -> Any:
        """Split along the batch's axis where it divides evenly; a shorter last batch is computed on every device.

        What every device holds already (data that steps gather rows of) stays so.
        """
        shape = np.shape(leaf)
        if isinstance(leaf, jax.Array) and leaf.sharding == self._everywhere:
            return self._everywhere
        if len(shape) <= axis or not shape[axis] or shape[axis] % len(self.devices):
            return self._everywhere
        return self._splits[axis]

    def jit(
        self,
        function: Callable[..., Any],
        example: tuple[Any, ...],
        *,
        donate: tuple[int, ...],
        batch: int | None,
        axis: int = 0,
    ) -> Any:
        shardings = [
            jax.tree.map(functools.partial(self.batch_sharding, axis=axis), argument)
            if i == batch
            else self._everywhere
            for i, argument in enumerate(example)
        ]
        return jax.jit(function, donate_argnums=donate, in_shardings=tuple(shardings), out_shardings=self._everywhere)


@functools.cache
def _available(platform: str | None) -> tuple[jax.Device, ...]:
    try:
        return tuple(jax.local_devices(backend=platform) if platform else jax.local_devices())
    except RuntimeError:
        return ()


def make_strategy(
    strategy: Any = "auto", accelerator: str = "auto", devices: Any = "auto", num_nodes: int = 1
) -> Strategy:
    """Resolves Lightning's three flags to a strategy. Starts a JAX backend.

    Args:
        strategy: `"auto"`, `"ddp"` (and its aliases), `"single_device"` or a `Strategy`.
        accelerator: `"auto"`, `"cpu"`, `"gpu"`, `"cuda"` or `"tpu"`.
        devices: `"auto"` (one on a CPU, all local ones on an accelerator), a number, -1 for all, or a list of indices.
        num_nodes: Number of hosts; only 1 is built.

    Returns:
        The strategy.

    Raises:
        MisconfigurationException: If the devices do not exist.
        ValueError: If the strategy has no meaning here.
    """
    if isinstance(strategy, Strategy):
        return strategy
    if num_nodes != 1:
        raise MisconfigurationException(f"`Trainer(num_nodes={num_nodes})` is not built yet; 1 is possible.")
    platform = _PLATFORMS.get(accelerator)
    found = _available(platform)
    if not found:
        raise MisconfigurationException(
            f"`Trainer(accelerator={accelerator!r})` finds no such device: this machine has "
            f"{sorted({d.platform for d in jax.local_devices()})}."
        )
    chosen = _choose(devices, found, accelerator)
    if strategy in ("auto", "single_device") and len(chosen) == 1:
        return SingleDeviceStrategy(chosen)
    if strategy in (
        "auto",
        "ddp",
        "ddp_spawn",
        "ddp_notebook",
        "ddp_fork",
        "ddp_find_unused_parameters_true",
        "data_parallel",
    ):
        return DataParallelStrategy(chosen)
    if strategy == "single_device":
        raise MisconfigurationException(
            f"`strategy='single_device'` runs on one device, but devices={devices!r} was given."
        )
    raise ValueError(
        f"You selected an invalid strategy name: `strategy={strategy!r}`. Built so far: 'auto', 'single_device', 'ddp'."
    )


def _choose(devices: Any, found: tuple[jax.Device, ...], accelerator: str) -> list[jax.Device]:
    if devices in ("auto", None):
        return list(found[:1]) if found[0].platform == "cpu" else list(found)
    if isinstance(devices, str):
        devices = -1 if devices.strip() == "-1" else _parse(devices)
    if isinstance(devices, bool) or not isinstance(devices, int | list | tuple):
        raise MisconfigurationException(f"`Trainer(devices={devices!r})` is not a number, a list of indices or 'auto'.")
    if devices == -1:
        return list(found)
    if isinstance(devices, int):
        wanted = list(range(devices))
    else:
        wanted = [int(i) for i in devices]
    if not wanted or max(wanted) >= len(found) or min(wanted) < 0:
        raise MisconfigurationException(
            f"`Trainer(devices={devices!r})` does not fit: this machine has {len(found)} device(s) of the kind "
            f"{found[0].platform!r} (accelerator={accelerator!r})."
            + (
                " On a CPU, XLA_FLAGS=--xla_force_host_platform_device_count=N simulates N."
                if found[0].platform == "cpu"
                else ""
            )
        )
    return [found[i] for i in wanted]


def _parse(devices: str) -> int | list[int]:
    parts = [part for part in devices.split(",") if part.strip()]
    return int(parts[0]) if len(parts) == 1 and "," not in devices else [int(part) for part in parts]
