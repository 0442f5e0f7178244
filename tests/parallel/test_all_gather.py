"""`all_gather` and what only the first process does."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.models import Classifier, batches

import jaxlightning as pl
from jaxlightning.utilities.rank_zero import rank_zero_only


@pytest.mark.catalogue("PN06", adaptation="one process sees whole arrays; several go through process_allgather")
def test_one_process_gets_its_data_back_without_a_new_axis() -> None:
    gathered: list[Any] = []

    class Gathers(Classifier):
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            return self.all_gather(super().training_step(batch, batch_idx))

        def on_train_epoch_end(self) -> None:
            gathered.append(self.all_gather({"a": jnp.ones((3, 2)), "b": [np.float32(1.0)]}))

    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    x, y = (np.concatenate(parts) for parts in zip(*batches(), strict=True))
    trainer = pl.Trainer(max_epochs=1, devices=2, limit_val_batches=0, **off)
    trainer.fit(Gathers(), pl.ArrayLoader(x, y, batch_size=4), pl.ArrayLoader(x, y, batch_size=4))
    assert trainer.global_step == 4
    assert gathered[0]["a"].shape == (3, 2)
    assert gathered[0]["b"] == [1.0]
    assert rank_zero_only(lambda: "ran")() == "ran"


def test_several_processes_are_stacked(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax.experimental import multihost_utils

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(
        multihost_utils, "process_allgather", lambda data: jax.tree.map(lambda x: np.stack([x, x]), data)
    )
    assert Classifier().all_gather({"a": np.ones(3)})["a"].shape == (2, 3)


def test_groups_do_not_exist() -> None:
    with pytest.raises(ValueError, match="groups of processes do not exist here"):
        Classifier().all_gather(1, group="some")
