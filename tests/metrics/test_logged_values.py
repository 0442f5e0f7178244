"""When values appear where: loggers, step axis, the three dictionaries, results of evaluations."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
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
