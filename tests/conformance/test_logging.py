"""LG: what `self.log` does where no recorded trace shows it, with Lightning beside."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conformance.loggers import recorder
from support.beside import Side, both, caught, error, events_callback, plain, same

pytestmark = [
    pytest.mark.lightning,
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::jaxlightning.utilities.warnings.PossibleUserWarning"),
]


@pytest.mark.catalogue("LG08")
def test_a_callback_logs_under_its_own_hook() -> None:
    def scenario(side: Side) -> Any:
        class Logs(side.Callback):  # type: ignore[name-defined,misc]
            def on_train_start(self, trainer: Any, module: Any) -> None:
                self.log("start", 1.0)

            def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
                self.log("both", float(batch_idx), on_epoch=True)
                self.log_dict({"x": 1.0, "y": float(batch_idx)}, on_step=False, on_epoch=True, reduce_fx="sum")

            def on_validation_batch_start(self, *args: Any, **kwargs: Any) -> None:
                self.log("val", 3.0)

            def on_validation_end(self, trainer: Any, module: Any) -> None:
                if not trainer.sanity_checking:
                    refused.append(error(lambda: self.log("late", 1.0))[0])

        refused: list[str] = []
        trainer = side.trainer(callbacks=[Logs()], max_epochs=2)
        trainer.fit(side.Tiny())
        return plain(dict(trainer.callback_metrics)), refused

    metrics, refused = same(scenario)
    assert metrics["both_epoch"] == 1.0
    assert refused == ["MisconfigurationException"] * 2


@pytest.mark.catalogue("LG11", adaptation="a logged value leaves the step beside the loss, gradients stopped")
@pytest.mark.parametrize("log", [True, False])
def test_logging_changes_no_gradient(log: bool) -> None:
    def scenario(side: Side) -> Any:
        class Model(side.Tiny):  # type: ignore[name-defined,misc]
            def training_step(self, batch: Any, batch_idx: Any) -> Any:
                loss = self.loss(batch)
                if log:
                    self.log("huge", loss * 1e6, on_epoch=True)
                return loss * 0.0

            def configure_optimizers(self) -> Any:
                return side.sgd(self, lr=1.0)

        module = Model()
        seen: list[Any] = []
        weights = "layer.bias"
        callback = events_callback(
            side,
            ["on_train_batch_end"],
            lambda hook, t, m, *args: seen.append(float(np.abs(np.asarray(m.state_dict()[weights])).sum())),
        )
        trainer = side.trainer(limit_val_batches=0, callbacks=[callback])
        trainer.fit(module)
        moved = len(set(seen)) > 1
        kept = [type(value).__name__ for value in trainer.callback_metrics.values()]
        graph = [getattr(value, "requires_grad", False) for value in trainer.callback_metrics.values()]
        return moved, len(kept), graph

    assert same(scenario)[0] is False


@pytest.mark.catalogue("LG16")
def test_a_missing_logger_is_pointed_out_only_when_one_is_asked_for() -> None:
    def scenario(side: Side) -> Any:
        class Model(side.Tiny):  # type: ignore[name-defined,misc]
            def on_train_epoch_end(self) -> None:
                self.log("quiet", 1.0)
                self.log("loud", 1.0, logger=True)

        trainer = side.trainer(limit_val_batches=0)
        with caught() as warned:
            trainer.fit(Model())
        found = [[kind, text[:40]] for kind, text in warned if "loud" in text or "quiet" in text]
        return found, plain(dict(trainer.logged_metrics))

    found, _ = same(scenario)
    assert len(found) == 1


@pytest.mark.catalogue("LG41", "LO10", "LO11", "LG60", "LG54", "LG55", "LG57", "LO12")
def test_several_loggers_hear_everything_in_turn() -> None:
    def scenario(side: Side) -> Any:
        class Model(side.Tiny):  # type: ignore[name-defined,misc]
            def on_train_start(self) -> None:
                self.log("start", 4.0)

            def training_step(self, batch: Any, batch_idx: Any) -> Any:
                self.log("i", batch_idx * 1.0)
                return {"loss": self.loss(batch), "extra": self.loss(batch) * 2}

            def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
                self.log("trained", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")

            def on_validation_batch_start(self, *args: Any, **kwargs: Any) -> None:
                self.log("validated", 1.0, reduce_fx="sum")

        calls: list[Any] = []
        trainer = side.trainer(
            logger=[recorder(side, calls, "a"), recorder(side, calls, "b")], log_every_n_steps=2, max_epochs=2
        )
        module = Model()
        trainer.fit(module)
        names = [each.name for each in trainer.loggers]
        shown = [trainer.logger.name, names, module.logger.name, [each.name for each in module.loggers]]
        trainer.logger = None
        empty = [trainer.logger, trainer.loggers, module.logger, module.loggers]
        trainer.loggers = [recorder(side, calls, "c")]
        return calls, shown, empty, trainer.logger.name

    calls, *_ = same(scenario)
    metrics = [each[2] for each in calls if each[:2] == ["a", "log_metrics"]]
    assert sum("start" in each for each in metrics) == 1
    assert not any("extra" in each for each in metrics)
    assert [each["validated"] for each in metrics if "validated" in each] == [2.0, 2.0]


@pytest.mark.catalogue("LO11", "LG60")
@pytest.mark.parametrize("given", [False, None, []])
def test_without_a_logger_there_is_none(given: Any) -> None:
    def scenario(side: Side) -> Any:
        trainer, module = side.trainer(logger=given), side.Tiny()
        trainer.fit(module)
        found = [trainer.logger, trainer.loggers, module.logger, module.loggers]
        return [type(each).__name__ if each else each for each in found[:1]], len(found[1]), len(found[3])

    same(scenario)


@pytest.mark.catalogue(
    "LG49", "LG53", adaptation="our metric objects: updated on the device, computed and reset at the epoch's end"
)
def test_metric_objects_are_computed_and_reset_like_torchmetrics() -> None:
    def scenario(side: Side) -> Any:
        if side.ours:
            from jaxlightning import metrics
        else:
            import torchmetrics as metrics  # type: ignore[no-redef]

        class Model(side.Tiny):  # type: ignore[name-defined,misc]
            sizes = {**side.Tiny.sizes, "train": 5, "val": 3}

            def __init__(self) -> None:
                super().__init__()
                self.mean, self.error, self.val = metrics.MeanMetric(), metrics.MeanSquaredError(), metrics.MaxMetric()

            def training_step(self, batch: Any, batch_idx: Any) -> Any:
                x = batch[0][:, 0]
                self.mean(x)
                self.log("mean", self.mean, on_step=True, on_epoch=True)
                self.error(x, x * 0.5)
                self.log("error", self.error, on_step=False, on_epoch=True)
                return self.loss(batch)

            def validation_step(self, batch: Any, batch_idx: Any) -> Any:
                self.val(batch[0])
                self.log("val", self.val)

        calls: list[Any] = []
        trainer = side.trainer(max_epochs=2, logger=recorder(side, calls), log_every_n_steps=1)
        trainer.fit(Model())
        return [each[2:] for each in calls if each[1] == "log_metrics"], plain(dict(trainer.callback_metrics))

    same(scenario)


@pytest.mark.catalogue("LG51", adaptation="compute() has to give an array of one element")
def test_a_metric_that_computes_no_array_is_refused() -> None:
    def scenario(side: Side) -> Any:
        if side.ours:
            from jaxlightning.metrics import Metric
        else:
            from torchmetrics import Metric  # type: ignore[assignment]

        class Wrong(Metric):  # type: ignore[misc]
            def update(self, *args: Any) -> None: ...

            def compute(self) -> Any:
                return "text"

        class Model(side.Tiny):  # type: ignore[name-defined,misc]
            def __init__(self) -> None:
                super().__init__()
                self.wrong = Wrong()

            def training_step(self, batch: Any, batch_idx: Any) -> Any:
                self.wrong(batch[0])
                self.log("w", self.wrong, on_step=False, on_epoch=True)
                return self.loss(batch)

        return error(lambda: side.trainer(limit_val_batches=0).fit(Model()))[0]

    assert same(scenario) == "ValueError"


@pytest.mark.catalogue("LG52", adaptation="values of one process are global already")
def test_synchronising_one_process_changes_nothing() -> None:
    def scenario(side: Side) -> Any:
        class Model(side.Tiny):  # type: ignore[name-defined,misc]
            def training_step(self, batch: Any, batch_idx: Any) -> Any:
                for fx in ("mean", "sum", "max"):
                    self.log(fx, batch_idx * 1.0, sync_dist=True, reduce_fx=fx, on_step=True, on_epoch=True)
                self.log("one", 2.0, sync_dist=True, rank_zero_only=True)
                return self.loss(batch)

        trainer = side.trainer(limit_val_batches=0)
        trainer.fit(Model())
        return plain(dict(trainer.callback_metrics))

    same(scenario)


@pytest.mark.catalogue("LG56", adaptation="fetched into numpy scalars")
def test_values_are_on_the_host_after_a_run() -> None:
    def scenario(side: Side) -> Any:
        class Model(side.Tiny):  # type: ignore[name-defined,misc]
            def training_step(self, batch: Any, batch_idx: Any) -> Any:
                self.log("a", batch[0].mean(), on_step=True, on_epoch=True, prog_bar=True)
                return self.loss(batch)

        trainer = side.trainer(limit_val_batches=0)
        trainer.fit(Model())
        found = {name: value.item() for name, value in trainer.callback_metrics.items()}
        bars = {name: type(value).__name__ for name, value in trainer.progress_bar_metrics.items()}
        shapes = [list(value.shape) for value in trainer.logged_metrics.values()]
        if side.ours:
            assert all(isinstance(value, np.generic) for value in trainer.callback_metrics.values())
        return found, bars, shapes

    same(scenario)


@pytest.mark.catalogue("LG59", "PB08", adaptation="in a hook as in Lightning; inside a step jax.debug.print is named")
def test_printing_goes_through_the_bar(capsys: pytest.CaptureFixture[str]) -> None:
    def scenario(side: Side) -> Any:
        bar_class = side.get("callbacks.TQDMProgressBar")
        printed: list[Any] = []

        class Bar(bar_class):  # type: ignore[misc,valid-type]
            def print(self, *args: Any, **kwargs: Any) -> None:
                printed.append([*args])

        class Model(side.Tiny):  # type: ignore[name-defined,misc]
            def on_train_epoch_start(self) -> None:
                self.print("epoch", self.current_epoch)

        side.trainer(callbacks=[Bar()], enable_progress_bar=True, limit_val_batches=0).fit(Model())
        capsys.readouterr()
        side.trainer(limit_val_batches=0).fit(Model())
        return printed, capsys.readouterr().out

    printed, out = same(scenario)
    assert printed == [["epoch", 0]]
    assert out == "epoch 0\n"


LEVELS: list[dict[str, bool]] = [
    {},
    {"on_step": True, "on_epoch": False},
    {"on_step": False, "on_epoch": True},
    {"on_step": True, "on_epoch": True},
    {"on_step": False, "on_epoch": False},
]
IN_STEPS = ["training_step", "validation_step", "test_step", "predict_step"]


@pytest.mark.catalogue("LG01", "LG02", adaptation="the options are known when the step is traced")
@pytest.mark.catalogue("LG03", "LG04", "LG05", "LG07")
@pytest.mark.parametrize("who", ["module", "callback"])
def test_where_logging_is_allowed(who: str) -> None:
    """Every hook of a whole life, on both sides: allowed or refused, with which words."""
    from support.tracing import CALLBACK_HOOKS, MODULE_HOOKS

    returning = {"configure_callbacks", "configure_optimizers", "state_dict", "load_state_dict", "configure_model"}
    returning |= {f"{kind}_dataloader" for kind in ("train", "val", "test", "predict")} | set(IN_STEPS)

    def scenario(side: Side) -> Any:
        found: dict[str, list[Any]] = {}

        def attempt(module: Any, hook: str) -> None:
            stage = module._trainer.state.stage if module._trainer is not None else None
            key = f"{hook}@{stage.value if stage else None}"
            if key in found:
                return
            found[key] = []
            for level in LEVELS:
                name = f"{hook}_{level.get('on_step')}_{level.get('on_epoch')}"
                outcome = error(lambda name=name, level=level: module.log(name, 1.0, **level))
                found[key].append("ok" if outcome is None else outcome[0])

        def hook_of(name: str, parent: Any) -> Any:
            def run(self: Any, *args: Any, **kwargs: Any) -> Any:
                result = getattr(super(parent[0], self), name)(*args, **kwargs)
                attempt(self if who == "module" else args[0].lightning_module, name)
                return result

            return run

        parent: list[Any] = []
        base, hooks = (side.Tiny, MODULE_HOOKS) if who == "module" else (side.Callback, CALLBACK_HOOKS)
        wanted = [hook for hook in hooks if hook not in returning]
        parent.append(type("Logs", (base,), {hook: hook_of(hook, parent) for hook in wanted}))
        module = parent[0]() if who == "module" else side.Tiny()
        trainer = side.trainer(callbacks=[] if who == "module" else [parent[0]()], max_epochs=1, limit_train_batches=2)
        trainer.fit(module)
        for verb in ("validate", "test", "predict"):
            getattr(trainer, verb)(module, **({} if verb == "predict" else {"verbose": False}))
        return found

    theirs, ours = both(scenario)
    assert ours == theirs
    assert len(theirs) > 40


@pytest.mark.catalogue("LG06")
def test_logging_without_a_trainer_is_a_warning() -> None:
    def scenario(side: Side) -> Any:
        with caught() as warned:
            side.Tiny().log("a", 1.0)
        return [[kind, text[:28]] for kind, text in warned]

    assert len(same(scenario)) == 1
