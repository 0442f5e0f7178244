"""Metrics of nnx on a module: updated in the compiled step, computed at the epoch's end, reset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx
from support.models import Classifier

import jaxlightning as pl
from jaxlightning import ArrayLoader
from jaxlightning.metrics.nnx_metric import NnxMetric


def _data(n: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n, 6)).astype(np.float32)
    return x, x[:, :4].argmax(-1).astype(np.int32)


class Measured(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.train_mean = nnx.metrics.Average()
        self.accuracy = nnx.metrics.Accuracy()
        self.several = nnx.MultiMetric(acc=nnx.metrics.Accuracy(), mean=nnx.metrics.Average("x"))
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        self.train_mean.update(values=batch[0][:, 0])
        self.log("train_mean", self.train_mean, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: Any) -> Any:
        logits = self.net(batch[0])
        self.accuracy.update(logits=logits, labels=batch[1])
        self.log("accuracy", self.accuracy)
        self.several.update(logits=logits, labels=batch[1], x=batch[0])
        self.log_dict(self.several)

    def on_train_epoch_end(self) -> None:
        self.seen.append(float(self.trainer.callback_metrics["accuracy"]))


@pytest.mark.parametrize("jit", [True, False])
def test_nnx_metrics_are_logged_over_uneven_batches_and_epochs(tmp_path: Path, jit: bool) -> None:
    x, y = _data(70)
    model = Measured()
    trainer = pl.Trainer(
        max_epochs=2, jit=jit, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, num_sanity_val_steps=1,
    )  # fmt: skip
    trainer.fit(model, ArrayLoader(x, y, batch_size=16), ArrayLoader(x, y, batch_size=32))
    model.eval()
    predicted = np.asarray(model(x)).argmax(-1)
    metrics = trainer.callback_metrics
    assert metrics["accuracy"] == pytest.approx((predicted == y).mean(), abs=1e-6)
    assert metrics["acc"] == pytest.approx((predicted == y).mean(), abs=1e-6)
    assert metrics["mean"] == pytest.approx(x.mean(), abs=1e-6)
    assert metrics["train_mean"] == pytest.approx(x[:, 0].mean(), abs=1e-6)
    assert len(model.seen) == 2


def test_states_merge_as_nnx_updates_one_after_another() -> None:
    rng = np.random.default_rng(1)
    parts = [rng.standard_normal(n).astype(np.float32) for n in (3, 5, 1)]
    reference, ours = nnx.metrics.Welford(), NnxMetric(nnx.metrics.Welford())
    for part in parts:
        reference.update(values=part)
        ours.update(values=part)
    expected, got = reference.compute(), ours.compute()
    np.testing.assert_allclose(got.mean, expected.mean, rtol=1e-5)
    np.testing.assert_allclose(got.standard_deviation, expected.standard_deviation, rtol=1e-5)


def test_an_unknown_nnx_metric_is_refused_by_name() -> None:
    class Own(nnx.metrics.Metric):
        def __init__(self) -> None:
            pass

    with pytest.raises(NotImplementedError, match=r"`Own`.*jaxlightning\.metrics\.Metric"):
        NnxMetric(Own())
