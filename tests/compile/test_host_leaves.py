"""Leaves of a batch that JAX cannot hold (texts, objects): handed on by steps, not looked at."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.verbatim import QUIET

import jaxlightning as pl

BATCHES = [
    {"x": np.full((2, 3), float(i), np.float32), "name": [f"a{i}", f"b{i}"], "meta": {"file": f"{i}.png"}}
    for i in range(4)
]


class Loader:
    """Gives the batches."""

    def __iter__(self) -> Iterator[Any]:
        return iter(BATCHES)

    def __len__(self) -> int:
        return len(BATCHES)


class Named(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Dense(1)
        self.names: list[str] = []
        self.rows: list[Any] = []
        self.losses: dict[str, Any] = {}

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        loss = (self.net(batch["x"]) ** 2).mean()
        self.names.extend(batch["name"])
        self.rows.append({"file": batch["meta"]["file"], "loss": loss, "number": batch_idx})
        self.losses[batch["meta"]["file"]] = loss
        self.print(batch["name"][0])
        return {"loss": loss, "file": batch["meta"]["file"]}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["file"] == f"{batch_idx}.png"

    def predict_step(self, batch: Any, batch_idx: Any) -> Any:
        return {"mean": self.net(batch["x"]).mean(), "name": batch["name"]}

    def configure_optimizers(self) -> Any:
        return optax.sgd(0.1)


@pytest.mark.parametrize("jit", [True, False], ids=["compiled", "eager"])
def test_texts_of_the_batch_are_appended_written_printed_and_returned(
    jit: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    module = Named()
    trainer = pl.Trainer(**QUIET, max_epochs=1, jit=jit)
    trainer.fit(module, Loader())
    assert module.names == ["a0", "b0", "a1", "b1", "a2", "b2", "a3", "b3"]
    assert [(row["file"], int(row["number"])) for row in module.rows] == [(f"{i}.png", i) for i in range(4)]
    assert list(module.losses) == [f"{i}.png" for i in range(4)]
    assert [float(row["loss"]) for row in module.rows] == [float(loss) for loss in module.losses.values()]
    assert [line for line in capsys.readouterr().out.split() if line.startswith("a")] == ["a0", "a1", "a2", "a3"]
    predicted = trainer.predict(module, Loader())
    assert [each["name"] for each in predicted] == [batch["name"] for batch in BATCHES]


@pytest.mark.parametrize(
    "look",
    [
        lambda self, leaf: self.log(f"loss_{leaf}", 1.0),
        lambda self, leaf: leaf == "0.png",
        lambda self, leaf: leaf in self.losses,
    ],
    ids=["f-string", "comparison", "membership"],
)
def test_a_compiled_step_does_not_look_at_a_text(look: Any) -> None:
    class Looking(Named):
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            self.losses["first"] = jnp.zeros(())
            look(self, batch["meta"]["file"])
            return super().training_step(batch, batch_idx)

    with pytest.raises(TypeError, match=r"batch leaf .*file.* that JAX cannot hold"):
        pl.Trainer(**QUIET, max_epochs=1).fit(Looking(), Loader())
