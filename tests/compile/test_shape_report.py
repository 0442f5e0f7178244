"""Many shapes of batches are reported once, with the leaf that varies and what helps."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

from jaxlightning.compile.shape_report import SHAPES, ShapeReport
from jaxlightning.utilities.warnings import PossibleUserWarning


def reports(batches: list[Any], kind: str = "train") -> list[str]:
    report = ShapeReport("Net")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in batches:
            report.note(kind, batch)
    assert all(issubclass(each.category, PossibleUserWarning) for each in caught)
    return [str(each.message) for each in caught]


def test_a_few_shapes_again_and_again_are_no_news() -> None:
    assert reports([{"x": np.zeros((32, n))} for n in range(SHAPES)] * 5) == []


def test_a_sequence_that_varies_is_named_once() -> None:
    batches = [{"ids": np.zeros((4, n), np.int32), "y": np.zeros(4)} for n in range(1, 30)]
    (message,) = reports(batches)
    assert "The train step of Net has met 9 shapes" in message
    assert "batch['ids']: int32[4, 1], int32[4, 2]" in message
    assert "'y'" not in message
    assert "bucketed(loader, boundaries, axis=...)" in message
    assert "pad_batches" not in message


def test_a_batch_size_that_varies_is_told_to_be_padded() -> None:
    (message,) = reports([(np.zeros((n, 3)), np.zeros(n)) for n in range(1, 12)], "validate")
    assert "batch[0]: float64[1, 3]" in message
    assert "batch[1]: float64[1]" in message
    assert "pad_batches=True" in message
    assert "bucketed" not in message


def test_a_structure_or_dtype_that_varies_is_named() -> None:
    (message,) = reports([{f"k{n}": np.zeros(2)} for n in range(12)])
    assert "the structure of the batch" in message
    kinds = ["int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "float32", "bool"]
    (message,) = reports([np.zeros(2, kind) for kind in kinds])
    assert "batch: int8[2], int16[2]" in message
    assert "same containers and dtypes" in message


def test_each_step_has_a_report_of_its_own() -> None:
    report, found = ShapeReport("Net"), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for kind in ("train", "validate"):
            for n in range(20):
                report.note(kind, np.zeros(n))
        found = [str(each.message).split(" of ")[0] for each in caught]
    assert found == ["The train step", "The validate step"]


def test_a_run_reports_what_varies() -> None:
    import jax.numpy as jnp
    import optax

    import jaxlightning as pl

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            import flax.linen as nn

            self.embed = nn.Embed(4, 2)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return jnp.mean(self.embed(batch) ** 2)

        def configure_optimizers(self) -> Any:
            return optax.sgd(0.1)

    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(max_epochs=1, enable_checkpointing=False, **quiet)
    with pytest.warns(PossibleUserWarning, match=r"The train step of Net has met 9 shapes.*batch: int32\[2, 1\]"):
        trainer.fit(Net(), lambda: (np.zeros((2, n), np.int32) for n in range(1, 11)))
