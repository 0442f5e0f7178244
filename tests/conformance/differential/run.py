"""Runs the differential test over a range of seeds and prints what differs.

For example:

    python tests/conformance/differential/run.py --seeds 0:300 --jobs 2
    python tests/conformance/differential/run.py --seeds 17 --show
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from pprint import pformat

TESTS = Path(__file__).resolve().parents[2]


def _prepare() -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    if str(TESTS) not in sys.path:
        sys.path.insert(0, str(TESTS))


def _one(seed: int) -> tuple[int, float, list[str]]:
    from conformance.differential.compare import differences

    start = time.perf_counter()
    lines = differences(seed)
    return seed, time.perf_counter() - start, lines


def _results(seeds: Iterable[int], jobs: int) -> Iterator[tuple[int, float, list[str]]]:
    if jobs <= 1:
        yield from map(_one, seeds)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_prepare) as pool:
        yield from pool.map(_one, seeds, chunksize=1)


def main() -> int:
    """Run the command; 1 when some seed differs."""
    parser = argparse.ArgumentParser(description="Random configurations on Lightning and on jaxlightning.")
    parser.add_argument("--seeds", default="0:60", help="first:last (last not included), or numbers with commas")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes")
    parser.add_argument("--show", action="store_true", help="print the configurations")
    parser.add_argument("--write-status", action="store_true", help="write the result to tests/RESULT.md")
    parser.add_argument("--progress", action="store_true", help="print a line per seed to stderr")
    options = parser.parse_args()
    first, colon, last = options.seeds.partition(":")
    seeds = range(int(first), int(last)) if colon else [int(seed) for seed in options.seeds.split(",")]
    _prepare()
    failed, total = [], 0.0
    for seed, seconds, lines in _results(seeds, options.jobs):
        total += seconds
        if options.progress:
            print(f"{seed}: {len(lines)} lines, {seconds:.1f} s", file=sys.stderr, flush=True)
        if lines:
            failed.append(seed)
            print(f"seed {seed} ({seconds:.1f} s) differs:")
            print("\n".join(lines[:40]), flush=True)
        if options.show:
            from conformance.differential.sampling import sample

            print(pformat(sample(seed), sort_dicts=False, width=140), flush=True)
    said = f"{len(seeds) - len(failed)} of {len(seeds)} seeds agree"
    print(f"{said}; {total / max(1, len(seeds)):.2f} s per seed")
    if options.write_status:
        from support.suite_report import note_command

        note_command(f"tests/conformance/differential/run.py --seeds {options.seeds}", said, total)
    if failed:
        print("failed:", ",".join(map(str, failed)))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
