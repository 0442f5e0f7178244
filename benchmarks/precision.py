"""Test accuracy of the Fashion-MNIST CNN in "bf16-mixed" and "16-mixed" beside "32-true", the mean over several seeds.

The network is that of examples/fashion_mnist_linen.py; each run is a process of its own.

Example:
    python benchmarks/precision.py --seeds 3 --epochs 2 --limit 12000 --write benchmarks/precision
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")
BATCH = 128
LIMIT_POINTS = 0.7
"""How far from the mean of "32-true", in percentage points, the other means may be."""


def train(precision: str, seed: int, epochs: int, limit: int | None, data: Path | None) -> dict[str, Any]:
    """Train and test once, in this process.

    Args:
        precision: What `Trainer(precision=...)` gets.
        seed: Seed of weights, order and dropout.
        epochs: Passes over the training images.
        limit: Training images to use, None for all; the test always has all of its images.
        data: Folder to look for Fashion-MNIST in.

    Returns:
        `test_acc` (0 to 1), `seconds`, the dtypes of the parameters, the updates left out, and the traces of the step.
    """
    sys.path.insert(0, str(EXAMPLES))
    import jax
    import numpy as np

    import _data
    import jaxlightning as jl
    from fashion_mnist_linen import LitCNN

    images = _data.load_images(data)
    x, y = _data.normalize(images.train_x[:limit]), images.train_y[:limit].astype(np.int32)
    train_loader = jl.ArrayLoader(x, y, batch_size=BATCH, shuffle=True, drop_last=True, seed=seed)
    test_loader = jl.ArrayLoader(_data.normalize(images.test_x), images.test_y.astype(np.int32), batch_size=500)
    jl.seed_everything(seed)
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = jl.Trainer(max_epochs=epochs, precision=precision, limit_val_batches=0, **off)
    model = LitCNN()
    start = time.perf_counter()
    trainer.fit(model, train_loader, test_loader)  # no batch of it: the limit is 0
    (results,) = trainer.test(model, test_loader, verbose=False)
    seconds = time.perf_counter() - start
    engine = model._engine
    return {
        "test_acc": float(results["test_acc"]),
        "seconds": round(seconds, 1),
        "parameters": sorted({str(leaf.dtype) for leaf in jax.tree.leaves(trainer.state.params)}),
        "skipped": engine.skipped_updates(),
        "traces": engine.trace_counts["train"],
    }


def _child(precision: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", precision, "--first-seed", str(seed), "--epochs", str(args.epochs)]
    command += ["--limit", str(args.limit)] if args.limit is not None else []
    command += ["--data", str(args.data)] if args.data is not None else []
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"}, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{precision}, seed {seed} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def table(results: dict[str, Any]) -> str:
    """Write the results as Markdown."""
    images = "all" if results["limit"] is None else f"{results['limit']:,}"
    lines = [
        f"# Test accuracy by precision on {results['data']}, {results['date']}",
        "",
        f"`python benchmarks/precision.py`: the CNN of `examples/fashion_mnist_linen.py`, {results['epochs']} epochs "
        f"of {images} training images, {results['seeds']} seeds: their mean and each.",
        "",
        "| precision | mean | points from 32-true | each seed | parameters | updates left out | traces |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in results["precisions"].items():
        runs = row["runs"]
        each = ", ".join(f"{100 * run['test_acc']:.2f}" for run in runs)
        kept = ", ".join(sorted({dtype for run in runs for dtype in run["parameters"]}))
        skipped, traces = (", ".join(str(run[key]) for run in runs) for key in ("skipped", "traces"))
        lines.append(
            f"| `{name}` | {100 * row['mean']:.2f} % | {row['points_apart']:+.2f} | {each} | {kept} | {skipped} | "
            f"{traces} |"
        )
    lines += ["", f"Machine: {results['machine']}. Versions: {results['versions']}.", ""]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; return 1 when a mean is further from that of "32-true" than allowed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (%(default)s)")
    parser.add_argument("--first-seed", type=int, default=0, help="the first of them (%(default)s)")
    parser.add_argument("--epochs", type=int, default=5, help="epochs of each run (%(default)s)")
    parser.add_argument("--limit", type=int, default=None, metavar="N", help="use only N training images")
    parser.add_argument("--data", type=Path, default=None, metavar="DIR", help="folder to look for Fashion-MNIST in")
    parser.add_argument("--write", type=Path, default=None, metavar="PATH", help="write PATH.json and PATH.md too")
    parser.add_argument("--one", choices=PRECISIONS, default=None, help="one run only; print its result as JSON")
    args = parser.parse_args(argv)
    if args.one is not None:
        print(json.dumps(train(args.one, args.first_seed, args.epochs, args.limit, args.data)))
        return 0
    sys.path.insert(0, str(EXAMPLES))
    import _data

    rows: dict[str, dict[str, Any]] = {name: {"runs": []} for name in PRECISIONS}
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        for name in PRECISIONS:
            run = _child(name, seed, args)
            rows[name]["runs"].append(run)
            print(f"{name} seed {seed}: {100 * run['test_acc']:.2f} % in {run['seconds']:.0f} s", flush=True)
    for row in rows.values():
        row["mean"] = statistics.mean(run["test_acc"] for run in row["runs"])
        row["points_apart"] = 100 * (row["mean"] - rows[PRECISIONS[0]]["mean"])
    results = {
        "date": datetime.date.today().isoformat(),
        "data": "Fashion-MNIST" if _data.find_fashion_mnist(args.data) is not None else "scikit-learn's digits",
        "epochs": args.epochs,
        "seeds": args.seeds,
        "limit": args.limit,
        "precisions": rows,
        "machine": f"{os.cpu_count()} CPU cores, {platform.system()} {platform.machine()}",
        "versions": ", ".join(f"{name} {version(name)}" for name in ("jax", "flax", "optax")),
    }
    print(table(results))
    if args.write is not None:
        args.write.parent.mkdir(parents=True, exist_ok=True)
        args.write.with_suffix(".json").write_text(json.dumps(results, indent=2) + "\n")
        args.write.with_suffix(".md").write_text(table(results))
    return int(any(abs(row["points_apart"]) > LIMIT_POINTS for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
