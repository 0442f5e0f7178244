"""Resuming against the recorded runs of Lightning, with what we do better (RS10, RS12, RS15) as named rules."""

from __future__ import annotations

import os
import warnings
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest
from support.checkpoints import golden, trainer
from support.tracing import RecordingLogger

import jaxlightning as pl
from jaxlightning.callbacks import EarlyStopping, ModelCheckpoint, Timer
from jaxlightning.checkpoint._stored import StoredCheckpoint
from jaxlightning.optim import SGD

GOLDEN = golden("resume")


class Data:
    """A plain iterable of single numbers that may tell where it stands."""

    def __init__(self, n: int, stateful: bool = False) -> None:
        self.n, self.pos, self.start = n, 0, 0
        if stateful:
            self.state_dict = lambda: {"pos": self.pos}
            self.load_state_dict = lambda state: setattr(self, "start", state["pos"] % n)

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Any:
        start, self.start = self.start, 0
        for i in range(start, self.n):
            self.pos = i + 1
            yield np.array([float(i)], np.float32)


class Seeing(pl.LightningModule):
    """Notes which batches it gets."""

    def __init__(self, n: int = 4, stateful: bool = False, boom: Any = None) -> None:
        super().__init__()
        self.layer = nn.Dense(2)
        self.n, self.stateful, self.boom = n, stateful, boom
        self.failing = False
        self.notes: dict[str, list[Any]] = {"seen": [], "hooks": []}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.failing = self.boom == (self.current_epoch, batch_idx)
        if not self.failing:
            self.notes["seen"].append([self.current_epoch, batch_idx, float(batch.item()), self.global_step])

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        if self.failing:  # looked at in every step with jit=False
            raise RuntimeError("boom")
        self.log("x", 1.0)
        return jnp.mean(self.layer(batch[:, None]) ** 2)

    def on_validation_batch_start(self, batch: Any, batch_idx: int) -> None:
        kind = "sanity" if self.trainer.sanity_checking else "val"
        self.notes["seen"].append([kind, self.current_epoch, batch_idx])

    def validation_step(self, batch: Any, batch_idx: Any) -> None:
        self.log("vl", jnp.asarray(self.current_epoch, jnp.float32))

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return Data(self.n, self.stateful)

    def val_dataloader(self) -> Any:
        return Data(2)

    def test_step(self, batch: Any, batch_idx: Any) -> None:
        pass

    def test_dataloader(self) -> Any:
        return Data(1)

    def predict_step(self, batch: Any, batch_idx: Any) -> Any:
        return jnp.zeros(())

    def predict_dataloader(self) -> Any:
        return Data(1)

    def _note(self, hook: str) -> None:
        self.notes["hooks"].append([hook, self.current_epoch, self.global_step])

    def on_train_start(self) -> None:
        self._note("on_train_start")

    def on_train_epoch_start(self) -> None:
        self._note("on_train_epoch_start")

    def on_train_epoch_end(self) -> None:
        self._note("on_train_epoch_end")


# name -> (flags of the first run, of the second, arguments of ModelCheckpoint, which checkpoint, further options)
SCENARIOS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], str, dict[str, Any]]] = {
    "epoch_end_ckpt": ({"max_epochs": 2}, {"max_epochs": 3}, {}, "epoch=0-step=4.ckpt", {}),
    "last_epoch_end_ckpt": ({"max_epochs": 2}, {"max_epochs": 3}, {}, "epoch=1-step=8.ckpt", {}),
    "epoch_end_no_val": ({"max_epochs": 2}, {"max_epochs": 3}, {}, "epoch=1-step=8.ckpt", {"val": False}),
    "mid_epoch_step2": ({"max_epochs": 1}, {"max_epochs": 2}, {"every_n_train_steps": 2}, "epoch=0-step=2.ckpt", {}),
    "mid_epoch_step2_stateful_loader": (
        {"max_epochs": 1},
        {"max_epochs": 2},
        {"every_n_train_steps": 2},
        "epoch=0-step=2.ckpt",
        {"stateful": True},
    ),
    "step_ckpt_at_epoch_boundary": (
        {"max_epochs": 1},
        {"max_epochs": 2},
        {"every_n_train_steps": 2},
        "epoch=0-step=4.ckpt",
        {},
    ),
    "mid_epoch_acc2": (
        {"max_epochs": 1, "accumulate_grad_batches": 2},
        {"max_epochs": 2, "accumulate_grad_batches": 2},
        {"every_n_train_steps": 1},
        "epoch=0-step=1.ckpt",
        {},
    ),
    "after_val_mid_epoch": (
        {"max_epochs": 1, "val_check_interval": 0.5},
        {"max_epochs": 2, "val_check_interval": 0.5},
        {},
        "epoch=0-step=2.ckpt",
        {},
    ),
    "save_on_val_end": (
        {"max_epochs": 1},
        {"max_epochs": 2},
        {"save_on_train_epoch_end": False},
        "epoch=0-step=4.ckpt",
        {},
    ),
    "max_steps_resume": ({"max_steps": 6}, {"max_steps": 10}, {}, "epoch=1-step=6.ckpt", {}),
    "exception_ckpt": (
        {"max_epochs": 3},
        {"max_epochs": 3},
        {"save_on_exception": True, "every_n_epochs": 9},
        "epoch=1-step=6.ckpt",
        {"boom": (1, 2)},
    ),
    "resume_already_done": ({"max_epochs": 2}, {"max_epochs": 2}, {}, "epoch=1-step=8.ckpt", {}),
}


def progress(loops: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in loops["fit_loop"].items() if "progress" in k or (k.endswith("state_dict") and v)}


def scenario(root: Any, first: Any, second: Any, ck: Any, pick: str, options: Any) -> dict[str, Any]:
    options = dict(options)
    flags = {} if options.pop("val", True) else {"limit_val_batches": 0}
    module = Seeing(**options)
    saving = ModelCheckpoint(root, save_top_k=-1, **ck)
    t = trainer(root, enable_checkpointing=True, callbacks=[saving], jit="boom" not in options, **first, **flags)
    if "boom" in options:
        with pytest.raises(RuntimeError, match="boom"):
            t.fit(module)
    else:
        t.fit(module)
    raw = StoredCheckpoint(os.path.join(root, pick)).body()
    calls: list[dict[str, Any]] = []
    options.pop("boom", None)
    resumed = Seeing(**options)
    logger = RecordingLogger(calls)
    t = trainer(root, logger=logger, enable_checkpointing=False, log_every_n_steps=1, **second, **flags)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        t.fit(resumed, ckpt_path=os.path.join(root, pick))
    return {
        "files": sorted(f for f in os.listdir(root) if f.endswith(".ckpt")),
        "picked": pick,
        "saved": {"epoch": raw["epoch"], "global_step": raw["global_step"], "progress": progress(raw["loops"])},
        "first_seen_tail": module.notes["seen"][-3:],
        "resumed_seen": resumed.notes["seen"],
        "resumed_hooks": resumed.notes["hooks"],
        "log_steps": [[e["step"], sorted(e["metrics"])] for e in calls if e["hook"] == "log_metrics"],
        "final": {"global_step": t.global_step, "current_epoch": t.current_epoch},
        "warn_mid_epoch": any("ended before the epoch ended" in str(w.message) for w in caught),
    }


def wanted(name: str) -> dict[str, Any]:
    want = GOLDEN[name]
    # RS10: the data continue where they stopped (batch k holds the value k), and nobody has to be warned.
    want["resumed_seen"] = [[*e[:2], float(e[1]), e[3]] if isinstance(e[0], int) else e for e in want["resumed_seen"]]
    want["warn_mid_epoch"] = False
    if name == "step_ckpt_at_epoch_boundary":
        # RS12: the checkpoint of the last batch still leads to that epoch's validation and hooks.
        want["resumed_seen"] = [["val", 0, 0], ["val", 0, 1], *want["resumed_seen"]]
        want["resumed_hooks"] = [
            ["on_train_start", 0, 4],
            ["on_train_epoch_end", 0, 4],
            ["on_train_epoch_start", 1, 4],
            ["on_train_epoch_end", 1, 8],
        ]
        want["log_steps"] = [[3, ["epoch", "vl"]], *want["log_steps"]]
    if name == "exception_ckpt":
        # RS15: no shift of the loggers' axis by one.
        want["log_steps"] = [[step - 1, names] for step, names in want["log_steps"]]
    return want


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.catalogue("DL09", "RS09", "RS13", "RS16", "RS17", "LP25")
@pytest.mark.catalogue("RS11", adaptation="keys and windows are restored too")
@pytest.mark.catalogue("RS10", "RS12", "RS15")
def test_what_a_resumed_run_sees_is_what_was_recorded(name, tmp_path):
    first, second, ck, pick, options = SCENARIOS[name]
    got, want = scenario(str(tmp_path), first, second, ck, pick, options), wanted(name)
    # Where the loaders stand is in the same place, in the words of our sources.
    got["saved"]["progress"].pop("state_dict", None)
    want["saved"]["progress"].pop("state_dict", None)
    # Ours besides: whether the validation that is due after the present batch has run.
    got["saved"]["progress"]["epoch_loop.state_dict"].pop("phase", None)
    got["saved"]["progress"].pop("epoch_loop.val_loop.state_dict", None)  # the loggers' axis of validation batches
    for key in want:
        assert got[key] == want[key], key


def test_a_checkpoint_saved_after_fit_starts_the_next_epoch(tmp_path):
    want = GOLDEN["saved_after_fit_returned"]
    t = trainer(tmp_path, enable_checkpointing=False, max_epochs=2)
    t.fit(Seeing())
    t.save_checkpoint(tmp_path / "a.ckpt")
    raw = StoredCheckpoint(tmp_path / "a.ckpt").body()
    saved = progress(raw["loops"])
    saved.pop("state_dict", None)
    saved.pop("epoch_loop.val_loop.state_dict", None)
    assert (raw["epoch"], raw["global_step"], saved) == (want["epoch"], want["global_step"], want["progress"])
    module = Seeing()
    t = trainer(tmp_path, enable_checkpointing=False, max_epochs=3)
    t.fit(module, ckpt_path=tmp_path / "a.ckpt")
    assert module.notes["seen"] == want["resumed_seen"]
    assert [t.global_step, t.current_epoch] == want["final"]


@pytest.mark.catalogue("ES09", "RS19", "CB03", "TM05")
def test_the_state_of_callbacks_comes_back(tmp_path):
    want = GOLDEN["callback_state"]
    root = str(tmp_path)
    callbacks = [
        ModelCheckpoint(root, monitor="vl", save_top_k=2),
        EarlyStopping("vl", patience=10),
        Timer("01:00:00:00"),
    ]
    trainer(root, max_epochs=3, enable_checkpointing=True, callbacks=callbacks).fit(Seeing())
    last = os.path.join(root, sorted(os.listdir(root))[-1])
    raw = StoredCheckpoint(last).body()["callbacks"]
    assert {key: sorted(state) for key, state in raw.items()} == want["saved_keys"]
    fresh = [ModelCheckpoint(root, monitor="vl", save_top_k=2), EarlyStopping("vl", patience=99)]
    seen: dict[str, Any] = {}

    class Peek(pl.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            seen.update(
                es_wait=fresh[1].wait_count,
                es_best=float(fresh[1].best_score),
                es_patience=fresh[1].patience,
                mc_best=os.path.basename(fresh[0].best_model_path),
                mc_k=len(fresh[0].best_k_models),
            )

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        t = trainer(root, max_epochs=4, enable_checkpointing=True, callbacks=[*fresh, Peek()])
        t.fit(Seeing(), ckpt_path=last)
    assert seen == want["restored"]
    about = [str(w.message)[:120] for w in caught if "callbacks used to create" in str(w.message)]
    assert about == want["warn_missing_callback"]


@pytest.mark.slow
@pytest.mark.catalogue("RS06", "RS07")
def test_the_keywords_of_ckpt_path_find_what_was_recorded(tmp_path):
    root, found = str(tmp_path), {}
    warnings.simplefilter("ignore")
    t = trainer(root, max_epochs=2, callbacks=[ModelCheckpoint(root, save_last=True)])
    t.fit(Seeing())
    for fn in ("validate", "test", "predict"):
        for arguments in ({}, {"ckpt_path": "best"}, {"ckpt_path": "last"}):
            for with_model in (True, False):
                t = trainer(root, max_epochs=2, callbacks=[ModelCheckpoint(root, save_last=True)])
                t.fit(Seeing())
                quiet = {} if fn == "predict" else {"verbose": False}
                getattr(t, fn)(*([Seeing()] if with_model else []), **arguments, **quiet)
                found[f"{fn} model={with_model} {arguments}"] = t.ckpt_path and os.path.basename(t.ckpt_path)
    assert found == GOLDEN["ckpt_path_keywords"]
