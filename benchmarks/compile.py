"""How long the first step takes in a fresh process, imports excluded: hand-written, and `fit` without and with a cache.

From the call of `fit` (hand-written: from the creation of the parameters) to the result of step 1 and to the first log
point (step 50). The model is a convolution with BatchNorm and a dense layer, batch 32, Adam. "Warm" is `fit` with the
persistent compilation cache that an earlier process of the same script has filled.

Example:
    python benchmarks/compile.py --json benchmarks/results/compile.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _fresh import in_a_fork
from _harness import Report, aa_spread, orders, ratio_of_medians, use_the_cpu
from _interleave import Batches, quiet

use_the_cpu()

import jax  # noqa: E402  (the platform has to be chosen first)
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import linen as nn  # noqa: E402

import jaxlightning as jl  # noqa: E402

BATCH, CLASSES, FIRST_LOG = 32, 10, 50


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        x = nn.Conv(16, (3, 3), strides=2)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
        return nn.Dense(CLASSES)(x.mean((1, 2)))


class LitCNN(jl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = CNN()

    def training_step(self, batch: Any, batch_idx: int) -> jax.Array:
        x, y = batch
        loss = optax.softmax_cross_entropy_with_integer_labels(self.net(x), y).mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(1e-3)


def make_batches() -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the batches up to the first log point."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCH, 28, 28, 1)).astype(np.float32)
    return [(x, rng.integers(0, CLASSES, BATCH).astype(np.int32)) for _ in range(FIRST_LOG)]


def hand_written() -> dict[str, float]:
    """Time a hand-written script from the creation of its parameters."""
    batches = make_batches()
    start = time.perf_counter()
    net, optimizer = CNN(), optax.adam(1e-3)
    variables = jax.jit(net.init)(jax.random.key(0), batches[0][0])
    params, stats = variables["params"], variables["batch_stats"]
    opt_state = jax.jit(optimizer.init)(params)

    def step(params: Any, stats: Any, opt_state: Any, x: jax.Array, y: jax.Array) -> Any:
        def loss_of(params: Any) -> Any:
            logits, new = net.apply({"params": params, "batch_stats": stats}, x, train=True, mutable=["batch_stats"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), new["batch_stats"]

        (loss, stats_), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, opt_state_ = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), stats_, opt_state_, loss

    jitted = jax.jit(step, donate_argnums=(0, 1, 2))
    first = 0.0
    for x, y in batches:
        params, stats, opt_state, loss = jitted(params, stats, opt_state, x, y)
        if not first:
            loss.block_until_ready()
            first = time.perf_counter() - start
    float(loss)
    return {"first_step": first, "first_log": time.perf_counter() - start}


def ours(cache: str | None) -> dict[str, float]:
    """Time `fit` from its call, with the bar and the CSVLogger on.

    Args:
        cache: Folder of the compilation cache, None for none.
    """
    if cache is not None:
        jax.config.update("jax_enable_compilation_cache", True)
    times: dict[str, float] = {}

    class Moments(jl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if not times:
                outputs["loss"].block_until_ready()
                times["first_step"] = time.perf_counter() - start
            elif batch_idx == FIRST_LOG - 1:
                outputs["loss"].block_until_ready()
                times["first_log"] = time.perf_counter() - start

    with quiet() as folder:
        trainer = jl.Trainer(
            max_epochs=1, logger=jl.loggers.CSVLogger(folder), callbacks=[Moments()], enable_checkpointing=False,
            default_root_dir=folder, compilation_cache=cache or False,
        )  # fmt: skip
        module, batches = LitCNN(), Batches(make_batches())
        start = time.perf_counter()
        trainer.fit(module, batches)
    return times


def main() -> int:
    """Print the ratios; return 1 when a limit is missed by more than the A/A spread."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=15, help="fresh processes of each kind (%(default)s)")
    parser.add_argument("--json", type=Path, default=None, metavar="PATH", help="write the result there")
    args = parser.parse_args()
    report = Report("compile", args.json)
    with tempfile.TemporaryDirectory() as cache:
        sides = {"hand-written": hand_written, "fit": lambda: ours(None), "fit, warm cache": lambda: ours(cache)}
        for measure in sides.values():  # fills the cache, and reads the files of all of it from the disk
            in_a_fork(measure)
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
        for order in orders(args.pairs):
            for name in list(sides) if order[0] == 0 else list(reversed(sides)):
                found[name].append(in_a_fork(sides[name]))
        report.result["cache_bytes"] = sum(path.stat().st_size for path in Path(cache).iterdir())
    report.result["seconds"] = found

    def column(name: str, moment: str) -> list[float]:
        return [row[moment] for row in found[name]]

    for name in sides:
        for moment in ("first_step", "first_log"):
            report.check(f"{name}, {moment}", statistics.median(column(name, moment)), None, unit="s")
    for name, base, moment, limit in (
        ("fit", "hand-written", "first_step", 1.15),
        ("fit", "hand-written", "first_log", 1.6),
        ("fit, warm cache", "fit", "first_step", 0.5),
    ):
        mine, other = column(name, moment), column(base, moment)
        spread = max(aa_spread(mine), aa_spread(other)) if args.pairs >= 4 else 0.0
        report.check(f"{name} / {base}, {moment}", ratio_of_medians(mine, other), limit, spread)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
