"""States of the host's random generators in a checkpoint: what shuffles and augments on the host goes on exactly."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from jaxlightning.utilities.rank_zero import rank_zero_warn
from jaxlightning.utilities.seed import collect_rng_states, restore_rng_states


def collect(*, seed: int, states: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the seed of the compiled steps and the states of Python's, numpy's and torch's generators.

    Args:
        seed: The engine's seed.
        states: States that `collect_rng_states` returned earlier, in place of the present ones.
    """
    if states is None:
        states = collect_rng_states()
    version, words, gauss = states["python"]
    host: dict[str, Any] = {"python": {"version": version, "words": np.array(words, np.uint32), "gauss": gauss}}
    name, keys, position, has_gauss, cached = states["numpy"]
    host["numpy"] = {
        "name": name,
        "keys": np.asarray(keys),
        "position": int(position),
        "has_gauss": int(has_gauss),
        "cached": float(cached),
    }
    if "torch" in states:  # only when the program imported it
        host["torch"] = states["torch"].numpy().copy()
    return {"seed": seed, "host": host}


def restore(rng: dict[str, Any], *, seed: int) -> None:
    """Set the host generators as `collect` found them, and warn when the compiled steps draw from another seed.

    Args:
        rng: What `collect` returned.
        seed: The engine's seed in this run.
    """
    saved = rng.get("seed")
    if saved != seed:
        rank_zero_warn(
            f"The checkpoint was written by a run with the seed {saved}, and this one has the seed {seed}: dropout and "
            f"other random draws in the steps go on differently. Use `Trainer(seed={saved})` or "
            f"`seed_everything({saved})` to continue exactly."
        )
    host: dict[str, Any] = rng.get("host") or {}
    states: dict[str, Any] = {}
    if "python" in host:
        python = host["python"]
        states["python"] = (python["version"], tuple(int(word) for word in python["words"]), python["gauss"])
    if "numpy" in host:
        n = host["numpy"]
        states["numpy"] = (n["name"], n["keys"], n["position"], n["has_gauss"], n["cached"])
    torch = sys.modules.get("torch")
    if "torch" in host and torch is not None:
        states["torch"] = torch.from_numpy(host["torch"].copy())
    restore_rng_states(states)
