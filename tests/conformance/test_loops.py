"""LP and GA: counters, stops and their announcements, with Lightning beside."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from support.beside import Side, both, caught, error, events_callback, rows, same
from support.tracing import golden

import jaxlightning as pl
from jaxlightning.utilities.exceptions import SIGTERMException

pytestmark = [
    pytest.mark.lightning,
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::jaxlightning.utilities.warnings.PossibleUserWarning"),
]


def counters(trainer: Any) -> list[int]:
    return [trainer.global_step, trainer.current_epoch]


@pytest.mark.catalogue("LP01", "LP09")
def test_counters_go_on_over_runs_and_a_stop_is_forgotten() -> None:
    def scenario(side: Side) -> Any:
        seen: list[Any] = []

        class Model(side.Tiny):  # type: ignore[name-defined,misc]
            def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
                self.trainer.should_stop = self.trainer.global_step == 4

            def on_fit_start(self) -> None:
                seen.append(["should_stop", self.trainer.should_stop])

        trainer, module = side.trainer(max_epochs=2), Model()
        trainer.fit(module)
        seen += [counters(trainer), trainer.should_stop]
        trainer.validate(module, verbose=False)
        trainer.test(module, verbose=False)
        trainer.predict(module)
        seen.append(counters(trainer))
        trainer.fit_loop.max_epochs = 3
        trainer.fit(module)
        return [*seen, counters(trainer)]

    seen = same(scenario)
    assert seen[1] == [4, 2]
    assert golden("resume")["validate_after_fit_counters"] == [4, 1]


@pytest.mark.catalogue("LP21", adaptation="variables stay with the module; optimizer state is made anew")
def test_a_second_fit_goes_on_where_the_first_ended() -> None:
    def scenario(side: Side) -> Any:
        class Model(side.Tiny):  # type: ignore[name-defined,misc]
            sizes = {**side.Tiny.sizes, "train": 8}
            configured = 0

            def configure_optimizers(self) -> Any:
                self.configured += 1
                return super().configure_optimizers()

        seen: list[Any] = []
        hooks = ["on_train_batch_start", "on_validation_batch_start"]

        def note(hook: str, trainer: Any, module: Any, batch: Any, batch_idx: int, *more: Any) -> None:
            place = "sanity" if trainer.sanity_checking else "val" if "validation" in hook else trainer.current_epoch
            seen.append([place, batch_idx, trainer.global_step])

        trainer, module = side.trainer(max_epochs=1, callbacks=[events_callback(side, hooks, note)]), Model()
        trainer.fit(module)
        first, before = counters(trainer), len(seen)
        trainer.fit(module)  # nothing left to do
        same_limit = [counters(trainer), seen[before:]]
        trainer.fit_loop.max_epochs, before = 2, len(seen)
        trainer.fit(module)
        return first, same_limit, counters(trainer), seen[before:], module.configured

    first, _, second, seen, configured = same(scenario)
    theirs = golden("resume")["fit_twice_same_trainer"]
    assert [first, second] == [theirs["after_first"], theirs["after_second"]]
    recorded = [[each[0], each[2] if isinstance(each[0], str) else each[1]] for each in theirs["second_seen"]]
    assert [each[:2] for each in seen] == recorded
    assert configured == 3


@pytest.mark.catalogue("LP10", "LP08")
@pytest.mark.parametrize(
    "flags",
    [
        {"max_epochs": 1},
        {"max_epochs": -1, "max_steps": 2},
        {"max_epochs": 0},
        {"limit_train_batches": 0},
        {"max_epochs": 9, "min_epochs": 2},
        {"max_epochs": 9, "min_steps": 4},
    ],
)
def test_the_reason_of_an_end_is_announced(flags: dict[str, Any]) -> None:
    def scenario(side: Side) -> Any:
        class Model(side.Tiny):  # type: ignore[name-defined,misc]
            def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
                if "min_epochs" in flags or "min_steps" in flags:
                    self.trainer.should_stop = True

        trainer = side.trainer(**flags)
        with side.messages(10) as said:
            trainer.fit(Model())
        about = [each for each in said if "stopped" in each or "has not been met" in each or "has been met" in each]
        return about, counters(trainer)

    about, _ = same(scenario)
    assert about or flags == {"limit_train_batches": 0}


@pytest.mark.catalogue("LP13")
def test_only_the_module_may_end_an_epoch_with_minus_one() -> None:
    def scenario(side: Side) -> Any:
        callback = type("Minus", (side.Callback,), {"on_train_batch_start": lambda *args: -1})()
        trainer = side.trainer(callbacks=[callback])
        trainer.fit(side.Tiny())
        return counters(trainer)

    assert same(scenario) == [3, 1]


class _Noting:
    """A loader that says when its iterator is made."""

    def __init__(self, side: Side, samples: int, seen: list[str], name: str) -> None:
        self.inner, self.seen, self.name = side.loader(samples), seen, name

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Any:
        self.seen.append(f"iter {self.name}")
        return iter(self.inner)


@pytest.mark.catalogue("LP22")
def test_iterators_are_made_before_training_starts_and_at_each_later_epoch() -> None:
    def scenario(side: Side) -> Any:
        seen: list[str] = []
        hooks = ["on_train_start", "on_train_epoch_start", "on_validation_start"]
        callback = events_callback(side, hooks, lambda hook, *args: seen.append(hook))
        trainer = side.trainer(max_epochs=3, callbacks=[callback], num_sanity_val_steps=0)
        trainer.fit(side.Tiny(), _Noting(side, 4, seen, "train"), side.loader(2))
        # Lightning makes one for nothing but the length, right before the one that it uses.
        return [each for at, each in enumerate(seen) if each != "iter train" or seen[at - 1 : at] != [each]]

    assert same(scenario)[:2] == ["iter train", "on_train_start"]


@pytest.mark.catalogue("LP26", "LP27", "LP25")
def test_progress_counts_batches_as_lightning_does() -> None:
    def scenario(side: Side) -> Any:
        seen: list[Any] = []

        def note(hook: str, trainer: Any, *args: Any) -> None:
            loop = trainer.fit_loop.epoch_loop
            batches, validated = loop.batch_progress, loop.val_loop.batch_progress
            optimizer = loop.automatic_optimization.optim_progress
            seen.append(
                [
                    hook,
                    [loop.batch_idx, loop.total_batch_idx],
                    [batches.total.ready, batches.current.ready, batches.current.completed],
                    [validated.total.ready, validated.current.ready],
                    [optimizer.optimizer.step.total.completed, optimizer.optimizer.zero_grad.current.completed],
                    [trainer.fit_loop.epoch_progress.current.ready, trainer.fit_loop.epoch_progress.current.completed],
                ]
            )

        hooks = ["on_train_epoch_start", "on_train_batch_end", "on_validation_batch_end", "on_train_epoch_end"]
        trainer = side.trainer(
            max_epochs=2,
            accumulate_grad_batches=2,
            val_check_interval=2,
            callbacks=[events_callback(side, hooks, note)],
        )
        trainer.fit(side.Tiny())
        return seen

    same(scenario)


@pytest.mark.catalogue("LP28")
def test_a_stop_iteration_in_a_step_is_an_error_that_names_the_step() -> None:
    """DIFFERENCES: Lightning ends the epoch and says nothing."""

    def scenario(side: Side) -> Any:
        class Model(side.Tiny):  # type: ignore[name-defined,misc]
            def training_step(self, batch: Any, batch_idx: Any) -> Any:
                raise StopIteration

        try:
            side.trainer(limit_val_batches=0).fit(Model())
        except Exception as raised:
            return type(raised).__name__, "training_step" in str(raised)
        return "finished"

    theirs, ours = both(scenario)
    assert theirs == "finished"
    assert ours[1] is True


@pytest.mark.catalogue("LP29", "PR02")
@pytest.mark.parametrize("limit", [0, 1.0])
@pytest.mark.parametrize("verb", ["validate", "test"])
def test_an_evaluation_of_nothing_calls_no_hook(verb: str, limit: Any) -> None:
    def scenario(side: Side) -> Any:
        seen: list[str] = []
        word = {"validate": "validation"}.get(verb, verb)
        hooks = ["setup", "teardown", f"on_{word}_start", f"on_{word}_epoch_start", f"on_{word}_end"]
        callback = events_callback(side, hooks, lambda hook, *args, **kwargs: seen.append(hook))
        trainer = side.trainer(limit_val_batches=limit, limit_test_batches=limit, callbacks=[callback])
        return getattr(trainer, verb)(side.Tiny(), verbose=False), seen

    returned, _ = same(scenario)
    assert returned == ([] if limit == 0 else [{}])


@pytest.mark.catalogue("LP32")
def test_a_termination_ends_with_code_143_and_one_checkpoint(tmp_path: Path) -> None:
    """DIFFERENCES: the step finishes first; the handlers of before are back afterwards."""

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            import flax.linen as nn

            self.layer, self.ended = nn.Dense(1), []

        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            return (self.layer(batch) ** 2).mean()

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                os.kill(os.getpid(), signal.SIGTERM)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.ended.append(batch_idx)

        def configure_optimizers(self) -> Any:
            return pl.optim.SGD(self.parameters(), lr=0.0)

    before = signal.getsignal(signal.SIGTERM)
    module = Model()
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = pl.Trainer(accelerator="cpu", devices=1, default_root_dir=tmp_path, max_epochs=1, **quiet)
    with pytest.raises(SIGTERMException) as raised:
        trainer.fit(module, pl.ArrayLoader(rows(8), batch_size=2))
    assert raised.value.code == 143
    assert module.ended[-1] == 1
    assert trainer.received_sigterm
    assert signal.getsignal(signal.SIGTERM) == before
    assert [each.name for each in tmp_path.rglob("interrupted*.ckpt")] == ["interrupted.ckpt"]


@pytest.mark.catalogue("GA07")
@pytest.mark.parametrize("name", ["gas_empty", "gas_neg_epoch", "gas_zero_factor", "gas_with_trainer_acc"])
def test_a_wrong_accumulation_schedule_is_refused(name: str) -> None:
    given: dict[str, Any] = {"gas_empty": {}, "gas_neg_epoch": {-1: 2}, "gas_zero_factor": {0: 0}}

    def scenario(side: Side) -> Any:
        def run() -> Any:
            callback = side.get("callbacks.GradientAccumulationScheduler")(given.get(name, {0: 2}))
            side.trainer(callbacks=[callback], accumulate_grad_batches=2).fit(side.Tiny())

        return error(run)

    assert same(scenario)[0] == golden("errors")[name]["type"]


@pytest.mark.catalogue("GA07")
def test_an_overridden_step_or_zeroing_is_pointed_out_beside_a_schedule() -> None:
    def scenario(side: Side) -> Any:
        class Model(side.Tiny):  # type: ignore[name-defined,misc]
            def optimizer_zero_grad(self, *args: Any) -> None:
                super().optimizer_zero_grad(*args)

        callback = side.get("callbacks.GradientAccumulationScheduler")({0: 2})
        with caught() as warned:
            side.trainer(callbacks=[callback], limit_val_batches=0).fit(Model())
        return [[kind, text[:60]] for kind, text in warned if "overriding" in text]

    theirs, ours = both(scenario)
    assert len(theirs) == 1
    assert ours == theirs
