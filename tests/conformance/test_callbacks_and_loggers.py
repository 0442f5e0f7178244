"""LO, PB, TM, ES and LM: loggers, bars and the callbacks that watch, with Lightning beside."""

from __future__ import annotations

import inspect
import pickle
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from support.beside import Side, caught, error, events_callback, plain, same
from support.tracing import golden

pytestmark = [
    pytest.mark.usefixtures("compiled_once"),
    pytest.mark.lightning,
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::jaxlightning.utilities.warnings.PossibleUserWarning"),
]


def logging_module(side: Side) -> Any:
    class Model(side.Tiny):  # type: ignore[name-defined,misc]
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            self.log("loss", batch_idx * 1.0, prog_bar=True, on_step=True, on_epoch=True)
            return self.loss(batch)

        def validation_step(self, batch: Any, batch_idx: Any) -> Any:
            self.log("val", batch_idx + 0.5, prog_bar=True)
            return self.loss(batch)

    return Model()


# --- loggers


@pytest.mark.catalogue("LO10")
def test_the_log_directory_is_the_first_loggers(tmp_path: Path) -> None:
    def scenario(side: Side) -> Any:
        csv, board = side.get("loggers.CSVLogger"), side.get("loggers.TensorBoardLogger")
        root = tmp_path / side.name

        def relative(loggers: Any) -> Any:
            trainer = side.trainer(logger=loggers, default_root_dir=root)
            trainer.fit(side.Tiny())
            return str(Path(trainer.log_dir).relative_to(root))

        return [
            relative([csv(root, name="c"), board(root, name="t")]),
            relative([board(root, name="t", version="x"), csv(root, name="c")]),
            relative(False),
            relative(board(root, sub_dir="sub")),
        ]

    same(scenario)


@pytest.mark.catalogue("LO12", "LO17", "LG41")
@pytest.mark.parametrize("fails", [False, True])
def test_a_logger_is_called_in_lightnings_order(fails: bool, tmp_path: Path) -> None:
    def scenario(side: Side) -> Any:
        calls: list[Any] = []
        base = side.get("loggers.logger.Logger")

        class Mine(base):  # type: ignore[misc,valid-type]
            name, version = "mine", 0

            @property
            def experiment(self) -> Any:
                calls.append("experiment") if "experiment" not in calls else None
                return self

            def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
                calls.append(["log_metrics", sorted(metrics), step])

            def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
                calls.append("log_hyperparams")

            def log_graph(self, *args: Any, **kwargs: Any) -> None:
                calls.append("log_graph")

            def save(self) -> None:
                calls.append("save")

            def finalize(self, status: str) -> None:
                calls.append(["finalize", status])

            def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
                calls.append("after_save_checkpoint")

        class Model(type(logging_module(side))):  # type: ignore[misc]
            def setup(self, stage: str) -> None:
                calls.append("setup")

            def on_train_batch_end(self, *args: Any) -> None:
                if fails:
                    raise ValueError("stop")

        saving = side.get("callbacks.ModelCheckpoint")(tmp_path / side.name)
        trainer = side.trainer(logger=Mine(), log_every_n_steps=1, callbacks=[saving], enable_checkpointing=True)
        return error(lambda: trainer.fit(Model())), calls

    _, calls = same(scenario)
    assert calls.index("experiment") < calls.index("setup")
    assert calls[-1] == ["finalize", "failed" if fails else "success"]


@pytest.mark.catalogue("LO13")
def test_the_dummy_swallows_everything() -> None:
    def scenario(side: Side) -> Any:
        dummy = side.get("loggers.logger.DummyLogger")()
        experiment = dummy.experiment
        return [
            dummy.name, dummy.version, dummy.log_metrics({"a": 1}, 2), dummy.log_hyperparams(1, x=2),
            dummy.whatever(1, a=2), experiment.anything(3), dummy[0] is experiment, experiment[1] is experiment,
        ]  # fmt: skip

    same(scenario)


@pytest.mark.catalogue("LO16", adaptation="compiled functions and device arrays are left out")
def test_a_trainer_with_loggers_can_be_pickled(tmp_path: Path) -> None:
    def scenario(side: Side) -> Any:
        loggers = [side.get("loggers.CSVLogger")(tmp_path / side.name), side.get("loggers.TensorBoardLogger")(tmp_path)]
        trainer = side.trainer(logger=loggers, max_epochs=3)
        again = pickle.loads(pickle.dumps(trainer))
        loggers[0].log_metrics({"a": 1.0}, 3)
        logger = pickle.loads(pickle.dumps(loggers[0]))
        return again.max_epochs, [type(each).__name__ for each in again.loggers], logger.version, logger.name

    same(scenario)


@pytest.mark.catalogue("LO18")
def test_a_logger_written_for_lightning_hears_the_same_from_us(tmp_path: Path) -> None:
    """As third parties write them: a subclass of Lightning's own Logger."""
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.loggers.logger import Logger

    class Third(Logger):
        name, version = "third", 1

        def __init__(self) -> None:
            super().__init__()
            self.calls: list[Any] = []

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            self.calls.append([dict(metrics), step])

        def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
            self.calls.append(dict(params))

        def finalize(self, status: str) -> None:
            self.calls.append(status)

    def scenario(side: Side) -> Any:
        third, csv = Third(), CSVLogger(str(tmp_path / side.name))
        side.trainer(logger=[third, csv], log_every_n_steps=1).fit(logging_module(side))
        return third.calls, Path(csv.log_dir, "metrics.csv").read_text()

    same(scenario)


@pytest.mark.catalogue("LO04", "LO03")
@pytest.mark.parametrize("every", [1, 2, 100])
def test_a_csv_logger_alone_writes_every_n_steps(every: int, tmp_path: Path) -> None:
    def scenario(side: Side) -> Any:
        logger = side.get("loggers.CSVLogger")(tmp_path / side.name, flush_logs_every_n_steps=every)
        seen = []
        for step in range(4):
            logger.log_metrics({"a": step * 1.0, **({"late": 1.0} if step == 3 else {})}, step)
            file = Path(logger.log_dir, "metrics.csv")
            seen.append([file.exists() and file.read_text(), len(logger.experiment.metrics)])
        logger.save()
        return seen, Path(logger.log_dir, "metrics.csv").read_text()

    same(scenario)


# --- progress bars


@pytest.mark.catalogue("PB06", "PB04", "PB05")
def test_a_bar_shows_the_metrics_of_the_epochs_end() -> None:
    def scenario(side: Side) -> Any:
        bar_class = side.get("callbacks.TQDMProgressBar")
        seen: list[Any] = []

        class Bar(bar_class):  # type: ignore[misc,valid-type]
            def on_train_epoch_end(self, *args: Any) -> None:
                super().on_train_epoch_end(*args)
                seen.append(["epoch", self.train_progress_bar.desc, self.train_progress_bar.postfix])

            def on_validation_end(self, *args: Any) -> None:
                super().on_validation_end(*args)
                if not args[0].sanity_checking:
                    seen.append(["validation", self.train_progress_bar.postfix, self.total_val_batches])

        trainer = side.trainer(
            callbacks=[Bar()], enable_progress_bar=True, max_epochs=2, check_val_every_n_epoch=2, log_every_n_steps=1
        )
        trainer.fit(logging_module(side))
        return seen

    found = same(scenario)
    assert "val=" in found[-1][2]


@pytest.mark.catalogue("PB07", "PB08")
@pytest.mark.parametrize("options", [{}, {"refresh_rate": 0}, {"refresh_rate": 3, "leave": True}])
@pytest.mark.parametrize("environment", [{}, {"COLAB_GPU": "1"}, {"TQDM_MINITERS": "7"}])
def test_the_refresh_rate_follows_options_and_environment(
    options: dict[str, Any], environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    def scenario(side: Side) -> Any:
        bar = side.get("callbacks.TQDMProgressBar")(**options)
        again = pickle.loads(pickle.dumps(bar))
        bar.disable()
        disabled = bar.is_disabled
        bar.enable()
        return again.refresh_rate, again.is_disabled, again.is_enabled, disabled, bar.is_enabled

    same(scenario)


@pytest.mark.catalogue("PB07")
@pytest.mark.parametrize("rate", [1, 2, 4, 5])
def test_a_bar_counts_in_steps_of_the_refresh_rate(rate: int) -> None:
    def scenario(side: Side) -> Any:
        bar_class = side.get("callbacks.TQDMProgressBar")
        seen: list[int] = []

        class Bar(bar_class):  # type: ignore[misc,valid-type]
            def on_train_batch_end(self, *args: Any) -> None:
                super().on_train_batch_end(*args)
                seen.append(self.train_progress_bar.n)

        class Model(side.Tiny):  # type: ignore[name-defined,misc]
            sizes = {**side.Tiny.sizes, "train": 14}

        side.trainer(callbacks=[Bar(refresh_rate=rate)], enable_progress_bar=True, limit_val_batches=0).fit(Model())
        return seen

    same(scenario)


@pytest.mark.catalogue("PB01")
def test_one_bar_at_most_and_none_when_switched_off() -> None:
    """DIFFERENCES: the default is the plain one."""

    def scenario(side: Side) -> Any:
        bar = side.get("callbacks.TQDMProgressBar")
        make = side.pl.Trainer
        return [
            error(lambda: make(accelerator="cpu", callbacks=[bar(), bar()], logger=False)),
            error(lambda: make(accelerator="cpu", callbacks=[bar()], enable_progress_bar=False, logger=False)),
            type(make(accelerator="cpu", callbacks=[bar()], logger=False).progress_bar_callback).__name__,
        ]

    same(scenario)


@pytest.mark.catalogue("PB02")
def test_a_metric_named_like_the_version_is_pointed_out(tmp_path: Path) -> None:
    def scenario(side: Side) -> Any:
        class Model(side.Tiny):  # type: ignore[name-defined,misc]
            def training_step(self, batch: Any, batch_idx: Any) -> Any:
                self.log("v_num", 5.0, prog_bar=True)
                return self.loss(batch)

        bar = side.get("callbacks.TQDMProgressBar")()
        logger = side.get("loggers.CSVLogger")(tmp_path / side.name, version=3)
        with caught() as warned:
            trainer = side.trainer(
                callbacks=[bar], enable_progress_bar=True, logger=logger, limit_val_batches=0, log_every_n_steps=1
            )
            trainer.fit(Model())
            shown = bar.get_metrics(trainer, trainer.lightning_module)
        return shown, sorted({kind for kind, text in warned if "v_num" in text})

    same(scenario)


# --- timers


@pytest.mark.catalogue("TM01")
@pytest.mark.parametrize(
    "given", ["00:00:00:01", "1:02:03:04", "60", "a:b:c:d", timedelta(minutes=2), {"hours": 1, "seconds": 5}, None]
)
def test_a_duration_is_read_like_lightnings(given: Any) -> None:
    def scenario(side: Side) -> Any:
        return error(lambda: side.get("callbacks.Timer")(given).time_remaining())

    same(scenario)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that have been added to the clock of both libraries."""
    real, ahead = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: real() + ahead[0])
    return ahead


@pytest.mark.catalogue("TM02", adaptation="the step is waited for before the clock is read")
@pytest.mark.catalogue("TM03")
@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.parametrize("flags", [{}, {"min_steps": 7}, {"min_epochs": 2}])
def test_a_timer_stops_unless_a_minimum_is_missing(interval: str, flags: dict[str, Any], clock: list[float]) -> None:
    def scenario(side: Side) -> Any:
        def tick(*args: Any) -> None:
            clock[0] += 10.0

        timer = side.get("callbacks.Timer")(timedelta(seconds=45), interval=interval)
        ticking = events_callback(side, ["on_train_batch_start"], tick)
        trainer = side.trainer(max_epochs=9, callbacks=[ticking, timer], limit_val_batches=0, **flags)
        with side.messages() as said:
            trainer.fit(side.Tiny())
        return trainer.global_step, trainer.current_epoch, sum("Time limit reached" in each for each in said)

    steps, _, said = same(scenario)
    assert steps >= 5
    assert said >= 1


@pytest.mark.catalogue("TM04", "TM05")
def test_a_timer_keeps_the_time_of_each_stage(clock: list[float], tmp_path: Path) -> None:
    def scenario(side: Side) -> Any:
        timer = side.get("callbacks.Timer")(timedelta(days=1))
        hooks = ["on_train_batch_start", "on_validation_batch_start", "on_test_batch_start"]
        seconds = dict(zip(hooks, (100.0, 1000.0, 10000.0), strict=True))

        def tick(hook: str, *args: Any) -> None:
            clock[0] += seconds[hook]

        callbacks = [events_callback(side, hooks, tick), timer]
        trainer = side.trainer(callbacks=callbacks, num_sanity_val_steps=1)
        before = [timer.start_time("train"), timer.end_time("test"), timer.time_elapsed("train")]
        trainer.fit(side.Tiny())
        trainer.test(side.Tiny(), verbose=False)
        elapsed = [round(timer.time_elapsed(stage), -2) for stage in ("train", "validate", "test", "sanity_check")]
        started = [timer.start_time(stage) is not None for stage in ("train", "validate", "test")]
        state = {key: {k: round(v, -2) for k, v in value.items()} for key, value in timer.state_dict().items()}
        remaining = round((timer.time_remaining() or 0) + timer.time_elapsed("train"), -2)
        fresh = side.get("callbacks.Timer")(timedelta(days=1))
        fresh.load_state_dict(timer.state_dict())
        return before, elapsed, started, state, remaining, round(fresh.time_elapsed(), -2)

    same(scenario)


# --- early stopping


@pytest.mark.catalogue("ES08")
def test_a_value_of_one_element_is_squeezed_and_another_mode_refused() -> None:
    def scenario(side: Side) -> Any:
        stop = side.get("callbacks.EarlyStopping")
        callback = stop("x")

        class Model(side.Tiny):  # type: ignore[name-defined,misc]
            def on_train_epoch_end(self) -> None:
                self.trainer.callback_metrics["x"] = side.array([[3.0]])

        class Same(stop):  # type: ignore[misc,valid-type]
            def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
                trainer.callback_metrics["x"] = side.array([[3.0]])
                super().on_train_epoch_end(trainer, module)

        callback = Same("x", patience=9)
        side.trainer(callbacks=[callback], max_epochs=2).fit(side.Tiny())
        return error(lambda: stop("x", mode="bad"))[0], plain(callback.best_score), callback.wait_count

    assert same(scenario) == ["MisconfigurationException", 3.0, 1]


@pytest.mark.catalogue("ES10", "ES09")
def test_any_of_several_stops_and_each_has_a_key_of_its_own() -> None:
    def scenario(side: Side) -> Any:
        stop = side.get("callbacks.EarlyStopping")

        class Model(side.Tiny):  # type: ignore[name-defined,misc]
            def on_train_epoch_end(self) -> None:
                self.log("better", -float(self.current_epoch))
                self.log("same", 1.0)

        both_of = [stop("better", patience=1), stop("same", patience=2)]
        trainer = side.trainer(callbacks=both_of, max_epochs=9)
        trainer.fit(Model())
        states = [{k: plain(v) for k, v in each.state_dict().items() if k != "best_score"} for each in both_of]
        fresh = stop("same", patience=99)
        fresh.load_state_dict(both_of[1].state_dict())
        keys = [each.state_key for each in both_of]
        return trainer.current_epoch, keys, [sorted(s) for s in states], fresh.patience, fresh.wait_count

    same(scenario)


@pytest.mark.catalogue("ES11", "ES05")
@pytest.mark.parametrize("verbose", [True, False])
@pytest.mark.parametrize("options", [{}, {"stopping_threshold": 0.5}, {"divergence_threshold": 3.0}])
def test_early_stopping_says_what_it_decides(options: dict[str, Any], verbose: bool) -> None:
    def scenario(side: Side) -> Any:
        callback = side.get("callbacks.EarlyStopping")("x", patience=1, verbose=verbose, **options)
        values = {"divergence_threshold": [1.0, 4.0], "stopping_threshold": [2.0, 0.1]}
        series = values.get(next(iter(options), ""), [3.0, 2.0, 2.5, 2.5])

        class Model(side.Tiny):  # type: ignore[name-defined,misc]
            def on_train_epoch_end(self) -> None:
                self.log("x", series[self.current_epoch])

        with side.messages() as said:
            side.trainer(callbacks=[callback], max_epochs=len(series)).fit(Model())
        about = [turned(each) for each in said if "score" in each or "threshold" in each]
        reason = turned(callback.stopping_reason_message or "")
        return about, callback.stopping_reason.name, callback.stopped_epoch, reason

    def turned(text: str) -> str:
        """Lightning writes the sign of a divergence the wrong way round."""
        return text.replace(" > ", " < ") if "Divergence" in text else text

    same(scenario)


@pytest.mark.catalogue("ES02", "ES01")
@pytest.mark.parametrize(
    "flags",
    [{}, {"val_check_interval": 1}, {"check_val_every_n_epoch": 2}, {"limit_val_batches": 0}, {"fast_dev_run": 2}],
)
def test_early_stopping_checks_once_where_lightning_does(flags: dict[str, Any]) -> None:
    def scenario(side: Side) -> Any:
        stop = side.get("callbacks.EarlyStopping")
        seen: list[Any] = []

        class Stop(stop):  # type: ignore[misc,valid-type]
            def _run_early_stopping_check(self, trainer: Any) -> None:
                seen.append([trainer.current_epoch, trainer.global_step, str(trainer.state.stage.value)])
                super()._run_early_stopping_check(trainer)

        class Model(side.Tiny):  # type: ignore[name-defined,misc]
            def training_step(self, batch: Any, batch_idx: Any) -> Any:
                self.log("x", 1.0, on_epoch=True)
                return self.loss(batch)

            def validation_step(self, batch: Any, batch_idx: Any) -> Any:
                self.log("v", 1.0)
                return self.loss(batch)

        callback = Stop("x", patience=99, strict=False)
        trainer = side.trainer(callbacks=[callback], max_epochs=3, **flags)
        trainer.fit(Model())
        trainer.validate(Model(), verbose=False)
        trainer.test(Model(), verbose=False)
        return callback.wait_count, callback.stopped_epoch

    same(scenario)


# --- learning-rate monitor


@pytest.mark.catalogue("LM05", "LM08", "LM03")
def test_the_monitor_needs_a_logger_and_has_lightnings_options() -> None:
    """`log_key_prefix` is newer than Lightning 2.6.6."""

    def scenario(side: Side) -> Any:
        monitor = side.get("callbacks.LearningRateMonitor")
        names = list(inspect.signature(monitor.__init__).parameters)
        return [
            names,
            error(lambda: side.trainer(callbacks=[monitor()]).fit(side.Tiny()))[0],
            error(lambda: monitor("x"))[0],
        ]

    names, *kinds = same(scenario)
    assert "log_key_prefix" not in names
    assert kinds[0] == golden("errors")["lr_monitor_no_logger"]["type"]
