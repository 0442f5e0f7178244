"""MO, LG36: manual optimization counts, logs, saves and refuses as Lightning does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest
from support.beside import Side, caught, error, same
from support.tracing import RecordingLogger, golden

import jaxlightning as pl

pytestmark = [pytest.mark.filterwarnings("ignore::jaxlightning.utilities.warnings.PossibleUserWarning")]

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


class Weight(nn.Module):
    """A single number, times the input."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return self.param("w", nn.initializers.zeros, ()) * x


class Two(pl.LightningModule):
    """Two numbers with an optimizer each, stepped every so many batches: the module of the recorded run."""

    def __init__(self, every: tuple[int, int] = (1, 1)) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = Weight(), Weight()
        self.every = every
        self.trace: list[dict[str, Any]] = []

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        for k, opt in enumerate(self.optimizers()):
            loss = (self.first if k == 0 else self.second)(batch).mean()
            opt.zero_grad()
            self.manual_backward(loss)
            if batch_idx % self.every[k] == 0:
                opt.step()
        self.log("a", 1.0, on_step=True, on_epoch=True)

    def validation_step(self, batch: Any, batch_idx: Any) -> Any:
        self.log("vl", 1.0)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: Any) -> None:
        self.trace.append(
            {"gs": self.global_step, "epoch": self.current_epoch, "batch_idx": batch_idx, "out": dict(outputs)}
        )

    def train_dataloader(self) -> Any:
        return pl.ArrayLoader(np.array([1.0, 2.0, 3.0], np.float32), batch_size=1)

    def val_dataloader(self) -> Any:
        return pl.ArrayLoader(np.zeros(2, np.float32), batch_size=1)

    def configure_optimizers(self) -> Any:
        return [pl.optim.SGD("first/*", lr=1.0), pl.optim.SGD("second/*", lr=1.0)]


RUNS: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "two_opts_each_batch": ((1, 1), {}),
    "second_every_2": ((1, 2), {}),
    "max_steps_5": ((1, 1), {"max_epochs": -1, "max_steps": 5}),
    "log_every_2": ((1, 1), {"log_every_n_steps": 2}),
}


@pytest.mark.catalogue("LG36", "MO03", "MO10")
@pytest.mark.catalogue("MO02", adaptation="the steps of a compiled batch are counted on the host when it has run")
@pytest.mark.parametrize("name", RUNS)
def test_optimizer_steps_and_logged_steps_are_counted_as_recorded(name: str, tmp_path: Path) -> None:
    every, flags = RUNS[name]
    sink: list[dict[str, Any]] = []
    module = Two(every)
    trainer = pl.Trainer(
        **{
            **QUIET, "default_root_dir": tmp_path, "enable_checkpointing": False, "max_epochs": 2,
            "log_every_n_steps": 1, "logger": RecordingLogger(sink), **flags,
        }
    )  # fmt: skip
    trainer.fit(module)
    expected = golden("optimization")["manual"][name]
    logged = [[event["step"], sorted(event["metrics"])] for event in sink if event["hook"] == "log_metrics"]
    assert module.trace == expected["trace"]
    assert [trainer.global_step, trainer.current_epoch] == [expected["global_step"], expected["current_epoch"]]
    assert logged == expected["log_steps"]


@pytest.mark.catalogue("MO11", adaptation="weights are saved as they are after the batch; there is no `saved_models`")
def test_checkpoints_every_n_steps_count_the_steps_of_all_optimizers(tmp_path: Path) -> None:
    saving = pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1)
    pl.Trainer(**QUIET, default_root_dir=tmp_path, logger=False, max_epochs=2, callbacks=[saving]).fit(Two())
    found = sorted(path.name for path in tmp_path.iterdir() if path.name.endswith("ckpt"))
    assert found == golden("optimization")["manual"]["every_n_train_steps_4_two_opts_files"]


def manual(side: Side, **members: Any) -> Any:
    """A tiny module of a side that optimizes by itself."""

    class Manual(side.Tiny):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            opt = self.optimizers()
            opt.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            opt.step()
            return loss

        def configure_optimizers(self) -> Any:
            return side.sgd(self, lr=0.0)

    for name, member in members.items():
        setattr(Manual, name, member)
    return Manual()


@pytest.mark.lightning
@pytest.mark.torch
@pytest.mark.catalogue("MO04")
@pytest.mark.parametrize("kind", ["array", "dictionary", "dictionary without loss", "nothing", "number", "list"])
def test_what_a_manual_step_may_return(kind: str) -> None:
    def scenario(side: Side) -> Any:
        seen: list[Any] = []

        def training_step(self: Any, batch: Any, batch_idx: Any) -> Any:
            loss = side.array(3.0)
            self.manual_backward(self.loss(batch))
            return {
                "array": loss,
                "dictionary": {"loss": loss, "x": loss},
                "dictionary without loss": {"x": loss},
                "nothing": None,
                "number": 3.0,
                "list": [loss],
            }[kind]

        def on_train_batch_end(self: Any, outputs: Any, batch: Any, batch_idx: Any) -> None:
            seen.append({key: float(value) for key, value in outputs.items()})

        module = manual(side, training_step=training_step, on_train_batch_end=on_train_batch_end)
        found = error(lambda: side.trainer(limit_val_batches=0).fit(module))
        return found, seen

    found, seen = same(scenario)
    assert (found is not None) is (kind in ("number", "list"))
    assert len(seen) == (0 if found else 3)


@pytest.mark.lightning
@pytest.mark.torch
@pytest.mark.catalogue("MO05", "MO06")
@pytest.mark.parametrize("case", ["clip", "accumulate", "backward in automatic", "manual_backward_in_automatic"])
def test_settings_that_manual_optimization_refuses(case: str) -> None:
    def scenario(side: Side) -> Any:
        if case.startswith(("backward", "manual_backward")):

            class Automatic(side.Tiny):  # type: ignore[name-defined,misc]
                def training_step(self, batch: Any, batch_idx: Any) -> Any:
                    loss = self.loss(batch)
                    self.manual_backward(loss)
                    return loss

            return error(lambda: side.trainer(limit_val_batches=0).fit(Automatic()))
        flags = {"gradient_clip_val": 1.0} if case == "clip" else {"accumulate_grad_batches": 2}
        return error(lambda: side.trainer(limit_val_batches=0, **flags).fit(manual(side)))

    assert same(scenario)[0] == "MisconfigurationException"


@pytest.mark.lightning
@pytest.mark.torch
@pytest.mark.catalogue("MO07")
def test_schedulers_move_only_when_the_step_moves_them() -> None:
    def scenario(side: Side) -> Any:
        rates: list[list[float]] = []

        def configure_optimizers(self: Any) -> Any:
            opt = side.sgd(self, lr=1.0)
            kind = side.get("optim.lr_scheduler.StepLR") if side.ours else _torch_step_lr()
            return [opt], [{"scheduler": kind(opt, step_size=1, gamma=0.5), "interval": "step", "monitor": "m"}]

        def training_step(self: Any, batch: Any, batch_idx: Any) -> Any:
            opt = self.optimizers()
            opt.zero_grad()
            self.manual_backward(self.loss(batch) * 0.0)
            opt.step()
            if batch_idx == 1:
                self.lr_schedulers().step()

        def on_train_batch_end(self: Any, outputs: Any, batch: Any, batch_idx: Any) -> None:
            rates.append([group["lr"] for opt in self.trainer.optimizers for group in opt.param_groups])

        members = {
            "configure_optimizers": configure_optimizers,
            "training_step": training_step,
            "on_train_batch_end": on_train_batch_end,
        }
        with caught() as warned:
            side.trainer(limit_val_batches=0).fit(manual(side, **members))
        ignored = [text for category, text in warned if "keys will be ignored" in text and category == "RuntimeWarning"]
        return rates, len(ignored)

    assert same(scenario) == [[[1.0], [0.5], [0.5]], 1]


def _torch_step_lr() -> Any:
    import torch

    return torch.optim.lr_scheduler.StepLR


@pytest.mark.lightning
@pytest.mark.torch
@pytest.mark.catalogue("GA07")
def test_the_accumulation_scheduler_is_refused() -> None:
    def scenario(side: Side) -> Any:
        callback = side.get("callbacks.GradientAccumulationScheduler")({0: 2})  # the case "gas_manual"
        return error(lambda: side.trainer(limit_val_batches=0, callbacks=[callback]).fit(manual(side)))

    assert same(scenario)[0] == "RuntimeError"


@pytest.mark.catalogue("MO08", adaptation="gradients that live across steps are buffers of the state")
def test_gradients_add_up_until_they_are_forgotten() -> None:
    class Sums(Two):
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            first, second = self.optimizers()
            second.zero_grad()
            self.manual_backward(self.first(batch).mean())
            self.manual_backward(self.second(batch).mean())
            if (batch_idx + 1) % 2 == 0:
                first.step()
                first.zero_grad()

    module = Sums()
    flags = {**QUIET, "enable_checkpointing": False, "logger": False, "max_epochs": 1, "limit_val_batches": 0}
    pl.Trainer(**flags).fit(module)
    assert float(module.state_dict()["first.w"]) == -3.0  # the gradients are the inputs: 1 + 2; the 3 waits
    np.testing.assert_array_equal(module._engine.state_dict()["gradients"]["first"]["w"], 3.0)


@pytest.mark.catalogue("MO09", adaptation="the closure is traced with the step; `sync_grad` has nothing to switch off")
def test_a_closure_runs_before_the_update_and_its_result_comes_back() -> None:
    class Closure(Two):
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            first, second = self.optimizers()

            def closure() -> Any:
                loss = self.first(batch).mean() + self.second(batch).mean()
                first.zero_grad()
                self.manual_backward(loss)
                return loss + 7

            with first.toggle_model(sync_grad=True):
                result = first.step(closure=closure)
            second.step()  # it was toggled off and holds nothing
            self.log("result", jnp.asarray(result))

    module = Closure()
    flags = {**QUIET, "enable_checkpointing": False, "logger": False, "max_epochs": 1, "limit_val_batches": 0}
    trainer = pl.Trainer(**flags)
    trainer.fit(module)
    state = module.state_dict()
    assert [float(state["first.w"]), float(state["second.w"])] == [-6.0, 0.0]
    assert float(trainer.callback_metrics["result"]) == 7 - 3.0 * 3
