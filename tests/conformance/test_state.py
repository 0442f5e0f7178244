"""TA: attributes of module and Trainer, and what they know of each other, with Lightning beside."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.beside import Side, error, same

pytestmark = [
    pytest.mark.lightning,
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::jaxlightning.utilities.warnings.PossibleUserWarning"),
]


@pytest.mark.catalogue("TA04", "TA05", adaptation="host values outside a step; arguments of the compiled step inside")
def test_the_module_and_the_trainer_know_each_other() -> None:
    def scenario(side: Side) -> Any:
        class Child(side.pl.LightningModule):  # type: ignore[name-defined,misc]
            def forward(self, x: Any) -> Any:
                return x

        class Model(side.Tiny):  # type: ignore[name-defined,misc]
            def __init__(self) -> None:
                super().__init__()
                self.child = Child()

            def on_train_batch_end(self, *args: Any) -> None:
                seen.append([self.current_epoch, self.global_step, self.child.trainer is self.trainer])

        seen: list[Any] = []
        module = Model()
        before = [error(lambda: module.trainer)[0], module.current_epoch, module.global_step, module.logger]
        before += [module.global_rank, module.local_rank]
        trainer = side.trainer(max_epochs=2, limit_val_batches=0)
        trainer.fit(module)
        return before, seen, trainer.lightning_module is module, module.trainer is trainer, trainer.model is not None

    before, seen, *rest = same(scenario)
    assert before == ["RuntimeError", 0, 0, None, 0, 0]
    assert all(rest)
    assert seen[-1] == [1, 6, True]


@pytest.mark.catalogue("TA06", adaptation="the device is JAX's; arrays are placed by the strategy, not by .to()")
def test_a_module_knows_its_device() -> None:
    def scenario(side: Side) -> Any:
        module = side.Tiny()
        side.trainer(limit_val_batches=0).fit(module)
        device = module.device
        return getattr(device, "type", None) or device.platform

    assert same(scenario) == "cpu"


@pytest.mark.catalogue("TA08", "CB01")
def test_callbacks_are_found_by_their_kind() -> None:
    def scenario(side: Side) -> Any:
        get = side.get
        given = [
            get("callbacks.ModelCheckpoint")(monitor="a"),
            get("callbacks.EarlyStopping")("b"),
            get("callbacks.ModelCheckpoint")(monitor="c"),
            get("callbacks.EarlyStopping")("d"),
            get("callbacks.TQDMProgressBar")(),
        ]
        trainer = side.pl.Trainer(accelerator="cpu", callbacks=given, logger=False, enable_model_summary=False)
        bare = side.trainer()
        return [
            given.index(trainer.checkpoint_callback),
            [given.index(each) for each in trainer.checkpoint_callbacks],
            given.index(trainer.early_stopping_callback),
            [given.index(each) for each in trainer.early_stopping_callbacks],
            given.index(trainer.progress_bar_callback),
            [bare.checkpoint_callback, bare.checkpoint_callbacks, bare.early_stopping_callback],
            [bare.early_stopping_callbacks, bare.progress_bar_callback],
        ]

    same(scenario)


@pytest.mark.catalogue("TA09", adaptation="one process drives all devices, so the world is the processes")
def test_one_device_is_one_world() -> None:
    def scenario(side: Side) -> Any:
        trainer = side.trainer()
        names = ("num_devices", "world_size", "node_rank", "global_rank", "local_rank", "num_nodes", "is_global_zero")
        return {name: getattr(trainer, name) for name in names}, len(trainer.device_ids)

    same(scenario)


@pytest.mark.catalogue("TA11", adaptation="batches and iterators are let go; the module keeps its variables")
def test_nothing_of_a_run_is_held_by_the_trainer() -> None:
    import gc
    import weakref

    def scenario(side: Side) -> Any:
        kept: list[Any] = []

        class Loader:
            def __len__(self) -> int:
                return 2

            def __iter__(self) -> Any:
                for _ in range(2):
                    batch = _Batch([side.array(np.ones((2, 4)))])
                    kept.append(weakref.ref(batch))
                    yield batch

        trainer = side.trainer(limit_val_batches=0)
        trainer.fit(side.Tiny(), Loader())
        gc.collect()
        return [each() is None for each in kept]

    assert same(scenario) == [True, True]


class _Batch(list[Any]):
    """A list that can be referred to weakly."""
