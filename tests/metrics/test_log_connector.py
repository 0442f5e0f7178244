"""When values appear where: loggers, step axis, the three dictionaries, results of evaluations."""

from __future__ import annotations

import json
import pickle
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlightning.utilities.exceptions import MisconfigurationException


def log_module(fake: Any, *, train: bool = True) -> Any:
    """The module of the golden CSV runs."""

    class LogModule(fake.Module):  # type: ignore[name-defined,misc]
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            v = jnp.float32(100.0 * self.current_epoch + batch_idx + 0.5 + 1000 * dataloader_idx)
            self.log("va_default", v)
            self.log("va_step", v, on_step=True, on_epoch=False)
            self.log("va_both", v, on_step=True, on_epoch=True, prog_bar=True)

        def on_validation_epoch_end(self) -> None:
            self.log("va_end", float(self.current_epoch))

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("te_default", batch_idx + 0.25)
            self.log("te_both", batch_idx + 0.25, on_step=True, on_epoch=True)

    class Trained(LogModule):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            v = jnp.float32(10 * self.current_epoch + batch_idx)
            self.log("tr_default", v)
            self.log("tr_step", v, on_step=True, on_epoch=False)
            self.log("tr_epoch", v, on_step=False, on_epoch=True)
            self.log("tr_both", v, on_step=True, on_epoch=True, prog_bar=True)
            self.log("tr_sum", v, on_step=False, on_epoch=True, reduce_fx="sum")
            self.log("tr_max", v, on_step=False, on_epoch=True, reduce_fx="max")
            self.log("tr_nolog", v, logger=False, on_epoch=True)
            self.log("tr_bs1", v, on_step=False, on_epoch=True, batch_size=1)

        def on_train_epoch_end(self) -> None:
            self.log("tr_end", float(self.current_epoch))

    return Trained() if train else LogModule()


SIZES = {5: (2, 2, 1), 8: (2, 2, 2, 2)}
RUNS: dict[str, dict[str, Any]] = {
    "base_log2": {"log_every_n_steps": 2},
    "log1": {"log_every_n_steps": 1},
    "log2_accumulate2": {"log_every_n_steps": 2, "accumulate_grad_batches": 2},
    "log2_accumulate2_4batches": {"log_every_n_steps": 2, "accumulate_grad_batches": 2, "n_train": 8},
    "log50_default": {},
    "log0": {"log_every_n_steps": 0},
    "val_check_interval_0.5": {"val_every_batches": 2, "n_train": 8, "log_every_n_steps": 1},
    "check_val_every_2": {"check_val_every_n_epoch": 2, "log_every_n_steps": 2},
    "max_steps_4": {"max_epochs": 100, "max_steps": 4, "log_every_n_steps": 1},
    "two_val_loaders": {"loaders": 2, "log_every_n_steps": 1},
    "fit_validate_test": {"log_every_n_steps": 1},
    "val_only": {"train": False, "log_every_n_steps": 1},
}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", RUNS)
def test_loggers_and_dictionaries_get_what_lightning_gives(fake: Any, name: str, late: bool) -> None:
    expected = fake.golden("csv_logging")[name]
    flags = dict(RUNS[name])
    train = fake.batches(*SIZES[flags.pop("n_train", 5)])
    val = [fake.batches(2, 1)] * flags.pop("loaders", 1)
    logger = fake.Logger()
    module = log_module(fake, train=flags.pop("train", True))
    trainer = fake.Trainer(module, loggers=(logger,), **{"max_epochs": 2, **flags})
    trainer.connector.may_be_late = lambda: late  # whether values travel late changes nothing but the moment
    runs = {
        "fit": lambda: trainer.fit(train, val),
        "validate": lambda: trainer.run_evaluation("validate", val),
        "test": lambda: trainer.run_evaluation("test", [fake.batches(2, 1)]),
    }
    for verb, after in expected["after"].items():
        returned = runs[verb]()
        assert fake.rounded(returned) == after["returned"]
        assert fake.rounded(trainer.callback_metrics) == after["callback_metrics"], verb
        assert fake.rounded(trainer.logged_metrics) == after["logged_metrics"], verb
        assert fake.rounded(trainer.progress_bar_metrics) == after["progress_bar_metrics"], verb
        assert all(type(value) is float for value in trainer.progress_bar_metrics.values())
    assert logger.calls == expected["log_metrics_calls"]


def test_metrics_named_step_and_epoch_take_over(fake: Any) -> None:
    expected = fake.golden("csv_logging")["step_epoch_keys"]

    class StepKey(fake.Module):  # type: ignore[name-defined,misc]
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.log("x", 1.0)
            self.log("step", 100.0 + batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("vx", 2.0)
            self.log("step", 7.0)
            self.log("epoch", 55.0)

    logger = fake.Logger()
    trainer = fake.Trainer(StepKey(), loggers=(logger,), max_epochs=2, log_every_n_steps=1)
    trainer.fit(fake.batches(2, 2), [fake.batches(2)])
    assert logger.calls == expected["log_metrics_calls"]
    assert fake.rounded(trainer.callback_metrics) == expected["after"]["fit"]["callback_metrics"]


@pytest.mark.catalogue("LG33")
def test_fast_dev_run_and_a_stop_log_every_step(fake: Any) -> None:
    class Module(fake.Module):  # type: ignore[name-defined,misc]
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.log("x", float(batch_idx))

    for flag in ("fast_dev_run", "should_stop"):
        logger = fake.Logger()
        trainer = fake.Trainer(Module(), loggers=(logger,))
        setattr(trainer, flag, True)
        trainer.fit(fake.batches(2, 2))
        assert [call["step"] for call in logger.calls] == [0, 1]


def test_the_dictionaries_show_in_every_hook_what_lightning_shows(fake: Any) -> None:
    expected = fake.golden("metrics_visibility")
    seen: list[dict[str, Any]] = []

    class Module(fake.Module):  # type: ignore[name-defined,misc]
        def training_step(self, batch: Any, batch_idx: int) -> None:
            v = jnp.float32(batch_idx + 10 * self.current_epoch)
            self.log("ts", v, prog_bar=True)
            self.log("te", v, on_step=False, on_epoch=True, prog_bar=True)
            self.log("tb", v, on_step=True, on_epoch=True, prog_bar=True)

        def on_train_epoch_end(self) -> None:
            self.log("tend", 9.0, prog_bar=True)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            v = jnp.float32(batch_idx + 100)
            self.log("vs", v, on_step=True, on_epoch=False, prog_bar=True)
            self.log("ve", v, prog_bar=True)
            self.log("vb", v, on_step=True, on_epoch=True, prog_bar=True)

    class Watch:
        def __getattr__(self, hook: str) -> Any:
            if not hook.startswith("on_"):
                raise AttributeError(hook)

            def look(trainer: Any, module: Any, *_: Any) -> None:
                seen.append(
                    {
                        "hook": hook,
                        "stage": trainer.state.stage,
                        "epoch": trainer.current_epoch,
                        "callback": fake.rounded(dict(trainer.callback_metrics)),
                        "logged": fake.rounded(dict(trainer.logged_metrics)),
                        "pbar": fake.rounded(dict(trainer.progress_bar_metrics)),
                    }
                )

            return look

    trainer = fake.Trainer(Module(), callbacks=(Watch(),), max_epochs=2, log_every_n_steps=1)
    val = [fake.batches(2, 2)]
    trainer.fit(fake.batches(2, 2, 2), val, sanity=2)

    def view() -> dict[str, Any]:
        return fake.rounded(
            {
                "callback": dict(trainer.callback_metrics),
                "logged": dict(trainer.logged_metrics),
                "pbar": dict(trainer.progress_bar_metrics),
            }
        )

    assert view() == expected["after"]["fit"]
    trainer.run_evaluation("validate", val)
    assert view() == expected["after"]["validate"]
    hooks = {event["hook"] for event in expected["per_hook"]}
    assert [event for event in seen if event["hook"] in hooks] == expected["per_hook"]


def _same_key_cases() -> dict[str, Any]:
    def same_args(s: Any, i: int) -> None:
        s.log("a", 1.0, on_epoch=True)
        s.log("a", 3.0, on_epoch=True)

    def diff_args(s: Any, i: int) -> None:
        s.log("a", 1.0)
        s.log("a", 3.0, prog_bar=True)

    def conditional(s: Any, i: int) -> None:
        if i == 1:
            s.log("a", 5.0, on_step=True, on_epoch=True)

    def only_epoch0_two_epochs(s: Any, i: int) -> None:
        if s.current_epoch == 0:
            s.log("a", 5.0, on_step=True, on_epoch=True)

    def suffix_clash(s: Any, i: int) -> None:
        s.log("a", 1.0, on_step=True, on_epoch=True)
        s.log("a_epoch", 7.0, on_step=False, on_epoch=True)

    def dlidx(s: Any, i: int) -> None:
        s.log("a/dataloader_idx_0", 1.0)

    def logdict(s: Any, i: int) -> None:
        s.log_dict({"x": 1.0, "y": 2.0}, on_epoch=True)

    def logdict_nested(s: Any, i: int) -> None:
        s.log_dict({"x": {"y": 2.0}})

    return {name: function for name, function in locals().items() if callable(function)}


@pytest.mark.parametrize("where", ["training_step", "on_train_batch_end"])
@pytest.mark.parametrize("case", _same_key_cases())
@pytest.mark.catalogue("LG25", "LG46", "LG48")
@pytest.mark.catalogue("LG22", adaptation="arguments are compared while tracing and across traces")
def test_one_key_logged_twice(fake: Any, case: str, where: str) -> None:
    expected = fake.golden("logging_rules")["same_key_rules"][case]
    body = _same_key_cases()[case]
    module = type("Module", (fake.Module,), {where: lambda self, *args: body(self, args[-1])})()
    trainer = fake.Trainer(module, max_epochs=2 if "two_epochs" in case else 1)
    if isinstance(expected, str):
        kind, _, message = expected.partition(": ")
        error = {"MisconfigurationException": MisconfigurationException, "ValueError": ValueError}[kind]
        with pytest.raises(error) as caught:
            trainer.fit(fake.batches(2, 2, 2))
        for phrase in ("twice in", "with different arguments", "dataloader_idx", "values cannot be logged"):
            assert (phrase in message) == (phrase in str(caught.value))
        return
    trainer.fit(fake.batches(2, 2, 2))
    assert fake.rounded(trainer.callback_metrics) == expected


def test_the_error_about_other_arguments_names_them(fake: Any) -> None:
    class Module(fake.Module):  # type: ignore[name-defined,misc]
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.log("a", 1.0, prog_bar=batch_idx == 1)

    with pytest.raises(MisconfigurationException, match="prog_bar was False and is True"):
        fake.Trainer(Module()).fit(fake.batches(2, 2))


@pytest.mark.catalogue("LG23")
def test_one_key_from_two_hooks_is_two_metrics(fake: Any) -> None:
    class Module(fake.Module):  # type: ignore[name-defined,misc]
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.log("k", 1.0, on_step=False, on_epoch=True)

        def on_train_epoch_end(self) -> None:
            self.log("k", 5.0)

    trainer = fake.Trainer(Module())
    trainer.fit(fake.batches(2, 2, 2))
    expected = fake.golden("logging_rules")["same_key_rules"]["same_key_step_and_epoch_end"]
    assert fake.rounded(trainer.callback_metrics) == expected


@pytest.mark.catalogue("LG24", adaptation="chosen by Python values; each choice is a compiled variant of its own")
def test_a_key_of_some_batches_only(fake: Any) -> None:
    expected = fake.golden("extra")["key_logged_only_in_batch_1_of_3"]

    class Sometimes(fake.Module):  # type: ignore[name-defined,misc]
        def training_step(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                self.log("a", 5.0, on_step=True, on_epoch=True)
            self.log("always", float(batch_idx))

    logger = fake.Logger()
    trainer = fake.Trainer(Sometimes(), loggers=(logger,), max_epochs=2, log_every_n_steps=1)
    trainer.fit(fake.batches(2, 2, 2))
    assert [[call["step"], call["metrics"]] for call in logger.calls] == expected["calls"]
    assert fake.rounded(trainer.callback_metrics) == expected["callback_metrics"]


@pytest.mark.catalogue("LG43")
def test_one_key_in_training_and_validation(fake: Any) -> None:
    class SameName(fake.Module):  # type: ignore[name-defined,misc]
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loss", 1.0, on_step=True, on_epoch=True)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loss", 9.0)

    golden = fake.golden("extra")
    logger = fake.Logger()
    trainer = fake.Trainer(SameName(), loggers=(logger,), log_every_n_steps=1)
    val = [fake.batches(2, 2)]
    trainer.fit(fake.batches(2, 2, 2), val)
    expected = golden["same_name_in_train_and_val"]
    assert [[call["step"], call["metrics"]] for call in logger.calls] == expected["calls"]
    assert fake.rounded(trainer.callback_metrics) == expected["callback_metrics"]
    for _ in range(2):
        trainer.run_evaluation("validate", val)
    expected = golden["validate_after_fit_step_axis"]
    assert [[call["step"], call["metrics"]] for call in logger.calls] == expected["calls"]
    assert fake.rounded(trainer.callback_metrics) == expected["callback_metrics"]


def evaluated(fake: Any, clash: bool) -> Any:
    """The module of `dataloaders.evaluate`."""

    class Module(fake.Module):  # type: ignore[name-defined,misc]
        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            n = batch[0].shape[0]
            self.log("a", float(batch[0].sum()) if n else 0.0)
            self.log("b", float(batch_idx), on_step=True, on_epoch=True)
            self.log("s", 1.0, on_step=True, on_epoch=False)
            if clash:
                self.log("c", float(dataloader_idx), add_dataloader_idx=False)

        def on_test_epoch_end(self) -> None:
            self.log("end", 9.0)

    return Module()


@pytest.mark.parametrize("loaders", [1, 2])
def test_results_of_an_evaluation_have_one_dictionary_per_loader(fake: Any, loaders: int) -> None:
    name = "single" if loaders == 1 else "two"
    expected = fake.golden("dataloaders")["evaluate"]
    trainer = fake.Trainer(evaluated(fake, clash=False))
    data = [fake.batches(2, 2, 1), fake.batches(2)][:loaders]
    results = trainer.run_evaluation("test", data)
    golden = expected[f"{name}|c=False"]
    assert [list(result) for result in results] == [list(result) for result in golden["returned"]]
    assert all(type(value) is float for result in results for value in result.values())
    weighted = "b_epoch" if loaders == 1 else "b_epoch/dataloader_idx_0"
    assert results[0][weighted] == golden["returned"][0][weighted]
    assert list(trainer.callback_metrics) == list(golden["callback_metrics"])
    assert list(trainer.logged_metrics) == list(golden["logged_metrics"])


def test_one_name_for_two_loaders_is_refused_without_the_suffix(fake: Any) -> None:
    expected = fake.golden("dataloaders")["evaluate"]["two|c=True"]
    assert expected.startswith("MisconfigurationException: You called `self.log(c, ...)` twice in `test_step`")
    with pytest.raises(MisconfigurationException, match=r"`self.log\(c, ...\)` twice in `test_step` with different"):
        fake.Trainer(evaluated(fake, clash=True)).run_evaluation("test", [fake.batches(2), fake.batches(2)])


def test_an_evaluation_that_logs_nothing_returns_empty_dictionaries(fake: Any) -> None:
    trainer = fake.Trainer(fake.Module())
    assert trainer.run_evaluation("validate", [fake.batches(2), fake.batches(2)]) == [{}, {}]
    assert trainer.connector._trainer.lightning_module._engine.reads == 0


def test_metrics_of_train_start_belong_to_the_first_epoch(fake: Any) -> None:
    class Module(fake.Module):  # type: ignore[name-defined,misc]
        def on_train_start(self) -> None:
            self.log("start", 4.0)

        def on_train_epoch_start(self) -> None:
            self.log("epoch_start", float(self.current_epoch), reduce_fx=max)

    logger = fake.Logger()
    trainer = fake.Trainer(Module(), loggers=(logger,), max_epochs=2)
    trainer.fit(fake.batches(2, 2))
    assert logger.calls == [
        {"step": 1, "metrics": {"start": 4.0, "epoch_start": 0.0, "epoch": 0}},
        {"step": 3, "metrics": {"epoch_start": 1.0, "epoch": 1}},
    ]


def test_sums_of_batch_hooks_count_an_epoch_and_no_sanity_check(fake: Any) -> None:
    class Module(fake.Module):  # type: ignore[name-defined,misc]
        def on_validation_batch_start(self, *_: Any) -> None:
            self.log("count", 1.0, reduce_fx="sum")

        def on_train_batch_start(self, *_: Any) -> None:
            self.log("trained", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")

    logger = fake.Logger()
    trainer = fake.Trainer(Module(), loggers=(logger,), max_epochs=2)
    trainer.fit(fake.batches(2, 2, 2), [fake.batches(2, 2)], sanity=2)
    assert [call["metrics"] for call in logger.calls] == [
        {"count": 2.0, "epoch": 0},
        {"trained": 3.0, "epoch": 0},
        {"count": 2.0, "epoch": 1},
        {"trained": 3.0, "epoch": 1},
    ]


class CountReads:
    """Counts what brings an array to the host."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        inner = jax.device_get

        def device_get(tree: Any) -> Any:
            self.count += 1
            return inner(tree)

        monkeypatch.setattr(jax, "device_get", device_get)


def test_nothing_is_read_between_log_points(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Module(fake.Module):  # type: ignore[name-defined,misc]
        def training_step(self, batch: Any, batch_idx: int) -> None:
            for i in range(10):
                self.log(f"v{i}", jnp.float32(batch_idx), on_step=True, on_epoch=True, prog_bar=True)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.log("host", jnp.float32(batch_idx) * 2, on_step=True, on_epoch=True)

    reads = CountReads(monkeypatch)
    counts: list[int] = []

    class Logger(fake.Logger):  # type: ignore[name-defined,misc]
        def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
            counts.append(reads.count)
            super().log_metrics(metrics, step)

    trainer = fake.Trainer(Module(), loggers=(Logger(),), log_every_n_steps=5, progress_bar_callback=object())
    trainer.fit(fake.batches(*[2] * 20))
    assert counts[:4] == [1, 2, 3, 4]  # at batches 5, 10, 15, 20: one read each
    assert trainer.connector.progress_bar_cached["v0_epoch"] == 9.5
    assert trainer.callback_metrics["host_epoch"] == 19.0
    assert trainer.lightning_module._engine.reads == 1


def test_equal_plans_of_an_eager_engine_pile_up_nowhere(fake: Any) -> None:
    import dataclasses

    class Module(fake.Module):  # type: ignore[name-defined,misc]
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.log("x", jnp.float32(batch_idx), on_step=True, on_epoch=True)
            if batch_idx % 2:
                self.log("odd", jnp.float32(batch_idx))

    trainer = fake.Trainer(Module(), log_every_n_steps=1)
    step = trainer.lightning_module._engine.step

    def eager(*args: Any) -> Any:
        out = step(*args)
        out.plan = dataclasses.replace(out.plan)
        return out

    trainer.lightning_module._engine.step = eager
    seen = []
    inner = trainer.connector.update_train_epoch_metrics

    def look() -> None:
        results = trainer.connector._collections["train"]
        seen.append((len(results._older), len(results._active_plans), len(results._known._by_id)))
        inner()

    trainer.connector.update_train_epoch_metrics = look
    trainer.fit(fake.batches(*[2] * 150))
    assert seen[0][:2] == (1, 2)
    assert seen[0][2] <= 64
    assert trainer.callback_metrics == {"x": 74.5, "x_step": 149.0, "odd": 149.0, "x_epoch": 74.5}


@pytest.mark.parametrize("collect", [0.0, 3600.0])
def test_late_emission_sends_the_same_when_it_was_collected(
    fake: Any, monkeypatch: pytest.MonkeyPatch, collect: float
) -> None:
    monkeypatch.setattr("jaxlightning.metrics._emission._COLLECT", collect)
    moments: list[tuple[str, Any]] = []

    class Module(fake.Module):  # type: ignore[name-defined,misc]
        def training_step(self, batch: Any, batch_idx: int) -> None:
            moments.append(("step", batch_idx))
            self.log("x", jnp.float32(batch_idx))

    class Logger(fake.Logger):  # type: ignore[name-defined,misc]
        def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
            moments.append(("log", step))

    trainer = fake.Trainer(Module(), loggers=(Logger(),), log_every_n_steps=2)
    trainer.connector.may_be_late = lambda: True
    trainer.fit(fake.batches(2, 2, 2, 2))
    if collect:
        assert moments == [("step", 0), ("step", 1), ("step", 2), ("step", 3), ("log", 1), ("log", 3)]
    else:
        assert moments == [("step", 0), ("step", 1), ("step", 2), ("log", 1), ("step", 3), ("log", 3)]


def test_emission_is_late_only_when_nobody_could_notice(fake: Any) -> None:
    trainer = fake.Trainer(fake.Module())
    connector = trainer.connector
    assert connector.may_be_late() is False  # no hook table: nothing is known
    for user_code, loggers, expected in ((False, [], True), (True, [], False), (False, [fake.Logger()], False)):
        connector.late_emission = None
        trainer._hooks = SimpleNamespace(wants_outputs=lambda name, answer=user_code: answer)
        trainer.loggers = loggers
        assert connector.may_be_late() is expected


def test_a_host_array_is_reduced_on_the_device_with_every_reduction(fake: Any) -> None:
    class Module(fake.Module):  # type: ignore[name-defined,misc]
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            value = [5.0, 1.0, 3.0][batch_idx]
            for fx in ("mean", "sum", "min", "max"):
                self.log(fx, jnp.float32(value), on_step=False, on_epoch=True, reduce_fx=fx)
                mixed = value if batch_idx == 1 else jnp.array([value], jnp.bfloat16)
                self.log(f"mixed_{fx}", mixed, on_step=False, on_epoch=True, reduce_fx=fx)

    trainer = fake.Trainer(Module())
    trainer.fit(fake.batches(2, 2, 1))
    expected = {"mean": 3.0, "sum": 9.0, "min": 1.0, "max": 5.0}
    assert fake.rounded(trainer.callback_metrics) == expected | {f"mixed_{k}": v for k, v in expected.items()}


def test_callbacks_may_write_into_callback_metrics(fake: Any) -> None:
    class Module(fake.Module):  # type: ignore[name-defined,misc]
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.log("x", float(batch_idx))

        def on_train_batch_start(self, *_: Any) -> None:
            self._trainer.callback_metrics.update(mine=7.0)
            self._trainer.connector.update_callback_metrics({"lr": 0.1})

    trainer = fake.Trainer(Module())
    trainer.fit(fake.batches(2))
    assert trainer.callback_metrics == {"mine": 7.0, "lr": 0.1, "x": 0.0}


def test_log_metrics_takes_arrays_and_the_step_key(fake: Any) -> None:
    logger = fake.Logger()
    trainer = fake.Trainer(fake.Module(), loggers=(logger,))
    trainer.connector.log_metrics({"a": jnp.array([1.5]), "step": 4})
    trainer.connector.log_metrics({"a": np.float32(2.5)}, step=9)
    trainer.connector.log_metrics({"a": 3.5})
    trainer.connector.log_metrics({})
    assert logger.calls == [
        {"step": 4, "metrics": {"a": 1.5}},
        {"step": 9, "metrics": {"a": 2.5}},
        {"step": 0, "metrics": {"a": 3.5, "epoch": 0}},
    ]
    assert fake.rounded(trainer.logged_metrics) == {"a": 3.5, "step": 4}


def test_the_version_of_a_metric_tells_new_measurements_from_old(fake: Any) -> None:
    seen: list[Any] = []

    class Module(fake.Module):  # type: ignore[name-defined,misc]
        def training_step(self, batch: Any, batch_idx: int) -> None:
            if batch_idx != 1:
                self.log("x", 1.0)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("v", 1.0)

        def on_train_batch_end(self, *_: Any) -> None:
            connector = self._trainer.connector
            seen.append((connector.metric_version("x"), connector.metric_version("v")))

    trainer = fake.Trainer(Module(), max_epochs=2)
    trainer.fit(fake.batches(2, 2, 2), [fake.batches(2)])
    x, v = zip(*seen, strict=True)
    assert x[0] == x[1] != x[2] != x[3]
    assert v[3] == v[4] == v[5]
    trainer.connector.update_callback_metrics({"lr": 1.0})
    assert trainer.connector.metric_version("lr") != trainer.connector.metric_version("lr")


def test_values_survive_pickling(fake: Any) -> None:
    class Module(fake.Module):  # type: ignore[name-defined,misc]
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.log("x", jnp.float32(batch_idx), prog_bar=True)

    trainer = fake.Trainer(Module())
    trainer.fit(fake.batches(2, 2))
    connector = trainer.connector
    connector._trainer = SimpleNamespace(state=SimpleNamespace(stage=None), loggers=[], lightning_module=None)
    again = pickle.loads(pickle.dumps(connector))
    assert again.callback_metrics == {"x": 1.0}
    again.begin_run("fit")
    assert again.callback_metrics == {}


@pytest.mark.parametrize("where", ["training_step", "on_train_batch_end"])
def test_an_epoch_goes_on_from_a_checkpoint(fake: Any, where: str) -> None:
    """Stopped after two of three batches, the sums and the last step values are those of an unbroken epoch."""

    class Module(fake.Module):  # type: ignore[name-defined,misc]
        pass

    def call(self: Any, *args: Any) -> None:
        value = jnp.float32(args[-1] + 1)
        for fx in ("mean", "sum", "min", "max"):
            self.log(fx, value, on_step=True, on_epoch=True, reduce_fx=fx)
        if args[-1] == 1:
            self.log("once", value, on_step=True, on_epoch=True)

    setattr(Module, where, call)
    logger, train = fake.Logger(), fake.batches(2, 1, 3)
    whole = fake.Trainer(Module(), loggers=(logger,), log_every_n_steps=1)
    whole.fit(train)

    broken = fake.Trainer(Module())
    saved: list[Any] = []
    inner = broken.connector.update_train_step_metrics
    broken.connector.update_train_step_metrics = lambda: (inner(), saved.append(broken.connector.state_dict()))
    broken.fit(train)
    state = json.loads(json.dumps(saved[1]))

    later = fake.Logger()
    resumed = fake.Trainer(Module(), loggers=(later,), log_every_n_steps=1)
    connector = resumed.connector
    begin = connector.on_epoch_start

    def on_epoch_start(stage: str) -> None:
        begin(stage)
        connector.load_state_dict(state)

    connector.on_epoch_start = on_epoch_start
    resumed.fit_loop.epoch_loop._batches_that_stepped = 2
    _last_batch_only(resumed, train)
    assert later.calls == logger.calls[2:]


def _last_batch_only(trainer: Any, train: list[Any]) -> None:
    """Runs the third batch under its own index."""
    step, hook = trainer.step, trainer.hook

    def shifted(args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*args[:-1], args[-1] + 2) if args else args

    trainer.step = lambda stage, name, *args: step(stage, name, *shifted(args))
    trainer.hook = lambda name, *args: hook(name, *(shifted(args) if "batch" in name else args))
    trainer.fit(train[2:])
