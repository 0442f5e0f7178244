"""HP: how arguments are collected, and which can be written, with Lightning beside."""

from __future__ import annotations

import argparse
import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest
from support.beside import Side, caught, error, same
from support.tracing import golden

pytestmark = [
    pytest.mark.lightning,
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::jaxlightning.utilities.warnings.PossibleUserWarning"),
]


@pytest.mark.catalogue("HP01", "HP02", "HP03")
def test_arguments_are_collected_like_lightnings() -> None:
    def scenario(side: Side) -> Any:
        base = side.pl.LightningModule

        class All(base):  # type: ignore[misc,valid-type]
            def __init__(self, a: int, b: int = 2, *args: Any, c: str = "x", **kw: Any) -> None:
                super().__init__()
                local = a + 1
                self.save_hyperparameters()
                del local

        class Sub(All):
            def __init__(self, z: int = 9, **kw: Any) -> None:
                z += 1
                super().__init__(a=5, **kw)
                self.save_hyperparameters()

        class Ignoring(base):  # type: ignore[misc,valid-type]
            def __init__(self, a: int = 1, b: int = 2) -> None:
                super().__init__()
                self.save_hyperparameters(ignore=["b"])

        class One(base):  # type: ignore[misc,valid-type]
            def __init__(self, conf: Any) -> None:
                super().__init__()
                self.save_hyperparameters(conf)

        class Chosen(base):  # type: ignore[misc,valid-type]
            def __init__(self, a: int = 1, b: int = 2, c: int = 3) -> None:
                super().__init__()
                self.save_hyperparameters("a", "c")

        found = [dict(each.hparams) for each in (All(1, 7, 8, c="y", extra=5), Sub(q=3), Ignoring(), Chosen(c=9))]
        found += [dict(One({"x": 1}).hparams), dict(One(argparse.Namespace(x=1)).hparams)]
        chosen = Chosen()
        chosen.hparams.a = 50
        chosen.hparams["new"] = 1
        found.append([chosen.hparams.a, chosen.hparams_initial.a, "new" in chosen.hparams_initial])
        found.append([error(lambda value=value: One(value))[0] for value in (1, 1.5, "x", True)])
        return found

    same(scenario)


@pytest.mark.catalogue("HP04")
def test_composition_and_dataclasses_do_not_mix_arguments_up() -> None:
    def scenario(side: Side) -> Any:
        class Inner(side.pl.LightningModule):  # type: ignore[name-defined,misc]
            def __init__(self, a: int, same_name: str = "inner") -> None:
                super().__init__()
                self.save_hyperparameters()

        class Outer:
            def __init__(self, b: int, same_name: str = "outer") -> None:
                self.inner = Inner(a=b + 1)

        @dataclasses.dataclass
        class Data(side.pl.LightningDataModule):  # type: ignore[name-defined,misc]
            x: int
            y: str = "y"
            hidden: int = dataclasses.field(default=3, init=False)

            def __post_init__(self) -> None:
                super().__init__()
                self.save_hyperparameters()

        outer = Outer(1)
        return dict(outer.inner.hparams), dict(Data(2).hparams)

    same(scenario)


@pytest.mark.catalogue("HP05", adaptation="networks of flax and large arrays are warned about")
def test_a_network_among_the_arguments_is_pointed_out() -> None:
    def scenario(side: Side) -> Any:
        if side.ours:
            import flax.linen as nn

            net: Any = nn.Dense(1)
        else:
            import torch

            net = torch.nn.Linear(1, 1)

        class Held(side.pl.LightningModule):  # type: ignore[name-defined,misc]
            def __init__(self, a: Any) -> None:
                super().__init__()
                self.save_hyperparameters()

        with caught() as about_networks:
            Held(net)
        return [[kind, text[:16]] for kind, text in about_networks]

    found = same(scenario)
    assert [text for _, text in found] == [text[:16] for text in golden("hparams")["nn_module_warn"]]


@pytest.mark.catalogue("HP05", adaptation="nothing is pickled: what cannot be written is left out of the checkpoint")
def test_an_argument_that_cannot_be_written_is_left_out_with_a_warning(tmp_path: Path) -> None:
    recorded = golden("hparams")["unpicklable_dropped"]

    def scenario(side: Side) -> Any:
        class Unpicklable(side.Tiny):  # type: ignore[name-defined,misc]
            def __init__(self, fn: Any = lambda: 1, lr: float = 0.1) -> None:
                super().__init__()
                self.save_hyperparameters()

        with caught() as warned:
            trainer = side.trainer(limit_val_batches=0)
            trainer.fit(Unpicklable())
            trainer.save_checkpoint(tmp_path / f"{side.name}.ckpt")
        loaded = Unpicklable.load_from_checkpoint(tmp_path / f"{side.name}.ckpt", fn=None)
        return dict(loaded.hparams), len([text for kind, text in warned if "fn" in text])

    hparams, warned = same(scenario)
    assert hparams == {"fn": None, "lr": 0.1}
    assert warned == len(recorded[1]) == 1


@pytest.mark.catalogue("HP08")
def test_yaml_leaves_out_what_it_cannot_hold(tmp_path: Path) -> None:
    def scenario(side: Side) -> Any:
        save = side.get(
            "core.saving.save_hparams_to_yaml" if not side.ours else "utilities.hparams.save_hparams_to_yaml"
        )
        path = tmp_path / f"{side.name}.yaml"
        with caught() as warned:
            save(str(path), {"a": 1, "b": [1, 2], "fn": threading.Lock(), "nested": {"c": "x"}})
        import yaml

        loaded = yaml.safe_load(path.read_text())
        return loaded, [kind for kind, text in warned if "fn" in text]

    loaded, warned = same(scenario)
    assert "fn" not in loaded
    assert len(warned) == 1
