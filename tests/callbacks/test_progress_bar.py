from __future__ import annotations

import copy
import cProfile
import math
import os
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from jaxlightning.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar
from jaxlightning.callbacks.progress import _tqdm

MakeTrainer = Callable[..., Any]


def _evaluate(bar: Any, trainer: Any, kind: str, loaders: int = 1, batches: int = 2) -> Iterator[None]:
    """Run the hooks of an evaluation; yields after each batch."""
    getattr(bar, f"on_{kind}_start")(trainer, None)
    for loader in range(loaders):
        for i in range(batches):
            getattr(bar, f"on_{kind}_batch_start")(trainer, None, None, i, loader)
            getattr(bar, f"on_{kind}_batch_end")(trainer, None, None, None, i, loader)
            yield
    getattr(bar, f"on_{kind}_end")(trainer, None)


def _fit(bar: Any, trainer: Any, epochs: int = 1, batches: int = 3, validate: bool = True) -> None:
    """Run the hooks of a whole fit."""
    trainer.num_training_batches = batches
    bar.setup(trainer, None, "fit")
    trainer.sanity_checking = True
    bar.on_sanity_check_start(trainer, None)
    list(_evaluate(bar, trainer, "validation"))
    bar.on_sanity_check_end(trainer, None)
    trainer.sanity_checking = False
    bar.on_train_start(trainer, None)
    for epoch in range(epochs):
        trainer.current_epoch = epoch
        bar.on_train_epoch_start(trainer, None)
        for i in range(batches):
            bar.on_train_batch_end(trainer, None, None, None, i)
        if validate:
            list(_evaluate(bar, trainer, "validation"))
        bar.on_train_epoch_end(trainer, None)
    bar.on_train_end(trainer, None)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make bars believe that they write to a terminal."""
    monkeypatch.setattr(_tqdm, "is_plain_output", lambda file: False)


# totals and metrics


def test_totals_follow_the_trainer(make_trainer: MakeTrainer) -> None:
    bar = ProgressBar()
    with pytest.raises(TypeError, match="_trainer` reference has not been set yet"):
        _ = bar.trainer
    trainer = make_trainer(num_training_batches=10, num_val_batches=[2, 5], num_sanity_val_batches=[1, 1])
    bar._trainer = trainer
    assert bar.total_train_batches == 10
    trainer.max_epochs, trainer.max_steps, trainer.global_step = -1, 7, 4
    assert bar.total_train_batches == 3
    assert bar.total_val_batches == 7
    trainer.check_val_every_n_epoch, trainer.current_epoch = 2, 0
    assert bar.total_val_batches == 0
    assert bar.has_dataloader_changed(1)
    assert not bar.has_dataloader_changed(1)
    assert bar.total_val_batches_current_dataloader == 5
    trainer.sanity_checking = True
    assert bar.total_val_batches_current_dataloader == 1
    bar.reset_dataloader_idx_tracker()
    assert bar.has_dataloader_changed(1)


@pytest.mark.parametrize(
    ("versions", "shown"),
    [
        ([], {}),
        ([3], {"v_num": 3}),
        (["abcdefgh"], {"v_num": "efgh"}),
        ([1, 2], {"v_num": "1_2"}),
        ([""], {}),
        ([None], {}),
    ],
)
def test_the_version_is_shown_as_lightning_does(
    versions: list[Any], shown: dict[str, Any], make_trainer: MakeTrainer
) -> None:
    trainer = make_trainer(loggers=[SimpleNamespace(version=v) for v in versions], progress_bar_metrics={"loss": 0.5})
    assert ProgressBar().get_metrics(trainer, None) == {**shown, "loss": 0.5}  # type: ignore[arg-type]


def test_a_metric_called_v_num_is_pointed_out_once(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(loggers=[SimpleNamespace(version=1)], progress_bar_metrics={"v_num": 9.0})
    bar = ProgressBar()
    with pytest.warns(UserWarning, match="already tracks a metric with the name"):
        assert bar.get_metrics(trainer, None) == {"v_num": 9.0}  # type: ignore[arg-type]
    bar.get_metrics(trainer, None)  # type: ignore[arg-type]


def test_other_processes_show_nothing(make_trainer: MakeTrainer) -> None:
    bar = TQDMProgressBar()
    bar.setup(make_trainer(is_global_zero=False), None, "fit")  # type: ignore[arg-type]
    assert bar.is_disabled
    bar.enable()
    assert bar.is_enabled
    with pytest.raises(NotImplementedError, match="must override `disable`"):
        ProgressBar().disable()


def test_between_log_points_no_metric_is_read(make_trainer: MakeTrainer, terminal: None) -> None:
    class Trap(dict[str, float]):
        """`trainer.progress_bar_metrics`, which reads the device."""

    reads: list[int] = []
    trainer = make_trainer(num_training_batches=100)
    type_ = type(
        "Trainer", (SimpleNamespace,), {"progress_bar_metrics": property(lambda self: reads.append(1) or Trap())}
    )
    del trainer.progress_bar_metrics
    trainer = type_(**vars(trainer))
    bar = TQDMProgressBar()
    bar.setup(trainer, None, "fit")  # type: ignore[arg-type]
    bar.on_train_start(trainer, None)
    bar.on_train_epoch_start(trainer, None)
    for i in range(100):
        if i % 50 == 49:
            trainer._logger_connector.progress_bar_cached["loss"] = i / 100
        bar.on_train_batch_end(trainer, None, None, None, i)  # type: ignore[arg-type]
    assert bar.train_progress_bar.postfix == "loss=0.990"
    assert reads == []
    bar.on_train_epoch_end(trainer, None)  # type: ignore[arg-type]
    assert reads == [1]
    bar.on_train_end()


def test_an_overridden_get_metrics_is_asked_at_log_points(make_trainer: MakeTrainer, terminal: None) -> None:
    class Mine(TQDMProgressBar):
        def get_metrics(self, trainer: Any, pl_module: Any) -> dict[str, Any]:
            items = super().get_metrics(trainer, pl_module)
            items.pop("v_num", None)
            return {**items, "extra": "yes"}

    bar = Mine()
    trainer = make_trainer(loggers=[SimpleNamespace(version=1)])
    trainer._logger_connector.progress_bar_cached = {"loss": 1.0}
    bar.setup(trainer, None, "fit")  # type: ignore[arg-type]
    bar.on_train_start()
    bar.on_train_epoch_start(trainer)
    bar.on_train_batch_end(trainer, None, None, None, 0)  # type: ignore[arg-type]
    assert bar.train_progress_bar.postfix == "loss=1.000, extra=yes"
    bar.on_train_end()


# the tqdm bar


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0.01, "0.010"),
        (0.123456, "0.123"),
        (1.0, "1.000"),
        (21, "21"),
        (1e-8, "1e-8"),
        ("12", "12.00"),
        ("abc", "abc"),
        ("1.2345678", "1.2345678"),
    ],
)
def test_numbers_keep_their_width(number: Any, text: str) -> None:
    assert _tqdm.tqdm_class().format_num(number) == text


@pytest.mark.parametrize(
    ("rate", "variables", "resolved"),
    [
        (1, {}, 1),
        (0, {}, 0),
        (7, {}, 7),
        (1, {"TQDM_MINITERS": "5"}, 5),
        (9, {"TQDM_MINITERS": "5"}, 9),
        (1, {"COLAB_GPU": "1"}, 20),
        (2, {"COLAB_GPU": "1"}, 2),
    ],
)
def test_the_refresh_rate_heeds_its_variables(
    rate: int, variables: dict[str, str], resolved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    bar = TQDMProgressBar(refresh_rate=rate)
    assert bar.refresh_rate == resolved
    assert bar.is_enabled == (resolved > 0)


@pytest.mark.parametrize(
    ("rate", "batches", "counts"), [(1, 3, [1, 2, 3]), (2, 5, [0, 2, 2, 4, 5]), (10, 3, [0, 0, 3])]
)
def test_counts_in_steps_of_the_refresh_rate(
    rate: int, batches: int, counts: list[int], make_trainer: MakeTrainer, terminal: None
) -> None:
    seen: list[int] = []

    class Mine(TQDMProgressBar):
        def on_train_batch_end(self, *args: Any) -> None:
            super().on_train_batch_end(*args)
            seen.append(self.train_progress_bar.n)

    _fit(Mine(refresh_rate=rate), make_trainer(), batches=batches)
    assert seen == counts


def test_with_rate_zero_nothing_is_shown(make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str]) -> None:
    bar = TQDMProgressBar(refresh_rate=0)
    _fit(bar, make_trainer())
    assert bar.train_progress_bar.n == 0
    assert capsys.readouterr().out == ""


def test_a_loader_without_length_has_no_total(make_trainer: MakeTrainer, terminal: None) -> None:
    bar = TQDMProgressBar()
    _fit(bar, make_trainer(num_val_batches=[float("inf")]))
    assert bar.val_progress_bar.total is None


def test_each_loader_begins_anew(make_trainer: MakeTrainer, terminal: None) -> None:
    bar, trainer = TQDMProgressBar(), make_trainer(num_test_batches=[2, float("inf")])
    bar.setup(trainer, None, "test")  # type: ignore[arg-type]
    seen = []
    for _ in _evaluate(bar, trainer, "test", loaders=2):
        seen.append((bar.test_progress_bar.desc, bar.test_progress_bar.n, bar.test_progress_bar.total))
    assert seen == [
        ("Testing DataLoader 0: ", 1, 2),
        ("Testing DataLoader 0: ", 2, 2),
        ("Testing DataLoader 1: ", 1, None),
        ("Testing DataLoader 1: ", 2, None),
    ]


def test_where_nothing_can_be_redrawn_there_is_one_line_per_epoch(
    make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make_trainer(progress_bar_metrics={"loss": 0.25})
    _fit(TQDMProgressBar(), trainer, epochs=4)
    out, err = capsys.readouterr()
    assert err == ""
    assert "\r" not in out
    lines = out.splitlines()
    assert len(lines) == 4
    assert re.fullmatch(r"Epoch 3: 100% 3/3 \[00:00<00:00, .*it/s, loss=0.250\]", lines[-1])


def test_a_long_epoch_gets_a_plain_line_now_and_then(
    make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    bar, trainer = TQDMProgressBar(), make_trainer(num_training_batches=float("inf"))
    bar.setup(trainer, None, "fit")  # type: ignore[arg-type]
    bar.on_train_start()
    bar.on_train_epoch_start(trainer)
    for i in range(1000):
        clock.now += 0.1
        bar.on_train_batch_end(trainer, None, None, None, i)  # type: ignore[arg-type]
    bar.on_train_end()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("Epoch 0: ") and "?" not in line.split("[")[0] for line in lines)


@pytest.mark.parametrize(
    ("kind", "fn", "word"),
    [("validation", "validate", "Validation"), ("test", "test", "Testing"), ("predict", "predict", "Predicting")],
)
def test_every_verb_leaves_one_plain_line(
    kind: str, fn: str, word: str, make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str]
) -> None:
    bar, trainer = TQDMProgressBar(), make_trainer(state=SimpleNamespace(fn=fn))
    bar.setup(trainer, None, fn)  # type: ignore[arg-type]
    list(_evaluate(bar, trainer, kind))
    out = capsys.readouterr().out
    assert out.startswith(f"{word} DataLoader 0: 100% 2/2 [")
    assert out.count("\n") == 1


def test_a_notebook_is_redrawable(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = SimpleNamespace(kernel=1)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[arg-type]
    assert not _tqdm.is_plain_output(SimpleNamespace(isatty=lambda: False))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))  # type: ignore[arg-type]
    assert _tqdm.is_plain_output(SimpleNamespace(isatty=lambda: False))
    assert not _tqdm.is_plain_output(SimpleNamespace(isatty=lambda: True))


def test_drawing_is_rare_and_a_batch_costs_little(make_trainer: MakeTrainer, terminal: None) -> None:
    bar, trainer = TQDMProgressBar(), make_trainer(num_training_batches=20_000)
    trainer._logger_connector.progress_bar_cached = {f"m{i}": 0.5 for i in range(10)}
    bar.setup(trainer, None, "fit")  # type: ignore[arg-type]
    bar.on_train_start()
    bar.on_train_epoch_start(trainer)
    draws: list[int] = []
    tqdm_bar = bar.train_progress_bar
    tqdm_bar.refresh = lambda *args, **kwargs: draws.append(1)
    begin = time.perf_counter()
    for i in range(20_000):
        bar.on_train_batch_end(trainer, None, None, None, i)  # type: ignore[arg-type]
    assert len(draws) <= (time.perf_counter() - begin) / 0.1 + 2
    profile = cProfile.Profile()
    bar._next_draw = math.inf
    profile.runcall(bar.on_train_batch_end, trainer, None, None, None, 20)  # type: ignore[arg-type]
    assert sum(entry.callcount for entry in profile.getstats()) < 20
    bar.on_train_end()


def test_printing_goes_above_the_bar(
    make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str], terminal: None
) -> None:
    bar, trainer = TQDMProgressBar(), make_trainer()
    bar.print("before", "any", sep="-")
    assert capsys.readouterr().out == "before-any\n"
    bar.setup(trainer, None, "fit")  # type: ignore[arg-type]
    bar.on_train_start()
    capsys.readouterr()
    bar.print("a", 1, {"b": 2})
    out = capsys.readouterr().out
    assert "a 1 {'b': 2}\n" in out
    assert out.endswith("[00:00<?, ?it/s]")  # the bar is drawn again below
    bar.on_train_end()
    capsys.readouterr()
    bar.print("after")
    assert capsys.readouterr().out == "after\n"


def test_an_exception_closes_the_bars(
    make_trainer: MakeTrainer, terminal: None, capsys: pytest.CaptureFixture[str]
) -> None:
    bar, trainer = TQDMProgressBar(), make_trainer()
    bar.setup(trainer, None, "fit")  # type: ignore[arg-type]
    bar.on_train_start()
    bar.on_train_epoch_start(trainer)
    bar.on_validation_start(trainer, None)  # type: ignore[arg-type]
    bar.on_exception(trainer, None, ValueError())  # type: ignore[arg-type]
    assert bar.train_progress_bar.disable
    assert bar.val_progress_bar.disable
    assert capsys.readouterr().out.endswith("\n")


def test_bars_can_be_pickled_and_copied(make_trainer: MakeTrainer) -> None:
    for bar in (TQDMProgressBar(refresh_rate=3, leave=True), RichProgressBar(leave=True)):
        _fit(bar, make_trainer())
        for other in (pickle.loads(pickle.dumps(bar)), copy.deepcopy(bar)):
            assert other.refresh_rate == bar.refresh_rate
            assert other._leave


def test_a_bar_that_is_not_open_is_named(make_trainer: MakeTrainer) -> None:
    with pytest.raises(TypeError, match=r"`TQDMProgressBar\._val_progress_bar` reference has not been set yet"):
        _ = TQDMProgressBar().val_progress_bar


def test_leave_keeps_the_bar_of_each_epoch(make_trainer: MakeTrainer, terminal: None) -> None:
    made = []

    class Mine(TQDMProgressBar):
        def init_train_tqdm(self) -> Any:
            made.append(super().init_train_tqdm())
            return made[-1]

    _fit(Mine(leave=True), make_trainer(), epochs=3)
    assert len(made) == 3
    made.clear()
    _fit(Mine(), make_trainer(), epochs=3)
    assert len(made) == 1


def test_users_may_bring_a_tqdm_bar_of_their_own(make_trainer: MakeTrainer) -> None:
    import io

    import tqdm

    stream = io.StringIO()

    class Mine(TQDMProgressBar):
        def init_train_tqdm(self) -> Any:
            return tqdm.tqdm(desc="mine", file=stream, mininterval=0.0)

    _fit(Mine(), make_trainer(), epochs=2)
    assert "Epoch 1" in stream.getvalue()


_ON_A_TERMINAL = """
import sys
sys.path.insert(0, {folder!r})
from conftest import _fake_trainer
from test_progress_bar import _fit
from jaxlightning.callbacks import TQDMProgressBar
_fit(TQDMProgressBar(), _fake_trainer(progress_bar_metrics=dict(loss=0.5)), epochs=3)
"""


def _run_on_a_terminal(rows: int, columns: int) -> str:
    """Run a fit in another process on a pseudo-terminal of the given size; return what it wrote."""
    pty = pytest.importorskip("pty")
    import fcntl
    import struct
    import termios

    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    code = _ON_A_TERMINAL.format(folder=os.path.dirname(__file__))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=child, stderr=child, stdin=child)
    os.close(child)
    chunks = []
    while True:
        try:
            chunk = os.read(parent, 4096)
        except OSError:  # the other end is closed
            break
        if not chunk:
            break
        chunks.append(chunk)
    os.close(parent)
    assert process.wait() == 0
    return b"".join(chunks).decode()


def test_on_a_terminal_all_bars_share_one_line() -> None:
    """A validation bar on a second line leaves a line behind per epoch on many terminals: pytorch-lightning#15283."""
    text = _run_on_a_terminal(40, 100)
    assert text.count("\n") == 1
    assert "\x1b[A" not in text
    assert "Sanity Checking DataLoader 0" in text
    assert "Validation DataLoader 0" in text
    last = text.rstrip("\r\n").split("\r")[-1]
    assert last.startswith("Epoch 2: 100%|")
    assert "3/3" in last
    assert "loss=0.500" in last


def test_a_terminal_without_a_size_gets_plain_lines() -> None:
    """`docker run -t` without a client reports zero columns, and tqdm then shows nothing at all."""
    assert _run_on_a_terminal(0, 0).count("Epoch") == 3


# the rich bar


def test_the_rich_bar_counts_and_shows_metrics(make_trainer: MakeTrainer) -> None:
    import io

    stream = io.StringIO()
    console = {"file": stream, "force_terminal": True, "width": 200}
    trainer = make_trainer(loggers=[SimpleNamespace(version=7)], progress_bar_metrics={"loss": 0.25}, max_epochs=2)
    _fit(RichProgressBar(console_kwargs=console), trainer, epochs=2)
    text = stream.getvalue()
    assert "Sanity Checking DataLoader 0" in text
    assert "Validation DataLoader 0" in text
    last = [line for line in text.splitlines() if "Epoch" in line][-1]
    assert "Epoch 1/1" in last
    assert "3/3" in last
    assert "v_num: 7 loss: 0.250" in last


def test_the_rich_bar_is_quiet_when_switched_off(make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str]) -> None:
    _fit(RichProgressBar(refresh_rate=0), make_trainer())
    assert capsys.readouterr().out == ""


def test_the_rich_bar_names_the_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install jaxlightning\[rich\]"):
        RichProgressBar()


def test_the_rich_bar_prints_above_and_closes_on_an_exception(make_trainer: MakeTrainer) -> None:
    import io

    stream = io.StringIO()
    bar, trainer = RichProgressBar(console_kwargs={"file": stream}), make_trainer()
    bar.setup(trainer, None, "predict")  # type: ignore[arg-type]
    bar.on_predict_start(trainer, None)  # type: ignore[arg-type]
    bar.print("hello")
    assert "hello" in stream.getvalue()
    bar.on_exception(trainer, None, ValueError())  # type: ignore[arg-type]
    assert bar.progress is None


def test_a_run_whose_output_is_closed_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    bar = _tqdm.tqdm_class()(total=2, file=None)
    bar.plain = True
    bar.update(2)
    bar.write_line()
    bar.close()
    bar.close()
    assert bar.n == 2
