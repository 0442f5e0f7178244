"""`Trainer(data_on_device=...)`: training data that is in arrays anyway is copied to the device once.

What the loader decides (order, batches, position) stays the loader's: it hands out row numbers in place of batches
(`adapters.in_memory`), and the compiled step gathers the rows (`compile.resident`). Wherever something on the host may
look at a batch, batches are made on the host as ever.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxlightning.callbacks._registry import runs_user_code
from jaxlightning.compile.batch import is_array
from jaxlightning.compile.engine import Engine
from jaxlightning.compile.resident import ResidentBatch, RowLayout
from jaxlightning.utilities.exceptions import MisconfigurationException

if TYPE_CHECKING:
    from jaxlightning.trainer import Trainer

__all__ = ["SHARE", "ResidentSource", "check_data_on_device", "device_memory", "resident"]

_log = logging.getLogger("jaxlightning")

SHARE = 0.25
"""The part of a device's memory that data may take by default."""

_HOOKS = ("on_train_batch_start", "on_train_batch_end")


def check_data_on_device(value: Any) -> bool | float | str:
    """The flag `Trainer(data_on_device=...)`, checked.

    Raises:
        ValueError: If it is neither "auto", True, False nor a share of the memory.
    """
    if value == "auto" or isinstance(value, bool) or (isinstance(value, float) and 0.0 < value <= 1.0):
        return value  # type: ignore[no-any-return]
    raise ValueError(
        "`data_on_device` must be 'auto', True, False or the largest part of a device's memory that data may take, "
        f"above 0.0 and up to 1.0. Received: data_on_device={value!r}."
    )


def device_memory(device: Any) -> int:
    """Bytes of memory of one device; on a CPU the machine's memory, divided by the number of simulated devices."""
    stats = None if device.platform == "cpu" else device.memory_stats()
    if stats and stats.get("bytes_limit"):
        return int(stats["bytes_limit"])
    try:
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not a POSIX system
        machine = 8 << 30
    return machine // (len(jax.local_devices(backend="cpu")) if device.platform == "cpu" else 1)


def _hooks_with_batches(trainer: Trainer) -> str | None:
    """Who looks at training batches on the host, None for nobody."""
    for name in _HOOKS:
        if trainer._hooks.module(name) is not None:
            return f"`{type(trainer.lightning_module).__name__}.{name}` receives every batch"
        for callback in trainer.callbacks:
            if runs_user_code(callback, name):
                return f"`{type(callback).__name__}.{name}` receives every batch"
    return None


def _reason_against(trainer: Trainer, loaders: int) -> str | None:
    """Why the data of this run stays on the host, None when nothing speaks against it so far."""
    if trainer._data_on_device == "auto" and trainer.strategy.root_device.platform == "cpu":
        # The same memory, and the same cores that gather: 0.7 us by numpy, 3 us in the compiled step for 32 rows of 32.
        return "on a CPU that gains nothing (a number, or True, keeps it there all the same)"
    if type(trainer._engine) is not Engine:
        return (
            "batches are padded on the host" if trainer._pad_batches else "the step is a function that gets the batch"
        )
    if not trainer._jit:
        return "steps are not compiled (`jit=False`)"
    if trainer._detect_anomaly or trainer._checkify:
        return "a run that looks for errors (`detect_anomaly`, `checkify`) shows batches"
    if loaders != 1:
        return f"a batch comes from {loaders} loaders"
    if trainer._prefetch_batches:
        return "batches are read ahead by a thread (`prefetch_batches`)"
    if trainer.reload_dataloaders_every_n_epochs:
        return "loaders are made anew during the run (`reload_dataloaders_every_n_epochs`)"
    if trainer._data_connector.transfer() is not None:
        return "a batch transfer hook is overridden"
    if trainer.fast_dev_run:
        return "`fast_dev_run` sees a few rows only"
    return _hooks_with_batches(trainer)


def resident(trainer: Trainer, source: Any, loaders: int) -> Any:
    """Makes what hands out the rows of one training loader, where the flag and the run allow it.

    Args:
        trainer: The trainer, with its engine.
        source: A source of an adapter.
        loaders: How many training loaders there are.

    Returns:
        A `ResidentSource`, or the source itself.

    Raises:
        MisconfigurationException: If `data_on_device=True` cannot be kept.
    """
    if trainer._data_on_device is False:
        return source
    reason = _reason_against(trainer, loaders)
    if reason is not None:
        _tell(trainer, source, reason)
        return source
    return ResidentSource(trainer, source)


def _tell(trainer: Trainer, source: Any, reason: str) -> None:
    if trainer._data_on_device is True:
        raise MisconfigurationException(
            f"`Trainer(data_on_device=True)`, but the data of {source.describe()} cannot be kept on the device: "
            f"{reason}. Use 'auto' to keep it there only where that is possible."
        )
    level = logging.DEBUG if trainer._data_on_device == "auto" and not trainer._log_compiles else logging.INFO
    _log.log(level, "The data of %s stays on the host: %s.", source.describe(), reason)


class ResidentSource(Iterable[Any]):
    """A source whose batches are rows of arrays on the device, while that is possible.

    Args:
        trainer: The trainer.
        source: A source of an adapter.
    """

    def __init__(self, trainer: Trainer, source: Any) -> None:
        self.trainer = trainer
        self.source = source
        self._columns: tuple[Any, ...] | None = None
        self._layout: RowLayout | None = None
        self._content: Any = None
        self._asked = self._refused = False
        self._allowed = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[Any]:
        self.source.row_reader, self._asked = None if self._refused else self._reader, False
        try:
            batches: Iterator[Any] = iter(self.source)
        finally:
            self.source.row_reader = None
        if not self._asked and not self._refused:
            self._refuse("it is not read from arrays in memory")
        return batches

    def sequential(self) -> ResidentSource:
        """The same batches without shuffling."""
        return ResidentSource(self.trainer, self.source.sequential())

    def settle(self) -> None:
        """Called before the batches of an epoch run: hooks may have come that look at them."""
        reason = None if self._refused else _hooks_with_batches(self.trainer)
        if reason is not None:
            self._refuse(reason)

    def close(self) -> None:
        """Lets go of the device's memory and of what the source holds."""
        self._columns = self._content = None
        self.source.close()

    def _refuse(self, reason: str) -> None:
        self._refused, self._allowed, self._columns, self._content = True, False, None, None
        _tell(self.trainer, self.source, reason)

    def _reader(self, data: Any) -> Callable[[Any], Any] | None:
        self._asked = True
        reason = self._reason_against(data) if self._columns is None else None
        if reason is not None:
            self._refuse(reason)
            return None
        content = data.fingerprint()
        if self._columns is None:
            reason = self._place(data)
        elif content != self._content:
            reason = "it was changed between two passes"
        if reason is not None:
            self._refuse(reason)
            return None
        self._content = content
        columns, layout, gather = self._columns, self._layout, data.gather

        def make(rows: Any) -> Any:
            if not self._allowed:
                return gather(rows)
            return ResidentBatch(rows.astype(np.int32, copy=False), columns, layout)  # type: ignore[arg-type]

        return make

    def _reason_against(self, data: Any) -> str | None:
        trainer = self.trainer
        device = trainer.strategy.root_device
        share = trainer._data_on_device
        budget = (share if isinstance(share, float) and share is not True else SHARE) * device_memory(device)
        if share is not True and data.nbytes > budget:
            return f"its {_amount(data.nbytes)} are more than the {_amount(budget)} that data may take on the device"
        if data.size >= 1 << 31:
            return f"it has {data.size} rows"
        return None

    def _place(self, data: Any) -> str | None:
        """Copies the data to the device; says why not."""
        strategy = self.trainer.strategy
        columns = data.columns()
        for column in columns:
            if not is_array(column):
                return f"it has an array of dtype {column.dtype}, which JAX cannot hold"
        if strategy.root_device.platform == "cpu":
            # There a device array may share the memory of the array that it was made of.
            columns = [np.array(column) for column in columns]
        self._columns = tuple(strategy.put(columns))
        split = getattr(strategy, "batch_sharding", None)
        devices = len(strategy.devices)
        self._layout = RowLayout(data.structure, None if split is None else split(np.zeros(devices)))
        _log.debug("The data of %s, %s, is on the device.", self.source.describe(), _amount(data.nbytes))
        return None


def _amount(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
