"""A loop and an engine just large enough to drive the log connector without the real ones."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.golden import read

from jaxlightning.compile.packing import SlotTable, pack, plan_of, states_of
from jaxlightning.compile.trace import LogEntry, activate
from jaxlightning.metrics import LoggerConnector, log_value


def read_golden(name: str) -> Any:
    """The `data` of a golden trace recorded with Lightning."""
    return read(name)


def rounded(value: Any) -> Any:
    """Numbers as the golden traces have them: Python's, with six digits."""
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    if isinstance(value, np.generic | np.ndarray):
        value = value.item()
    return round(value, 6) if isinstance(value, float) else value


class StubTrace:
    """Collects the calls of `self.log` of one step."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.logs: list[LogEntry] = []
        self.mask = None

    def add_log(self, meta: Any, value: Any, weight: Any = None) -> None:
        self.logs.append(LogEntry(meta, value, weight))


class FakeEngine:
    """Runs steps eagerly and keeps their logs as the real engine does: one vector, one matrix."""

    def __init__(self) -> None:
        self.tables: dict[str, SlotTable] = {}
        self.accumulators: dict[str, Any] = {}
        self.plans: dict[Any, Any] = {}
        self.reads = 0

    def step(self, stage: str, run: Callable[[], Any]) -> SimpleNamespace:
        trace = StubTrace(stage)
        with activate(trace):  # type: ignore[arg-type]
            run()
        table = self.tables.setdefault(stage, SlotTable())
        plan = plan_of(table, trace.logs)
        plan = self.plans.setdefault((stage, plan), plan)
        table.capacity = 64
        if stage not in self.accumulators:
            self.accumulators[stage] = table.identity(np.float32)
        fresh = table.identity(np.float32)
        old = np.asarray(self.accumulators[stage])
        unused = old[1] == 0
        old = np.where(unused, fresh, old)
        values, self.accumulators[stage] = pack(table, trace.logs, np.asarray(old))
        return SimpleNamespace(plan=plan, values=values, states=states_of(trace.logs), outputs=None, skipped=False)

    def read_accumulators(self, stage: str) -> np.ndarray[Any, Any]:
        self.reads += 1
        return np.asarray(self.accumulators[stage])

    def reset_accumulators(self, stage: str) -> None:
        self.accumulators.pop(stage, None)

    def preload_accumulators(self, stage: str, rows: list[tuple[Any, Any, Any]]) -> list[int]:
        table = self.tables.setdefault(stage, SlotTable())
        table.capacity = 64
        slots = [table.add(meta) for meta, _, _ in rows]
        start = table.identity(np.float32)
        for slot, (_, total, weight) in zip(slots, rows, strict=True):
            start[:, slot] = total, weight
        self.accumulators[stage] = start
        return slots


class RecordingLogger:
    """A logger of somebody else's: only the methods that are needed."""

    name, version = "rec", 0

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        assert all(type(value) in (int, float) for value in metrics.values())
        self.calls.append({"step": step, "metrics": rounded(dict(metrics))})

    def log_hyperparams(self, params: Any) -> None:
        self.calls.append({"params": params})

    def save(self) -> None: ...


class FakeModule:
    """The user's module; hooks that it lacks are skipped."""

    automatic_optimization = True

    def __init__(self) -> None:
        self._trainer: Any = None
        self._current_fx_name: str | None = None
        self._engine = FakeEngine()

    @property
    def current_epoch(self) -> int:
        return int(self._trainer.current_epoch)

    def log(self, name: str, value: Any, **options: Any) -> None:
        log_value(self, name, value, **options)

    def log_dict(self, values: dict[str, Any], **options: Any) -> None:
        for name, value in values.items():
            self.log(name, value, **options)


class FakeTrainer:
    """Calls hooks and connector in the order of the real loops (see DESIGN and the golden hook traces)."""

    def __init__(
        self, module: Any, *, loggers: tuple[Any, ...] = (), callbacks: tuple[Any, ...] = (), **flags: Any
    ) -> None:
        self.lightning_module = module
        module._trainer = self
        self.loggers = list(loggers)
        self.callbacks = callbacks
        self.barebones = False
        self.state = SimpleNamespace(stage=None, fn=None)
        self.current_epoch = 0
        self.log_every_n_steps = flags.get("log_every_n_steps", 50)
        self.max_epochs = flags.get("max_epochs", 1)
        self.accumulate = flags.get("accumulate_grad_batches", 1)
        self.max_steps = flags.get("max_steps", -1)
        self.val_every = flags.get("val_every_batches")
        self.check_val_every_n_epoch = flags.get("check_val_every_n_epoch", 1)
        self.fast_dev_run = flags.get("fast_dev_run", False)
        self.progress_bar_callback = flags.get("progress_bar_callback")
        self.should_stop = False
        self.should_accumulate = False
        epoch_loop = SimpleNamespace(_batches_that_stepped=0)
        self.fit_loop = SimpleNamespace(epoch_loop=epoch_loop, _should_accumulate=lambda: self.should_accumulate)
        self.connector = self._logger_connector = LoggerConnector(self)
        self.validated: dict[int, int] = {}

    callback_metrics = property(lambda self: self.connector.callback_metrics)
    logged_metrics = property(lambda self: self.connector.logged_metrics)
    progress_bar_metrics = property(lambda self: self.connector.progress_bar_metrics)

    def hook(self, name: str, *args: Any) -> None:
        module = self.lightning_module
        module._current_fx_name = name
        for callback in self.callbacks:
            if hasattr(callback, name):
                getattr(callback, name)(self, module, *args)
        if hasattr(module, name):
            getattr(module, name)(*args)
        module._current_fx_name = None

    def step(self, stage: str, name: str, *args: Any) -> None:
        module = self.lightning_module
        module._current_fx_name = name
        out = module._engine.step(stage, lambda: getattr(module, name)(*args) if hasattr(module, name) else None)
        module._current_fx_name = None
        self.connector.on_step_output(stage, out)

    def fit(self, train: list[Any], val: list[list[Any]] | None = None, sanity: int = 0) -> None:
        self.connector.begin_run("fit")
        self.validated = {}
        if val and sanity:
            self.evaluate("sanity_check", [batches[:sanity] for batches in val], "validation")
            self.hook("on_sanity_check_end")
            self.connector.reset_results("sanity_check")
            self.connector.reset_metrics()
        self.state.stage = "train"
        self.hook("on_train_start")
        steps = 0
        while self.current_epoch < self.max_epochs and steps != self.max_steps:
            self.connector.on_epoch_start("train")
            self.hook("on_train_epoch_start")
            for index, batch in enumerate(train):
                last = index == len(train) - 1
                self.connector.on_batch_start("train", batch, None, index)
                self.hook("on_train_batch_start", batch, index)
                self.should_accumulate = bool((index + 1) % self.accumulate) and not last
                self.step("train", "training_step", batch, index)
                self.hook("on_train_batch_end", None, batch, index)
                self.connector.update_train_step_metrics()
                due = last if self.val_every is None else (index + 1) % self.val_every == 0
                if val and due and (self.current_epoch + 1) % self.check_val_every_n_epoch == 0:
                    self.connector.flush()
                    self.evaluate("validate", val, "validation")
                    self.state.stage = "train"
                if not self.should_accumulate:
                    self.fit_loop.epoch_loop._batches_that_stepped += 1
                    steps += 1
                if steps == self.max_steps:
                    break
            self.connector.epoch_end_reached("train")
            self.hook("on_train_epoch_end")
            self.fit_loop.epoch_loop._batches_that_stepped -= 1
            self.connector.update_train_epoch_metrics()
            self.fit_loop.epoch_loop._batches_that_stepped += 1
            self.current_epoch += 1
        self.hook("on_train_end")
        self.hook("on_fit_end")
        self.state.stage = None
        self.connector.teardown()

    def run_evaluation(self, stage: str, loaders: list[list[Any]]) -> list[dict[str, float]]:
        self.connector.begin_run(stage)
        self.validated = {}
        results = self.evaluate(stage, loaders, "validation" if stage == "validate" else "test")
        self.state.stage = None
        self.connector.teardown()
        return results

    def evaluate(self, stage: str, loaders: list[list[Any]], word: str) -> list[dict[str, float]]:
        self.state.stage = stage
        connector = self.connector
        connector.on_epoch_start(stage)
        self.hook(f"on_{word}_start")
        self.hook(f"on_{word}_epoch_start")
        several = len(loaders) > 1
        for number, batches in enumerate(loaders):
            for index, batch in enumerate(batches):
                extra = (number,) if several else ()
                connector.on_batch_start(stage, batch, number if several else None, index)
                self.hook(f"on_{word}_batch_start", batch, index, *extra)
                self.step(stage, f"{word}_step", batch, index, *extra)
                self.hook(f"on_{word}_batch_end", None, batch, index, *extra)
                if stage != "sanity_check":
                    connector.update_eval_step_metrics(self.validated.get(number, 0))
                    self.validated[number] = self.validated.get(number, 0) + 1
        connector.epoch_end_reached(stage)
        self.hook(f"on_{word}_epoch_end")
        connector.update_eval_epoch_metrics()
        self.hook(f"on_{word}_end")
        connector.reset_results(stage)
        return connector.eval_results


def batches_of(*sizes: int) -> list[Any]:
    return [(np.zeros((size, 4), np.float32),) for size in sizes]


@pytest.fixture
def fake() -> SimpleNamespace:
    """The fakes and helpers, for tests that cannot import this file."""
    return SimpleNamespace(
        Trainer=FakeTrainer,
        Module=FakeModule,
        Engine=FakeEngine,
        Logger=RecordingLogger,
        StubTrace=StubTrace,
        batches=batches_of,
        golden=read_golden,
        rounded=rounded,
    )
