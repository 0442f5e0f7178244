"""A single weight trained by hand: accumulation, clipping, skipped steps and schedulers beside Lightning's record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest
from support.golden import read

import jaxlightning as pl
from jaxlightning import optim
from jaxlightning.optim import lr_scheduler

GOLDEN = read("optimization")
XS = (1.0, 2.0, 3.0)

pytestmark = pytest.mark.filterwarnings("ignore:`training_step` returned `None`")


class Weight(nn.Module):
    """`w * x`, so that the gradient is the mean of `x`."""

    start: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.param("w", nn.initializers.constant(self.start), ()) * x


class One(pl.LightningModule):
    def __init__(
        self, configure: Callable[[Any], Any] | None = None, none_at: tuple[int, ...] = (), start: float = 0.0
    ) -> None:
        super().__init__()
        self.net = Weight(start)
        self.configure, self.none_at = configure, none_at
        self.skip = False
        self.trace: list[dict[str, Any]] = []

    def training_step(self, batch: jax.Array, batch_idx: Any) -> Any:
        self.log("loss_like", batch_idx * 1.0, batch_size=1)
        loss = self.net(batch).mean()
        return None if self.skip else loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.skip = batch_idx in self.none_at

    def validation_step(self, batch: jax.Array, batch_idx: Any) -> None:
        self.log("vl", 1.0, batch_size=1)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trace.append(
            {
                "epoch": self.current_epoch,
                "batch_idx": batch_idx,
                "gs": self.global_step,
                "w": float(next(iter(self.state_dict().values()))),
                "lrs": [group["lr"] for o in self.trainer.optimizers for group in o.param_groups],
                "out": {key: float(value) for key, value in (outputs or {}).items()},
            }
        )

    def train_dataloader(self) -> Any:
        return pl.ArrayLoader(np.array(XS, np.float32), batch_size=1)

    def val_dataloader(self) -> Any:
        return pl.ArrayLoader(np.zeros(2, np.float32), batch_size=1)

    def configure_optimizers(self) -> Any:
        return self.configure(self) if self.configure else optim.SGD(self.parameters(), lr=1.0)


def fit(module: One, **options: Any) -> Any:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = pl.Trainer(**{"max_epochs": 2, **quiet, **options})
    trainer.fit(module)
    return trainer


# --- accumulation, clipping, skipped steps -----------------------------------------------------------------------

RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "acc1": ({}, {}),
    "acc2_remainder": ({"accumulate_grad_batches": 2}, {}),
    "acc3": ({"accumulate_grad_batches": 3}, {}),
    "acc5_gt_epoch": ({"accumulate_grad_batches": 5}, {}),
    "acc2_none_at_0": ({"accumulate_grad_batches": 2}, {"none_at": (0,)}),
    "acc2_none_at_1_stepping_batch": ({"accumulate_grad_batches": 2}, {"none_at": (1,)}),
    "acc1_none_at_1": ({}, {"none_at": (1,)}),
    "clip_value_0.5": ({"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}, {}),
    "clip_norm_0.5": ({"gradient_clip_val": 0.5}, {}),
    "clip_norm_acc2": ({"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}, {}),
    "clip_0_disabled": ({"gradient_clip_val": 0}, {}),
}
# A window cut short by the epoch's end is divided by its real count (GA02); Lightning divides by N.
CUT_SHORT = {"acc2_remainder", "acc5_gt_epoch", "acc2_none_at_0", "acc2_none_at_1_stepping_batch"}


def by_hand(options: dict[str, Any], none_at: tuple[int, ...], real_count: bool) -> list[dict[str, Any]]:
    n, limit = options.get("accumulate_grad_batches", 1), options.get("gradient_clip_val") or None
    w, total, count, steps, rows = 0.0, 0.0, 0, 0, []
    for epoch in range(2):
        for index, x in enumerate(XS):
            out = {} if index in none_at else {"loss": w * x / n}
            total += 0.0 if index in none_at else x / n
            count += 1
            if count == n or index == len(XS) - 1:
                gradient = total * n / count if real_count else total
                if limit is not None:
                    value = options.get("gradient_clip_algorithm") == "value"
                    gradient = min(gradient, limit) if value else gradient * min(1.0, limit / (gradient + 1e-6))
                w, total, count, steps = w - gradient, 0.0, 0, steps + 1
            rows.append({"epoch": epoch, "batch_idx": index, "gs": steps, "w": w, "lrs": [1.0], "out": out})
    return rows


def _assert_equal(got: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(got) == len(expected)
    for ours, theirs in zip(got, expected, strict=True):
        assert [ours[key] for key in ("epoch", "batch_idx", "gs", "lrs")] == [
            theirs[key] for key in ("epoch", "batch_idx", "gs", "lrs")
        ]
        assert ours["w"] == pytest.approx(theirs["w"], abs=2e-6)
        assert ours["out"] == pytest.approx(theirs["out"], abs=2e-6)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.catalogue("GA02")
@pytest.mark.catalogue(
    "GA08", adaptation="a micro-batch without gradient adds nothing; a stepping one applies the rest"
)
@pytest.mark.catalogue("HK11", adaptation="the loss that hooks see is divided by N inside the compiled step")
@pytest.mark.catalogue("OP10", adaptation="the loss is divided inside the compiled step")
@pytest.mark.catalogue("OP11", adaptation="clipping is part of the compiled update, with torch's formula")
def test_weights_after_every_batch(name: str) -> None:
    options, make = RUNS[name]
    golden = GOLDEN["accumulation_and_clipping"][name]
    _assert_equal(golden["trace"], by_hand(options, make.get("none_at", ()), real_count=False))
    module = One(**make)
    trainer = fit(module, **options)
    _assert_equal(module.trace, by_hand(options, make.get("none_at", ()), real_count=True))
    if name not in CUT_SHORT:
        _assert_equal(module.trace, golden["trace"])
    assert trainer.global_step == golden["global_step"]


@pytest.mark.parametrize(
    ("name", "options", "start"),
    [("momentum_none_at_1", {"momentum": 0.9}, 0.0), ("weight_decay_none_at_1", {"weight_decay": 0.5}, 1.0)],
)
@pytest.mark.catalogue("OP07", adaptation="a step that returns None is a variant without an update")
def test_a_skipped_step_touches_neither_momentum_nor_weights(name: str, options: dict[str, Any], start: float) -> None:
    module = One(lambda m: optim.SGD(m.parameters(), lr=1.0, **options), none_at=(1,), start=start)
    fit(module, max_epochs=1)
    _assert_equal(module.trace, GOLDEN["accumulation_and_clipping"][name]["trace"])


# --- schedulers --------------------------------------------------------------------------------------------------


def _scheduled(kind: str = "exp", **config: Any) -> Callable[[Any], Any]:
    def configure(module: Any) -> Any:
        optimizer = optim.SGD(module.parameters(), lr=1.0)
        if kind == "exp":
            scheduler: Any = lr_scheduler.ExponentialLR(optimizer, 0.5)
        else:
            scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **config}}

    return configure


TIMELINES: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "epoch_f1": (_scheduled(), {}),
    "epoch_f2": (_scheduled(frequency=2), {"max_epochs": 5}),
    "step_f1": (_scheduled(interval="step"), {}),
    "step_f2": (_scheduled(interval="step", frequency=2), {}),
    "step_f2_acc2": (_scheduled(interval="step", frequency=2), {"accumulate_grad_batches": 2}),
    "step_f1_acc2": (_scheduled(interval="step"), {"accumulate_grad_batches": 2}),
    "epoch_check_val_2": (_scheduled(), {"check_val_every_n_epoch": 2, "max_epochs": 4}),
    "epoch_limit2": (_scheduled(), {"limit_train_batches": 2}),
    "step_max_steps4": (_scheduled(interval="step"), {"max_epochs": -1, "max_steps": 4}),
    "epoch_max_steps4": (_scheduled(), {"max_epochs": -1, "max_steps": 4}),
    "plateau_epoch_val": (_scheduled("plateau", monitor="vl"), {"max_epochs": 4}),
    "plateau_step_train": (_scheduled("plateau", interval="step", monitor="loss_like"), {}),
    "plateau_epoch_freq2": (_scheduled("plateau", monitor="vl", frequency=2), {"max_epochs": 5}),
}
# `frequency` counts optimizer steps over the whole run (SC02); Lightning looks at the batch's index in the epoch.
FREQUENCY = {"step_f2": [1.0, 0.5, 0.5, 0.25, 0.25, 0.125], "step_f2_acc2": [1.0, 1.0, 0.5, 0.5, 0.5, 0.25]}


@pytest.mark.parametrize("name", TIMELINES)
@pytest.mark.catalogue("SC02", "SC03", "SC04", "SC06", "LP06")
def test_learning_rates_after_every_batch(name: str) -> None:
    configure, options = TIMELINES[name]
    module = One(configure)
    trainer = fit(module, **options)
    golden = GOLDEN["scheduler_timeline"][name]
    got = [[row["epoch"], row["batch_idx"], row["lrs"][0]] for row in module.trace]
    if name in FREQUENCY:
        assert [row[2] for row in got] == FREQUENCY[name]
    else:
        assert got == golden["lr_after_each_batch"]
        assert trainer.optimizers[0].param_groups[0]["lr"] == golden["final_lr"]


def test_a_plateau_steps_only_on_news() -> None:
    """Validation every second epoch gives two values in four epochs, so one reduction (SC06)."""
    module = One(_scheduled("plateau", monitor="vl", strict=False))
    with pytest.warns(RuntimeWarning, match="not available but strict is set to `False`"):
        trainer = fit(module, max_epochs=4, check_val_every_n_epoch=2, num_sanity_val_steps=0)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("interval", ["epoch", "step"])
@pytest.mark.catalogue("SC03")
def test_where_a_new_learning_rate_is_seen(interval: str) -> None:
    events: list[list[Any]] = []

    class Seen(One):
        def _lr(self) -> float:
            return self.trainer.optimizers[0].param_groups[0]["lr"]

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            events.append(["on_train_batch_end", self.current_epoch, batch_idx, self._lr()])

        def on_validation_start(self) -> None:
            events.append(["on_validation_start", self.current_epoch, None, self._lr()])

        def on_train_epoch_end(self) -> None:
            events.append(["on_train_epoch_end", self.current_epoch, None, self._lr()])

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            saved = checkpoint["lr_schedulers"][0]["_last_lr"][0]
            events.append(["on_save_checkpoint", checkpoint["epoch"], checkpoint["global_step"], saved])

    fit(Seen(_scheduled(interval=interval)), num_sanity_val_steps=0, enable_checkpointing=True)
    golden = GOLDEN["scheduler_vs_validation_and_ckpt"][interval]
    assert events == [event for event in golden if event[0] != "training_step"]
