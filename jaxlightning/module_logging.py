"""What a module can log and print; inside a step it is recorded, outside it goes to the trainer's log connector."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxlightning.compile.host_calls import recorded_print
from jaxlightning.compile.trace import current_trace
from jaxlightning.module_base import ModuleBase

__all__ = ["ModuleLogging"]


class ModuleLogging(ModuleBase):
    """`log`, `log_dict` and `print` of a module."""

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[[Any], Any] = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Logs a scalar under a key; inside a compiled step it costs no host read.

        Args:
            name: The key.
            value: A number or an array with a single element.
            prog_bar: Whether the progress bar shows it.
            logger: Whether loggers get it (None: yes).
            on_step: Whether each step's value is logged; None takes the hook's default.
            on_epoch: Whether the values are reduced over the epoch; None takes the hook's default.
            reduce_fx: `"mean"` (weighted by batch size), `"sum"`, `"min"`, `"max"` or the function of that name.
            enable_graph: Accepted; a logged value never takes part in a gradient.
            sync_dist: Accepted; values of one process with several devices are global already.
            sync_dist_group: Must be None.
            add_dataloader_idx: Whether keys of several loaders get the suffix `/dataloader_idx_N`.
            batch_size: Weight of a mean; inferred from the batch by default.
            metric_attribute: Name of the attribute that holds a metric object.
            rank_zero_only: Whether only the first process logs it.

        Raises:
            MisconfigurationException: For a hook or options that Lightning refuses.
            ValueError: For a value that is not a scalar.
        """
        trace = current_trace()
        if trace is not None and trace.silent:
            if trace.kind == "train" and on_step is not False and isinstance(value, jax.Array | float | int):
                from jaxlightning.metrics._values import default_dtype

                # As a host number is logged: JAX has no place for large integers.
                seen = value if isinstance(value, jax.Array) else jnp.asarray(value, default_dtype())
                seen = jax.lax.stop_gradient(seen)
                trace.unseen_logs.update({name: seen, f"{name}_step": seen} if on_epoch else {name: seen})
            return
        from jaxlightning.metrics import log_value

        log_value(
            self,
            name,
            value,
            prog_bar=prog_bar,
            logger=logger,
            on_step=on_step,
            on_epoch=on_epoch,
            reduce_fx=reduce_fx,
            enable_graph=enable_graph,
            sync_dist=sync_dist,
            sync_dist_group=sync_dist_group,
            add_dataloader_idx=add_dataloader_idx,
            batch_size=batch_size,
            metric_attribute=metric_attribute,
            rank_zero_only=rank_zero_only,
        )

    def log_dict(self, dictionary: Mapping[str, Any], **options: Any) -> None:
        """Logs every entry of a dictionary with the same options as `log`."""
        for key, value in dictionary.items():
            if isinstance(value, Mapping):
                raise ValueError(
                    f"`self.log_dict({{{key!r}: ...}})` was called with a nested dictionary; values must be scalars."
                )
            self.log(key, value, **options)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints on the first process, through the progress bar; inside a compiled step at every step."""
        trace = current_trace()
        if trace is not None and recorded_print(self, args, kwargs):
            return
        if self._trainer is None:
            print(*args, **kwargs)
            return
        if self._trainer.is_global_zero:
            bar = self._trainer.progress_bar_callback
            if bar is not None and getattr(bar, "is_enabled", True):
                bar.print(*args, **kwargs)
            else:
                print(*args, **kwargs)
