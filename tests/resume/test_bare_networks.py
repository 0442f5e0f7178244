"""Resuming modules with networks that have no variables, and with one that only a later epoch calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flax.linen as nn
import numpy as np
import optax
import pytest
from flax import nnx

import jaxlightning as pl
from jaxlightning import ArrayLoader

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class Linen(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.drop, self.late = nn.Dense(3), nn.Dropout(0.3), nn.Dense(3)

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        x, y = batch
        logits = self.net(self.drop(x))
        if self.current_epoch > 1:
            logits = logits + self.late(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    def configure_optimizers(self) -> Any:
        return optax.adam(1e-2)


class Nnx(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.drop = nnx.Linear(4, 3, rngs=nnx.Rngs(0)), nnx.Dropout(0.3, rngs=nnx.Rngs(1))

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        x, y = batch
        return optax.softmax_cross_entropy_with_integer_labels(self.net(self.drop(x)), y).mean()

    def configure_optimizers(self) -> Any:
        return optax.adam(1e-2)


def data() -> ArrayLoader:
    rng = np.random.default_rng(0)
    return ArrayLoader(rng.normal(size=(32, 4)).astype(np.float32), rng.integers(0, 3, 32), batch_size=8, shuffle=True)


@pytest.mark.parametrize("stop", [1, 3], ids=["before the late network", "after it"])
@pytest.mark.parametrize("module", [Linen, Nnx])
def test_a_run_with_networks_without_variables_goes_on_as_if_nothing_happened(
    tmp_path: Path, module: type[pl.LightningModule], stop: int
) -> None:
    whole = module()
    pl.seed_everything(5, verbose=False)
    pl.Trainer(max_epochs=4, default_root_dir=tmp_path, **QUIET).fit(whole, data())
    pl.seed_everything(5, verbose=False)
    trainer = pl.Trainer(max_epochs=stop, default_root_dir=tmp_path, **QUIET)
    trainer.fit(module(), data())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    rest = module()
    pl.Trainer(max_epochs=4, default_root_dir=tmp_path, **QUIET).fit(rest, data(), ckpt_path=tmp_path / "a.ckpt")
    found = rest.state_dict()
    assert found.keys() == whole.state_dict().keys()
    for name, value in whole.state_dict().items():
        np.testing.assert_array_equal(value, found[name], err_msg=name)


def test_a_network_that_the_checkpoint_does_not_know_is_missing(tmp_path: Path) -> None:
    class Before(Linen):
        def __init__(self) -> None:
            super().__init__()
            del self.late

        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            return self.net(self.drop(batch[0])).mean()

    trainer = pl.Trainer(max_epochs=1, default_root_dir=tmp_path, **QUIET)
    trainer.fit(Before(), data())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(RuntimeError, match="missing: everything of network `late`"):
        pl.Trainer(max_epochs=2, default_root_dir=tmp_path, **QUIET).fit(Linen(), data(), ckpt_path=tmp_path / "a.ckpt")
