"""`Trainer(pad_batches=...)`: one shape, exact numbers, and nothing averaged that is padding."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxlightning as pl
from jaxlightning import metrics
from jaxlightning.compile.padding import BatchPadding
from jaxlightning.utilities.exceptions import MisconfigurationException

_ROWS, _BATCH = 71, 32  # 32, 32, 7
_rng = np.random.default_rng(0)
X = _rng.normal(size=(_ROWS, 5)).astype(np.float32)
Y = _rng.integers(0, 3, _ROWS)


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Dense(3)
        self.acc = metrics.MulticlassAccuracy(3)
        self.seen: list[tuple[str, int]] = []

    def losses(self, batch: Any) -> tuple[Any, Any]:
        logits = self.net(batch[0])
        return logits, optax.softmax_cross_entropy_with_integer_labels(logits, batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = jnp.mean(self.losses(batch)[1], where=self.batch_mask)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        logits, losses = self.losses(batch)
        self.acc(logits, batch[1])
        self.log("acc", self.acc)
        self.log("val", jnp.mean(losses, where=self.batch_mask))
        # What people write in Lightning: the size that they see is the padded one.
        self.log("said", jnp.mean(losses, where=self.batch_mask), batch_size=len(batch[0]))
        return {"logits": logits}

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return {"logits": self.net(batch[0]), "constant": jnp.ones(3)}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(("train", len(batch[0])))

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen.append(("validate", len(batch[0])))
        assert outputs["logits"].shape == (len(batch[0]), 3)

    def configure_optimizers(self) -> Any:
        return optax.sgd(0.1)


def trainer(**options: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(max_epochs=2, enable_checkpointing=False, seed=0, num_sanity_val_steps=0, **quiet, **options)


def loader(batch_size: int = _BATCH) -> Any:
    return pl.ArrayLoader(X, Y, batch_size=batch_size)


def run(module: Any = None, batch_size: int = _BATCH, **options: Any) -> tuple[Any, Any]:
    module = Net() if module is None else module
    made = trainer(**options)
    made.fit(module, loader(batch_size), loader(batch_size))
    return module, made


@functools.cache
def unpadded(batch_size: int = _BATCH, **options: Any) -> tuple[Any, Any]:
    """The run to compare with; nobody changes it."""
    return run(batch_size=batch_size, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"pad_batches": True},
        pytest.param({"pad_batches": 40}, marks=pytest.mark.slow),
        pytest.param({"pad_batches": True, "jit": False}, marks=pytest.mark.slow),
    ],
)
def test_padded_training_gives_the_numbers_of_unpadded_training(options: dict[str, Any]) -> None:
    plain, one = unpadded()
    padded, other = run(**options)
    for name, value in one.callback_metrics.items():
        np.testing.assert_allclose(other.callback_metrics[name], value, rtol=2e-6, err_msg=name)
    for left, right in zip(jax.tree.leaves(one.state.params), jax.tree.leaves(other.state.params), strict=True):
        np.testing.assert_allclose(left, right, rtol=2e-5, atol=1e-7)
    assert padded.seen == plain.seen, "hooks see the batches of the loader"
    if options.get("jit", True):
        assert one._engine.trace_counts == {"train": 2, "validate": 2}
        assert other._engine.trace_counts == {"train": 1, "validate": 1}, "the short batch compiles nothing new"


@pytest.mark.slow
def test_several_devices_get_a_batch_that_divides() -> None:
    _, one = unpadded(batch_size=8, devices=4)
    _, other = run(batch_size=8, devices=4, pad_batches=True)
    assert other._engine.trace_counts == {"train": 1, "validate": 1}
    for name, value in one.callback_metrics.items():
        np.testing.assert_allclose(other.callback_metrics[name], value, rtol=2e-6, err_msg=name)


@pytest.mark.parametrize("steps", [1, 3])
def test_batches_without_hooks_between_them_are_padded_too(steps: int) -> None:
    class Quiet(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Dense(3)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            losses = optax.softmax_cross_entropy_with_integer_labels(self.net(batch[0]), batch[1])
            loss = jnp.mean(losses, where=self.batch_mask)
            self.log("loss", loss, on_epoch=True)
            return loss

        def configure_optimizers(self) -> Any:
            return optax.sgd(0.1)

    results = []
    for options in ({}, {"pad_batches": True, "steps_per_dispatch": steps}):
        made = trainer(**options)
        made.fit(Quiet(), loader(batch_size=10))
        results.append((float(made.callback_metrics["loss_epoch"]), made.state.params, made._engine.trace_counts))
    np.testing.assert_allclose(results[1][0], results[0][0], rtol=2e-6)
    for left, right in zip(jax.tree.leaves(results[0][1]), jax.tree.leaves(results[1][1]), strict=True):
        np.testing.assert_allclose(left, right, rtol=2e-5, atol=1e-7)
    assert results[0][2]["train"] == 2
    assert results[1][2]["train"] == 1


@pytest.mark.slow
def test_manual_steps_are_padded_too() -> None:
    class Manual(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            loss = jnp.mean(self.losses(batch)[1], where=self.batch_mask)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.log("loss", loss, on_step=True, on_epoch=True)

    _, padded = run(Manual(), pad_batches=True)
    assert padded._engine.trace_counts == {"train": 1, "validate": 1}
    for name, value in unpadded()[1].callback_metrics.items():
        np.testing.assert_allclose(padded.callback_metrics[name], value, rtol=2e-6, err_msg=name)

    class Careless(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            self.manual_backward(self.losses(batch)[1].mean())
            optimizer.step()

    with pytest.raises(MisconfigurationException, match=r"never looks at `self\.batch_mask`"):
        run(Careless(), pad_batches=True)


def test_predictions_are_those_of_the_real_rows() -> None:
    module, made = run(pad_batches=True)
    found = made.predict(module, loader())
    assert [part["logits"].shape for part in found] == [(32, 3), (32, 3), (7, 3)]
    assert all(part["constant"].shape == (3,) for part in found)
    again = trainer().predict(unpadded()[0], loader())
    for left, right in zip(found, again, strict=True):
        np.testing.assert_allclose(left["logits"], right["logits"], rtol=2e-5, atol=1e-6)


@pytest.mark.slow
def test_accumulation_and_split_steps_are_padded_too() -> None:
    class Hooked(Net):
        def on_after_backward(self) -> None:
            self.backwards = getattr(self, "backwards", 0) + 1

    _, plain = run(accumulate_grad_batches=2)
    _, padded = run(accumulate_grad_batches=2, pad_batches=True)
    module, split = run(Hooked(), accumulate_grad_batches=2, pad_batches=True)
    assert module.backwards == 6
    for other in (padded, split):
        for left, right in zip(jax.tree.leaves(plain.state.params), jax.tree.leaves(other.state.params), strict=True):
            np.testing.assert_allclose(left, right, rtol=2e-5, atol=1e-7)


def test_a_training_step_that_ignores_the_mask_is_refused() -> None:
    class Careless(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.losses(batch)[1].mean()

    with pytest.raises(MisconfigurationException, match=r"Careless.training_step.*never looks at `self.batch_mask`"):
        run(Careless(), pad_batches=True)


def test_a_logged_value_that_ignores_the_mask_is_refused() -> None:
    class Careless(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("val", self.losses(batch)[1].mean())

    with pytest.raises(MisconfigurationException, match=r"'val'.*would count the padding as data"):
        run(Careless(), pad_batches=True)


def test_a_metric_of_something_else_than_rows_needs_the_mask() -> None:
    class Pairs(Net):
        def __init__(self) -> None:
            super().__init__()
            self.mean = metrics.MeanMetric()

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.mean(jnp.concatenate([batch[0], batch[0]]))
            self.log("mean", self.mean)

    with pytest.raises(MisconfigurationException, match="'MeanMetric'"):
        run(Pairs(), pad_batches=True)


def test_metric_objects_alone_need_no_mask() -> None:
    class OnlyMetrics(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.acc(self.losses(batch)[0], batch[1])
            self.log("acc", self.acc)

        def on_validation_batch_end(self, *_: Any) -> None:
            pass

    _, padded = run(OnlyMetrics(), pad_batches=True)
    np.testing.assert_allclose(padded.callback_metrics["acc"], unpadded()[1].callback_metrics["acc"], rtol=1e-6)


class Furthest(metrics.Metric):
    """A metric as users write them, on attributes, reduced by a maximum and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("far", 0.0, "max")
        self.add_state("rows", 0, "sum")

    def update(self, x: Any, scale: float = 1.0) -> None:
        self.far = jnp.maximum(self.far, jnp.abs(x).max() * scale)
        self.rows += x.shape[0]

    def compute(self) -> Any:
        return self.far * self.rows


def _labels(k: int) -> Any:
    return np.random.default_rng(3).integers(0, 2, (_ROWS, k))


_METRICS: dict[str, Any] = {
    "accuracy": (lambda: metrics.MulticlassAccuracy(3), lambda x, y: (x[:, :3], y)),
    "accuracy of pixels": (lambda: metrics.MulticlassAccuracy(3), lambda x, y: (x[:, :3, None] * 1.0, y[:, None])),
    "binary logits": (lambda: metrics.BinaryF1Score(), lambda x, y: (x[:, 0] * 3, y > 0)),
    "multilabel": (lambda: metrics.MultilabelPrecision(2), lambda x, y: (x[:, :2], (x[:, 2:4] > 0).astype(int))),
    "confusion": (lambda: metrics.ConfusionMatrix("multiclass", num_classes=3), lambda x, y: (x[:, :3], y)),
    "confusion of labels": (
        lambda: metrics.ConfusionMatrix("multilabel", num_labels=2),
        lambda x, y: (x[:, :2], (x[:, 2:4] > 0).astype(int)),
    ),
    "auroc": (lambda: metrics.BinaryAUROC(thresholds=20), lambda x, y: (x[:, 0], y > 0)),
    "auroc of classes": (lambda: metrics.MulticlassAUROC(3, thresholds=20), lambda x, y: (x[:, :3], y)),
    "auroc of labels": (
        lambda: metrics.MultilabelAUROC(2, thresholds=20),
        lambda x, y: (x[:, :2], (x[:, 2:4] > 0).astype(int)),
    ),
    "mean": (lambda: metrics.MeanMetric(), lambda x, y: (x[:, 0],)),
    "weighted mean": (lambda: metrics.MeanMetric(), lambda x, y: (x[:, 0], y)),
    "mean with nan left in": (lambda: metrics.MeanMetric(nan_strategy="disable"), lambda x, y: (x,)),
    "sum": (lambda: metrics.SumMetric(), lambda x, y: (x,)),
    "max": (lambda: metrics.MaxMetric(), lambda x, y: (x[:, 0],)),
    "squared error": (lambda: metrics.MeanSquaredError(), lambda x, y: (x[:, :2], x[:, 2:4])),
    "absolute error of outputs": (lambda: metrics.MeanAbsoluteError(num_outputs=2), lambda x, y: (x[:, :2], x[:, 2:4])),
    "r2": (lambda: metrics.R2Score(), lambda x, y: (x[:, 0], x[:, 1])),
    "own": (Furthest, lambda x, y: (x,)),
}


_OFTEN = ("accuracy of pixels", "confusion of labels", "auroc of labels", "weighted mean", "r2", "own")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in _OFTEN else pytest.mark.slow) for name in _METRICS]
)
def test_metric_objects_leave_out_the_padding(name: str) -> None:
    make, inputs = _METRICS[name]

    class Measuring(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.metric = make()
            self.value: Any = None

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.metric.update(*inputs(*batch))

        def on_test_epoch_end(self) -> None:
            self.value = np.asarray(self.metric.compute())

    values = []
    for pad in (False, True):
        module = Measuring()
        trainer(pad_batches=pad).test(module, loader(), verbose=False)
        values.append(module.value)
    # Counts are exact; sums of floats are added in another order.
    np.testing.assert_allclose(values[1], values[0], rtol=2e-5, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Average", "Welford"])
def test_metrics_of_nnx_leave_out_the_padding(kind: str) -> None:
    from flax import nnx

    class Measuring(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.metric = getattr(nnx.metrics, kind)()
            self.value: Any = None

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.metric.update(values=batch[0][:, 0])

        def on_test_epoch_end(self) -> None:
            self.value = self.metric.compute()

    values = []
    for pad in (False, True):
        module = Measuring()
        trainer(pad_batches=pad).test(module, loader(), verbose=False)
        values.append(module.value)
    for left, right in zip(jax.tree.leaves(values[0]), jax.tree.leaves(values[1]), strict=True):
        np.testing.assert_allclose(left, right, rtol=2e-5, atol=2e-6)


def test_without_padding_the_mask_is_all_true() -> None:
    _, made = unpadded()
    assert made._engine.trace_counts["train"] == 2  # the step of this module reads the mask in any case
    with pytest.raises(RuntimeError, match="belongs to the batch inside a step"):
        _ = Net().batch_mask


def test_a_module_may_have_a_batch_mask_of_its_own() -> None:
    module = Net()
    module.batch_mask = 3
    assert module.batch_mask == 3


# what is padded


def padding(size: int | None = None, expected: int | None = None) -> BatchPadding:
    return BatchPadding(size, lambda stage, index: expected)


def test_rows_are_repeated_and_other_leaves_stay() -> None:
    pad = padding(expected=4)
    full = {"x": np.arange(8.0).reshape(4, 2), "names": ["a", "b", "c", "d"], "classes": np.arange(3), "n": np.int32(1)}
    padded, rows = pad("train", None, full)
    assert rows == 4
    assert padded.mask.all()
    short = {"x": np.arange(6.0).reshape(3, 2), "names": ["a", "b", "c"], "classes": np.arange(3), "n": np.int32(1)}
    short["x"], short["names"] = short["x"][:2], ["a", "b"]
    padded, rows = pad("train", None, short)
    assert rows == 2
    np.testing.assert_array_equal(padded.batch["x"], short["x"][[0, 1, 0, 1]])
    assert padded.batch["names"] == ["a", "b", "a", "b"]
    assert padded.batch["classes"] is short["classes"]
    np.testing.assert_array_equal(padded.mask, [True, True, False, False])


def test_an_empty_batch_becomes_zeros() -> None:
    padded, rows = padding(expected=2)("train", None, (np.zeros((0, 3), np.int32), np.zeros(0)))
    assert rows == 0
    assert padded.batch[0].shape == (2, 3)
    assert not padded.mask.any()


def test_device_arrays_and_dataclasses_are_padded() -> None:
    from jaxlightning.adapters import as_source

    @dataclasses.dataclass
    class Record:
        x: Any

    batch = next(iter(as_source(lambda: iter([Record(np.ones((2, 3)))]))))
    padded, _ = padding(3)("train", None, batch)
    assert padded.batch.x.shape == (3, 3)
    padded, _ = padding(3)("train", None, jnp.ones((2, 3)))
    assert padded.batch.shape == (3, 3)


def test_a_larger_batch_than_asked_for_raises() -> None:
    with pytest.raises(MisconfigurationException, match=r"pad_batches=4.*5 rows"):
        padding(4)("train", None, np.zeros(5))


def test_without_a_known_size_the_largest_batch_so_far_counts() -> None:
    pad = padding()
    assert len(pad("train", None, np.zeros(3))[0].mask) == 3
    assert len(pad("validate", 1, np.zeros(2))[0].mask) == 2
    assert len(pad("sanity_check", 1, np.zeros(1))[0].mask) == 2
    assert len(pad("train", None, np.zeros(5))[0].mask) == 5
    assert len(pad("train", None, np.zeros(3))[0].mask) == 5


def test_a_leaf_with_a_length_of_its_own_that_varies_raises() -> None:
    pad = padding(expected=4)
    pad("train", None, {"a": np.zeros(4), "b": np.zeros((4, 1))})
    with pytest.raises(MisconfigurationException, match=r"batch\['b'\].*has 2"):
        pad("train", None, {"a": np.zeros(3), "b": np.zeros((2, 1))})


@pytest.mark.parametrize("value", [0, -1, "yes", 2.5, None])
def test_bad_values_of_the_flag_raise(value: Any) -> None:
    with pytest.raises(ValueError, match="`pad_batches` must be"):
        pl.Trainer(pad_batches=value, logger=False, enable_checkpointing=False)


def test_what_a_step_appends_has_the_real_rows() -> None:
    class Collecting(Net):
        def __init__(self) -> None:
            super().__init__()
            self.collected: list[Any] = []

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.collected.append({"labels": batch[1], "three": jnp.ones(3)})

        def on_validation_batch_end(self, *_: Any) -> None:
            pass

    module, _ = run(Collecting(), pad_batches=True)
    found = module.collected
    assert [len(item["labels"]) for item in found] == [32, 32, 7] * 2
    assert [len(item["three"]) for item in found] == [3] * 6
    np.testing.assert_array_equal(np.concatenate([item["labels"] for item in found[:3]]), Y)
