"""What the benchmarks share: pairs in alternating order, medians, the spread of the run itself, and the report.

The rule of comparison: both sides run in one process, one after the other, the order turned round in every pair, so
that a slow phase of the machine meets both. The A/A spread is the same statistic computed between two halves of the
*same* side: what this run would have called a difference although there is none.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "torch", "lightning")


def use_the_cpu() -> None:
    """Keep JAX on the CPU; call it before jax is imported."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"


def orders(pairs: int) -> Iterator[tuple[int, int]]:
    """Yield (0, 1), (1, 0), (0, 1), ...: which side runs first in each pair."""
    for pair in range(pairs):
        yield (0, 1) if pair % 2 == 0 else (1, 0)


def ratio_of_medians(ours: Sequence[float], base: Sequence[float]) -> float:
    """Return median(ours) / median(base)."""
    return statistics.median(ours) / statistics.median(base)


def aa_spread(values: Sequence[float]) -> float:
    """Return how far the medians of every other measurement of one side are apart, as a fraction.

    Args:
        values: At least four measurements of the same thing, in the order of time.
    """
    # Taken as a, b, b, a, a, b, b, a ...: the alternating order of the pairs themselves.
    first = [value for i, value in enumerate(values) if i % 4 in (0, 3)]
    second = [value for i, value in enumerate(values) if i % 4 in (1, 2)]
    return abs(statistics.median(first) / statistics.median(second) - 1.0)


def machine() -> dict[str, Any]:
    """Describe where and with what the numbers were taken."""
    versions: dict[str, str] = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "date": datetime.date.today().isoformat(),
        "cpu_cores": os.cpu_count(),
        "load_average_1min": round(os.getloadavg()[0], 2),
        "platform": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "versions": versions,
    }


def write_json(path: Path | None, result: dict[str, Any]) -> None:
    """Write the result with the machine's description, or only print it when there is no path."""
    text = json.dumps({**result, "machine": machine()}, indent=2)
    if path is None:
        print(text)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
    print(f"written: {path}")
