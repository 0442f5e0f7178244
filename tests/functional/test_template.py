"""The template that JAX users copy around, run as its readers run it, beside the loop that they write themselves.

The script is `examples/fit_template.py`. Where the text that it follows cannot run, it departs from it:

- `jax.numpy` is imported as `jnp`.
- The dropout key, a free variable there, is `state.step_key()`.
- The optimizer state is advanced once: the step returns `state.opt_state` in place of a second `tx.update`.
- `loss_2` compares the logits with one-hot labels, whose shapes agree.
- The TFDS pipeline has a `.batch(...)`.
- The NCHW images of torchvision become NHWC.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
pytest.importorskip("sklearn")


@pytest.fixture
def template(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setenv("POSSIBLE_USER_WARNINGS", "off")
    before = set(sys.modules)
    yield importlib.import_module("fit_template")
    for name in (set(sys.modules) - before) & {file.stem for file in EXAMPLES.glob("*.py")}:
        del sys.modules[name]


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("template")


def by_hand(template: ModuleType, args: Any, data: Any, test: Any, channels_first: bool) -> Any:
    """The loop that the template's readers write, with its evaluation, which draws from torch's generator too."""

    def arrays(batch: Any) -> Any:
        x, y = map(np.asarray, batch)
        return (np.ascontiguousarray(x.transpose(0, 2, 3, 1)) if channels_first else x), y

    state = template.new_state(len(data), args.epochs, args.seed)
    opt_state = state.opt_state
    for _ in range(args.epochs):
        for batch in data:
            state, _, opt_state = template.train_step(state, arrays(batch), opt_state)
        for batch in test:
            template.eval_step(state, arrays(batch))
    return state


def check(template: ModuleType, source: str, shared: Path, root: Path, epochs: int, limit: int | None) -> float:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from jaxlightning.functional import load_state

    output = shared / f"{source}-{limit}"
    args = argparse.Namespace(
        epochs=epochs, batch_size=128 if limit is None else 50, seed=0, limit=limit, data=shared / "data", output=output
    )
    options = ["--epochs", str(epochs), "--batch-size", str(args.batch_size), "--quiet", "--source", source]
    options += ["--output", str(output), "--data", str(args.data)]
    accuracy = template.main([*options, *([] if limit is None else ["--limit", str(limit)])])
    data, test = (template.torchvision_data if source == "torchvision" else template.tfds_data)(args)
    want = by_hand(template, args, data, test, channels_first=source == "torchvision")
    version = output / "fashion" / "version_0"
    fresh = template.new_state(len(data), epochs)
    got = load_state(version / "checkpoints" / "last.ckpt", fresh)
    for name in ("params", "batch_stats", "opt_state"):
        jax.tree.map(np.testing.assert_array_equal, getattr(got, name), getattr(want, name))
    (best,) = [path for path in (version / "checkpoints").iterdir() if path.name.startswith("best-")]
    assert int(load_state(best, fresh).step) > 0
    board = EventAccumulator(str(version)).Reload()
    assert {"loss", "loss_1", "loss_2", "learning_rate", "accuracy"} <= set(board.Tags()["scalars"])
    return accuracy


@pytest.mark.torch
def test_the_template_is_its_own_loop_on_torchvision(template: ModuleType, shared: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    check(template, "torchvision", shared, tmp_path, epochs=2, limit=500)


@pytest.mark.slow
@pytest.mark.tf
def test_the_template_is_its_own_loop_on_tfds(template: ModuleType, shared: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    pytest.importorskip("tensorflow_datasets")
    check(template, "tfds", shared, tmp_path, epochs=2, limit=500)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.timeout(3600)
def test_five_epochs_of_fashion_mnist_from_torchvision(template: ModuleType, shared: Path, tmp_path: Path) -> None:
    assert check(template, "torchvision", shared, tmp_path, epochs=5, limit=None) >= 0.86


@pytest.mark.slow
@pytest.mark.tf
@pytest.mark.timeout(3600)
def test_five_epochs_of_fashion_mnist_from_tfds(template: ModuleType, shared: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorflow_datasets")
    assert check(template, "tfds", shared, tmp_path, epochs=5, limit=None) >= 0.86


@pytest.mark.slow
def test_a_step_costs_what_it_costs_in_a_loop_of_ones_own(template: ModuleType, tmp_path: Path) -> None:
    """At most 1.05 of the hand-written loop, plus the spread of that loop against itself."""
    import jaxlightning

    rng = np.random.default_rng(0)
    batches = [(rng.random((128, 28, 28, 1), np.float32), rng.integers(0, 10, 128)) for _ in range(30)]
    hand: list[float] = []
    again: list[float] = []
    ours: list[float] = []
    state = template.new_state(len(batches), 10)

    def loop() -> float:
        carry, opt = state, state.opt_state
        start = time.perf_counter()
        for batch in batches:
            carry, losses, opt = template.train_step(carry, batch, opt)
        jax.block_until_ready((carry.params, losses))
        return time.perf_counter() - start

    class Clock(jaxlightning.Callback):
        """Runs the loop between two epochs, so that the machine's moods meet both."""

        def on_train_epoch_start(self, trainer, module) -> None:
            hand.append(loop())
            again.append(loop())
            self.start = time.perf_counter()

        def on_train_epoch_end(self, trainer, module) -> None:
            jax.block_until_ready(trainer._engine.held.dynamic())
            ours.append(time.perf_counter() - self.start)

    loop()
    jaxlightning.fit(
        state, batches, train_step=template.train_step, num_epochs=14, callbacks=Clock(), default_root_dir=tmp_path,
        enable_model_summary=False, enable_checkpointing=False, log_every_n_steps=10, enable_progress_bar=False,
    )  # fmt: skip
    base, second, fit = (float(np.median(times[2:])) for times in (hand, again, ours))
    spread = abs(second / base - 1)
    assert fit / base <= 1.05 + spread, (fit / base, spread)
