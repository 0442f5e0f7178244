"""Measurements in fresh processes without the time of their imports: a fork of a process that has only imported."""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any


def in_a_fork(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run a function in a forked child, before any JAX backend was started in this process.

    Args:
        measure: Returns something that JSON can hold.

    Raises:
        RuntimeError: When the child failed.
    """
    read, write = os.pipe()
    sys.stdout.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the fork: what runs in other threads here is idle
        child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(read)
            with os.fdopen(write, "w") as answer:
                json.dump(measure(), answer)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    if status != 0 or not text:
        raise RuntimeError(f"The measurement ended with status {status}.")
    result: dict[str, Any] = json.loads(text)
    return result
