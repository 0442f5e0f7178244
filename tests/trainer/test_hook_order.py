"""The order of hooks and logger calls, event by event, against what Lightning recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.tracing import (
    CALLBACK_HOOKS,
    DATAMODULE_HOOKS,
    MODULE_HOOKS,
    STEPS,
    RecordingLogger,
    TinyModule,
    compact,
    golden,
    loader,
    traced,
)

import jaxlightning as pl
from jaxlightning.callbacks import ModelCheckpoint

# The traced module and the traced datamodule both override the transfer hooks, which our Trainer points out.
pytestmark = [
    pytest.mark.filterwarnings("ignore:You have overridden:UserWarning"),
    pytest.mark.filterwarnings("ignore::jaxlightning.utilities.warnings.PossibleUserWarning"),
]

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Base(TinyModule):
    sched = "epoch"

    def configure_model(self) -> None:
        pass

    def prepare_data(self) -> None:
        pass

    def on_validation_model_train(self) -> None:
        super().on_validation_model_train()

    def configure_optimizers(self) -> Any:
        optimizer = pl.optim.SGD(self.parameters(), lr=0.1)
        scheduler = pl.optim.lr_scheduler.StepLR(optimizer, 1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.sched}}


class Data(pl.LightningDataModule):
    def prepare_data(self) -> None:
        pass

    def train_dataloader(self) -> Any:
        return loader(6)

    def val_dataloader(self) -> Any:
        return loader(4)

    def test_dataloader(self) -> Any:
        return loader(4)

    def predict_dataloader(self) -> Any:
        return loader(4)

    def state_dict(self) -> dict[str, Any]:
        return {"dm": 1}


class Stateful(pl.Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"cb": 1}


def build(sink: list[dict[str, Any]], datamodule: bool, sched: str = "epoch") -> tuple[Any, Any, Any, Any]:
    module = traced(Base, MODULE_HOOKS, "module", sink, lambda self, args: self._trainer)()
    module.sched = sched

    def trainer_of(self: Any, args: tuple[Any, ...]) -> Any:
        return args[0] if args and isinstance(args[0], pl.Trainer) else None

    callback = traced(Stateful, CALLBACK_HOOKS, "callback", sink, trainer_of, drop=2)()
    data = traced(Data, DATAMODULE_HOOKS, "datamodule", sink, lambda self, args: self.trainer)() if datamodule else None
    return module, callback, data, RecordingLogger(sink)


def fit(root: Path, datamodule: bool = True, sched: str = "epoch", acc: int = 1, **flags: Any) -> list[dict[str, Any]]:
    sink: list[dict[str, Any]] = []
    module, callback, data, logger = build(sink, datamodule, sched)
    trainer = pl.Trainer(
        default_root_dir=root,
        max_epochs=2,
        accumulate_grad_batches=acc,
        callbacks=[callback, ModelCheckpoint(dirpath=root, save_top_k=-1)],
        logger=logger,
        log_every_n_steps=1,
        num_sanity_val_steps=2,
        **QUIET,
        **flags,
    )
    trainer.fit(module, datamodule=data)
    return sink


def other(root: Path, verb: str, datamodule: bool, **flags: Any) -> list[dict[str, Any]]:
    sink: list[dict[str, Any]] = []
    module, callback, data, logger = build(sink, datamodule)
    trainer = pl.Trainer(default_root_dir=root, callbacks=[callback], logger=logger, **QUIET, **flags)
    getattr(trainer, verb)(module, datamodule=data, **({} if verb == "predict" else {"verbose": False}))
    return sink


RUNS: dict[str, dict[str, Any]] = {
    "fit_acc1_datamodule": {},
    "fit_acc2_datamodule": {"acc": 2},
    "fit_acc1_module_loaders": {"datamodule": False},
    "fit_acc1_step_scheduler": {"sched": "step"},
    "fit_acc2_step_scheduler": {"acc": 2, "sched": "step"},
    "fit_val_check_interval_int1": {"val_check_interval": 1},
    "fit_no_val": {"limit_val_batches": 0},
    "fit_clip": {"gradient_clip_val": 0.5},
}
OTHERS = [f"{verb}_{data}" for verb in ("validate", "test", "predict") for data in ("datamodule", "module_loaders")]


def without_steps(events: list[str]) -> list[str]:
    """A compiled step runs in Python only while it is compiled (DESIGN), so its own call is not compared."""
    return [event for event in events if not any(event.startswith(f"M.{step}") for step in STEPS)]


@pytest.mark.parametrize("name", RUNS)
def test_eager_fit_calls_every_hook_in_lightnings_order(name: str, tmp_path: Path) -> None:
    assert compact(fit(tmp_path, jit=False, **RUNS[name])) == golden("hooks_compact")[name]


@pytest.mark.parametrize("name", RUNS)
def test_compiled_fit_calls_every_hook_in_lightnings_order(name: str, tmp_path: Path) -> None:
    assert without_steps(compact(fit(tmp_path, **RUNS[name]))) == without_steps(golden("hooks_compact")[name])


@pytest.mark.parametrize("name", OTHERS)
def test_eager_evaluation_calls_every_hook_in_lightnings_order(name: str, tmp_path: Path) -> None:
    verb, _, data = name.partition("_")
    assert compact(other(tmp_path, verb, data == "datamodule", jit=False)) == golden("hooks_compact")[name]


@pytest.mark.parametrize("name", OTHERS)
def test_compiled_evaluation_calls_every_hook_in_lightnings_order(name: str, tmp_path: Path) -> None:
    verb, _, data = name.partition("_")
    ours = without_steps(compact(other(tmp_path, verb, data == "datamodule")))
    assert ours == without_steps(golden("hooks_compact")[name])


def _state_of(event: dict[str, Any]) -> tuple[Any, ...]:
    at = event.get("at") or {}
    return event["who"], event["hook"], event.get("phase"), at.get("stage"), at.get("training_mode")


@pytest.mark.parametrize("name", ["fit_acc1_datamodule", *OTHERS])
def test_every_hook_sees_the_module_in_lightnings_mode(name: str, tmp_path: Path) -> None:
    if name.startswith("fit"):
        ours = fit(tmp_path)
    else:
        verb, _, data = name.partition("_")
        ours = other(tmp_path, verb, data == "datamodule")
    theirs = golden("hooks_full")[name]["events"]
    pick = [[_state_of(event) for event in events if event["hook"] not in STEPS] for events in (ours, theirs)]
    assert pick[0] == pick[1]


# What stands for an object of torch in the recorded arguments, and what stands there with us.
_TRANSLATED = {
    "<SGD>": "OPTIMIZER",
    "<LightningSGD>": "OPTIMIZER",
    "<device>": "DEVICE",
    "<CpuDevice>": "DEVICE",
    "<Device>": "DEVICE",
    "<StepLR>": "SCHEDULER",
    "<function>": "CLOSURE",
    "<Closure>": "CLOSURE",
    "list[1]": "BATCH",
    "tuple[1]": "BATCH",
}


def _arguments(event: dict[str, Any]) -> list[Any]:
    args = [_TRANSLATED.get(each, each) if isinstance(each, str) else each for each in event.get("args", [])]
    # A checkpoint of ours has keys of its own besides Lightning's.
    checkpoint = "global_step"
    return ["CHECKPOINT" if isinstance(each, str) and checkpoint in each else each for each in args]


@pytest.mark.parametrize("name", ["fit_acc2_step_scheduler", "fit_acc1_datamodule", *OTHERS])
def test_every_hook_gets_lightnings_arguments(name: str, tmp_path: Path) -> None:
    if name.startswith("fit"):
        ours = fit(tmp_path, **RUNS[name])
    else:
        verb, _, data = name.partition("_")
        ours = other(tmp_path, verb, data == "datamodule")
    theirs = golden("hooks_full")[name]["events"]
    skip = {*STEPS, "log_metrics", "log_graph", "save", "finalize", "after_save_checkpoint"}
    pick = [
        [(event["hook"], _arguments(event)) for event in events if event["hook"] not in skip]
        for events in (ours, theirs)
    ]
    assert pick[0] == pick[1]
