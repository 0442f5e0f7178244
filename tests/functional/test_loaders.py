"""What `fit` takes as data, and that its order is that of the `for` statements it stands for, also after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxlightning
from jaxlightning import TrainState
from jaxlightning.utilities.exceptions import MisconfigurationException

QUIET = {"enable_progress_bar": False, "enable_model_summary": False}
TX = optax.sgd(0.1)
X = np.random.default_rng(0).normal(size=(4, 6, 3)).astype(np.float32)
PAIRS = [(x, x.sum(1)) for x in X]


@pytest.fixture(autouse=True)
def _no_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSSIBLE_USER_WARNINGS", "off")


def state() -> Any:
    return TrainState.create(apply_fn=None, params={"w": jnp.ones(3)}, tx=TX)


def loss_of(params: Any, x: Any, y: Any) -> jax.Array:
    return jnp.square(x @ params["w"] - 2 * y).mean()


def step_on(pick: Any) -> Any:
    def step(state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(state.params, *pick(batch))
        return state.apply_gradients(grads=grads), {"loss": loss}

    return step


@pytest.fixture(scope="module")
def expected() -> Any:
    want = state()
    for batch in PAIRS:
        want, _ = step_on(lambda batch: batch)(want, batch)
    return want.params


def run(data: Any, pick: Any, root: Path, **options: Any) -> Any:
    options = {"num_epochs": 1, "logger": False, "enable_checkpointing": False, **QUIET, **options}
    return jaxlightning.fit(state(), data, train_step=step_on(pick), default_root_dir=root, **options).params


def test_lists_of_batches_of_any_structure(expected: Any, tmp_path: Path) -> None:
    forms: list[tuple[Any, Any]] = [
        (tuple(PAIRS), lambda b: b),
        ([{"x": x, "y": y, "weight": 1.0} for x, y in PAIRS], lambda b: (b["x"], b["y"])),
        ([[x, [y]] for x, y in PAIRS], lambda b: (b[0], b[1][0])),
        ([(jnp.asarray(x), jnp.asarray(y)) for x, y in PAIRS], lambda b: b),
        (list(X), lambda b: (b, b.sum(1))),
        (lambda: iter(PAIRS), lambda b: b),
        (zip(*map(list, zip(*PAIRS, strict=True)), strict=True), lambda b: b),
    ]
    for data, pick in forms:
        got = run(data, pick, tmp_path)
        np.testing.assert_allclose(got["w"], expected["w"], rtol=1e-6)


@pytest.mark.torch
def test_lists_of_batches_of_torch_tensors(expected: Any, tmp_path: Path) -> None:
    import torch

    data = [{"x": torch.from_numpy(x), "y": torch.from_numpy(y)} for x, y in PAIRS]
    got = run(data, lambda b: (b["x"], b["y"]), tmp_path)
    np.testing.assert_allclose(got["w"], expected["w"], rtol=1e-6)


def test_data_without_a_batch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match="empty list as `train_ds`"):
        run([], lambda b: b, tmp_path)
    with pytest.raises(MisconfigurationException, match="empty list as `test_ds`"):
        run(PAIRS, lambda b: b, tmp_path, test_ds=[], eval_step=lambda state, batch: 1.0)
    with pytest.raises(TypeError, match=r"ArrayLoader\(array"):
        run(X, lambda b: b, tmp_path)


class Firsts(jaxlightning.Callback):
    """The first label of every batch tells its order."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        self.seen.append(float(batch[1][0]))


@pytest.mark.torch
@pytest.mark.parametrize(
    ("drop_last", "prefetch", "workers"),
    [(False, 0, 0), (True, 0, 0), (True, 2, 0), pytest.param(False, 2, 1, marks=pytest.mark.slow)],
)
def test_a_loader_with_its_own_generator_goes_on_as_in_a_for_statement_and_after_a_resume(
    drop_last: bool, prefetch: int, workers: int, tmp_path: Path
) -> None:
    """torch draws one permutation more when a `for` statement meets the end of the sampler."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    data = TensorDataset(torch.arange(27.0).reshape(9, 3), torch.arange(9.0))

    def loader() -> Any:
        generator = torch.Generator().manual_seed(3)
        return DataLoader(
            data, batch_size=3, shuffle=True, generator=generator, drop_last=drop_last, num_workers=workers
        )

    def order(epochs: int, name: str, **options: Any) -> list[float]:
        firsts = Firsts()
        jaxlightning.fit(
            state(), loader(), train_step=lambda state, batch: (state, {"loss": batch[1].sum()}), num_epochs=epochs,
            log_name=name, callbacks=firsts, default_root_dir=tmp_path, prefetch_batches=prefetch, log_every_n_steps=3,
            **QUIET, **options,
        )  # fmt: skip
        return firsts.seen

    by_hand, same = [], loader()
    for _ in range(4):
        by_hand += [float(y[0]) for _, y in same]
    assert order(4, "whole") == by_hand
    stopped = order(2, "part")
    assert stopped + order(4, "part", ckpt_path="last") == by_hand
