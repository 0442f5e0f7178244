"""MC and RS: checkpoint files, callbacks' states, loading and resuming, with Lightning beside."""

from __future__ import annotations

import os
import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.beside import Side, both, caught, error, events_callback, same

pytestmark = [
    pytest.mark.lightning,
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::jaxlightning.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory:UserWarning"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning"),
]

EPOCHS = {"val_check_interval": 1.0, "num_sanity_val_steps": 0}


def saving(side: Side, root: Path, **options: Any) -> Any:
    return side.get("callbacks.ModelCheckpoint")(root / side.name, **options)


def logging_module(side: Side) -> Any:
    class Model(side.Tiny):  # type: ignore[name-defined,misc]
        def on_validation_epoch_end(self) -> None:
            self.log("v", [5.0, 3.0, 4.0, 1.0, 2.0][self.current_epoch % 5])

    return Model()


def _host(value: Any) -> Any:
    return value.detach().numpy() if hasattr(value, "detach") else value


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.is_dir() else []


def fit(side: Side, callbacks: list[Any], module: Any = None, **flags: Any) -> Any:
    ckpt_path = flags.pop("ckpt_path", None)
    t = side.trainer(**{"max_epochs": 3, "enable_checkpointing": True, "callbacks": callbacks, **EPOCHS, **flags})
    t.fit(module or logging_module(side), ckpt_path=ckpt_path)
    return t


@pytest.mark.catalogue("MC06", "MC10")
def test_what_is_kept_without_a_metric_and_by_epoch_or_step(tmp_path: Path) -> None:
    def scenario(side: Side) -> Any:
        found: list[Any] = []
        for number, options in enumerate(
            [
                {},
                {"save_top_k": -1},
                {"save_top_k": 0},
                {"monitor": "epoch", "mode": "max", "save_top_k": 2},
                {"monitor": "step", "mode": "min"},
                {"monitor": "step", "mode": "max", "filename": "{epoch}-{step}-{v:.1f}"},
            ]
        ):
            root = tmp_path / str(number)
            callback = saving(side, root, **options)
            fit(side, [callback])
            score = callback.best_model_score
            found.append(
                [
                    names(root / side.name),
                    os.path.basename(callback.best_model_path),
                    None if score is None else float(score),
                ]
            )
        found.append(error(lambda: saving(side, tmp_path, save_top_k=2)))
        return found

    same(scenario)


@pytest.mark.catalogue("MC12", "MC33")
def test_moments_exclude_each_other_and_values_have_limits(tmp_path: Path) -> None:
    def scenario(side: Side) -> Any:
        trials: list[dict[str, Any]] = [
            {"every_n_train_steps": 1, "every_n_epochs": 1},
            {"every_n_train_steps": 1, "train_time_interval": timedelta(seconds=1)},
            {"every_n_epochs": -1},
            {"every_n_train_steps": -2},
            {"every_n_epochs": 0},
            {"mode": "best"},
            {"monitor": "v", "save_top_k": -3},
        ]
        kinds = [error(lambda o=options: saving(side, tmp_path, **o) and "fine") for options in trials]
        return [kind[0] if isinstance(kind, list) else kind for kind in kinds], saving(side, tmp_path)._every_n_epochs

    same(scenario)


@pytest.mark.catalogue("MC19", "MC36", "MC24")
def test_when_it_saves_and_which_counters_a_file_has(tmp_path: Path) -> None:
    def scenario(side: Side) -> Any:
        seen: list[Any] = []

        class Watch(side.Callback):  # type: ignore[name-defined,misc]
            def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
                seen.append([checkpoint["epoch"], checkpoint["global_step"], trainer.current_epoch])

        first = saving(side, tmp_path / "a", every_n_train_steps=2, save_top_k=-1, save_last=True)
        t = fit(side, [first, Watch()], num_sanity_val_steps=2, max_epochs=2)
        t.save_checkpoint(tmp_path / side.name / "after.ckpt")
        files = names(tmp_path / "a" / side.name)
        t.validate(verbose=False, ckpt_path=None, model=t.lightning_module)
        return seen, files, names(tmp_path / "a" / side.name) == files

    same(scenario)


@pytest.mark.catalogue("MC27")
def test_what_the_run_was_resumed_from_stays(tmp_path: Path) -> None:
    def scenario(side: Side) -> Any:
        root = tmp_path / "a"
        fit(side, [saving(side, root)], max_epochs=1)
        [first] = names(root / side.name)
        outside = tmp_path / f"outside-{side.name}.ckpt"
        t = fit(side, [saving(side, root)], max_epochs=3, ckpt_path=root / side.name / first)
        t.save_checkpoint(outside)
        return first, names(root / side.name), outside.exists()

    same(scenario)


@pytest.mark.catalogue("MC28", "MC29")
def test_the_state_of_the_callback(tmp_path: Path) -> None:
    def scenario(side: Side) -> Any:
        callback = saving(side, tmp_path / "a", monitor="v", save_top_k=2, save_last=True)
        fit(side, [callback])
        state = callback.state_dict()
        same_place = saving(side, tmp_path / "a", monitor="v", save_top_k=2)
        same_place.load_state_dict(state)
        other = saving(side, tmp_path / "b", monitor="v", save_top_k=2)
        with caught() as found:
            other.load_state_dict(state)
        return (
            callback.state_key,
            list(state),
            {os.path.basename(path): float(value) for path, value in same_place.best_k_models.items()},
            float(same_place.best_model_score),
            [len(other.best_k_models), other.best_model_score, os.path.basename(other.best_model_path)],
            [category for category, text in found if "dirpath" in text],
        )

    same(scenario)


@pytest.mark.catalogue("MC30")
def test_a_used_directory_is_warned_about(tmp_path: Path) -> None:
    def scenario(side: Side) -> Any:
        found = []
        for _ in range(2):
            with caught() as warned:
                fit(side, [saving(side, tmp_path)], max_epochs=1)
            found.append([text.split("/")[0] for _, text in warned if text.startswith("Checkpoint directory")])
        return found, len(names(tmp_path / side.name))

    same(scenario)


@pytest.mark.catalogue("MC31", "MC37")
def test_the_kept_files_as_yaml_and_a_copy_by_pickle(tmp_path: Path) -> None:
    import yaml

    def scenario(side: Side) -> Any:
        callback = saving(side, tmp_path, monitor="v", save_top_k=2)
        fit(side, [callback])
        callback.to_yaml(tmp_path / f"{side.name}.yaml")
        text = yaml.safe_load((tmp_path / f"{side.name}.yaml").read_text())
        fresh = saving(side, tmp_path, monitor="v", save_top_k=2)  # after a run it holds its module's `log`
        fresh.load_state_dict(callback.state_dict())
        copy = pickle.loads(pickle.dumps(fresh))
        return (
            {os.path.basename(path): float(value) for path, value in text.items()},
            copy.state_key == callback.state_key,
            sorted(map(os.path.basename, copy.best_k_models)),
        )

    same(scenario)


@pytest.mark.catalogue("MC34", "MC35")
def test_which_checkpoint_callbacks_a_trainer_has(tmp_path: Path) -> None:
    def scenario(side: Side) -> Any:
        make = side.get("callbacks.ModelCheckpoint")
        default = side.trainer(enable_checkpointing=True, default_root_dir=tmp_path)
        own = side.trainer(enable_checkpointing=True, callbacks=[make(monitor="v")])
        twice = error(lambda: side.trainer(enable_checkpointing=True, callbacks=[make(), make()]))
        off = error(lambda: side.trainer(enable_checkpointing=False, callbacks=[make()]))
        return (
            [type(each).__name__ for each in default.checkpoint_callbacks],
            [each.monitor for each in own.checkpoint_callbacks],
            side.trainer().checkpoint_callback is None,
            twice[0],
            off[0],
        )

    same(scenario)


@pytest.mark.catalogue("RS02", "RS03", "RS05", "RS18")
def test_weights_only_files_and_what_is_refused(tmp_path: Path) -> None:
    def scenario(side: Side) -> Any:
        module = logging_module(side)
        t = side.trainer(max_epochs=1, **EPOCHS)
        unattached = error(lambda: side.trainer().save_checkpoint(tmp_path / "x.ckpt"))
        calls: list[str] = []
        t.callbacks.append(events_callback(side, ["on_save_checkpoint"], lambda hook, *rest: calls.append(hook)))
        t.fit(module)
        path = tmp_path / f"{side.name}.ckpt"
        t.save_checkpoint(path, weights_only=True)
        before = list(calls)
        t.save_checkpoint(tmp_path / f"{side.name}-all.ckpt")
        resumed = error(lambda: side.trainer(max_epochs=2).fit(logging_module(side), ckpt_path=path))
        missing = error(lambda: side.trainer().fit(logging_module(side), ckpt_path=tmp_path / "none.ckpt"))
        return unattached[0], before, calls, resumed[0], missing[0]

    same(scenario)


@pytest.mark.catalogue("RS01", adaptation="the same keys; a directory, with the arrays in items of their own")
@pytest.mark.catalogue("RS04", "RS08")
def test_what_a_fit_and_the_other_verbs_restore(tmp_path: Path) -> None:
    def scenario(side: Side) -> Any:
        t = side.trainer(max_epochs=2, **EPOCHS)
        module = logging_module(side)
        t.fit(module)
        path = tmp_path / f"{side.name}.ckpt"
        keys: list[str] = []

        class Watch(side.Callback):  # type: ignore[name-defined,misc]
            def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
                keys.extend(sorted(checkpoint))

        t.save_checkpoint(path)
        found: list[Any] = []
        for verb in ("validate", "test", "predict", "fit"):
            other = side.trainer(max_epochs=3, callbacks=[Watch()], **EPOCHS)
            fresh = logging_module(side)
            arguments = {"verbose": False} if verb in ("validate", "test") else {}
            getattr(other, verb)(fresh, ckpt_path=path, **arguments)
            found.append([verb, other.global_step, other.current_epoch, os.fspath(other.ckpt_path) == str(path)])
        sticky = side.trainer(max_epochs=3, **EPOCHS)
        sticky.ckpt_path = path
        sticky.fit(logging_module(side))
        found.append([sticky.global_step, os.fspath(sticky.ckpt_path) == str(path)])
        return found, sorted(
            {"epoch", "global_step", "state_dict", "loops", "callbacks", "optimizer_states"} - set(keys)
        )

    found, missing = same(scenario)
    assert missing == []
    assert [each[1] for each in found[:3]] == [0, 0, 0]


@pytest.mark.catalogue("RS27")
def test_nothing_of_a_loaded_checkpoint_is_kept(tmp_path: Path) -> None:
    def scenario(side: Side) -> Any:
        t = side.trainer(max_epochs=1, **EPOCHS)
        t.fit(logging_module(side))
        t.save_checkpoint(tmp_path / f"{side.name}.ckpt")
        other = side.trainer(max_epochs=2, **EPOCHS)
        during: list[int] = []
        hooks = events_callback(
            side, ["on_load_checkpoint"], lambda hook, t, m, checkpoint: during.append(len(checkpoint))
        )
        other.callbacks.append(hooks)
        other.fit(logging_module(side), ckpt_path=tmp_path / f"{side.name}.ckpt")
        connector = other._checkpoint_connector
        kept = connector._loaded if side.ours else connector._loaded_checkpoint
        return [each > 0 for each in during], len(kept)

    same(scenario)


@pytest.mark.catalogue("RS14")
def test_a_run_that_failed_in_validation_finishes_it_first(tmp_path: Path) -> None:
    def scenario(side: Side) -> Any:
        class Model(side.Tiny):  # type: ignore[name-defined,misc]
            fail = True

            def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
                if self.fail and batch_idx == 1:
                    raise RuntimeError("boom")
                events.append(["v", self.current_epoch])

            def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
                events.append(["t", self.current_epoch, batch_idx])

            def on_train_epoch_start(self) -> None:
                events.append(["epoch", self.current_epoch])

        events: list[Any] = []
        make = side.get("callbacks.OnExceptionCheckpoint")
        folder = tmp_path / side.name

        def trainer() -> Any:
            return side.trainer(
                max_epochs=2,
                val_check_interval=2,
                num_sanity_val_steps=0,
                enable_checkpointing=True,
                callbacks=[make(folder)],
            )

        with caught(), pytest.raises(RuntimeError, match="boom"):
            trainer().fit(Model())
        failed, events[:] = list(events), []
        module = Model()
        module.fail = False
        with caught():
            trainer().fit(module, ckpt_path=folder / "on_exception.ckpt")
        return failed, events

    (failed, theirs), (ours_failed, ours) = both(scenario)
    assert ours_failed == failed
    # Here 2.6.6 goes on with the next batch; the row's words, and RS12's, are that the validation comes first.
    assert ours == [["v", 0], ["v", 0], *theirs]


@pytest.mark.catalogue("RS20", adaptation="sets of flat paths are compared, and shapes")
@pytest.mark.catalogue("RS21", adaptation="no map_location: arrays go where the strategy places them")
@pytest.mark.catalogue("RS26")
def test_loading_by_the_class(tmp_path: Path) -> None:
    def scenario(side: Side) -> Any:
        class Small(side.Tiny):  # type: ignore[name-defined,misc]
            def __init__(self, width: int = 1, name: str = "a", **more: Any) -> None:
                super().__init__()
                self.save_hyperparameters()

        class Strict(side.Tiny):  # type: ignore[name-defined,misc]
            def __init__(self, width: int = 1) -> None:
                super().__init__()
                self.save_hyperparameters()

        class Bigger(Strict):
            def __init__(self, width: int = 1) -> None:
                super().__init__(width)
                self.extra = type(side.Tiny().layer)(2) if side.ours else type(side.Tiny().layer)(4, 2)

            def loss(self, batch: Any) -> Any:
                return super().loss(batch) + (self.extra(batch[0]) ** 2).mean()

        paths = {}
        for cls in (Small, Strict):
            t = side.trainer(max_epochs=1, limit_train_batches=1, **EPOCHS)
            t.fit(cls(width=3))
            paths[cls] = tmp_path / f"{side.name}-{cls.__name__}.ckpt"
            t.save_checkpoint(paths[cls])
        loaded = Small.load_from_checkpoint(paths[Small], name="b", other=1)
        plain = Strict.load_from_checkpoint(paths[Strict], unknown=5)
        options = {} if side.ours else {"weights_only": False}
        with caught() as warned:
            loose = Bigger.load_from_checkpoint(paths[Strict], strict=False, **options)
        return (
            dict(loaded.hparams),
            dict(plain.hparams),
            error(lambda: Strict().load_from_checkpoint(paths[Strict]))[0],
            type(loose).__name__,
            sorted({text.split(":")[0] for _, text in warned if text.startswith("Found keys")}),
            error(lambda: Strict.load_from_checkpoint(paths[Strict], hparams_file=tmp_path / "x.txt"))[0],
        )

    theirs, ours = both(scenario)
    assert ours == theirs


@pytest.mark.catalogue("RS22")
def test_paths_with_a_scheme_are_paths(tmp_path: Path) -> None:
    def scenario(side: Side) -> Any:
        module = logging_module(side)
        t = side.trainer(max_epochs=1, **EPOCHS)
        t.fit(module)
        path = f"file://{tmp_path}/{side.name}/far.ckpt"
        t.save_checkpoint(path)
        other = side.trainer(max_epochs=2, **EPOCHS)
        other.fit(logging_module(side), ckpt_path=path)
        return other.global_step

    assert same(scenario) == 6


@pytest.mark.catalogue("RS23", adaptation="saves are in the background by themselves; the snapshot is a host copy")
def test_a_background_save_has_the_values_of_its_moment(tmp_path: Path) -> None:
    def scenario(side: Side) -> Any:
        class Model(side.Tiny):  # type: ignore[name-defined,misc]
            def configure_optimizers(self) -> Any:
                return side.sgd(self, lr=0.05)

        seen: list[Any] = []

        class Save(side.Callback):  # type: ignore[name-defined,misc]
            def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
                if trainer.global_step == 1:
                    seen.extend(np.array(_host(value), copy=True) for value in module.state_dict().values())
                    trainer.save_checkpoint(tmp_path / f"{side.name}.ckpt")

        flags: dict[str, Any] = {}
        if not side.ours:
            from lightning.pytorch.plugins import AsyncCheckpointIO

            flags["plugins"] = [AsyncCheckpointIO()]
        side.trainer(callbacks=[Save()], limit_val_batches=0, **flags).fit(Model())
        loaded = Model.load_from_checkpoint(tmp_path / f"{side.name}.ckpt")
        values = [np.asarray(_host(value)) for value in loaded.state_dict().values()]
        return [bool(np.array_equal(a, b)) for a, b in zip(values, seen, strict=True)]

    assert same(scenario) == [True, True]


@pytest.mark.catalogue("RS25")
def test_a_slurm_job_takes_the_checkpoint_with_the_highest_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"SLURM_NTASKS": "1", "SLURM_JOB_ID": "12", "SLURM_JOB_NAME": "train"}.items():
        monkeypatch.setenv(name, value)

    def scenario(side: Side) -> Any:
        root = tmp_path / side.name
        module = logging_module(side)
        t = side.trainer(max_epochs=1, default_root_dir=root, **EPOCHS)
        t.fit(module)
        for number in (1, 2, 10):
            t.save_checkpoint(root / f"hpc_ckpt_{number}.ckpt")
        other = side.trainer(max_epochs=2, default_root_dir=root, **EPOCHS)
        other.fit(logging_module(side))
        return os.path.basename(other.ckpt_path), other.global_step

    assert same(scenario) == ["hpc_ckpt_10.ckpt", 6]
