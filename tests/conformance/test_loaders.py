"""DL: which loaders a run takes, how they are limited and checked, and their workers, with Lightning beside."""

from __future__ import annotations

from typing import Any

import pytest
from conformance.loaders import Items, free, watching
from support.beside import Side, caught, error, plain, rows, same, torch_loader
from support.tracing import golden

pytestmark = [
    pytest.mark.lightning,
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::jaxlightning.utilities.warnings.PossibleUserWarning"),
]


@pytest.mark.catalogue("DL01")
@pytest.mark.parametrize("verb", ["validate", "predict"])
def test_a_list_is_a_collection_of_loaders_never_of_batches(verb: str) -> None:
    def scenario(side: Side) -> Any:
        seen: list[Any] = []
        word = "validation" if verb == "validate" else verb
        trainer = side.trainer(callbacks=[watching(side, seen, f"on_{word}_batch_start")])
        loaders = [Items(*[side.array(0.0)] * 2), Items(*[side.array(1.0)] * 2)]
        result = getattr(trainer, verb)(free(side), loaders, **({} if verb == "predict" else {"verbose": False}))
        batches = trainer.num_val_batches if verb == "validate" else trainer.num_predict_batches
        one: list[Any] = []
        side.trainer(callbacks=[watching(side, one, "on_validation_batch_start")]).validate(
            free(side), Items(side.array([1.0, 2.0]), side.array([3.0])), verbose=False
        )
        return {"seen": seen, "returned": result, "num_batches": batches}, one

    found, one = same(scenario)
    assert found == golden("dataloaders")["combinations"][f"{verb}|plain_list_of_batches|default"]
    assert one == [[[1.0, 2.0], 0], [[3.0], 1]]


@pytest.mark.catalogue("DL07", "DL08")
def test_a_combined_loader_checks_its_limits_and_its_parts() -> None:
    def scenario(side: Side) -> Any:
        combined_loader = side.get("utilities.combined_loader.CombinedLoader")

        def limited(mode: str, limits: Any) -> Any:
            loader = combined_loader({"a": Items(0, 1, 2), "b": Items(10, 11)}, mode)
            loader.limits = limits
            return [plain(each) for each in loader], len(loader)

        def replaced(*parts: Any) -> Any:
            loader = combined_loader([Items(0), Items(1)], "sequential")
            loader.flattened = list(parts)
            return [plain(each) for each in loader]

        return [
            error(lambda: limited("sequential", [1, 2])),
            error(lambda: limited("sequential", [2, float("inf")])),
            error(lambda: limited("min_size", [1, 1])),
            error(lambda: limited("sequential", [1])),
            error(lambda: limited("max_size", None)),
            error(lambda: replaced(Items(7))),
            error(lambda: replaced(Items(7), Items(8, 9))),
            error(lambda: combined_loader([Items(0)], "x")),
            error(lambda: len(combined_loader([Items(0)], "max_size"))),
        ]

    same(scenario)


@pytest.mark.catalogue("DL08")
@pytest.mark.parametrize("limit", [1, 2, 0.5])
def test_each_loader_has_its_own_limit(limit: Any) -> None:
    def scenario(side: Side) -> Any:
        class Unsized:
            def __iter__(self) -> Any:
                return iter([side.array(9.0)] * 2)

        seen: list[Any] = []
        loaders = [Items(*map(side.array, (0.0, 1.0, 2.0, 3.0))), Items(*map(side.array, (10.0, 11.0)))]
        loaders += [Unsized()] if isinstance(limit, int) else []
        trainer = side.trainer(limit_val_batches=limit, callbacks=[watching(side, seen, "on_validation_batch_start")])
        trainer.validate(free(side), loaders, verbose=False)
        return seen, trainer.num_val_batches

    same(scenario)


@pytest.mark.catalogue("DL10", "DL12")
def test_loaders_given_win_over_hooks_and_are_handed_back_as_given() -> None:
    def scenario(side: Side) -> Any:
        asked: list[str] = []

        class Model(side.Tiny):  # type: ignore[name-defined,misc]
            def train_dataloader(self) -> Any:
                asked.append("train")
                return super().train_dataloader()

            def val_dataloader(self) -> Any:
                asked.append("val")
                return super().val_dataloader()

        module, trainer = Model(), side.trainer(max_epochs=2)
        train, val = side.loader(4), {"x": side.loader(2), "y": side.loader(4)}
        module.validation_step = lambda batch, batch_idx, dataloader_idx=0: None
        trainer.fit(module, train, val)
        first = [
            trainer.train_dataloader is train,
            all(trainer.val_dataloaders[name] is val[name] for name in val),
            list(asked),
        ]
        fresh = Model()
        trainer = side.trainer(max_epochs=3)
        trainer.fit(fresh)
        return first, asked, [type(trainer.train_dataloader).__name__ == type(train).__name__]

    first, asked, _ = same(scenario)
    assert first == [True, True, []]
    assert sorted(asked) == ["train", "val"]


@pytest.mark.catalogue("DL14")
def test_doubtful_loaders_are_pointed_out() -> None:
    import torch

    class Sized(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Any:
            return iter(torch.from_numpy(rows(4)))

    def scenario(side: Side) -> Any:
        found = []
        for name, loader, verb, flags in (
            ("shuffled", torch_loader(4, shuffle=True), "validate", {}),
            ("small", torch_loader(4), "fit", {"logger": True, "log_every_n_steps": 50}),
            ("sized stream", torch.utils.data.DataLoader(Sized(), batch_size=2), "validate", {}),
        ):
            with caught() as warned:
                trainer = side.trainer(limit_val_batches=1.0 if verb == "validate" else 0, **flags)
                verbose = {} if verb == "fit" else {"verbose": False}
                getattr(trainer, verb)(free(side), loader, **verbose)
            words = ("shuffling", "log_every_n_steps", "IterableDataset")
            found.append([name, sorted({kind for kind, text in warned if any(word in text for word in words)})])
        return found

    same(scenario)


@pytest.mark.catalogue("DL14")
def test_too_few_workers_are_pointed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)

    def scenario(side: Side) -> Any:
        with caught() as warned:
            side.trainer().validate(free(side), torch_loader(4), verbose=False)
        return sorted({kind for kind, text in warned if "does not have many workers" in text})

    assert same(scenario) == ["PossibleUserWarning"]


@pytest.mark.catalogue("DL18")
@pytest.mark.parametrize("loaders", [1, 2])
@pytest.mark.parametrize("hook", ["validation_step", "on_validation_batch_start", "on_validation_batch_end"])
def test_the_index_has_to_be_accepted_exactly_when_it_is_passed(hook: str, loaders: int) -> None:
    def scenario(side: Side) -> Any:
        def needs(self: Any, *args: Any, dataloader_idx: int) -> None: ...

        found = []
        for name in ("lacks", "needs"):
            base = {"validation_step": lambda self, batch, batch_idx, dataloader_idx=0: None} if loaders == 2 else {}
            functions = {
                "validation_step": {
                    "lacks": lambda self, batch, batch_idx: None,
                    "needs": lambda self, batch, batch_idx, dataloader_idx: None,
                },
                "on_validation_batch_start": {
                    "lacks": lambda self, batch, batch_idx: None,
                    "needs": lambda self, batch, batch_idx, dataloader_idx: None,
                },
                "on_validation_batch_end": {
                    "lacks": lambda self, outputs, batch, batch_idx: None,
                    "needs": lambda self, outputs, batch, batch_idx, dataloader_idx: None,
                },
            }
            module = type("Model", (side.Tiny,), {**base, hook: functions[hook][name]})()
            data = [side.loader(2) for _ in range(loaders)]
            given = data[0] if loaders == 1 else data
            found.append(
                error(lambda module=module, given=given: side.trainer().validate(module, given, verbose=False))
            )
        return found

    same(scenario)


@pytest.mark.catalogue("DL19")
@pytest.mark.parametrize("fails", [False, True])
def test_workers_are_gone_after_a_run(fails: bool) -> None:
    """And of ours no thread or child process is left either, see conftest.py."""
    import multiprocessing

    def scenario(side: Side) -> Any:
        class Model(side.Tiny):  # type: ignore[name-defined,misc]
            def on_train_batch_end(self, *args: Any) -> None:
                if fails:
                    raise ValueError("stop")

        trainer = side.trainer(limit_val_batches=0)
        with caught():  # advice about workers
            loader = torch_loader(4, num_workers=1, multiprocessing_context="spawn")
            outcome = error(lambda: trainer.fit(Model(), loader))
        return outcome, len(multiprocessing.active_children())

    assert same(scenario) == [["ValueError", "stop"] if fails else None, 0]


@pytest.mark.slow
@pytest.mark.catalogue("DL15", adaptation="workers of torch's loader follow torch's rules; others seed themselves")
def test_workers_draw_the_same_numbers_after_the_same_seed() -> None:
    from support.torch_data import RandomlyNoisy

    def scenario(side: Side) -> Any:
        import torch

        found = []
        for seed in (1, 1, 2):
            side.pl.seed_everything(seed, workers=True, verbose=False)
            seen: list[Any] = []
            callback = watching(side, seen, "on_validation_batch_start")
            loader = torch.utils.data.DataLoader(
                RandomlyNoisy(4), batch_size=2, num_workers=2, multiprocessing_context="spawn"
            )
            with caught():
                side.trainer(callbacks=[callback]).validate(free(side), loader, verbose=False)
            found.append(plain(seen))
        return [found[0] == found[1], found[0] == found[2], len(found[0])]

    assert same(scenario) == [True, False, 2]


@pytest.mark.catalogue("DL16", adaptation="one process shards its batches over the devices; no sampler is put in")
@pytest.mark.parametrize("use", [True, False])
def test_one_process_keeps_the_sampler_that_was_given(use: bool) -> None:
    import torch

    def scenario(side: Side) -> Any:
        data = torch.utils.data.TensorDataset(torch.from_numpy(rows(6)))
        sampler = torch.utils.data.distributed.DistributedSampler(data, num_replicas=2, rank=1, shuffle=False)
        loaders = [torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler), torch_loader(6)]
        seen: list[Any] = []
        for loader in loaders:
            side.trainer(
                callbacks=[watching(side, seen, "on_train_batch_start")],
                use_distributed_sampler=use,
                limit_val_batches=0,
            ).fit(free(side), loader)
        return seen

    same(scenario)


@pytest.mark.catalogue("DL21", adaptation="one compilation per structure of a batch")
def test_loaders_may_give_batches_of_different_structure() -> None:
    def scenario(side: Side) -> Any:
        class Model(side.Tiny):  # type: ignore[name-defined,misc]
            def validation_step(self, batch: Any, batch_idx: Any, dataloader_idx: Any) -> None:
                value = batch["x"].sum() if dataloader_idx == 0 else batch[0].sum() * 2
                self.log("v", value, on_epoch=True, batch_size=1)

        data = [Items({"x": side.array([1.0, 2.0])}), Items([side.array([[3.0]]), side.array(0.0)])]
        return side.trainer().validate(Model(), data, verbose=False)

    same(scenario)
