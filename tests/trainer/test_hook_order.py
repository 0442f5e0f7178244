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
    pytest.mark.usefixtures("compiled_once"),
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


class Manual(Base):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        opt = self.optimizers()
        loss = self._loss(batch)
        opt.zero_grad()
        self.manual_backward(loss)
        opt.step()
        return loss


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


def build(
    sink: list[dict[str, Any]], datamodule: bool, sched: str = "epoch", base: type = Base
) -> tuple[Any, Any, Any, Any]:
    module = traced(base, MODULE_HOOKS, "module", sink, lambda self, args: self._trainer)()
    module.sched = sched

    def trainer_of(self: Any, args: tuple[Any, ...]) -> Any:
        return args[0] if args and isinstance(args[0], pl.Trainer) else None

    callback = traced(Stateful, CALLBACK_HOOKS, "callback", sink, trainer_of, drop=2)()
    data = traced(Data, DATAMODULE_HOOKS, "datamodule", sink, lambda self, args: self.trainer)() if datamodule else None
    return module, callback, data, RecordingLogger(sink)


def fit(
    root: Path, datamodule: bool = True, sched: str = "epoch", acc: int = 1, base: type = Base, **flags: Any
) -> list[dict[str, Any]]:
    sink: list[dict[str, Any]] = []
    module, callback, data, logger = build(sink, datamodule, sched, base)
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
@pytest.mark.catalogue("HK09", adaptation="the order is that of the hooks; an eager step shows it whole")
def test_eager_fit_calls_every_hook_in_lightnings_order(name: str, tmp_path: Path) -> None:
    assert compact(fit(tmp_path, jit=False, **RUNS[name])) == golden("hooks_compact")[name]


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.catalogue("HK01", "HK05", "HK06", "HK13", "HK14", "HK16", "HK17", "LP03", "DM01", "DM02")
@pytest.mark.catalogue(
    "HK02", adaptation="the sanity check or the first batch makes the variables, so a restore may come before them"
)
@pytest.mark.catalogue(
    "HK07", adaptation="the step is cut in two where a hook between gradient and update is overridden"
)
@pytest.mark.catalogue("HK08", adaptation="two compiled variants, chosen on the host")
@pytest.mark.catalogue(
    "HK10", adaptation="schedulers are stepped on the host; the rate is an argument of the compiled step"
)
@pytest.mark.catalogue("LP02", adaptation="the counter lives on the host")
def test_compiled_fit_calls_every_hook_in_lightnings_order(name: str, tmp_path: Path) -> None:
    assert without_steps(compact(fit(tmp_path, **RUNS[name]))) == without_steps(golden("hooks_compact")[name])


@pytest.mark.catalogue(
    "HK23", "MO01", adaptation="the step is cut into compiled segments, and the hooks run between them"
)
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "compiled"])
def test_manual_fit_calls_every_hook_in_lightnings_order(jit: bool, tmp_path: Path) -> None:
    ours = compact(fit(tmp_path, base=Manual, jit=jit))
    expected = golden("hooks_compact")["fit_manual_opt"]
    if jit:
        ours, expected = without_steps(ours), without_steps(expected)
    assert ours == expected


@pytest.mark.parametrize("name", OTHERS)
def test_eager_evaluation_calls_every_hook_in_lightnings_order(name: str, tmp_path: Path) -> None:
    verb, _, data = name.partition("_")
    assert compact(other(tmp_path, verb, data == "datamodule", jit=False)) == golden("hooks_compact")[name]


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.catalogue("HK18", "HK20")
@pytest.mark.catalogue("HK19", adaptation="what a step returns is a pytree of arrays")
def test_compiled_evaluation_calls_every_hook_in_lightnings_order(name: str, tmp_path: Path) -> None:
    verb, _, data = name.partition("_")
    ours = without_steps(compact(other(tmp_path, verb, data == "datamodule")))
    assert ours == without_steps(golden("hooks_compact")[name])


def _state_of(event: dict[str, Any]) -> tuple[Any, ...]:
    at = event.get("at") or {}
    return event["who"], event["hook"], event.get("phase"), at.get("stage"), at.get("training_mode")


@pytest.mark.parametrize("name", ["fit_acc1_datamodule", *OTHERS])
@pytest.mark.catalogue("HK21", "TA10", adaptation="the mode is an attribute on the host, static for the compiled step")
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
@pytest.mark.catalogue("HK04")
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


RESUMES: dict[str, tuple[str, dict[str, Any]]] = {
    "resume_epoch_end": ("epoch=0-step=3.ckpt", {}),
    "resume_last_epoch_end": ("epoch=1-step=6.ckpt", {}),
    "resume_mid_epoch_step": ("epoch=0-step=2.ckpt", {"every_n_train_steps": 2}),
}


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")
@pytest.mark.parametrize("name", RESUMES)
@pytest.mark.catalogue("HK37", "HK06", "RS09")
@pytest.mark.catalogue("HK02", adaptation="variables that a restore needs come from the checkpoint")
def test_a_resumed_fit_calls_every_hook_in_lightnings_order(name: str, tmp_path: Path) -> None:
    picked, saving = RESUMES[name]
    module, callback, data, _ = build([], True)
    checkpoint = ModelCheckpoint(dirpath=tmp_path, save_top_k=-1, **saving)
    first = pl.Trainer(default_root_dir=tmp_path, max_epochs=2, callbacks=[callback, checkpoint], logger=False, **QUIET)
    first.fit(module, datamodule=data)
    sink: list[dict[str, Any]] = []
    module, callback, data, logger = build(sink, True)
    second = pl.Trainer(
        default_root_dir=tmp_path,
        max_epochs=3,
        callbacks=[callback],
        logger=logger,
        enable_checkpointing=False,
        log_every_n_steps=1,
        jit=False,
        **QUIET,
    )
    second.fit(module, datamodule=data, ckpt_path=tmp_path / picked)
    assert compact(sink) == golden("hooks_compact")[name]


@pytest.mark.catalogue("PF01", adaptation="what a compiled step holds has no time of its own on the host")
def test_a_profiler_records_lightnings_actions(tmp_path: Path) -> None:
    from jaxlightning.callbacks import Timer
    from jaxlightning.profilers import SimpleProfiler

    profiler = SimpleProfiler()
    trainer = pl.Trainer(
        default_root_dir=tmp_path, profiler=profiler, callbacks=[Timer()], max_epochs=1, logger=False, **QUIET
    )
    trainer.fit(TinyModule())
    ours = {name: len(durations) for name, durations in profiler.recorded_durations.items()}
    theirs = golden("trainer_misc")["profiler_actions"]
    # The strategy has no hooks here, and what a compiled step holds has no time of its own on the host.
    inside = ("zero_grad", "backward", "optimizer_step", "gradient_clipping", "batch_transfer", "transfer_batch")
    for action, count in theirs.items():
        hook = action.rpartition(".")[2]
        if action.startswith("[Strategy]") or any(word in hook for word in inside):
            continue
        if action.startswith("[LightningModule]") and action not in ours:
            continue  # a hook that the module does not override costs nothing and is not timed
        assert ours.get(action) == count, action
