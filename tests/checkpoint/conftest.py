"""A run that has left a checkpoint."""

from __future__ import annotations

import pytest
from support.checkpoints import DM, WithHparams, quiet_fit, trainer

from jaxlightning.callbacks import EarlyStopping, ModelCheckpoint


@pytest.fixture
def fitted(tmp_path):
    """A trainer after one epoch, and its root directory with `last.ckpt`."""
    callbacks = [ModelCheckpoint(dirpath=tmp_path, save_last=True), EarlyStopping("val_loss")]
    t = trainer(tmp_path, max_epochs=1, callbacks=callbacks)
    return quiet_fit(t, WithHparams(), datamodule=DM()), tmp_path
