"""TF: flags of the Trainer that no recorded trace covers, with Lightning beside."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.beside import Side, caught, error, events_callback, plain, same, torch_loader

import jaxlightning as pl

pytestmark = [
    pytest.mark.lightning,
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::jaxlightning.utilities.warnings.PossibleUserWarning"),
]


@pytest.mark.catalogue("TF09")
@pytest.mark.parametrize("limit", [1, 1.0, 2])
def test_a_limit_of_one_says_whether_it_means_a_batch_or_all(limit: Any) -> None:
    def scenario(side: Side) -> Any:
        with side.messages() as said:
            side.trainer(limit_train_batches=limit, limit_val_batches=limit)
        return [each for each in said if "limit_" in each]

    same(scenario)


@pytest.mark.catalogue("TF19", adaptation="the step is waited for before the clock is read")
@pytest.mark.parametrize(("every", "flags"), [(25, {}), (25, {"check_val_every_n_epoch": 2}), (45, {})])
def test_validation_by_the_clock(every: int, flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten seconds pass with every batch."""
    real, ahead = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: real() + ahead[0])

    def scenario(side: Side) -> Any:
        seen: list[Any] = []

        def note(hook: str, trainer: Any, module: Any, *args: Any) -> None:
            if hook == "on_train_batch_start":
                ahead[0] += 10.0
            elif not trainer.sanity_checking:
                seen.append([trainer.current_epoch, trainer.fit_loop.batch_idx])

        callback = events_callback(side, ["on_train_batch_start", "on_validation_start"], note)
        trainer = side.trainer(max_epochs=4, val_check_interval=timedelta(seconds=every), callbacks=[callback], **flags)
        trainer.fit(side.Tiny())
        return seen, trainer.val_check_batch

    seen, _ = same(scenario)
    assert len(seen) >= 2


@pytest.mark.catalogue("TF25", adaptation="our loaders offer an unshuffled view; torch's sampler is replaced")
@pytest.mark.catalogue("TF26")
@pytest.mark.parametrize("value", [2, 0.5])
def test_overfitting_sees_the_same_first_batches_unshuffled(value: Any) -> None:
    def scenario(side: Side) -> Any:
        seen: list[Any] = []
        hooks = ["on_train_batch_start", "on_validation_batch_start", "on_test_batch_start"]
        callback = events_callback(
            side, hooks, lambda hook, t, m, batch, *at: seen.append([hook, np.asarray(batch[0])[:, 0], *at[:1]])
        )
        trainer = side.trainer(max_epochs=2, overfit_batches=value, num_sanity_val_steps=0, callbacks=[callback])
        module = side.Tiny()
        with caught() as warned:
            trainer.fit(module, torch_loader(8, shuffle=True), torch_loader(8))
            trainer.test(module, torch_loader(6), verbose=False)
        return seen, sorted({kind for kind, text in warned if "overfit" in text})

    (seen, _) = same(scenario)
    train = [each for each in seen if each[0] == "on_train_batch_start"]
    assert train[: len(train) // 2] == train[len(train) // 2 :]
    assert train[0][1] == [0.0, 1.0]
    assert sum(each[0] == "on_test_batch_start" for each in seen) == 3


@pytest.mark.catalogue("TF30")
@pytest.mark.parametrize("value", [{0: 2}, 1.5, "2", 0, -1])
def test_accumulation_is_one_number_for_all_epochs(value: Any) -> None:
    def scenario(side: Side) -> Any:
        return error(lambda: side.trainer(accumulate_grad_batches=value).accumulate_grad_batches)

    same(scenario)


@pytest.mark.catalogue("TF34")
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_an_anomaly_names_the_first_leaf_and_the_step(where: str, tmp_path: Path) -> None:
    """DIFFERENCES: Lightning's type of exception, with more to say."""

    def scenario(side: Side) -> Any:
        class Model(side.Tiny):  # type: ignore[name-defined,misc]
            def training_step(self, batch: Any, batch_idx: Any) -> Any:
                loss = self.loss(batch)
                zero = loss * 0.0
                return loss + (zero**0.5 if where == "gradient" else zero / zero)

        try:
            side.trainer(detect_anomaly=True, limit_val_batches=0).fit(Model())
        except RuntimeError as raised:
            return type(raised).__name__, str(raised) if side.ours else ""
        return "no error"

    from support.beside import both

    theirs, ours = both(scenario)
    assert ours[0] == theirs[0] == "RuntimeError"
    assert where in ours[1]
    assert "0" in ours[1]


@pytest.mark.catalogue("TF41")
@pytest.mark.parametrize("given", [None, "~/runs", "a/../b", "memory://x/y", "."])
def test_the_root_directory_is_expanded_and_normalised(given: Any) -> None:
    def scenario(side: Side) -> Any:
        return side.trainer(default_root_dir=given).default_root_dir

    same(scenario)


@pytest.mark.catalogue("TF22", "TF23", "LO13", "LG33", "ES02")
def test_a_development_run_replaces_loggers_and_stops_callbacks(tmp_path: Path) -> None:
    def scenario(side: Side) -> Any:
        class Model(side.Tiny):  # type: ignore[name-defined,misc]
            def validation_step(self, batch: Any, batch_idx: Any) -> Any:
                self.log("v", 1.0)
                return self.loss(batch)

        stop = side.get("callbacks.EarlyStopping")("v", patience=0)
        saving = side.get("callbacks.ModelCheckpoint")(tmp_path / side.name)
        trainer = side.trainer(
            fast_dev_run=2,
            logger=True,
            enable_checkpointing=True,
            callbacks=[stop, saving],
            default_root_dir=tmp_path / side.name,
            limit_train_batches=1,
            num_sanity_val_steps=5,
        )
        trainer.fit(Model())
        logger = trainer.logger
        swallowed = [logger.experiment.anything(1), logger.log_metrics({"a": 1}), logger.name]
        limits = [trainer.limit_train_batches, trainer.num_sanity_val_steps, trainer.max_steps, trainer.global_step]
        return (
            type(logger).__name__, swallowed, limits, stop.wait_count, trainer.should_stop, saving.best_model_path,
            sorted(trainer.callback_metrics), [str(each) for each in (tmp_path / side.name).rglob("*")],
        )  # fmt: skip

    same(scenario)


def test_the_two_sides_see_the_same_batches() -> None:
    """What every scenario rests on."""

    def scenario(side: Side) -> Any:
        return [plain(batch[0]) for batch in side.loader(5)]

    assert len(same(scenario)) == 3
    assert pl.Trainer is not None
