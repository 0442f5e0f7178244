"""`self.acc(logits, y); self.log("acc", self.acc)`: as in Lightning with torchmetrics, compiled and eager."""

from __future__ import annotations

import json
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlightning as pl
from jaxlightning import metrics as M
from jaxlightning.utilities.exceptions import MisconfigurationException

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "logger": False,
}
CLASSES = 4


def data(samples: int, seed: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(samples, CLASSES)).astype(np.float32), rng.integers(0, CLASSES, samples).astype(np.int32)


TRAIN, VAL, SECOND = data(11, 0), data(9, 1), data(5, 2)


def build(home: Any, base: Any, loss: Any) -> type[Any]:
    """One module text for both frameworks; the batch holds the logits, so that no network differs."""

    class Module(base):  # type: ignore[misc]
        def __init__(self, **layers: Any) -> None:
            super().__init__()
            for name, layer in layers.items():
                setattr(self, name, layer)
            options = {"task": "multiclass", "num_classes": CLASSES}
            self.acc = home.Accuracy(**options)
            self.mean = home.MeanMetric()
            self.val_metrics = home.MetricCollection(
                {"acc": home.Accuracy(average="macro", **options), "f1": home.F1Score(average="macro", **options)},
                prefix="val_",
            )
            self.never_logged = home.SumMetric()
            self.seen: list[Any] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            logits, y = batch
            self.acc(logits, y)
            self.log("acc", self.acc, on_step=True, on_epoch=True, prog_bar=True)
            self.mean.update(logits[:, 0])
            self.log("mean", self.mean, on_step=False, on_epoch=True)
            self.never_logged.update(logits[0, 0])
            return loss(self, logits)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            logits, y = batch
            self.val_metrics.update(logits, y)
            self.log_dict(self.val_metrics)

        def on_validation_epoch_end(self) -> None:
            self.seen.append({name: float(value) for name, value in self.val_metrics.compute().items()})

        def on_train_epoch_end(self) -> None:
            self.log("by_hand", self.never_logged)

    return Module


class Recorder(pl.loggers.Logger):
    name, version = "rec", 0

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.calls.append((step, metrics))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None: ...


def ours(**extra: Any) -> Any:
    module_class = build(M, pl.LightningModule, lambda module, logits: (module.net(logits) ** 2).mean())
    module_class.configure_optimizers = lambda self: pl.optim.SGD(self.parameters(), lr=0.01)  # type: ignore[attr-defined]
    return module_class(net=nn.Dense(2))


def _equal(left: Any, right: Any) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        np.testing.assert_allclose(float(value), float(right[name]), rtol=1e-6, err_msg=name)


@pytest.mark.torch
@pytest.mark.lightning
@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.filterwarnings("ignore:The number of training batches")
def test_logged_metrics_are_lightnings(tmp_path: Any, jit: bool) -> None:
    import lightning.pytorch as reference
    import torch
    import torchmetrics
    from torch.utils.data import DataLoader, TensorDataset

    recorder, theirs_recorder = Recorder(), Recorder()
    flags = {**QUIET, "default_root_dir": tmp_path, "max_epochs": 2, "log_every_n_steps": 2}
    module, trainer = ours(), pl.Trainer(**{**flags, "logger": recorder}, jit=jit)
    trainer.fit(module, pl.ArrayLoader(TRAIN, batch_size=4), pl.ArrayLoader(VAL, batch_size=4))

    module_class = build(torchmetrics, reference.LightningModule, lambda m, logits: (m.net(logits) ** 2).mean())
    module_class.configure_optimizers = lambda self: torch.optim.SGD(  # type: ignore[attr-defined]
        self.net.parameters(), lr=0.01
    )

    class Adapter(reference.loggers.logger.Logger):
        name, version = "rec", 0
        log_metrics = theirs_recorder.log_metrics

        def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    theirs = module_class(net=torch.nn.Linear(CLASSES, 2))
    their_trainer = reference.Trainer(**{**flags, "logger": Adapter()})

    def loader(arrays: Any) -> Any:
        logits, y = arrays
        return DataLoader(TensorDataset(torch.as_tensor(logits), torch.as_tensor(y).long()), batch_size=4)

    their_trainer.fit(theirs, loader(TRAIN), loader(VAL))
    _equal(trainer.callback_metrics, their_trainer.callback_metrics)
    _equal(trainer.progress_bar_metrics, their_trainer.progress_bar_metrics)
    assert [step for step, _ in recorder.calls] == [step for step, _ in theirs_recorder.calls]
    for (_, left), (_, right) in zip(recorder.calls, theirs_recorder.calls, strict=True):
        _equal(left, right)
    assert len(module.seen) == len(theirs.seen) == 3  # the sanity check, and two epochs
    for left, right in zip(module.seen, theirs.seen, strict=True):
        _equal(left, right)
    assert not module.acc.update_called


@pytest.mark.filterwarnings("ignore:The number of training batches")
def test_every_loader_has_its_share_of_a_metric_logged_with_the_index(tmp_path: Any) -> None:
    """One object serves all loaders, as in Lightning: its state goes on from loader to loader."""

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.accs = [M.Accuracy(task="multiclass", num_classes=CLASSES) for _ in range(2)]

        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            metric = self.accs[dataloader_idx]
            metric.update(*batch)
            self.log("acc", metric)

    trainer = pl.Trainer(**QUIET, default_root_dir=tmp_path)
    loaders = [pl.ArrayLoader(each, batch_size=4) for each in (VAL, SECOND)]
    results = trainer.test(Module(), loaders, verbose=False)
    for index, (logits, y) in enumerate((VAL, SECOND)):
        expected = (logits.argmax(1) == y).mean()
        np.testing.assert_allclose(results[index][f"acc/dataloader_idx_{index}"], expected, rtol=1e-6)


@pytest.mark.filterwarnings("ignore:The number of training batches")
def test_a_metric_costs_no_host_read_per_step(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ours()
    counts: list[int] = []
    reads = [0]
    inner = jax.device_get

    def device_get(tree: Any) -> Any:
        reads[0] += 1
        return inner(tree)

    monkeypatch.setattr(jax, "device_get", device_get)

    class Count(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            counts.append(reads[0])

    trainer = pl.Trainer(
        **QUIET,
        default_root_dir=tmp_path,
        max_epochs=1,
        callbacks=[Count()],
        limit_val_batches=0,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, pl.ArrayLoader(data(40, 3), batch_size=4), pl.ArrayLoader(VAL, batch_size=4))
    assert len(counts) == 10
    assert counts[1:] == [counts[1]] * 9


def test_the_same_over_eight_devices(tmp_path: Any) -> None:
    logits, y = data(64, 4)
    values = []
    for devices in (1, 8):
        trainer = pl.Trainer(
            **{**QUIET, "devices": devices}, strategy="ddp" if devices > 1 else "auto", default_root_dir=tmp_path
        )
        batch_size = 32 // devices
        results = trainer.validate(ours(), pl.ArrayLoader((logits, y), batch_size=batch_size), verbose=False)
        values.append(results[0])
    assert values[0] == values[1]


@pytest.mark.lightning
def test_metrics_with_merge_and_compute_are_merged_over_the_epoch(fake: Any) -> None:
    """clu's are one example; the same in a step and from a host hook."""
    import flax

    @flax.struct.dataclass
    class Average:
        total: Any
        count: Any

        def merge(self, other: Any) -> Any:
            return Average(self.total + other.total, self.count + other.count)

        def compute(self) -> Any:
            return self.total / self.count

    for where in ("training_step", "on_train_batch_end"):

        class Module(fake.Module):  # type: ignore[name-defined,misc]
            pass

        def call(self: Any, *args: Any, on_step: bool = where == "training_step") -> None:
            value = Average(jnp.float32(args[-1] + 1), jnp.float32(args[-1] + 1) * 2 - args[-1])
            self.log("avg", value, on_step=on_step, on_epoch=True)

        setattr(Module, where, call)
        trainer = fake.Trainer(Module(), max_epochs=2)
        trainer.fit(fake.batches(2, 2, 2))
        name = "avg_epoch" if where == "training_step" else "avg"
        np.testing.assert_allclose(trainer.callback_metrics[name], 6 / 9, rtol=1e-6)
        if where == "training_step":
            np.testing.assert_allclose(trainer.callback_metrics["avg_step"], 3 / 4, rtol=1e-6)


def module_with(fake: Any, step: Any, **attributes: Any) -> Any:
    module = type("Module", (fake.Module,), {"training_step": lambda self, batch, i: step(self, i)})()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def test_a_metric_called_twice_in_a_step_takes_both(fake: Any) -> None:
    def step(self: Any, i: int) -> None:
        self.total(1.0)
        self.total(float(i))
        self.log("total", self.total, on_step=True, on_epoch=True)

    trainer = fake.Trainer(module_with(fake, step, total=M.SumMetric()))
    trainer.fit(fake.batches(2, 2, 2))
    assert fake.rounded(trainer.callback_metrics) == {"total": 6.0, "total_step": 2.0, "total_epoch": 6.0}


@pytest.mark.parametrize(
    ("step", "error", "said"),
    [
        (lambda s, i: (s.m.update(1.0), s.log("m", s.m)), MisconfigurationException, "was not called"),
        (lambda s, i: s.m.compute(), RuntimeError, "in a step"),
        (lambda s, i: s.m.reset(), RuntimeError, "never again"),
        (lambda s, i: s.log("m", M.SumMetric()), MisconfigurationException, "Could not find"),
        (
            lambda s, i: s.log("m", s.m, metric_attribute="other"),
            MisconfigurationException,
            "is not the metric that was logged",
        ),
        (lambda s, i: (s.matrix([0, 1], [0, 1]), s.log("m", s.matrix)), ValueError, "single element"),
    ],
)
def test_what_cannot_work_in_a_step_says_so(fake: Any, step: Any, error: Any, said: str) -> None:
    module = module_with(fake, step, m=M.SumMetric(), other=M.SumMetric(), matrix=M.ConfusionMatrix(task="binary"))
    with pytest.raises(error, match=said):
        fake.Trainer(module).fit(fake.batches(2))


def test_a_matrix_cannot_be_an_epoch_value(fake: Any) -> None:
    def step(self: Any, i: int) -> None:
        self.matrix.update(jnp.array([0, 1]), jnp.array([0, 1]))
        self.log("m", self.matrix, on_step=False, on_epoch=True)

    with pytest.raises(ValueError, match="must be a tensor with a single element"):
        fake.Trainer(module_with(fake, step, matrix=M.ConfusionMatrix(task="binary"))).fit(fake.batches(2))


def test_a_metric_is_found_wherever_it_lives_and_missed_when_it_is_gone(fake: Any) -> None:
    def step(self: Any, i: int) -> None:
        for name, metric in {"a": self.held["x"][0], "b": self.collection["SumMetric"]}.items():
            metric(1.0)
            self.log(name, metric, on_step=False, on_epoch=True)

    module = module_with(fake, step, held={"x": [M.SumMetric()]}, collection=M.MetricCollection([M.SumMetric()]))
    trainer = fake.Trainer(module)
    trainer.fit(fake.batches(2, 2))
    assert fake.rounded(trainer.callback_metrics) == {"a": 2.0, "b": 2.0}
    trainer.max_epochs = 3

    def forget(*_: Any) -> None:
        module.held = {}

    trainer.callbacks = (type("Forget", (), {"on_train_batch_end": forget})(),)
    trainer.connector.update_train_step_metrics = lambda: None
    with pytest.raises(KeyError):
        trainer.fit(fake.batches(2, 2))


def test_predicting_with_a_metric_is_refused() -> None:
    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.total = M.SumMetric()

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.total(batch)

    with pytest.raises(NotImplementedError, match="predict_step"):
        pl.Trainer(**QUIET).predict(Module(), pl.ArrayLoader(np.ones(4, np.float32), batch_size=2))


def test_a_metric_goes_on_from_a_checkpoint(fake: Any) -> None:
    def step(self: Any, i: int) -> None:
        self.total(float(i + 1))
        self.log("total", self.total, on_step=True, on_epoch=True)

    broken = fake.Trainer(module_with(fake, step, total=M.SumMetric()))
    saved: list[Any] = []
    inner = broken.connector.update_train_step_metrics
    broken.connector.update_train_step_metrics = lambda: (inner(), saved.append(broken.connector.state_dict()))
    broken.fit(fake.batches(2, 2, 2))
    assert broken.callback_metrics["total_epoch"] == 6.0

    resumed = fake.Trainer(module_with(fake, step, total=M.SumMetric()))
    begin = resumed.connector.on_epoch_start

    def on_epoch_start(stage: str) -> None:
        begin(stage)
        resumed.connector.load_state_dict(json.loads(json.dumps(saved[1])))

    resumed.connector.on_epoch_start = on_epoch_start
    resumed.fit(fake.batches(2))  # logs 1.0 on top of 1.0 + 2.0
    assert resumed.callback_metrics["total_epoch"] == 4.0


@pytest.mark.lightning
def test_torchmetrics_on_the_module_is_refused_by_name(tmp_path: Any) -> None:
    import torchmetrics

    flags = {**QUIET, "default_root_dir": tmp_path, "max_epochs": 1}
    loaders = [pl.ArrayLoader(each, batch_size=4) for each in (TRAIN, VAL)]
    for held in (torchmetrics.MeanMetric(), [torchmetrics.MeanMetric()], {"x": torchmetrics.MeanMetric()}):
        module = ours()
        module.metric = held
        with pytest.raises(MisconfigurationException, match=r"Module\.metric.*`jaxlightning\.metrics\.MeanMetric`"):
            pl.Trainer(**flags).fit(module, *loaders)
    module.metric = torchmetrics.CatMetric()
    with pytest.raises(MisconfigurationException, match="among them Accuracy"):
        pl.Trainer(**flags).fit(module, *loaders)
