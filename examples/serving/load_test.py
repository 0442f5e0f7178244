"""Send many requests at once to a service of service.py, and say how long they took.

Example:
    python examples/serving/load_test.py --url http://127.0.0.1:8000 --requests 400 --clients 16 --shape 28,28,1
"""

from __future__ import annotations

import argparse
import json
import threading
import time
import urllib.request
from collections.abc import Sequence
from typing import Any

import numpy as np


def ask(url: str, rows: np.ndarray) -> Any:
    """Return the outputs for some rows."""
    body = json.dumps({"inputs": rows.tolist()}).encode()
    request = urllib.request.Request(f"{url}/predict", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.loads(response.read())["outputs"]


def load_test(url: str, inputs: Sequence[np.ndarray], clients: int) -> tuple[list[Any], list[float], float]:
    """Ask for all inputs from several threads.

    Args:
        url: Where the service listens.
        inputs: The rows of each request.
        clients: How many threads ask at the same time.

    Returns:
        The answers in order, the seconds that each took, and the seconds that all took.
    """
    answers: list[Any] = [None] * len(inputs)
    seconds = [0.0] * len(inputs)

    def client(first: int) -> None:
        for i in range(first, len(inputs), clients):
            start = time.perf_counter()
            answers[i] = ask(url, inputs[i])
            seconds[i] = time.perf_counter() - start

    threads = [threading.Thread(target=client, args=(i,)) for i in range(clients)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers, seconds, time.perf_counter() - start


def main(argv: Sequence[str] | None = None) -> None:
    """Run the test and print what it measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the service (%(default)s)")
    parser.add_argument("--requests", type=int, default=400, help="number of requests (%(default)s)")
    parser.add_argument("--clients", type=int, default=16, help="how many ask at once (%(default)s)")
    parser.add_argument("--shape", default="28,28,1", help="shape of one row (%(default)s)")
    args = parser.parse_args(argv)
    shape = tuple(int(size) for size in args.shape.split(","))
    rng = np.random.default_rng(0)
    inputs = [rng.random((1, *shape), np.float32) for _ in range(args.requests)]
    _, seconds, total = load_test(args.url, inputs, args.clients)
    with urllib.request.urlopen(f"{args.url}/health", timeout=60) as response:
        batches = json.loads(response.read())["batches"]
    print(
        f"{args.requests / total:.0f} requests/s, median {1e3 * np.median(seconds):.1f} ms, "
        f"99 % {1e3 * np.quantile(seconds, 0.99):.1f} ms, {batches} calls of the model since the service began"
    )


if __name__ == "__main__":
    main()
