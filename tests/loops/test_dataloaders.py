"""Which batches arrive where: collections, modes, indices, reloading, transfer hooks, prediction writers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tracing import TinyModule, golden, loader

import jaxlightning as pl
from jaxlightning.callbacks import BasePredictionWriter
from jaxlightning.utilities.combined_loader import CombinedLoader
from jaxlightning.utilities.exceptions import MisconfigurationException

pytestmark = [
    pytest.mark.usefixtures("compiled_once"),
    pytest.mark.filterwarnings("ignore::jaxlightning.utilities.warnings.PossibleUserWarning"),
]

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "logger": False,
    "enable_checkpointing": False,
    "max_epochs": 1,
}
THEIRS = golden("dataloaders")


class Numbers:
    """A loader over the numbers from a to b, two in a batch."""

    def __init__(self, a: int, b: int) -> None:
        self.values = np.arange(a, b).astype(np.float32)

    def __len__(self) -> int:
        return (len(self.values) + 1) // 2

    def __iter__(self) -> Any:
        return (self.values[i : i + 2] for i in range(0, len(self.values), 2))


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value if value is None or isinstance(value, (int, float)) else np.asarray(value).tolist()


LOADERS: dict[str, Any] = {
    "single": lambda: Numbers(0, 6),
    "list": lambda: [Numbers(0, 6), Numbers(10, 14)],
    "dict": lambda: {"a": Numbers(0, 6), "b": Numbers(10, 14)},
    "nested": lambda: {"a": [Numbers(0, 6), Numbers(10, 14)], "b": Numbers(20, 22)},
    "tuple": lambda: (Numbers(0, 6), Numbers(10, 14)),
}
COMBINATIONS = [key for key in THEIRS["combinations"] if "plain_list_of_batches" not in key]


class Watch(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append([plain(batch), batch_idx])

    def on_validation_batch_start(
        self, trainer: Any, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.seen.append([plain(batch), batch_idx, dataloader_idx])

    on_predict_batch_start = on_validation_batch_start


class Reader(TinyModule):
    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        return (self.layer(np.zeros((1, 4), np.float32)) ** 2).mean()

    def validation_step(self, batch: Any, batch_idx: Any, dataloader_idx: Any = 0) -> None:
        return None

    def predict_step(self, batch: Any, batch_idx: Any, dataloader_idx: Any = 0) -> Any:
        return batch_idx


@pytest.mark.parametrize("key", COMBINATIONS)
@pytest.mark.catalogue("DL03", "DL04", "DL05")
@pytest.mark.catalogue("DL06", adaptation="a None among the loaders is another structure, so one more compilation")
def test_collections_give_lightnings_batches(key: str) -> None:
    verb, kind, mode = key.split("|")
    theirs = THEIRS["combinations"][key]
    loaders = LOADERS[kind]()
    if mode != "default":
        loaders = CombinedLoader(loaders, mode)
    watch = Watch()
    flags: dict[str, Any] = {"num_sanity_val_steps": 0, "limit_val_batches": 0} if verb == "fit" else {}
    trainer = pl.Trainer(callbacks=[watch], **flags, **QUIET)

    def run() -> Any:
        verbose = {"verbose": False} if verb == "validate" else {}
        return getattr(trainer, verb)(Reader(), loaders, **verbose)

    if isinstance(theirs, str):
        name, _, words = theirs.partition(": ")
        with pytest.raises(ValueError) as caught:
            run()
        assert type(caught.value).__name__ == name
        assert str(caught.value).startswith(words)
        return
    result = run()
    batches = {"fit": "num_training_batches", "validate": "num_val_batches", "predict": "num_predict_batches"}[verb]
    assert getattr(trainer, batches) == theirs["num_batches"]
    assert plain(result) == theirs["returned"]
    # The recorded fit validates on the module's own loader at its end.
    expected = [each for each in theirs["seen"] if verb != "fit" or len(each) == 2]
    assert watch.seen == expected


@pytest.mark.lightning
@pytest.mark.torch
def test_a_combined_loader_of_lightning_keeps_its_mode() -> None:
    from lightning.pytorch.utilities import CombinedLoader as Theirs

    watch = Watch()
    trainer = pl.Trainer(callbacks=[watch], limit_val_batches=0, **QUIET)
    given = [Numbers(0, 6), Numbers(10, 14)]
    trainer.fit(Reader(), Theirs(given, "min_size"))
    assert len(watch.seen) == 2
    assert trainer.train_dataloader is given


def test_a_collection_of_arrays_is_refused_and_names_array_loader() -> None:
    with pytest.raises(TypeError, match="ArrayLoader"):
        pl.Trainer(**QUIET).fit(Reader(), [np.zeros(2, np.float32), np.ones(2, np.float32)])


class Writer(BasePredictionWriter):
    def __init__(self, interval: str) -> None:
        super().__init__(interval)
        self.events: list[Any] = []

    def write_on_batch_end(
        self,
        trainer: Any,
        module: Any,
        prediction: Any,
        indices: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        self.events.append(["batch", plain(prediction), plain(indices), batch_idx, dataloader_idx])

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        self.events.append(["epoch", plain(predictions), plain(indices)])


class Summing(TinyModule):
    def predict_step(self, batch: Any, batch_idx: Any, dataloader_idx: Any = 0) -> Any:
        return batch.sum()


def rows(a: int, b: int) -> pl.ArrayLoader:
    return pl.ArrayLoader(np.arange(a, b).astype(np.float32), batch_size=2)


@pytest.mark.parametrize("key", [key for key in THEIRS["predict"] if "|" in key])
@pytest.mark.catalogue("PR04", "PR05")
@pytest.mark.catalogue("PR09", adaptation="indices come from our own samplers too")
def test_predictions_and_writers_get_lightnings_values(key: str) -> None:
    kind, _, value = key.partition("|return_predictions=")
    loaders = {"single": rows(0, 5), "list1": [rows(0, 5)], "two": [rows(0, 5), rows(10, 12)]}[kind]
    on_batch, on_epoch = Writer("batch"), Writer("epoch")
    trainer = pl.Trainer(callbacks=[on_batch, on_epoch], **QUIET)
    wanted = {"None": None, "True": True, "False": False}[value]
    result = trainer.predict(Summing(), loaders, return_predictions=wanted)
    theirs = THEIRS["predict"][key]
    assert plain(result) == theirs["returned"]
    assert on_batch.events == theirs["writer_batch"]
    assert on_epoch.events == theirs["writer_epoch"]


@pytest.mark.catalogue("PR08")
def test_prediction_limits_are_lightnings() -> None:
    limited = pl.Trainer(limit_predict_batches=1, **QUIET).predict(Summing(), [rows(0, 5), rows(10, 12)])
    assert plain(limited) == THEIRS["predict"]["limit_predict_1"]
    assert pl.Trainer(limit_predict_batches=0, **QUIET).predict(Summing(), rows(0, 5)) is None


@pytest.mark.catalogue("PR06", adaptation="fetched batch by batch into numpy arrays")
def test_predictions_are_on_the_host() -> None:
    result = pl.Trainer(**QUIET).predict(Summing(), rows(0, 5))
    assert result is not None
    assert all(isinstance(each, np.ndarray) for each in result)


def test_a_step_may_leave_out_the_batch_index() -> None:
    class Short(TinyModule):
        def predict_step(self, batch: Any) -> Any:
            return len(batch)

    assert pl.Trainer(**QUIET).predict(Short(), rows(0, 5)) == THEIRS["predict"]["no_batch_idx_arg"]


def test_a_prediction_of_none_is_kept_with_a_warning() -> None:
    class Nothing(TinyModule):
        def predict_step(self, batch: Any, batch_idx: Any) -> None:
            return None

    with pytest.warns(UserWarning, match="predict returned None"):
        assert pl.Trainer(**QUIET).predict(Nothing(), rows(0, 4)) == [None, None]


class Logged(TinyModule):
    c = False

    def test_step(self, batch: Any, batch_idx: Any, dataloader_idx: Any = 0) -> None:
        self.log("a", batch.sum())
        self.log("b", 1.0 * batch_idx, on_step=True, on_epoch=True)
        if self.c:
            self.log("c", float(dataloader_idx), add_dataloader_idx=False)
        self.log("s", 1.0, on_step=True, on_epoch=False)

    def on_test_epoch_end(self) -> None:
        self.log("end", 9.0)


@pytest.mark.parametrize("key", [key for key in THEIRS["evaluate"] if "|c=" in key])
@pytest.mark.catalogue("PR01", "PR13", "LG45", "LG47")
def test_results_of_a_test_are_lightnings(key: str) -> None:
    kind, _, with_c = key.partition("|c=")
    loaders = {"single": rows(0, 5), "two": [rows(0, 5), rows(10, 12)], "dict": {"x": rows(0, 5), "y": rows(10, 12)}}
    module = Logged()
    module.c = with_c == "True"
    trainer = pl.Trainer(**QUIET)
    theirs = THEIRS["evaluate"][key]
    if isinstance(theirs, str):
        with pytest.raises(MisconfigurationException, match="twice in `test_step` with different arguments"):
            trainer.test(module, loaders[kind], verbose=False)
        return
    result = trainer.test(module, loaders[kind], verbose=False)
    assert [sorted(each) for each in result] == [sorted(each) for each in theirs["returned"]]
    for ours, expected in zip(result, theirs["returned"], strict=True):
        assert all(type(value) is float for value in ours.values())
        assert ours == pytest.approx(expected, rel=1e-6)
    for name in ("callback_metrics", "logged_metrics"):
        assert {k: float(v) for k, v in getattr(trainer, name).items()} == pytest.approx(theirs[name], abs=1e-6)


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("every_0", {}),
        ("every_1", {"reload_dataloaders_every_n_epochs": 1}),
        ("every_2", {"reload_dataloaders_every_n_epochs": 2}),
        ("every_1_no_sanity", {"reload_dataloaders_every_n_epochs": 1, "num_sanity_val_steps": 0}),
        ("every_1_check_val_2", {"reload_dataloaders_every_n_epochs": 1, "check_val_every_n_epoch": 2}),
    ],
)
@pytest.mark.catalogue("TF33")
def test_loaders_are_requested_when_lightning_requests_them(name: str, flags: dict[str, Any]) -> None:
    events: list[Any] = []

    class Model(TinyModule):
        def train_dataloader(self) -> Any:
            events.append(["train_dataloader", self.trainer.current_epoch, self.trainer.state.stage.value])
            return super().train_dataloader()

        def val_dataloader(self) -> Any:
            events.append(["val_dataloader", self.trainer.current_epoch, self.trainer.state.stage.value])
            return super().val_dataloader()

    pl.Trainer(**{**QUIET, "max_epochs": 4, **flags}).fit(Model())
    assert events == THEIRS["reload"][name]


def test_a_run_resumed_where_a_reload_is_due_requests_its_loader_once(tmp_path: Path) -> None:
    events: list[int] = []

    class Model(TinyModule):
        def train_dataloader(self) -> Any:
            events.append(self.trainer.current_epoch)
            return super().train_dataloader()

    class Save(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                trainer.save_checkpoint(tmp_path / "a.ckpt")

    flags = {**QUIET, "reload_dataloaders_every_n_epochs": 2}
    pl.Trainer(**{**flags, "max_epochs": 7}, callbacks=[Save()]).fit(Model())
    assert events == [0, 2, 4, 6]
    events.clear()
    pl.Trainer(**{**flags, "max_epochs": 7}).fit(Model(), ckpt_path=tmp_path / "a.ckpt")
    assert len(events) == 3  # the one with which the resume begins is that of epoch 2
    assert events[1:] == [4, 6]


@pytest.mark.torch
@pytest.mark.catalogue("LP23")
def test_samplers_are_told_the_epoch() -> None:
    import torch

    class Sampler(torch.utils.data.Sampler):  # type: ignore[type-arg]
        def __init__(self, n: int) -> None:
            self.n, self.epochs = n, []  # type: ignore[var-annotated]

        def __iter__(self) -> Any:
            return iter(range(self.n))

        def __len__(self) -> int:
            return self.n

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    def loader_of(sampler: Any) -> Any:
        data = torch.utils.data.TensorDataset(torch.zeros(sampler.n, 4))
        return torch.utils.data.DataLoader(data, sampler=sampler)

    train, val = Sampler(4), Sampler(2)
    pl.Trainer(**{**QUIET, "max_epochs": 3}).fit(TinyModule(), loader_of(train), loader_of(val))
    assert train.epochs == THEIRS["reload"]["set_epoch_train"]
    assert val.epochs == THEIRS["reload"]["set_epoch_val"]


@pytest.mark.catalogue(
    "TF29",
    adaptation="host generators are put back; step keys are folded from counters that a sanity check does not move",
)
def test_the_sanity_check_leaves_the_order_of_training_alone() -> None:
    class Shuffled:
        def __len__(self) -> int:
            return 3

        def __iter__(self) -> Any:
            order = random.sample(range(3), 3)
            return ((np.full((2, 4), index, np.float32),) for index in order)

    seen = {}
    for sanity in (0, 2):
        pl.seed_everything(1)
        watch = Watch()
        trainer = pl.Trainer(callbacks=[watch], num_sanity_val_steps=sanity, **QUIET)
        trainer.fit(TinyModule(), Shuffled(), Shuffled())
        seen[sanity] = [each for each in watch.seen if len(each) == 2]
    assert (seen[0] == seen[2]) is THEIRS["reload"]["sanity_check_does_not_change_train_shuffle"] is True


@pytest.mark.filterwarnings("ignore:You have overridden:UserWarning")
@pytest.mark.parametrize("name", THEIRS["transfer_hooks"])
@pytest.mark.catalogue("HK27")
def test_transfer_hooks_belong_to_whom_lightning_gives_them(name: str) -> None:
    hooks = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
    owners: dict[str, tuple[Any, Any]] = {
        "module_only": (hooks, ()),
        "dm_only": ((), hooks),
        "both": (hooks, hooks),
        "module_before_dm_after": (hooks[:1], hooks[2:]),
    }
    calls: list[str] = []

    def recording(tag: str, names: Any) -> dict[str, Any]:
        def make(hook: str) -> Any:
            def run(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
                calls.append(f"{tag}.{hook}")
                return batch

            return run

        return {hook: make(hook) for hook in names}

    class Data(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return loader(2)

    in_module, in_data = owners[name]
    module = type("Module", (TinyModule,), recording("module", in_module))()
    data = type("Owner", (Data,), recording("dm", in_data))()
    pl.Trainer(limit_val_batches=0, **QUIET).fit(module, datamodule=data)
    assert calls == THEIRS["transfer_hooks"][name]


class Short:
    def __init__(self, given: int, stated: int | None) -> None:
        self.given, self.stated = given, stated

    def __iter__(self) -> Any:
        return iter([(np.zeros((2, 4), np.float32),)] * self.given)


class SizedShort(Short):
    def __len__(self) -> int:
        return int(self.stated or 0)


class Order(pl.Callback):
    def __init__(self) -> None:
        self.text, self.ends = "", []  # type: ignore[var-annotated]

    def on_train_batch_end(self, *args: Any) -> None:
        self.text += "t"

    def on_validation_start(self, *args: Any) -> None:
        self.text += "v"

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.ends.append([trainer.num_training_batches, trainer.global_step, trainer.is_last_batch])


@pytest.mark.parametrize(
    ("given", "flags"),
    [(SizedShort(3, 5), {}), (Short(3, None), {"limit_train_batches": 5})],
)
@pytest.mark.catalogue("LP18")
def test_a_loader_that_ends_early_still_validates(given: Any, flags: dict[str, Any]) -> None:
    """DIFFERENCES, LP18: the iterator's end is the epoch's end, whatever its length says."""
    order = Order()
    trainer = pl.Trainer(callbacks=[order], num_sanity_val_steps=0, **{**QUIET, "max_epochs": 2}, **flags)
    trainer.fit(TinyModule(), given, loader(2))
    assert order.text == "tttvtttv"
    assert [each[2] for each in order.ends] == [True, True]


@pytest.mark.catalogue("LP18", "GA02")
def test_a_loader_that_ends_early_flushes_its_window() -> None:
    """DIFFERENCES, LP18 and GA02: the window is applied, divided by its real count."""
    order = Order()
    trainer = pl.Trainer(callbacks=[order], accumulate_grad_batches=2, limit_val_batches=0, **QUIET)
    trainer.fit(TinyModule(), SizedShort(3, 5))
    assert order.ends == [[5, 2, True]]


def test_an_empty_unsized_loader_is_pointed_out() -> None:
    with pytest.warns(UserWarning, match="gave no batch in epoch 0"):
        pl.Trainer(limit_val_batches=0, **QUIET).fit(TinyModule(), Short(0, None))


@pytest.mark.catalogue("LP15")
def test_batches_of_none_are_skipped_as_in_lightning() -> None:
    class Gaps:
        def __len__(self) -> int:
            return 3

        def __iter__(self) -> Any:
            batch = (np.zeros((2, 4), np.float32),)
            return iter([batch, None, batch])

    class Model(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            self.ev: list[Any] = []

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.ev.append(["start", batch_idx])

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            shown = sorted(outputs) if isinstance(outputs, dict) else outputs
            self.ev.append(["end", batch_idx, shown, self.trainer.global_step])

    module = Model()
    with pytest.warns(UserWarning, match="train_dataloader yielded None"):
        pl.Trainer(limit_val_batches=0, **QUIET).fit(module, Gaps())
    theirs = golden("extra")["none_batches"][1]
    assert module.ev == [each for each in theirs if each[0] != "step"]
