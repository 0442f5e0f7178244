"""The Trainer's device flags: checked when they are given, resolved only when something runs.

Making a Trainer starts no JAX backend, so that `jax.distributed.initialize()` and XLA flags may come after it.
"""

from __future__ import annotations

import os
from typing import Any

from jaxlightning.utilities.exceptions import MisconfigurationException
from jaxlightning.utilities.rank_zero import process_rank

ACCELERATORS = ("cpu", "cuda", "gpu", "mps", "tpu")
_SUPPORTED = ("cpu", "cuda", "gpu", "tpu")
_BUILT = (
    "auto",
    "ddp",
    "ddp_fork",
    "ddp_notebook",
    "ddp_spawn",
    "ddp_find_unused_parameters_true",
    "data_parallel",
    "single_device",
)
_LIGHTNINGS = (
    "ddp",
    "deepspeed",
    "fsdp",
    "single_xla",
    "xla",
    "xla_fsdp",
    "model_parallel",
)


class DeviceFlags:
    """`accelerator`, `strategy`, `devices` and `num_nodes`.

    Args:
        accelerator: Where to run.
        strategy: How to use several devices; a name or a Strategy.
        devices: How many, which, or "auto".
        num_nodes: Number of hosts.

    Raises:
        ValueError: For an unknown accelerator or strategy.
        NotImplementedError: For one of Lightning's that is not built.
        MisconfigurationException: For no devices, or an accelerator that JAX does not have.
    """

    def __init__(self, accelerator: Any, strategy: Any, devices: Any, num_nodes: int) -> None:
        accelerator = "auto" if accelerator is None else accelerator
        if not isinstance(accelerator, str) or accelerator.lower() not in ("auto", *ACCELERATORS):
            raise ValueError(
                f"You selected an invalid accelerator name: `accelerator={accelerator!r}`. Available names are: auto,"
                f" {', '.join(ACCELERATORS)}."
            )
        accelerator = accelerator.lower()
        if accelerator not in ("auto", *_SUPPORTED):
            raise MisconfigurationException(
                f"`Trainer(accelerator={accelerator!r})` names a device that JAX cannot use here. Possible are: auto,"
                f" {', '.join(_SUPPORTED)}."
            )
        if isinstance(strategy, str):
            strategy = strategy.lower()
            if strategy not in _BUILT:
                if strategy.startswith(_LIGHTNINGS):
                    raise NotImplementedError(
                        f"`Trainer(strategy={strategy!r})` is not built yet in this version of jaxlightning. Built are:"
                        f" {', '.join(_BUILT[:2])} and single_device."
                    )
                raise ValueError(
                    f"You selected an invalid strategy name: `strategy={strategy!r}`. It must be either a string or an"
                    " instance of `jaxlightning.parallel.Strategy`. Example choices: auto, ddp, single_device."
                )
        elif not hasattr(strategy, "batches_per_step"):
            raise ValueError(
                f"You selected an invalid strategy: `strategy={strategy!r}`. It must be either a string or an instance"
                " of `jaxlightning.parallel.Strategy`."
            )
        if devices in ([], 0, "0") and devices is not False:
            # On "auto" the platform is not known before the run; a CPU is what every machine has.
            name = "cpu" if accelerator == "auto" else accelerator
            raise MisconfigurationException(
                f"`Trainer(devices={devices!r})` value is not a valid input using {name} accelerator."
            )
        if not isinstance(devices, (int, str, list, tuple)) or isinstance(devices, bool):
            raise MisconfigurationException(
                f"`Trainer(devices={devices!r})` must be a number, a list of indices, a string or 'auto'."
            )
        if accelerator == "cpu" and isinstance(devices, int) and devices < 0:
            raise MisconfigurationException(
                f"`Trainer(devices={devices!r})` needs a positive number with the cpu accelerator."
            )
        self.accelerator = accelerator
        self.strategy = strategy
        self.devices = devices
        self.num_nodes = num_nodes
        self._resolved: Any = None

    @property
    def resolved(self) -> Any:
        """The strategy if it was made already, else None."""
        return self._resolved

    def resolve(self) -> Any:
        """Return the strategy, making it (and with it a JAX backend) at the first call."""
        if self._resolved is None:
            from jaxlightning.parallel import make_strategy

            self._resolved = make_strategy(self.strategy, self.accelerator, self.devices, self.num_nodes)
        return self._resolved

    @property
    def num_devices(self) -> int:
        """How many devices are used; asks the backend only where the flags do not say."""
        if self._resolved is not None:
            return len(self._resolved.devices)
        if isinstance(self.devices, int) and self.devices > 0:
            return self.devices
        if isinstance(self.devices, (list, tuple)):
            return len(self.devices)
        if self.devices == "auto" and self.accelerator == "cpu":
            return 1
        return len(self.resolve().devices)

    @property
    def global_rank(self) -> int:
        """Index of this process."""
        return process_rank()

    @property
    def local_rank(self) -> int:
        """Index of this process on its host."""
        for name in ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"):
            if os.environ.get(name, "").isdigit():
                return int(os.environ[name])
        return 0

    @property
    def node_rank(self) -> int:
        """Index of this host."""
        for name in ("NODE_RANK", "GROUP_RANK", "SLURM_NODEID"):
            if os.environ.get(name, "").isdigit():
                return int(os.environ[name])
        return 0

    @property
    def world_size(self) -> int:
        """Number of processes: one drives all its devices."""
        if self._resolved is None:
            return 1
        import jax

        return int(jax.process_count())
