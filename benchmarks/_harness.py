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

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "torch", "lightning", "keras")

MOST_SPREAD = 0.5
"""With a larger A/A spread a run shows nothing, and its checks fail."""


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


class Report:
    """The checks of one benchmark: printed as they come, written as JSON with a picture beside it.

    Args:
        name: Of the benchmark.
        path: Where the JSON goes, None to print it.
    """

    def __init__(self, name: str, path: Path | None) -> None:
        self.name = name
        self.path = path
        self.result: dict[str, Any] = {"benchmark": name, "checks": []}

    def check(
        self,
        name: str,
        value: float,
        limit: float | None,
        spread: float = 0.0,
        *,
        at_least: bool = False,
        unit: str = "",
    ) -> None:
        """Hold a number against its limit; with limit None it is only shown.

        Args:
            name: What was measured.
            value: The number.
            limit: The highest value allowed, or the lowest with `at_least`.
            spread: The A/A spread of the same run, as a fraction of the limit.
            at_least: Whether more is better.
            unit: Of the number; empty for a ratio.
        """
        passed = None
        if limit is not None:
            passed = value >= limit * (1 - spread) if at_least else value <= limit * (1 + spread)
            passed = passed and spread <= MOST_SPREAD
        row = {
            "name": name, "value": value, "limit": limit, "at_least": at_least, "spread": spread, "unit": unit,
            "passed": passed,
        }  # fmt: skip
        self.result["checks"].append(row)
        print(as_text(row), flush=True)

    def finish(self) -> int:
        """Write the result; return 1 when a check failed."""
        failed = [row["name"] for row in self.result["checks"] if row["passed"] is False]
        self.result["passed"] = not failed
        write_json(self.path, self.result)
        if self.path is not None:
            plot(self.result["checks"], self.name, self.path.with_suffix(".png"))
        return int(bool(failed))


def as_text(row: dict[str, Any]) -> str:
    """Return a check as one line."""
    text = f"{row['name']}: {row['value']:.4g}{' ' + row['unit'] if row['unit'] else ''}"
    if row["limit"] is None:
        return text
    word = "at least" if row["at_least"] else "at most"
    verdict = "passed" if row["passed"] else "FAILED"
    if row["spread"] > MOST_SPREAD:
        verdict += ", the machine was too busy to tell"
    return f"{text} ({word} {row['limit']:g}, A/A spread {row['spread']:.3f}): {verdict}"


def plot(checks: Sequence[dict[str, Any]], name: str, path: Path) -> None:
    """Draw the ratios beside their limits; nothing without matplotlib."""
    rows = [row for row in checks if not row["unit"]]
    try:
        import matplotlib
    except ImportError:
        return
    if not rows:
        return
    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 1 + 0.35 * len(rows)), layout="constrained")
    colours = {True: "tab:green", False: "tab:red", None: "tab:gray"}
    labels = [row["name"] for row in rows]
    axes.barh(labels, [row["value"] for row in rows], color=[colours[row["passed"]] for row in rows])
    for i, row in enumerate(rows):
        if row["limit"] is not None:
            axes.plot([row["limit"]] * 2, [i - 0.4, i + 0.4], color="black")
    axes.set_xscale("log")
    axes.invert_yaxis()
    axes.set_title(f"{name}: ratios (bars) and limits (lines)")
    figure.savefig(path, dpi=120)
    plt.close(figure)
