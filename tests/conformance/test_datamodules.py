"""DM: a datamodule's hooks, hyper-parameters and state, with Lightning beside."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from conformance.loggers import recorder
from support.beside import Side, error, events_callback, rows, same
from support.tracing import golden

pytestmark = [
    pytest.mark.lightning,
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::jaxlightning.utilities.warnings.PossibleUserWarning"),
]


KINDS = ("train", "val", "test", "predict")


@pytest.mark.catalogue("DM04", adaptation="any dataset with len and [] serves, torch's with its loader")
def test_a_datamodule_from_datasets_has_the_hooks_of_what_was_given() -> None:
    import torch

    def scenario(side: Side) -> Any:
        data = torch.utils.data.TensorDataset(torch.from_numpy(rows(6)))

        class Data(side.pl.LightningDataModule):  # type: ignore[name-defined,misc]
            def __init__(self, batch_size: int = 1, extra: int = 0) -> None:
                super().__init__()
                self.seen = [batch_size, extra]

        from_datasets = side.pl.LightningDataModule.from_datasets
        module = from_datasets(train_dataset=data, predict_dataset=[data, data], batch_size=4, num_workers=0)
        own = Data.from_datasets(train_dataset=data, val_dataset=data, batch_size=3, extra=7)
        train = module.train_dataloader()
        # A hook that was not given raises in Lightning when it is called; ours returns None.
        have = [error(lambda kind=kind: bool(getattr(module, f"{kind}_dataloader")())) is True for kind in KINDS]
        return (
            [len(train), train.batch_size, type(train.sampler).__name__],
            len(module.predict_dataloader()),
            have,
            own.seen,
            type(own.val_dataloader().sampler).__name__,
        )

    same(scenario)


@pytest.mark.catalogue("DM02", "DM01")
@pytest.mark.parametrize("verb", ["fit", "validate", "test", "predict"])
def test_a_datamodule_lives_through_a_run(verb: str) -> None:
    def scenario(side: Side) -> Any:
        seen: list[Any] = []

        class Data(side.pl.LightningDataModule):  # type: ignore[name-defined,misc]
            def prepare_data(self) -> None:
                seen.append("prepare_data")

            def setup(self, stage: str) -> None:
                seen.append(["dm.setup", str(getattr(stage, "value", stage)), self.trainer is not None])

            def teardown(self, stage: str) -> None:
                seen.append(["dm.teardown", str(getattr(stage, "value", stage))])

            def state_dict(self) -> dict[str, Any]:
                seen.append("state_dict")
                return {}

        for kind in ("train", "val", "test", "predict"):
            setattr(Data, f"{kind}_dataloader", lambda self, kind=kind: (seen.append(kind), side.loader(2))[1])
        hooks = ["setup", "teardown"]
        callback = events_callback(side, hooks, lambda hook, *args, **kwargs: seen.append(f"callback.{hook}"))
        data, trainer = Data(), side.trainer(callbacks=[callback], num_sanity_val_steps=0)
        getattr(trainer, verb)(side.Tiny(), datamodule=data)
        return seen, data.trainer is trainer

    same(scenario)


@pytest.mark.catalogue("DM06", "LO14", "HP07", "TF40")
def test_hyperparameters_are_logged_once_and_together() -> None:
    theirs = golden("hparams")

    def scenario(side: Side) -> Any:
        class Module(side.Tiny):  # type: ignore[name-defined,misc]
            def __init__(self, hidden: int = 4, lr: float = 0.1) -> None:
                super().__init__()
                self.save_hyperparameters()

        class Data(side.pl.LightningDataModule):  # type: ignore[name-defined,misc]
            def __init__(self, bs: int = 2, lr: float | None = None) -> None:
                super().__init__()
                self.save_hyperparameters(ignore="lr" if lr is None else None)

            def train_dataloader(self) -> Any:
                return side.loader(4)

        class Silent(side.Tiny):  # type: ignore[name-defined,misc]
            def __init__(self, q: int = 1) -> None:
                super().__init__()
                self.save_hyperparameters(logger=False)

        def logged(module: Any, data: Any = None, **flags: Any) -> Any:
            calls: list[Any] = []
            trainer = side.trainer(logger=recorder(side, calls), limit_val_batches=0, **flags)
            trainer.fit(module, **({} if data is None else {"datamodule": data}))
            for verb in ("validate", "test", "predict") if data is None else ():
                getattr(trainer, verb)(module, **({} if verb == "predict" else {"verbose": False}))
            return [each[2] for each in calls if each[1] == "log_hyperparams"]

        return {
            "logged": logged(Module(hidden=8), Data()),
            "conflict": error(lambda: logged(Module(lr=0.1), Data(lr=0.2))),
            "autolog_False": logged(Module(), enable_autolog_hparams=False),
            "logger_False": logged(Silent()),
            "each verb": len(logged(Module())),
        }

    found = same(scenario)
    assert found["logged"] == theirs["logged"]
    assert found["autolog_False"] == theirs["autolog_False"]
    assert found["logger_False"] == theirs["logger_False"]
    assert found["conflict"][0] == theirs["conflict"].partition(":")[0]


@pytest.mark.catalogue("DM09")
def test_a_datamodule_describes_itself_and_can_be_pickled() -> None:
    import torch

    def scenario(side: Side) -> Any:
        data = torch.utils.data.TensorDataset(torch.from_numpy(rows(6)))
        module = side.pl.LightningDataModule.from_datasets(train_dataset=data, batch_size=2)
        trainer = side.trainer(limit_val_batches=0)
        trainer.fit(side.Tiny(), datamodule=module)
        empty = side.pl.LightningDataModule()
        again = pickle.loads(pickle.dumps(empty))
        return str(module), str(empty), type(again).__name__

    same(scenario)


@pytest.mark.catalogue("DM10")
def test_empty_loaders_are_a_choice_of_the_datamodule() -> None:
    def scenario(side: Side) -> Any:
        data = side.pl.LightningDataModule()
        return [
            data.allow_zero_length_dataloader_with_multiple_devices,
            side.Tiny().allow_zero_length_dataloader_with_multiple_devices,
            data.prepare_data_per_node,
        ]

    same(scenario)


@pytest.mark.catalogue("DM03", "DM07", "DM08")
def test_a_datamodule_saves_loads_and_hears_of_exceptions(tmp_path: Path) -> None:
    def scenario(side: Side) -> Any:
        seen: list[Any] = []

        class Data(side.pl.LightningDataModule):  # type: ignore[name-defined,misc]
            def __init__(self, bs: int = 2) -> None:
                super().__init__()
                self.save_hyperparameters()
                self.at = 0

            def train_dataloader(self) -> Any:
                return side.loader(4)

            def state_dict(self) -> dict[str, Any]:
                return {"at": 7}

            def load_state_dict(self, state_dict: dict[str, Any]) -> None:
                seen.append(state_dict)

            def on_exception(self, exception: BaseException) -> None:
                seen.append(type(exception).__name__)

        path = tmp_path / f"{side.name}.ckpt"
        trainer = side.trainer(limit_val_batches=0)
        trainer.fit(side.Tiny(), datamodule=Data(bs=3))
        trainer.save_checkpoint(path)
        side.trainer(limit_val_batches=0, max_epochs=2).fit(side.Tiny(), datamodule=Data(), ckpt_path=path)
        loaded = Data.load_from_checkpoint(path)

        class Fails(side.Tiny):  # type: ignore[name-defined,misc]
            def on_train_start(self) -> None:
                raise ValueError("x")

        outcome = error(lambda: side.trainer(limit_val_batches=0).fit(Fails(), datamodule=Data()))
        return seen, dict(loaded.hparams), outcome

    seen, hparams, _ = same(scenario)
    assert seen[-1] == "ValueError"
    assert hparams == {"bs": 3}
