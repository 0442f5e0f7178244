"""How much memory a run holds with a state of 500 MB, beside a hand-written loop; each side in a fresh process.

Counted are the live JAX arrays between two steps, and what XLA says that one call of the step needs on top (results
that are not written in place, temporaries). The model is a stack of dense layers whose parameters and Adam moments make
the size; Keras on JAX and PyTorch Lightning are shown by the peak of their process, imports taken off.

Example:
    python benchmarks/memory.py --json benchmarks/results/memory.json
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _fresh import in_a_fork
from _harness import Report, use_the_cpu
from _interleave import Batches, quiet

use_the_cpu()
os.environ.setdefault("KERAS_BACKEND", "jax")

import jax  # noqa: E402  (the platform has to be chosen first)
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import linen as nn  # noqa: E402

import jaxlightning as jl  # noqa: E402

LAYERS, BATCH, STEPS = 4, 8, 3


def width_for(megabytes: float) -> int:
    """Return the width of square layers whose parameters and two moments take so many megabytes."""
    return int((megabytes * 1e6 / (3 * 4 * LAYERS)) ** 0.5) + 1


class Stack(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(LAYERS):
            x = nn.relu(nn.Dense(self.width)(x))
        return x


def make_batches(width: int) -> list[tuple[np.ndarray]]:
    """Return the batches, float32 (8, width)."""
    return [(np.random.default_rng(0).normal(size=(BATCH, width)).astype(np.float32),)] * STEPS


def live_bytes() -> int:
    """Return the bytes of all JAX arrays that are alive."""
    gc.collect()
    buffers = {array.unsafe_buffer_pointer(): array.nbytes for array in jax.live_arrays() if not array.is_deleted()}
    return sum(buffers.values())


def extra_bytes(analysis: Any) -> int:
    """Return what a call needs beside its arguments."""
    return int(analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes)


def peak_bytes() -> int:
    """Return the largest resident size of this process so far."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def hand_written(width: int) -> dict[str, Any]:
    """Measure the hand-written loop."""
    before = peak_bytes()
    batches = make_batches(width)
    net, optimizer = Stack(width), optax.adam(1e-3)
    params = jax.jit(net.init)(jax.random.key(0), batches[0][0])
    opt_state = optimizer.init(params)

    def step(params: Any, opt_state: Any, x: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(lambda p: (net.apply(p, x) ** 2).mean())(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, opt_state, batches[0][0]).compile()
    for (x,) in batches:
        params, opt_state, loss = compiled(params, opt_state, x)
    loss.block_until_ready()
    extra = extra_bytes(compiled.memory_analysis())
    return {"live": live_bytes(), "call": extra, "peak": peak_bytes() - before}


def ours(width: int) -> dict[str, Any]:
    """Measure `fit` after its last step, with one logged value, the bar and the CSVLogger."""
    before = peak_bytes()
    result: dict[str, Any] = {}

    class Module(jl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Stack(width)

        def training_step(self, batch: Any, batch_idx: int) -> jax.Array:
            loss = (self.net(batch[0]) ** 2).mean()
            self.log("loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> optax.GradientTransformation:
            return optax.adam(1e-3)

    class Weigh(jl.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            engine = trainer._engine
            engine.block_until_ready()
            result.update(live=live_bytes(), call=extra_bytes(engine.compiled["train"].memory))

    with quiet() as folder:
        trainer = jl.Trainer(
            max_epochs=1, logger=jl.loggers.CSVLogger(folder), callbacks=[Weigh()], enable_checkpointing=False,
            default_root_dir=folder, log_every_n_steps=1, compilation_cache=False,
        )  # fmt: skip
        trainer.fit(Module(), Batches(make_batches(width)))
    return {**result, "peak": peak_bytes() - before}


def keras_on_jax(width: int) -> dict[str, Any]:
    """Measure the peak of Keras."""
    import keras

    before = peak_bytes()
    layers = [keras.layers.Dense(width, activation="relu") for _ in range(LAYERS)]
    model = keras.Sequential([keras.Input((width,)), *layers])
    model.compile(optimizer=keras.optimizers.Adam(1e-3), loss="mse", jit_compile=True)
    x = np.concatenate([batch[0] for batch in make_batches(width)])
    with quiet():
        model.fit(x, np.zeros_like(x), batch_size=BATCH, verbose=0)
    return {"peak": peak_bytes() - before}


def lightning(width: int) -> dict[str, Any]:
    """Measure the peak of PyTorch Lightning."""
    import lightning.pytorch as pl
    import torch

    before = peak_bytes()

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            layers = [part for _ in range(LAYERS) for part in (torch.nn.Linear(width, width), torch.nn.ReLU())]
            self.net = torch.nn.Sequential(*layers)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return (self.net(batch[0]) ** 2).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=1e-3)

    with quiet() as folder:
        trainer = pl.Trainer(
            max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            default_root_dir=folder,
        )  # fmt: skip
        trainer.fit(Module(), Batches([(torch.from_numpy(x),) for (x,) in make_batches(width)]))
    return {"peak": peak_bytes() - before}


def main() -> int:
    """Print the sizes; return 1 when the limit is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=500, help="size of the training state (%(default)s)")
    parser.add_argument("--json", type=Path, default=None, metavar="PATH", help="write the result there")
    args = parser.parse_args()
    width = width_for(args.megabytes)
    report = Report("memory", args.json)
    sides: dict[str, Callable[[int], dict[str, Any]]] = {"hand-written": hand_written, "fit": ours}
    if importlib.util.find_spec("keras") is not None:
        sides["Keras on JAX"] = keras_on_jax
    if importlib.util.find_spec("lightning") is not None:
        sides["Lightning"] = lightning
    found = {name: in_a_fork(lambda measure=measure: measure(width)) for name, measure in sides.items()}  # type: ignore[misc]
    report.result["bytes"] = found
    for name, row in found.items():
        for what, size in row.items():
            report.check(f"{name}, {what}", size / 1e6, None, unit="MB")
    hand, mine = found["hand-written"], found["fit"]
    # Exact numbers of one process: they have no spread.
    report.check("live arrays, fit / hand-written", mine["live"] / hand["live"], 1.05)
    total = (mine["live"] + mine["call"]) / (hand["live"] + hand["call"])
    report.check("live arrays and step, fit / hand-written", total, 1.05)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
