"""`jaxlightning.fit` around a hand-written step, beside the loop that the step's author writes around it.

The step is that of `examples/fit_template.py`, jitted, on 28 x 28 images in batches of 128: a convolution, BatchNorm,
Dropout, two losses, Adam with a schedule. Both sides call the same compiled function on the same numpy batches; `fit`
has its bar (written to the null device) and its TensorBoard log on, with three losses and the learning rate every ten
steps. A pair is one epoch of `fit` and one pass of the loop. A step of a few microseconds is shown beside it without a
limit: what `fit` adds to any step.

Example:
    python benchmarks/template.py --json benchmarks/results/template.json
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _harness import Report, use_the_cpu
from _interleave import Batches, Clock, quiet

use_the_cpu()
sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

import fit_template  # noqa: E402  (the platform has to be chosen first)
import jaxlightning as jl  # noqa: E402

LIMIT = 1.05


def images(steps: int) -> list[Any]:
    """Return batches of 128 images (28, 28, 1) and labels."""
    rng = np.random.default_rng(0)
    return [(rng.random((128, 28, 28, 1), np.float32), rng.integers(0, 10, 128)) for _ in range(steps)]


def loop(state: Any, step: Callable[..., Any], batches: list[Any]) -> Callable[[], float]:
    """Return a pass of the hand-written loop: seconds per step up to the last result."""
    carry, opt_state = state, state.opt_state

    def one_pass() -> float:
        nonlocal carry, opt_state
        start = time.perf_counter()
        for batch in batches:
            carry, losses, opt_state = step(carry, batch, opt_state)
        jax.block_until_ready((carry.params, losses))
        return (time.perf_counter() - start) / len(batches)

    return one_pass


def compare(state: Any, step: Callable[..., Any], batches: list[Any], pairs: int) -> Clock:
    """Pair epochs of `fit` with passes of the loop."""
    clock = Clock(loop(state, step, batches), pairs, len(batches))

    class Callback(jl.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            float(trainer.callback_metrics["loss"])
            clock.epoch_ended()

    with quiet() as folder:
        jl.fit(
            state, Batches(batches), train_step=step, num_epochs=clock.epochs, callbacks=[Callback()],
            log_every_n_steps=10, enable_checkpointing=False, enable_model_summary=False, default_root_dir=folder,
        )  # fmt: skip
    return clock


@jax.jit
def tiny_step(state: Any, batch: Any, opt_state: Any) -> Any:
    """A linear regression of eight numbers."""
    loss, grads = jax.value_and_grad(lambda p: jnp.square(batch @ p["w"]).mean())(state.params)
    state = state.apply_gradients(grads=grads)
    return state, {"loss": loss}, state.opt_state


def main() -> int:
    """Print the ratios; return 1 when the limit is missed by more than the A/A spread."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=16, help="pairs (%(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="steps of the template in an epoch (%(default)s)")
    parser.add_argument("--json", type=Path, default=None, metavar="PATH", help="write the result there")
    args = parser.parse_args()
    if args.pairs < 4:
        parser.error("at least 4 pairs are needed")
    report = Report("template", args.json)
    clock = compare(fit_template.new_state(args.steps, 100), fit_template.train_step, images(args.steps), args.pairs)
    report.result["template"] = clock.numbers()
    report.check("fit / hand-written, the template's step", clock.ratio, LIMIT, clock.spread)
    few = [np.ones((4, 8), np.float32)] * (20 * args.steps)
    state = jl.TrainState.create(apply_fn=None, params={"w": jnp.ones(8)}, tx=optax.sgd(1e-6))
    clock = compare(state, tiny_step, few, args.pairs)
    numbers = report.result["tiny"] = clock.numbers()
    report.check("fit, a tiny step", numbers["fit_us"], None, unit="us per step")
    report.check("hand-written, a tiny step", numbers["other_us"], None, unit="us per step")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
