"""How long a save holds up the training loop, beside a save that waits, and how much memory it takes meanwhile.

A state of 200 MB (parameters and both moments of Adam) is saved in pairs, in the background and at once, the order
turned round in every pair. The memory is the process's, sampled while the background save runs; what is above the
memory before it is the snapshot, and whatever the writing itself holds.

    python benchmarks/async_save.py --json benchmarks/results/async_save.json
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from _harness import orders, use_the_cpu, write_json

use_the_cpu()

import flax.linen as nn  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import jaxlightning as pl  # noqa: E402
from jaxlightning.optim import Adam  # noqa: E402

LIMIT_BLOCKED = 0.10
#: One state: the snapshot, which shrinks while it is written; as much of it as writing takes besides lies on disk
#: before the first slice is taken. The second number is what Python itself takes for a save of any size (objects, the
#: thread), in bytes.
LIMIT_STATES, PYTHONS_OWN = 1.0, 5e5


class Stack(nn.Module):
    width: int
    depth: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        for _ in range(self.depth):
            x = nn.relu(nn.Dense(self.width, use_bias=False)(x))
        return x


class Big(pl.LightningModule):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.net = Stack(width, depth)

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        return jnp.mean(self.net(batch) ** 2)

    def configure_optimizers(self) -> Any:
        return Adam(self.parameters(), lr=1e-4)


class Memory:
    """Samples the resident memory of this process until it is asked for the most of it."""

    def __init__(self) -> None:
        give_back()
        self._stop, self._runs = threading.Event(), threading.Event()
        self.before = self.most = 0
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        self._runs.wait()

    def _sample(self) -> None:
        self._stop.wait(0.002)
        self.before = self.most = resident()  # with this thread's own stack
        self._runs.set()
        while not self._stop.wait(0.002):
            self.most = max(self.most, resident())

    def extra(self) -> int:
        """Bytes above the beginning."""
        self._stop.set()
        self._thread.join()
        return self.most - self.before


def give_back() -> None:
    """Give memory that an earlier save left free back to the system, so that it is not taken for memory in use."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Measure(pl.Callback):
    """Saves in pairs between two batches."""

    def __init__(self, root: Path, pairs: int) -> None:
        self.root, self.pairs = root, list(orders(pairs))
        self.blocked: list[float] = []
        self.waited: list[float] = []
        self.memory: list[int] = []
        self.nbytes = 0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        connector = trainer._checkpoint_connector
        if batch_idx == 0:  # the first save imports and prepares what all others need
            trainer.save_checkpoint(self.root / "first.ckpt")
            connector.writer.wait()
            state = module._engine.state_dict()
            import jax

            trees = (state["params"], state["variables"], state["optimizer_states"])
            self.nbytes = sum(leaf.nbytes for leaf in jax.tree_util.tree_leaves(trees))
            return
        module._engine.block_until_ready()
        for side in self.pairs[batch_idx - 1]:
            connector.writer.background = side == 0
            memory = Memory() if side == 0 else None
            start = time.perf_counter()
            trainer.save_checkpoint(self.root / f"{side}.ckpt")
            (self.blocked if side == 0 else self.waited).append(time.perf_counter() - start)
            connector.writer.wait()
            if memory is not None:
                self.memory.append(memory.extra())
        connector.writer.background = True


def measure(megabytes: float, pairs: int) -> dict[str, Any]:
    """Train and save.

    Args:
        megabytes: Size of the state.
        pairs: How many pairs of saves.
    """
    depth = 8
    width = int((megabytes * 1e6 / 4 / 3 / depth) ** 0.5)
    data = np.random.RandomState(0).randn(pairs + 1, width).astype(np.float32)
    with tempfile.TemporaryDirectory() as folder:
        measuring = Measure(Path(folder), pairs)
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[measuring],
            default_root_dir=folder,
        )
        trainer.fit(Big(width, depth), pl.ArrayLoader(data, batch_size=1))
    blocked, waited = statistics.median(measuring.blocked), statistics.median(measuring.waited)
    return {
        "state_MB": round(measuring.nbytes / 1e6, 1),
        "pairs": pairs,
        "loop_blocked_ms": round(blocked * 1e3, 1),
        "synchronous_save_ms": round(waited * 1e3, 1),
        "blocked_fraction": round(blocked / waited, 4),
        "limit_blocked_fraction": LIMIT_BLOCKED,
        "extra_memory_in_states": round(statistics.median(measuring.memory) / measuring.nbytes, 5),
        "extra_memory_in_states_each": [round(extra / measuring.nbytes, 5) for extra in measuring.memory],
        "extra_memory_beyond_one_state_kB": round((statistics.median(measuring.memory) - measuring.nbytes) / 1e3, 1),
        "limit_memory_in_states": round(LIMIT_STATES + PYTHONS_OWN / measuring.nbytes, 5),
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the command; 0 when both limits hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--megabytes", type=float, default=200.0)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    result = measure(options.megabytes, options.pairs)
    for name, value in result.items():
        print(f"{name}: {value}")
    if options.json is not None:
        write_json(options.json, result)
    good = (
        result["blocked_fraction"] <= LIMIT_BLOCKED
        and result["extra_memory_in_states"] <= result["limit_memory_in_states"]
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
