"""Seeds of every random generator that user code may draw from on the host.

The keys inside a compiled step come from the trainer's seed (`PL_GLOBAL_SEED` by default), see DESIGN "Random keys".
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np

from jaxlightning.utilities.rank_zero import rank_zero_info, rank_zero_warn

#: Bounds of a seed: what `numpy.random.seed` accepts.
MIN_SEED = int(np.iinfo(np.uint32).min)
MAX_SEED = int(np.iinfo(np.uint32).max)

_SEED_VARIABLE = "PL_GLOBAL_SEED"
_WORKERS_VARIABLE = "PL_SEED_WORKERS"


def seed_everything(seed: int | None = None, workers: bool = False, verbose: bool = True) -> int:
    """Seed Python's, numpy's and (when it is already imported) torch's generators.

    It also sets ``PL_GLOBAL_SEED``, from which a trainer without a seed of its own takes the key of its compiled
    steps, and ``PL_SEED_WORKERS``, as Lightning does, for programs that look at it. Workers of a DataLoader draw from
    the base seed that the loader takes from torch's generator, each its own numbers, whether it is set or not.

    Args:
        seed: The seed, in [0, 2**32 - 1]. Without one, ``PL_GLOBAL_SEED`` is used, and 0 when that is not set.
        workers: What ``PL_SEED_WORKERS`` becomes.
        verbose: Whether to write the seed to the log (level INFO), and to warn when there is none.

    Returns:
        The seed that was used.

    Raises:
        ValueError: The seed is not a number in range.
    """
    if seed is None:
        text = os.environ.get(_SEED_VARIABLE)
        if text is None:
            seed = 0
            if verbose:
                rank_zero_warn(f"No seed found, seed set to {seed}")
        else:
            try:
                seed = int(text)
            except ValueError:
                raise ValueError(
                    f"The environment variable {_SEED_VARIABLE} must hold a whole number, got {text!r}. "
                    "Change it, unset it, or call seed_everything(<seed>)."
                ) from None
    else:
        seed = int(seed)
    if not MIN_SEED <= seed <= MAX_SEED:
        raise ValueError(f"A seed must be in the range [{MIN_SEED}, {MAX_SEED}], got {seed}.")

    if verbose:
        rank_zero_info("Seed set to %s", seed)
    os.environ[_SEED_VARIABLE] = str(seed)
    random.seed(seed)
    np.random.seed(seed)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(seed)
    os.environ[_WORKERS_VARIABLE] = f"{int(workers)}"
    return seed


def global_seed() -> int:
    """Return the seed that ``PL_GLOBAL_SEED`` holds; 0 when it is not set or no whole number."""
    try:
        return int(os.environ.get(_SEED_VARIABLE, "0"))
    except ValueError:
        return 0


def reset_seed() -> None:
    """Seed the host generators again with the seed that `seed_everything` set; without one, do nothing."""
    text = os.environ.get(_SEED_VARIABLE)
    if text is None:
        return
    workers = os.environ.get(_WORKERS_VARIABLE, "0")
    seed_everything(int(text), workers=bool(int(workers)), verbose=False)


def collect_rng_states() -> dict[str, Any]:
    """Return the states of the host generators (Python's, numpy's global one, torch's if imported)."""
    states: dict[str, Any] = {"python": random.getstate(), "numpy": np.random.get_state()}
    torch = sys.modules.get("torch")
    if torch is not None:
        states["torch"] = torch.get_rng_state()
    return states


def restore_rng_states(states: dict[str, Any]) -> None:
    """Put the host generators back into the states that `collect_rng_states` returned."""
    if "python" in states:
        version, internal, gauss = states["python"]
        random.setstate((version, tuple(internal), gauss))
    if "numpy" in states:
        np.random.set_state(states["numpy"])
    torch = sys.modules.get("torch")
    if torch is not None and "torch" in states:
        torch.set_rng_state(states["torch"])


@contextmanager
def isolate_rng() -> Generator[None, None, None]:
    """Leave the host generators as they were, whatever is drawn inside the block."""
    states = collect_rng_states()
    try:
        yield
    finally:
        restore_rng_states(states)
