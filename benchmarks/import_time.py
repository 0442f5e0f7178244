"""How long `import jaxlightning` takes beside what it stands on, and what it must not load.

Example:
    python benchmarks/import_time.py --json benchmarks/results/import_time.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from _harness import orders, ratio_of_medians, write_json

BASE = "import jax, flax.linen, flax.nnx, optax, numpy"
OURS = "from jaxlightning import LightningModule, Trainer"
PACKAGE_ALONE = "import jaxlightning"
LIGHTNING = "import lightning.pytorch"
FORBIDDEN = ("torch", "tensorflow", "tensorboardX", "lightning", "orbax", "tqdm")
PROBE = """
import json, sys, time
start = time.perf_counter()
{statement}
print(json.dumps({{"seconds": time.perf_counter() - start, "loaded": [n for n in {names} if n in sys.modules]}}))
"""


def measure(statement: str) -> tuple[float, list[str]]:
    """Run the statement in a fresh interpreter.

    Returns:
        The seconds it took, and which of `FORBIDDEN` were loaded afterwards.
    """
    script = PROBE.format(statement=statement, names=FORBIDDEN)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout.splitlines()[-1])
    return answer["seconds"], answer["loaded"]


def main() -> int:
    """Print the medians; return 1 when something forbidden was loaded."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=7, help="measurements of each side (%(default)s)")
    parser.add_argument("--lightning", action="store_true", help="time PyTorch Lightning's import too")
    parser.add_argument("--json", type=Path, default=None, metavar="PATH", help="write the result there")
    args = parser.parse_args()

    measure(OURS)  # the first reads the files from the disk
    alone: list[float] = []
    seconds: tuple[list[float], list[float]] = ([], [])
    loaded: list[str] = []
    for order in orders(args.pairs):
        for side in order:
            took, names = measure((BASE, OURS)[side])
            seconds[side].append(took)
            if side == 1:
                loaded = names
        alone.append(measure(PACKAGE_ALONE)[0])
    result = {
        "benchmark": "import_time",
        "base": BASE,
        "base_s": statistics.median(seconds[0]),
        "import_jaxlightning_s": statistics.median(alone),
        "ours": OURS,
        "ours_s": statistics.median(seconds[1]),
        "ratio": ratio_of_medians(seconds[1], seconds[0]),
        "loaded_although_forbidden": loaded,
    }
    if args.lightning:
        result["lightning_s"] = statistics.median(measure(LIGHTNING)[0] for _ in range(args.pairs))
    print(f"{PACKAGE_ALONE}: {result['import_jaxlightning_s']:.2f} s")
    print(f"{OURS}: {result['ours_s']:.2f} s, {BASE}: {result['base_s']:.2f} s")
    print(f"loaded although forbidden: {', '.join(loaded) or 'none'}")
    write_json(args.json, result)
    return int(bool(loaded))


if __name__ == "__main__":
    sys.exit(main())
