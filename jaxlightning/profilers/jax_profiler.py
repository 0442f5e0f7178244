"""What the device does: a trace by JAX's own profiler."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from jaxlightning.profilers.profiler import Profiler

_STEP_ACTIONS = ("run_training_batch", ".validation_step", ".test_step", ".predict_step")


class JaxProfiler(Profiler):
    """Write a trace of some steps, with the actions as ranges, for TensorBoard (`xprof`) or Perfetto.

    A trace of a whole run would be too large to look at, so it covers `num_steps` steps after the first `skip_steps`,
    which include compilation. It ends after the device has finished these steps.

    Args:
        dirpath: Folder of the trace; by default the Trainer's `log_dir`, then `jax_trace` in the working directory. The
            files lie in its sub-folder `plugins/profile/<time>`.
        filename: Name of a sub-folder of `dirpath` for the trace.
        skip_steps: How many steps run before the trace begins.
        num_steps: How many steps the trace covers.
        perfetto: Whether a `perfetto_trace.json.gz` is written beside TensorBoard's files, for https://ui.perfetto.dev.

    Raises:
        ValueError: A number that is out of range.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        *,
        skip_steps: int = 3,
        num_steps: int = 10,
        perfetto: bool = True,
    ) -> None:
        super().__init__(dirpath=dirpath, filename=filename)
        if skip_steps < 0 or num_steps < 1:
            raise ValueError(
                "`JaxProfiler` needs skip_steps >= 0 and num_steps >= 1. "
                f"Received: skip_steps={skip_steps}, num_steps={num_steps}"
            )
        self.skip_steps = skip_steps
        self.num_steps = num_steps
        self.perfetto = perfetto
        self.trace_dir: str | None = None
        self._seen = 0
        self._is_tracing = False
        self._ranges: dict[str, list[Any]] = {}

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | Path | None = None) -> None:
        """Begin a new count of steps."""
        super().setup(stage, local_rank, log_dir)
        self._seen = 0
        self.trace_dir = None

    def start(self, action_name: str) -> None:
        """Begin a range, and the trace when its first step has come."""
        if action_name.endswith(_STEP_ACTIONS):
            if self._seen == self.skip_steps and not self._is_tracing and self.trace_dir is None:
                self._start_trace()
            self._seen += 1
        if self._is_tracing:
            import jax

            annotation = jax.profiler.TraceAnnotation(action_name)
            annotation.__enter__()
            self._ranges.setdefault(action_name, []).append(annotation)

    def stop(self, action_name: str) -> None:
        """End a range, and the trace when it has covered its steps."""
        running = self._ranges.get(action_name)
        if running:
            running.pop().__exit__(None, None, None)
        if self._is_tracing and action_name.endswith(_STEP_ACTIONS) and self._seen >= self.skip_steps + self.num_steps:
            self._stop_trace()

    def summary(self) -> str:
        """Return where the trace lies."""
        self._stop_trace()
        if self.trace_dir is None:
            return (
                f"{self._title()}: no trace was written, the run had {self._seen} steps and the trace begins after "
                f"{self.skip_steps}. Lower `JaxProfiler(skip_steps=...)`."
            )
        return f"{self._title()}: trace of up to {self.num_steps} steps in {self.trace_dir}"

    def describe(self) -> None:
        """Print where the trace lies."""
        if self.local_rank == 0:
            print(self.summary())
        self.teardown(stage=self._stage)

    def teardown(self, stage: str | None) -> None:
        """End the trace of a run that ended early."""
        self._stop_trace()
        super().teardown(stage)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_ranges": {}, "_is_tracing": False}

    def _start_trace(self) -> None:
        import jax

        self.trace_dir = os.path.join(self.dirpath or "jax_trace", self.filename or "")
        jax.profiler.start_trace(self.trace_dir, create_perfetto_trace=self.perfetto)
        self._is_tracing = True

    def _stop_trace(self) -> None:
        if not self._is_tracing:
            return
        import jax

        untyped: Any = jax
        for running in self._ranges.values():
            while running:
                running.pop().__exit__(None, None, None)
        self._is_tracing = False
        # devices work in order: when something dispatched now is done, so is every step of the trace
        untyped.block_until_ready([jax.device_put(0.0, device) + 0.0 for device in jax.local_devices()])
        untyped.profiler.stop_trace()
