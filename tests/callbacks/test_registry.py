from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from jaxlightning.callbacks import (
    Callback,
    Checkpoint,
    EarlyStopping,
    LambdaCallback,
    ProgressBar,
    Timer,
    TQDMProgressBar,
    _registry,
)
from jaxlightning.callbacks._foreign import check_callbacks, foreign_bases
from jaxlightning.callbacks._registry import (
    is_monitoring_callback,
    load_external_callbacks,
    merge_model_callbacks,
    reorder_callbacks,
    runs_user_code,
    validate_callbacks,
)


class _First(Callback):
    _runs_first = True


def test_checkpoints_run_last_and_tuners_first_in_the_given_order() -> None:
    a, b, c, d, e, f = Checkpoint(), Timer(), Checkpoint(), _First(), EarlyStopping("x"), Callback()
    assert reorder_callbacks([a, b, c, d, e, f]) == [d, b, e, f, a, c]


def test_two_stateful_callbacks_of_one_key_are_refused() -> None:
    with pytest.raises(RuntimeError, match="Found more than one stateful callback of type `EarlyStopping`"):
        validate_callbacks([EarlyStopping("x"), EarlyStopping("x")])
    validate_callbacks([EarlyStopping("x"), EarlyStopping("x", mode="max"), EarlyStopping("y")])
    validate_callbacks([Callback(), Callback(), LambdaCallback(), LambdaCallback()])


def test_the_models_callbacks_replace_those_of_the_same_class(caplog: pytest.LogCaptureFixture) -> None:
    class Special(EarlyStopping):
        pass

    timer, checkpoint, old = Timer(), Checkpoint(), EarlyStopping("old")
    new = Special("new")
    with caplog.at_level(logging.INFO, logger="jaxlightning"):
        assert merge_model_callbacks([timer, checkpoint, old], [new]) == [timer, new, checkpoint]
    assert "will override existing callbacks passed to Trainer: EarlyStopping" in caplog.text
    # the other way round nothing is replaced, and a plain Callback replaces nothing either
    assert merge_model_callbacks([new], old) == [new, old]
    plain, user = Callback(), Timer()
    assert merge_model_callbacks([plain], [user]) == [plain, user]
    assert merge_model_callbacks([timer], None) == [timer]
    with pytest.raises(TypeError, match="Expected callbacks, got 3"):
        merge_model_callbacks([timer], [3])


def _make_timer() -> Any:
    return Timer()


def _make_two() -> Any:
    return [Timer(), Callback()]


def _make_nonsense() -> Any:
    return "no callback"


@pytest.mark.catalogue("CB04", adaptation="the group of entry points has our name")
def test_installed_packages_may_offer_callbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    offered = {"one": _make_timer, "two": _make_two}

    class Fake(EntryPoint):
        def load(self) -> Any:
            return offered[self.name]

    asked: list[str] = []

    def entry_points(*, group: str) -> list[EntryPoint]:
        asked.append(group)
        return [Fake(name, "package:factory", group) for name in offered]

    monkeypatch.setattr(_registry, "entry_points", entry_points)
    assert [type(c) for c in load_external_callbacks()] == [Timer, Timer, Callback]
    assert asked == ["jaxlightning.callbacks_factory"]
    offered["three"] = _make_nonsense
    with pytest.raises(TypeError) as caught:
        load_external_callbacks()
    assert "entry point `three`" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (Timer, r"the class `Timer` was given. Write `Timer\(\.\.\.\)`"),
        (3, "Expected callbacks, got 3 of type `int`"),
        (None, "Expected callbacks, got None"),
    ],
)
def test_what_is_no_callback_is_refused(wrong: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        check_callbacks([Timer(), wrong])


@pytest.mark.lightning
def test_plain_subclasses_of_lightnings_callback_are_accepted() -> None:
    from lightning.pytorch import callbacks as theirs

    class Plain(theirs.Callback):  # type: ignore[misc]
        pass

    class Writer(theirs.BasePredictionWriter):  # type: ignore[misc]
        pass

    class Saver(theirs.Checkpoint):  # type: ignore[misc]
        pass

    accepted = [Plain(), Writer("batch"), theirs.LambdaCallback(setup=lambda *_: None), Saver()]
    check_callbacks(accepted)
    assert all("Callback" in foreign_bases(callback) for callback in accepted)
    assert foreign_bases(Timer()) == []
    saver, timer = Saver(), Timer()
    assert reorder_callbacks([saver, timer]) == [timer, saver]
    validate_callbacks([Plain(), Plain()])


@pytest.mark.lightning
@pytest.mark.parametrize(
    ("make", "ours"),
    [
        (lambda c: c.ModelCheckpoint(), "ModelCheckpoint"),
        (lambda c: c.OnExceptionCheckpoint("."), "OnExceptionCheckpoint"),
        (lambda c: c.EarlyStopping("x"), "EarlyStopping"),
        (lambda c: c.TQDMProgressBar(), "TQDMProgressBar"),
        (lambda c: c.RichProgressBar(), "RichProgressBar"),
        (lambda c: c.LearningRateMonitor(), "LearningRateMonitor"),
        (lambda c: c.RichModelSummary(), "RichModelSummary"),
        (lambda c: c.Timer(), "Timer"),
        (lambda c: c.GradientAccumulationScheduler({0: 2}), "GradientAccumulationScheduler"),
        (lambda c: c.StochasticWeightAveraging(0.1), None),
        (lambda c: type("Mine", (c.EarlyStopping,), {})("x"), "EarlyStopping"),
        (lambda c: type("Bar", (c.ProgressBar,), {})(), "ProgressBar"),
    ],
)
def test_lightnings_own_callbacks_are_refused_with_the_name_of_ours(
    make: Callable[[Any], Any], ours: str | None
) -> None:
    from lightning.pytorch import callbacks as theirs

    with pytest.raises(TypeError, match=f"Use `jaxlightning.callbacks.{ours}`" if ours else "no callback of that name"):
        check_callbacks([make(theirs)])


def test_a_bar_is_a_callback() -> None:
    bar = ProgressBar()
    assert isinstance(bar, Callback)
    check_callbacks([bar])


def test_only_code_outside_this_package_is_the_users() -> None:
    class Mine(TQDMProgressBar):
        def on_train_batch_end(self, *args: Any) -> None: ...

    assert runs_user_code(Mine(), "on_train_batch_end")
    assert not runs_user_code(Mine(), "on_train_epoch_end")
    assert not runs_user_code(TQDMProgressBar(), "on_train_batch_end")
    assert not runs_user_code(Callback(), "on_train_batch_end")
    assert not runs_user_code(Callback(), "no_hook")
    assert runs_user_code(LambdaCallback(on_train_start=print), "on_train_start")
    assert not runs_user_code(LambdaCallback(on_train_start=print), "on_train_end")
    assert is_monitoring_callback(EarlyStopping("x"))
    assert is_monitoring_callback(Checkpoint())
    assert not is_monitoring_callback(Timer())


@pytest.mark.lightning
def test_hooks_that_lightnings_base_class_only_declares_are_not_the_users() -> None:
    from lightning.pytorch import Callback as Theirs

    class Mine(Theirs):  # type: ignore[misc]
        def on_train_start(self, *args: Any) -> None: ...

    assert runs_user_code(Mine(), "on_train_start")
    assert not runs_user_code(Mine(), "on_train_end")
