"""One key that is logged twice, from two hooks, in some batches only or in two stages."""

from __future__ import annotations

from typing import Any

import pytest

from jaxlightning.utilities.exceptions import MisconfigurationException


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
