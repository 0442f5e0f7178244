from __future__ import annotations

import inspect

import pytest

from jaxlightning.callbacks import Callback, Checkpoint


@pytest.mark.lightning
def test_every_hook_of_lightning_is_there_with_the_same_arguments() -> None:
    from lightning.pytorch import Callback as Theirs

    for name, function in inspect.getmembers(Theirs, inspect.isfunction):
        ours = inspect.signature(getattr(Callback, name)).parameters
        theirs = inspect.signature(function).parameters
        assert {n: p.default for n, p in ours.items()} == {n: p.default for n, p in theirs.items()}, name


def test_the_state_key_is_the_qualified_name() -> None:
    class Mine(Callback):
        pass

    assert Mine().state_key == Mine.__qualname__
    assert Mine()._generate_state_key(a=1, b="x") == f"{Mine.__qualname__}{{'a': 1, 'b': 'x'}}"


def test_a_checkpoint_callback_is_a_callback_without_state() -> None:
    assert isinstance(Checkpoint(), Callback)
    assert Checkpoint().state_dict() == {}
