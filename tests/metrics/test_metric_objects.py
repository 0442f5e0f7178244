"""Metric objects equal torchmetrics on random data, uneven batches and several epochs."""

from __future__ import annotations

import copy
import itertools
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlightning import metrics as M

pytestmark = [pytest.mark.torch, pytest.mark.lightning]
SIZES = (7, 3, 7)
Batches: TypeAlias = Callable[[np.random.Generator, int], tuple[Any, ...]]


def _rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def binary(kind: str) -> Batches:
    def batch(rng: np.random.Generator, n: int) -> tuple[Any, ...]:
        target = rng.integers(0, 2, (n, 3))
        preds = {
            "labels": rng.integers(0, 2, (n, 3)),
            "probabilities": rng.random((n, 3), dtype=np.float32),
            "logits": (rng.normal(size=(n, 3)) * 3).astype(np.float32),
        }[kind]
        return preds, target

    return batch


def multiclass(kind: str, classes: int = 5, absent: bool = False) -> Batches:
    def batch(rng: np.random.Generator, n: int) -> tuple[Any, ...]:
        target = rng.integers(0, classes - 1 if absent else classes, n)
        logits = rng.normal(size=(n, classes)).astype(np.float32) * 2
        logits[:, -1] -= 100 if absent else 0
        if kind == "labels":
            return logits.argmax(1), target
        if kind == "probabilities":
            logits = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        if kind == "pixels":
            return rng.normal(size=(n, classes, 2, 3)).astype(np.float32), rng.integers(0, classes, (n, 2, 3))
        return logits, target

    return batch


def multilabel(kind: str, labels: int = 4) -> Batches:
    def batch(rng: np.random.Generator, n: int) -> tuple[Any, ...]:
        target = rng.integers(0, 2, (n, labels, 2))
        logits = rng.normal(size=(n, labels, 2)).astype(np.float32)
        preds = {"labels": (logits > 0).astype(int), "logits": logits, "probabilities": 1 / (1 + np.exp(-logits))}[kind]
        return preds, target

    return batch


def regression(outputs: int) -> Batches:
    def batch(rng: np.random.Generator, n: int) -> tuple[Any, ...]:
        n = max(n, 2)
        target = rng.normal(size=(n, outputs) if outputs > 1 else n).astype(np.float32)
        return target + rng.normal(size=target.shape).astype(np.float32) * 0.3, target

    return batch


def values(nan: bool = False) -> Batches:
    def batch(rng: np.random.Generator, n: int) -> tuple[Any, ...]:
        value = rng.normal(size=(n, 2)).astype(np.float32)
        if nan:
            value[0, 0] = np.nan
        return (value,)

    return batch


def weighted(rng: np.random.Generator, n: int) -> tuple[Any, ...]:
    return rng.normal(size=(n, 2)).astype(np.float32), rng.random((n, 1), dtype=np.float32)


def cases() -> Iterator[Any]:
    for name in ("Accuracy", "Precision", "Recall", "F1Score"):
        for kind in ("labels", "probabilities", "logits"):
            yield name, {"task": "binary"}, binary(kind)
        yield name, {"task": "binary", "threshold": 0.7, "ignore_index": 0}, binary("probabilities")
        for average in ("micro", "macro", "weighted", "none"):
            for options in ({}, {"ignore_index": 1}, {"ignore_index": -1}):
                option = {"task": "multiclass", "num_classes": 5, "average": average, **options}
                yield name, option, multiclass("logits")
            option = {"task": "multiclass", "num_classes": 5, "average": average}
            yield name, option, multiclass("labels")
            yield name, option, multiclass("pixels")
            yield name, option, multiclass("probabilities", absent=True)
            yield name, {**option, "top_k": 2}, multiclass("logits", absent=True)
            option = {"task": "multilabel", "num_labels": 4, "average": average}
            yield name, option, multilabel("logits")
            yield name, {**option, "ignore_index": 0}, multilabel("probabilities")
            yield name, option, multilabel("labels")
    for name in ("Precision", "Recall", "F1Score"):
        option = {"task": "multiclass", "num_classes": 5, "average": "none", "zero_division": 1}
        yield name, option, multiclass("logits", absent=True)
    for normalize in (None, "true", "pred", "all"):
        yield "ConfusionMatrix", {"task": "binary", "normalize": normalize}, binary("logits")
        yield (
            "ConfusionMatrix",
            {"task": "multiclass", "num_classes": 5, "normalize": normalize, "ignore_index": 2},
            multiclass("pixels"),
        )
        yield "ConfusionMatrix", {"task": "multilabel", "num_labels": 4, "normalize": normalize}, multilabel("logits")
    yield "ConfusionMatrix", {"task": "multilabel", "num_labels": 4, "ignore_index": 1}, multilabel("probabilities")
    for thresholds in (5, 33, 200, [0.0, 0.3, 0.5, 0.9]):
        yield "AUROC", {"task": "binary", "thresholds": thresholds}, binary("logits")
        yield "AUROC", {"task": "binary", "thresholds": thresholds, "ignore_index": 1}, binary("probabilities")
        for average in ("macro", "weighted", "none"):
            option = {"task": "multiclass", "num_classes": 5, "thresholds": thresholds, "average": average}
            yield "AUROC", option, multiclass("probabilities")
            yield "AUROC", {**option, "ignore_index": 3}, multiclass("logits")
        for average in ("micro", "macro", "weighted", "none"):
            option = {"task": "multilabel", "num_labels": 4, "thresholds": thresholds, "average": average}
            yield "AUROC", option, multilabel("logits")
            yield "AUROC", {**option, "ignore_index": 0}, multilabel("probabilities")
    for outputs in (1, 3):
        for squared in (True, False):
            yield "MeanSquaredError", {"squared": squared, "num_outputs": outputs}, regression(outputs)
        yield "MeanAbsoluteError", {"num_outputs": outputs}, regression(outputs)
        for multioutput in ("uniform_average", "raw_values", "variance_weighted"):
            yield "R2Score", {"multioutput": multioutput, "num_outputs": outputs}, regression(outputs)
    yield "R2Score", {"adjusted": 1}, regression(1)
    for name in ("MeanMetric", "SumMetric", "MaxMetric", "MinMetric"):
        yield name, {}, values()
        yield name, {"nan_strategy": "ignore"}, values(nan=True)
        yield name, {"nan_strategy": 2.0}, values(nan=True)
        yield name, {"nan_strategy": "disable"}, values(nan=True)
    yield "MeanMetric", {}, weighted


def _ids(case: Any) -> str:
    return f"{case[0]}-{'-'.join(str(value) for value in case[1].values())}"


def _reference(name: str, options: dict[str, Any]) -> Any:
    import torchmetrics

    options = {key: value for key, value in options.items() if (name, key) != ("R2Score", "num_outputs")}
    return getattr(torchmetrics, name)(**options)


def _close(ours: Any, theirs: Any, what: Any) -> None:
    np.testing.assert_allclose(np.asarray(ours), theirs.numpy(), rtol=1e-6, atol=1e-6, err_msg=str(what))


def _fast(case: Any) -> Any:
    """One case of each kind always runs, the whole grid with the slow tests."""
    name, options, _ = case
    key = (name, options.get("task"), "ignore_index" in options, options.get("num_outputs"))
    first = key not in _seen
    _seen.add(key)
    return pytest.param(case, id=_ids(case), marks=() if first else pytest.mark.slow)


_seen: set[Any] = set()


@pytest.mark.parametrize("case", [_fast(case) for case in cases()])
def test_metrics_equal_torchmetrics(case: Any) -> None:
    """Batch values, epoch values over uneven batches, two epochs, compiled."""
    import torch

    name, options, make = case
    theirs = _reference(name, options)
    pure = getattr(M, name)(**options).functional()

    @jax.jit
    def step(state: Any, *batch: Any) -> Any:
        alone = pure.update(pure.init(), *batch)
        return pure.compute(alone), pure.merge(state, alone)

    rng = _rng(sum(map(ord, name)))
    for _ in range(2):
        state = pure.init()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torchmetrics about its own zero divisions
            for size in SIZES:
                batch = make(rng, size)
                value, state = step(state, *batch)
                _close(value, theirs(*(torch.as_tensor(each) for each in batch)), "batch")
            _close(jax.jit(pure.compute)(state), theirs.compute(), "epoch")
        theirs.reset()


@pytest.mark.parametrize(
    "case",
    [
        ("Accuracy", {"task": "multiclass", "num_classes": 5}, multiclass("logits")),
        ("AUROC", {"task": "binary", "thresholds": 20}, binary("logits")),
        ("R2Score", {}, regression(1)),
        ("MaxMetric", {}, values()),
    ],
    ids=_ids,
)
def test_the_stateful_face_equals_torchmetrics(case: Any) -> None:
    import torch

    name, options, make = case
    ours, theirs = getattr(M, name)(**options), _reference(name, options)
    rng = _rng(5)
    for _ in range(2):
        for size in SIZES:
            batch = make(rng, size)
            _close(ours(*batch), theirs(*(torch.as_tensor(each) for each in batch)), "batch")
        for _ in range(2):
            _close(ours.compute(), theirs.compute(), "epoch")
        ours.reset()
        theirs.reset()


def test_names_without_a_task_make_the_class_of_the_task() -> None:
    import torchmetrics

    for name, (task, extra) in itertools.product(
        ("Accuracy", "Precision", "Recall", "F1Score", "ConfusionMatrix", "AUROC"),
        (("binary", {}), ("multiclass", {"num_classes": 3}), ("multilabel", {"num_labels": 3})),
    ):
        options = {"task": task, **extra, **({"thresholds": 5} if name == "AUROC" else {})}
        ours, theirs = getattr(M, name)(**options), getattr(torchmetrics, name)(**options)
        assert type(ours).__name__ == type(theirs).__name__
        assert isinstance(ours, M.Metric)
    with pytest.raises(ValueError, match="tasks are"):
        M.Accuracy(task="ternary")
    with pytest.raises(ValueError, match="num_classes"):
        M.Accuracy(task="multiclass")


def test_what_a_compiled_step_cannot_do_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="thresholds=200"):
        M.AUROC(task="binary")
    with pytest.raises(NotImplementedError, match="samplewise"):
        M.Accuracy(task="binary", multidim_average="samplewise")
    with pytest.raises(NotImplementedError, match="dist_sync_on_step"):
        M.MeanMetric(dist_sync_on_step=True)
    with pytest.raises(NotImplementedError, match="max_fpr"):
        M.AUROC(task="binary", thresholds=5, max_fpr=0.5)
    M.MeanMetric(sync_on_compute=True)
    with pytest.raises(ValueError, match="unexpected argument 'colour'"):
        M.MeanMetric(colour=1)


@pytest.mark.parametrize(
    ("make", "args", "said"),
    [
        (lambda: M.Accuracy(task="binary"), (np.zeros(3), np.zeros(4, int)), "same shape"),
        (lambda: M.Accuracy(task="binary"), (np.zeros(3), np.zeros(3)), "integers"),
        (lambda: M.Accuracy(task="multiclass", num_classes=3), (np.zeros((4, 2)), np.zeros(4, int)), "of shape"),
        (lambda: M.Accuracy(task="multiclass", num_classes=3), (np.zeros(4), np.zeros(4, int)), "class numbers"),
        (lambda: M.Accuracy(task="multilabel", num_labels=3), (np.zeros((4, 2)), np.zeros((4, 2), int)), "num_labels"),
        (
            lambda: M.Accuracy(task="multiclass", num_classes=3, top_k=2),
            (np.zeros(4, int), np.zeros(4, int)),
            "scores of all classes",
        ),
        (lambda: M.AUROC(task="binary", thresholds=5), (np.zeros(3, int), np.zeros(3, int)), "probabilities"),
        (lambda: M.R2Score(), (np.zeros((4, 2)), np.zeros((4, 2))), "num_outputs=2"),
        (lambda: M.MeanSquaredError(), (np.zeros(4), np.zeros(3)), "same shape"),
    ],
)
def test_wrong_inputs_are_refused_with_both_shapes(make: Any, args: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()(*args)


def test_wrong_arguments_are_refused() -> None:
    for make in (
        lambda: M.Accuracy(task="multiclass", num_classes=3, average="median"),
        lambda: M.Accuracy(task="multiclass", num_classes=3, top_k=4),
        lambda: M.ConfusionMatrix(task="binary", normalize="rows"),
        lambda: M.AUROC(task="binary", thresholds=1),
        lambda: M.AUROC(task="binary", thresholds=[0.5, 2.0]),
        lambda: M.MeanSquaredError(squared=2),  # type: ignore[arg-type]
        lambda: M.MeanAbsoluteError(num_outputs=0),
        lambda: M.R2Score(adjusted=-1),
        lambda: M.R2Score(multioutput="best"),
        lambda: M.MeanMetric(nan_strategy="panic"),
    ):
        with pytest.raises(ValueError):
            make()


def test_nan_is_spoken_about_when_the_value_is_computed() -> None:
    warned, strict = M.MeanMetric(), M.SumMetric(nan_strategy="error")
    for metric in (warned, strict):
        metric.update(np.array([1.0, np.nan, 3.0], np.float32))
    with pytest.warns(UserWarning, match="Encountered `nan` values"):
        assert warned.compute() == 2.0
    with pytest.raises(RuntimeError, match="Encountered `nan` values"):
        strict.compute()


def test_computing_without_data_warns() -> None:
    with pytest.warns(UserWarning, match="before `update`"):
        M.SumMetric().compute()
    one = M.R2Score()
    one.update(np.ones(1), np.ones(1))
    with pytest.raises(ValueError, match="at least two samples"):
        one.compute()


def test_copies_have_states_of_their_own() -> None:
    metric = M.SumMetric()
    metric.update(2.0)
    for copied in (metric.clone(), copy.deepcopy(metric), pickle.loads(pickle.dumps(metric))):
        copied.update(5.0)
        assert copied.compute() == 7.0
    assert metric.compute() == 2.0
    other = M.SumMetric()
    other.state = metric.state
    assert other.compute() == 2.0
    other.reset()
    assert not other.update_called
    other.state = None


def test_an_ensemble_of_metrics_under_vmap() -> None:
    pure = M.Accuracy(task="multiclass", num_classes=3, average="micro").functional()
    logits = _rng(0).normal(size=(4, 10, 3)).astype(np.float32)
    target = _rng(1).integers(0, 3, 10)
    states = jax.vmap(lambda each: pure.update(pure.init(), each, target))(logits)
    expected = (logits.argmax(-1) == target).mean(-1)
    np.testing.assert_allclose(jax.vmap(pure.compute)(states), expected, rtol=1e-6)
    left, right = (jax.tree.map(lambda leaf, i=i: leaf[i], states) for i in (0, 1))
    np.testing.assert_allclose(pure.compute(pure.merge(left, right)), expected[:2].mean(), rtol=1e-6)


def _metrics(home: Any, **names: Any) -> Any:
    return home.MetricCollection(
        [home.Accuracy(task="multiclass", num_classes=5), home.F1Score(task="multiclass", num_classes=5)], **names
    )


def test_a_collection_is_torchmetrics() -> None:
    import torch
    import torchmetrics

    ours, theirs = _metrics(M, prefix="train_"), _metrics(torchmetrics, prefix="train_")
    rng = _rng(3)
    for size in SIZES:
        preds, target = multiclass("logits")(rng, size)
        batch, reference = ours(preds, target), theirs(torch.as_tensor(preds), torch.as_tensor(target))
        assert batch.keys() == reference.keys()
        for name in batch:
            _close(batch[name], reference[name], name)
    for left, right in ((ours, theirs), (ours.clone(prefix="val_"), theirs.clone(prefix="val_"))):
        computed, reference = left.compute(), right.compute()
        assert computed.keys() == reference.keys()
        for name in computed:
            _close(computed[name], reference[name], name)
        assert list(left.keys()) == list(right.keys()) == list(left)
        assert left.keys(keep_base=True) == list(right.keys(keep_base=True))
    assert len(ours) == 2
    assert ours["MulticlassAccuracy"] is ours["train_MulticlassAccuracy"] is ours.values()[0]
    assert "MulticlassF1Score" in ours
    ours.reset()
    assert not any(metric.update_called for metric in ours.values())


def test_collections_nest_and_pass_keywords_to_those_who_know_them() -> None:
    inner = M.MetricCollection({"b": M.MeanMetric(), "a": M.SumMetric()}, postfix="_x")
    outer = M.MetricCollection({"in": inner, "max": M.MaxMetric()}, prefix="p_")
    assert outer.keys() == ["p_in_a_x", "p_in_b_x", "p_max"]
    outer.update(np.array([1.0, 3.0]), weight=np.array([1.0, 0.0]))
    assert {name: float(value) for name, value in outer.compute().items()} == {"p_in_a_x": 4, "p_in_b_x": 1, "p_max": 3}
    assert M.MetricCollection(M.SumMetric(), M.MaxMetric()).keys() == ["SumMetric", "MaxMetric"]
    with pytest.raises(ValueError, match="both named SumMetric"):
        M.MetricCollection([M.SumMetric(), M.SumMetric()])
    with pytest.raises(ValueError, match=r"expected a `jaxlightning\.metrics\.Metric`"):
        M.MetricCollection({"x": 5})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="to be a string"):
        M.MetricCollection([M.SumMetric()], prefix=3)  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="none of the metrics"):
        outer["nothing"]


def _hits(home: Any, array: Any) -> Any:
    class Hits(home.Metric):  # type: ignore[name-defined,misc]
        """The same text for torchmetrics and for us."""

        def __init__(self, scale: float = 1.0) -> None:
            super().__init__()
            self.scale = scale
            self.add_state("correct", default=array(0.0), dist_reduce_fx="sum")
            self.add_state("total", default=array(0.0), dist_reduce_fx="sum")
            self.add_state("best", default=array(-np.inf), dist_reduce_fx="max")

        def update(self, preds: Any, target: Any) -> None:
            self.correct += (preds == target).sum()
            self.total += target.shape[0]
            self.best = array(preds.max() * 1.0)

        def compute(self) -> Any:
            return self.scale * self.correct / self.total

    return Hits


def test_a_metric_written_for_torchmetrics_works() -> None:
    import torch
    import torchmetrics

    ours, theirs = _hits(M, jnp.asarray)(2.0), _hits(torchmetrics, torch.as_tensor)(2.0)
    pure, rng = ours.functional(), _rng(9)
    update = jax.jit(pure.update)
    for _ in range(2):
        state = pure.init()
        for size in SIZES:
            preds, target = rng.integers(0, 3, size), rng.integers(0, 3, size)
            _close(ours(preds, target), theirs(torch.as_tensor(preds), torch.as_tensor(target)), "batch")
            state = update(state, preds, target)
        _close(ours.compute(), theirs.compute(), "epoch")
        _close(jax.jit(pure.compute)(state), theirs.compute(), "jit")
        _close(ours.total, theirs.total, "state")
        assert float(ours.best) == 2.0
        ours.reset()
        theirs.reset()
    assert ours.clone().scale == 2.0
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        ours.other
    for word, call in (("batch_state", lambda metric: metric(1)), ("value_of", lambda metric: metric.compute())):
        empty = type("Empty", (M.Metric,), {})()
        empty.state = {}
        with pytest.raises(NotImplementedError, match=f"neither .* nor `{word}`"):
            call(empty)


def test_a_metric_of_ones_own_must_keep_its_word() -> None:
    class Mine(M.Metric):
        def __init__(self) -> None:
            super().__init__()
            self.add_state("n", 0)

        def batch_state(self, values: Any) -> Any:
            return {"m": jnp.sum(values)}

        def value_of(self, state: Any) -> Any:
            return state["n"]

    with pytest.raises(RuntimeError, match="returned \\['m'\\], but `add_state` declared \\['n'\\]"):
        Mine()(np.ones(3))
    with pytest.raises(ValueError, match="merged by one of"):
        Mine().add_state("list", [], "cat")
    assert repr(M.SumMetric()) == "SumMetric()"
