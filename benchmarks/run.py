"""Runs the benchmarks one after the other and writes `benchmarks/RESULTS.md` from what they found.

Example:
    python benchmarks/run.py
    python benchmarks/run.py --only overhead,nnx
    python benchmarks/run.py --only none        # write RESULTS.md again from the results at hand
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from _harness import as_text

HERE = Path(__file__).resolve().parent
SCRIPTS = (
    "import_time", "overhead", "nnx", "manual", "template", "step_profile", "language", "vision", "input", "compile",
    "memory", "scaling",
)  # fmt: skip
QUICK = {
    "import_time": ["--pairs", "1"],
    "overhead": ["--pairs", "4", "--steps", "200"],
    "nnx": ["--pairs", "4", "--steps", "200"],
    "manual": ["--pairs", "4", "--steps", "2"],
    "template": ["--pairs", "4", "--steps", "5"],
    "step_profile": ["--passes", "4", "--steps", "200"],
    "language": ["--pairs", "4", "--steps", "2", "--peers", "0"],
    "vision": ["--pairs", "4", "--images", "512", "--peers", "0"],
    "compile": ["--pairs", "1"],
    "memory": ["--megabytes", "20"],
    "scaling": ["--pairs", "4", "--steps", "100", "--leaves", "10,50"],
}
"""Options for a run that only shows that the scripts work; `input` has no short form and is left out."""

NEEDS = {"vision": "torchvision", "input": "lightning"}


def run(name: str, options: list[str], results: Path) -> dict[str, Any]:
    """Run one script; its result goes to `<results>/<name>.json`."""
    command = [sys.executable, str(HERE / f"{name}.py"), "--json", str(results / f"{name}.json"), *options]
    print(f"== {name}", flush=True)
    start = time.perf_counter()
    status = subprocess.run(command, check=False).returncode
    took = time.perf_counter() - start
    print(f"== {name}: {'passed' if status == 0 else 'FAILED'} in {took:.0f} s", flush=True)
    return {"status": status, "seconds": took}


def verdicts(found: dict[str, Any]) -> list[str]:
    """Return what a script measured, as lines."""
    lines = [f"- {as_text(row)}" for row in found.get("checks", [])]
    if lines:
        return lines
    # Results of another form: their numbers, without the single measurements.
    for key, value in found.items():
        if isinstance(value, bool | int | float | str) and key not in ("benchmark",):
            lines.append(f"- {key}: {value:.4g}" if isinstance(value, float) else f"- {key}: {value}")
        elif isinstance(value, dict) and key != "machine":
            numbers = {k: v for k, v in value.items() if isinstance(v, bool | int | float | str)}
            text = ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in numbers.items())
            lines.append(f"- {key}: {text}")
    return lines


def profile_table(found: dict[str, Any]) -> list[str]:
    """Return where the microseconds of a step go, as a table."""
    lines = ["| | us per step | more than the line above |", "| --- | ---: | ---: |"]
    for row in found["table"]:
        more = "" if row["difference_us"] is None else f"{row['difference_us']:+.1f}"
        lines.append(f"| {row['name']} | {row['us']:.1f} | {more} |")
    return lines


def write(results: Path, target: Path) -> None:
    """Write the report from all results in a folder."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(results.glob("*.json"))}
    lines = [
        "# Results of the benchmarks",
        "",
        "Written by `make bench`. Ratios are those of medians over interleaved pairs of alternating order; a limit is",
        "met when the number is within it and the A/A spread of the same run: what that run calls a difference between",
        "two halves of one side. How each side is built is said at the top of its script.",
        "",
    ]
    for name in [n for n in SCRIPTS if n in found] + [n for n in found if n not in SCRIPTS]:
        result = found[name]
        machine = result.get("machine", {})
        lines += [f"## {name}", ""]
        if name == "step_profile":
            lines += ["Where the microseconds of a step go: the lines before the last include those above them.", ""]
            lines += profile_table(result)
        else:
            lines += verdicts(result)
        if (results / f"{name}.png").is_file():
            lines += ["", f"![{name}](results/{name}.png)"]
        if machine:
            versions = ", ".join(f"{package} {number}" for package, number in machine["versions"].items())
            lines += [
                "",
                f"{machine['date']}, {machine['platform']}, {machine['cpu_cores']} cores, load"
                f" {machine['load_average_1min']}; {versions}.",
            ]
        lines.append("")
    lines += [
        "## Left out",
        "",
        "Kauldron is not compared. Its release 1.4.2 asks for about 90 further packages (cloud clients, `xmanager`) and"
        " for an older protobuf than the one that is installed here.",
        "",
    ]
    target.write_text("\n".join(lines))
    print(f"written: {target}")


def main() -> int:
    """Run what was asked for; return 1 when a script failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default=",".join(SCRIPTS), help="scripts, with commas (%(default)s)")
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes: shows that the scripts work, measures nothing"
    )
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder of the results")
    parser.add_argument("--report", type=Path, default=HERE / "RESULTS.md", help="the report (%(default)s)")
    args = parser.parse_args()
    names = [] if args.only == "none" else args.only.split(",")
    if not set(names) <= set(SCRIPTS):
        parser.error(f"there are {', '.join(SCRIPTS)}")
    args.results.mkdir(parents=True, exist_ok=True)
    done = {}
    for name in names:
        if importlib.util.find_spec(NEEDS.get(name, "jax")) is None:
            print(f"LEFT OUT: {name}, which needs {NEEDS[name]}")
        elif not args.quick or name in QUICK:
            done[name] = run(name, QUICK.get(name, []) if args.quick else [], args.results)
    write(args.results, args.report)
    failed = [name for name, row in done.items() if row["status"]]
    if failed:
        print(f"beyond a limit, or broken: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
