"""`Trainer(steps_per_dispatch=...)`: several batches in one call, with everything that can be seen as without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn

import jaxlightning as pl
from jaxlightning.compile import fused_step
from jaxlightning.loggers import CSVLogger
from jaxlightning.utilities.exceptions import MisconfigurationException
from tests.loops.test_quiet_batches import Loader, Net

pytestmark = pytest.mark.usefixtures("compiled_once")


class Seeded(Net):
    """With dropout, so that the random keys of the steps matter."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def training_step(self, batch: Any, batch_idx: int) -> jax.Array:
        x, y = batch
        loss = optax.softmax_cross_entropy_with_integer_labels(self.net(self.drop(x)), y).mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


def _fit(folder: Path, loader: Any, module: Any = None, **options: Any) -> tuple[Any, Any, str]:
    trainer = pl.Trainer(
        **{
            "max_epochs": 2,
            "logger": CSVLogger(folder, name=None, version=0),
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "log_every_n_steps": 10,
            "default_root_dir": folder,
            **options,
        }
    )
    module = Seeded() if module is None else module
    trainer.fit(module, loader, Loader(2))
    return trainer, module, (folder / "version_0" / "metrics.csv").read_text()


def _assert_same_state(left: Any, right: Any) -> None:
    left, right = left.state_dict(), right.state_dict()
    assert left.keys() == right.keys()
    for name, value in left.items():
        np.testing.assert_array_equal(value, right[name], err_msg=name)


def test_fused_steps_are_bit_identical_to_single_ones(tmp_path: Path) -> None:
    loader = Loader(40, sizes={27: 5})  # a ragged batch in the middle is run by itself
    one, single, rows = _fit(tmp_path / "1", loader)
    four, fused, fused_rows = _fit(tmp_path / "4", loader, steps_per_dispatch=4)
    assert four._engine.trace_counts["train_fused"] == 1
    assert fused_rows == rows
    _assert_same_state(fused, single)
    assert four.fit_loop.epoch_loop.state_dict() == one.fit_loop.epoch_loop.state_dict()


@pytest.mark.parametrize(
    "options", [{"val_check_interval": 7}, pytest.param({"max_steps": 33, "max_epochs": -1}, marks=pytest.mark.slow)]
)
def test_calls_never_cross_a_validation_or_the_last_step(tmp_path: Path, options: dict[str, Any]) -> None:
    one, single, rows = _fit(tmp_path / "1", Loader(40), **options)
    three, fused, fused_rows = _fit(tmp_path / "3", Loader(40), steps_per_dispatch=3, **options)
    assert three._engine.trace_counts["train_fused"] == 1
    assert fused_rows == rows
    assert three.global_step == one.global_step
    _assert_same_state(fused, single)


def test_a_loader_sees_the_same_counters_and_its_exception_comes_after_the_batches_before(tmp_path: Path) -> None:
    class Watched(Loader):
        trainer: Any = None

        def __iter__(self) -> Any:
            for index, batch in enumerate(super().__iter__()):
                seen.append((index, self.trainer.global_step))
                if index == 26:
                    raise OSError("the disk is gone")
                yield batch

    ends: list[Any] = []
    for steps in (1, 8):
        seen: list[tuple[int, int]] = []
        loader, module = Watched(40), Seeded()
        trainer = pl.Trainer(
            max_epochs=1, logger=False, enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=0,
            enable_checkpointing=False, default_root_dir=tmp_path, steps_per_dispatch=steps,
        )  # fmt: skip
        loader.trainer = trainer
        with pytest.raises(OSError, match="the disk is gone"):
            trainer.fit(module, loader, Loader(1))
        progress = trainer.fit_loop.epoch_loop.batch_progress.current
        ends.append((seen, trainer.global_step, progress.ready, progress.completed, module))
    assert ends[0][0] == ends[1][0] == [(i, i) for i in range(27)]
    assert ends[0][1:4] == ends[1][1:4] == (26, 26, 26)
    _assert_same_state(ends[0][4], ends[1][4])


def test_a_stop_in_the_middle_of_a_call_runs_no_batch_too_many(tmp_path: Path) -> None:
    trainers: list[Any] = []

    def stop(index: int) -> None:
        if index == 13:
            trainers[0].should_stop = True

    for steps in (1, 8):
        trainers[:] = [
            pl.Trainer(
                max_epochs=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
                enable_checkpointing=False, default_root_dir=tmp_path, log_every_n_steps=0, steps_per_dispatch=steps,
            )
        ]  # fmt: skip
        trainers[0].fit(Seeded(), Loader(40, on_batch=stop), Loader(1))
        assert trainers[0].global_step == 14


def test_a_convolution_on_a_cpu_is_written_out(tmp_path: Path) -> None:
    class Images(Net):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv(2, (3, 3))

        def training_step(self, batch: Any, batch_idx: int) -> jax.Array:
            x, y = batch
            h = self.conv(x.reshape(-1, 2, 2, 1)).reshape(x.shape[0], -1)
            loss = optax.softmax_cross_entropy_with_integer_labels(self.net(h), y).mean()
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            return None

    trainer, fused, _ = _fit(tmp_path / "4", Loader(20), Images(), steps_per_dispatch=4, log_every_n_steps=20)
    text = str(trainer._engine.compiled["train_fused"].jaxpr)
    assert "unroll=4" in text
    _, single, _ = _fit(tmp_path / "1", Loader(20), Images(), log_every_n_steps=20)
    for name, value in single.state_dict().items():
        np.testing.assert_allclose(fused.state_dict()[name], value, rtol=1e-6, atol=1e-7, err_msg=name)


@pytest.mark.parametrize(("fused_seconds", "kept"), [(0.5, 50), (2.0, 1)])
def test_auto_keeps_single_steps_unless_fused_ones_are_faster(
    fused_seconds: float, kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(fused_step.time, "perf_counter", lambda: now[0])
    single = fused_step.RepeatedStep.__call__
    take = fused_step.RepeatedStep.take

    def slow_single(self: Any, batch: Any, row: Any) -> bool:
        now[0] += 1.0 / 25
        return single(self, batch, row)

    def slow_take(self: Any, result: Any) -> None:
        now[0] += fused_seconds
        take(self, result)

    monkeypatch.setattr(fused_step.RepeatedStep, "__call__", slow_single)
    monkeypatch.setattr(fused_step.RepeatedStep, "take", slow_take)
    auto, module, rows = _fit(tmp_path / "a", Loader(250), steps_per_dispatch="auto", log_every_n_steps=50)
    assert auto._engine.fusion.steps == kept
    monkeypatch.undo()
    _, reference, expected = _fit(tmp_path / "b", Loader(250), log_every_n_steps=50)
    assert rows == expected
    _assert_same_state(module, reference)


@pytest.mark.parametrize("steps", ["auto", pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("first", [17, pytest.param(33, marks=pytest.mark.slow)])
def test_another_shape_from_some_batch_on_changes_nothing(steps: Any, first: int, tmp_path: Path) -> None:
    """As buckets give them: so many alike batches of a new shape that all batches of one call have it."""
    loader = Loader(100, sizes=dict.fromkeys(range(first, 100), 5))
    options: dict[str, Any] = {"max_epochs": 1, "log_every_n_steps": 100}
    _, fused, fused_rows = _fit(tmp_path / "fused", loader, steps_per_dispatch=steps, **options)
    _, single, rows = _fit(tmp_path / "single", loader, **options)
    assert fused_rows == rows
    _assert_same_state(fused, single)


def test_hooks_per_batch_keep_steps_single(tmp_path: Path) -> None:
    class Watch(pl.Callback):
        seen = 0

        def on_train_batch_end(self, *_: Any) -> None:
            type(self).seen += 1

    trainer, _, _ = _fit(tmp_path, Loader(20), steps_per_dispatch=4, callbacks=[Watch()])
    assert Watch.seen == 40
    assert "train_fused" not in trainer._engine.trace_counts


@pytest.mark.parametrize("value", [0, -1, 2.5, True, "fast"])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(MisconfigurationException, match="steps_per_dispatch"):
        pl.Trainer(steps_per_dispatch=value)


def test_several_devices_fuse_bit_identically(tmp_path: Path) -> None:
    loader = Loader(80)  # two batches of the loader make one for both devices
    options: dict[str, Any] = {"strategy": "ddp", "devices": 2}
    four, fused, fused_rows = _fit(tmp_path / "4", loader, steps_per_dispatch=4, **options)
    _, single, rows = _fit(tmp_path / "1", loader, **options)
    assert four._engine.trace_counts["train_fused"] == 1
    assert fused_rows == rows
    _assert_same_state(fused, single)
    batch = four._engine.compiled["train_fused"]._compiled.input_shardings[0][1]
    assert [sharding.spec for sharding in batch] == [jax.sharding.PartitionSpec(None, "data")] * 2


@pytest.mark.parametrize(
    ("every", "steps"), [(50, 50), (10, 10), (5, 5), (1, 1), (0, 50), (47, 47), (100, 50), (60, 30)]
)
def test_auto_leaves_few_steps_over_before_a_log_point(every: int, steps: int) -> None:
    assert fused_step.auto_steps(every) == steps


def _calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many batches each call of several took, as they are made."""
    counts: list[int] = []
    call = fused_step.Fusion._call

    def counting(self: Any, single: Any, stacked: Any, integers: Any, environments: Any) -> int:
        counts.append(len(integers))
        return call(self, single, stacked, integers, environments)

    monkeypatch.setattr(fused_step.Fusion, "_call", counting)
    return counts


@pytest.mark.parametrize(
    ("module", "last"), [(Seeded, [8]), (lambda: Counting(100), [])], ids=["plain", "decides after batch 30"]
)
def test_batches_left_over_before_a_log_point_are_one_call_of_the_same_program(
    module: Any, last: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = _calls(monkeypatch)
    options: dict[str, Any] = {"log_every_n_steps": 15, "max_epochs": 1}
    fused, ours, fused_rows = _fit(tmp_path / "8", Loader(40), module(), steps_per_dispatch=8, **options)
    # The first batch and the last go the ordinary way; log points come after batches 15 and 30.
    assert counts == [8, 6, 8, 7, *last]
    assert fused._engine.trace_counts["train_fused"] == 1
    _, single, rows = _fit(tmp_path / "1", Loader(40), module(), **options)
    assert fused_rows == rows
    _assert_same_state(ours, single)


def test_without_counted_steps_all_calls_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an accelerator, where a counted loop would ask the host before each step."""
    monkeypatch.setattr(fused_step.Fusion, "fewest", lambda self, single: self.steps)
    counts = _calls(monkeypatch)
    options: dict[str, Any] = {"log_every_n_steps": 15, "max_epochs": 1}
    fused, ours, fused_rows = _fit(tmp_path / "8", Loader(40), steps_per_dispatch=8, **options)
    assert counts == [8, 8, 8]
    assert "scan[" in str(fused._engine.compiled["train_fused"].jaxpr)
    _, single, rows = _fit(tmp_path / "1", Loader(40), **options)
    assert fused_rows == rows
    _assert_same_state(ours, single)


@pytest.mark.parametrize("fit", [12, 1])
def test_large_batches_are_fewer_in_a_call_with_auto(fit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = _calls(monkeypatch)
    size = sum(leaf.nbytes for leaf in next(iter(Loader(1))))
    monkeypatch.setattr(fused_step, "MOST_BYTES", fit * size + 1)
    trainer, fused, fused_rows = _fit(tmp_path / "a", Loader(100), steps_per_dispatch="auto", log_every_n_steps=100)
    assert max(counts, default=1) == fit
    assert trainer._engine.fusion.steps in (1, fit)
    _, single, rows = _fit(tmp_path / "1", Loader(100), log_every_n_steps=100)
    assert fused_rows == rows
    _assert_same_state(fused, single)


class Counting(Seeded):
    """Numbers of the host: one that is counted, one that is only read, decisions by both."""

    def __init__(self, often: int) -> None:
        super().__init__()
        self.often, self.count, self.scale, self.seen = often, 0, 0.5, 0

    def training_step(self, batch: Any, batch_idx: int) -> jax.Array:
        self.count += 1
        loss = super().training_step(batch, batch_idx) * (1.0 + self.scale * self.count / 100 + batch_idx / 50)
        if self.count % self.often == 0 or batch_idx > 30:
            self.seen = self.count
            loss = loss * 0.5
        return loss / (1 + self.trainer.max_epochs)


@pytest.mark.parametrize(("often", "fuses"), [(13, True), pytest.param(2, False, marks=pytest.mark.slow)])
def test_steps_that_count_and_decide_are_fused_between_their_decisions(often: int, fuses: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"log_every_n_steps": 20, "max_epochs": 1 + fuses}
    four, fused, fused_rows = _fit(tmp_path / "4", Loader(40), Counting(often), steps_per_dispatch=4, **options)
    _, single, rows = _fit(tmp_path / "1", Loader(40), Counting(often), **options)
    assert ("train_fused" in four._engine.trace_counts) is fuses
    assert fused_rows == rows
    _assert_same_state(fused, single)
    assert (fused.count, fused.seen) == (single.count, single.seen) == (40 * (1 + fuses), single.seen)


def test_an_attribute_made_in_a_step_is_counted_in_fused_ones(tmp_path: Path) -> None:
    class Makes(Seeded):
        def training_step(self, batch: Any, batch_idx: int) -> jax.Array:
            self.total = getattr(self, "total", 0) + batch_idx
            return super().training_step(batch, batch_idx) / (1 + self.trainer.num_training_batches)

    four, fused, rows = _fit(tmp_path / "4", Loader(40), Makes(), steps_per_dispatch=4, max_epochs=1)
    _, single, expected = _fit(tmp_path / "1", Loader(40), Makes(), max_epochs=1)
    assert four._engine.trace_counts["train_fused"] >= 1
    assert rows == expected
    assert fused.total == single.total == sum(range(40))
    _assert_same_state(fused, single)


def test_a_step_that_stops_training_stops_where_it_does_alone(tmp_path: Path) -> None:
    class Stops(Seeded):
        def training_step(self, batch: Any, batch_idx: int) -> jax.Array:
            if self.global_step == 13:
                self.trainer.should_stop = True
            return super().training_step(batch, batch_idx)

    assert _fit(tmp_path, Loader(40), Stops(), steps_per_dispatch=4)[0].global_step == 14
