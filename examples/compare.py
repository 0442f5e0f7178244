"""Test accuracy of the two Flax examples beside that of lightning_original.py, the mean over several seeds.

Example:
    python examples/compare.py --seeds 3 --epochs 5 --write benchmarks/accuracy
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

EXAMPLES = ("lightning_original", "fashion_mnist_linen", "fashion_mnist_nnx")
LIMIT_POINTS = 0.7
"""How far apart, in percentage points, the means may be."""
PACKAGES = ("jax", "flax", "optax", "lightning", "torch", "torchvision")


def train(example: str, seed: int, passed_on: Sequence[str]) -> tuple[float, float]:
    """Run one example in a process of its own.

    Args:
        example: Name of the script, without `.py`.
        seed: Its seed.
        passed_on: Further options for it.

    Returns:
        The test accuracy (0 to 1) and the time it took in seconds.
    """
    script = Path(__file__).with_name(f"{example}.py")
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, str(script), "--quiet", "--seed", str(seed), *passed_on],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        check=False,
    )
    found = re.search(r"^test_acc=([\d.]+)$", done.stdout, flags=re.MULTILINE)
    if done.returncode != 0 or found is None:
        raise SystemExit(f"{script.name} --seed {seed} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return float(found.group(1)), time.perf_counter() - start


def table(results: dict[str, Any]) -> str:
    """Write the results as Markdown."""
    lines = [
        f"# Test accuracy on {results['data']}, {results['date']}",
        "",
        f"`python examples/compare.py`: {results['epochs']} epochs, {results['seeds']} seeds: their mean and each.",
        "",
        "| example | mean | points from Lightning | each seed | seconds a run |",
        "|---|---|---|---|---|",
    ]
    for name, row in results["examples"].items():
        each = ", ".join(f"{100 * value:.2f}" for value in row["test_acc"])
        mean, seconds = 100 * row["mean"], statistics.mean(row["seconds"])
        lines.append(f"| `{name}.py` | {mean:.2f} % | {row['points_apart']:+.2f} | {each} | {seconds:.0f} |")
    lines += ["", f"Machine: {results['machine']}. Versions: {results['versions']}.", results["note"], ""]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; return 1 when the means are further apart than allowed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (%(default)s)")
    parser.add_argument("--epochs", type=int, default=5, help="epochs of each run (%(default)s)")
    parser.add_argument("--limit", type=int, default=None, metavar="N", help="use only N training images")
    parser.add_argument("--data", type=Path, default=None, metavar="DIR", help="folder to look for Fashion-MNIST in")
    parser.add_argument("--output", type=Path, default=Path("example_output"), metavar="DIR", help="logs go here")
    parser.add_argument("--write", type=Path, default=None, metavar="PATH", help="write PATH.json and PATH.md too")
    parser.add_argument("--note", default="", help="a remark to write below the table")
    args = parser.parse_args(argv)

    import _data

    passed_on = ["--epochs", str(args.epochs), "--output", str(args.output)]
    passed_on += ["--limit", str(args.limit)] if args.limit is not None else []
    passed_on += ["--data", str(args.data)] if args.data is not None else []
    rows: dict[str, dict[str, Any]] = {name: {"test_acc": [], "seconds": []} for name in EXAMPLES}
    for seed in range(args.seeds):
        for name in EXAMPLES:
            accuracy, seconds = train(name, seed, passed_on)
            rows[name]["test_acc"].append(accuracy)
            rows[name]["seconds"].append(round(seconds, 1))
            print(f"{name} seed {seed}: {100 * accuracy:.2f} % in {seconds:.0f} s", flush=True)
    for row in rows.values():
        row["mean"] = statistics.mean(row["test_acc"])
        row["points_apart"] = 100 * (row["mean"] - rows[EXAMPLES[0]]["mean"])
    results = {
        "date": datetime.date.today().isoformat(),
        "data": "Fashion-MNIST" if _data.find_fashion_mnist(args.data) is not None else "scikit-learn's digits",
        "epochs": args.epochs,
        "seeds": args.seeds,
        "limit": args.limit,
        "examples": rows,
        "machine": f"{os.cpu_count()} CPU cores, {platform.system()} {platform.machine()}",
        "note": args.note,
        "versions": ", ".join(f"{name} {version(name)}" for name in PACKAGES),
    }
    print(table(results))
    if args.write is not None:
        args.write.parent.mkdir(parents=True, exist_ok=True)
        args.write.with_suffix(".json").write_text(json.dumps(results, indent=2) + "\n")
        args.write.with_suffix(".md").write_text(table(results))
    return int(any(abs(row["points_apart"]) > LIMIT_POINTS for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
