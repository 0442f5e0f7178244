"""PR: what evaluation and prediction return and print, with Lightning beside."""

from __future__ import annotations

from typing import Any

import pytest
from conformance.loaders import Items, free
from support.beside import Side, both, caught, same
from support.tracing import golden

pytestmark = [
    pytest.mark.lightning,
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::jaxlightning.utilities.warnings.PossibleUserWarning"),
]


@pytest.mark.catalogue("PR03")
@pytest.mark.parametrize("rich", [True, False])
def test_results_are_printed_as_a_table(
    rich: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not rich:
        import lightning.pytorch.loops.evaluation_loop as theirs

        monkeypatch.setattr(theirs, "_RICH_AVAILABLE", False)
        from jaxlightning.metrics import _table as ours

        monkeypatch.setattr(ours, "_rich_is_there", lambda: False)
    monkeypatch.setenv("COLUMNS", "120")

    def scenario(side: Side) -> Any:
        class Model(side.Tiny):  # type: ignore[name-defined,misc]
            def test_step(self, batch: Any, batch_idx: Any, dataloader_idx: Any = 0) -> None:
                self.log("a", batch[0].sum())
                self.log("b", batch_idx * 1.0, on_step=True, on_epoch=True)

            def on_test_epoch_end(self) -> None:
                self.log("end", 9.0)

        capsys.readouterr()
        side.trainer().test(Model(), [side.loader(5), side.loader(2)], verbose=True)
        text = capsys.readouterr().out
        return text.strip()

    found = same(scenario)
    assert ("┃" in found) == rich
    assert ("┃" in golden("dataloaders")["evaluate"]["printed_table"]) is True


@pytest.mark.catalogue("PR10")
def test_indices_of_a_stream_are_empty_with_a_warning() -> None:
    def scenario(side: Side) -> Any:
        writer_class = side.get("callbacks.BasePredictionWriter")

        class Writer(writer_class):  # type: ignore[misc,valid-type]
            def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, indices: Any, *args: Any) -> None:
                seen.append(indices)

            def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
                seen.append(indices)

        seen: list[Any] = []
        with caught() as warned:
            trainer = side.trainer(callbacks=[Writer("batch_and_epoch")])
            trainer.predict(free(side), Items(side.array([1.0]), side.array([2.0])))
        return seen, sorted({kind for kind, text in warned if "indices" in text or "batch_indices" in text})

    theirs, ours = both(scenario)
    assert ours[0][:2] == theirs[0][:2]
    assert ours[1] == theirs[1]


@pytest.mark.catalogue("PR11", adaptation="arrays, and Python values that are the same for every batch")
def test_predictions_may_be_more_than_arrays() -> None:
    def scenario(side: Side) -> Any:
        class Model(side.Tiny):  # type: ignore[name-defined,misc]
            def predict_step(self, batch: Any, batch_idx: Any) -> Any:
                return {"x": batch[0].sum(), "label": "text", "pair": (batch[0][:, 0], None)}

        return side.trainer().predict(Model(), side.loader(3))

    same(scenario)


@pytest.mark.catalogue("PR07", "PR04", "PR08")
def test_a_prediction_without_a_step_is_the_forward_pass() -> None:
    def scenario(side: Side) -> Any:
        class Model(side.Tiny):  # type: ignore[name-defined,misc]
            predict_step = side.pl.LightningModule.predict_step

            def forward(self, batch: Any) -> Any:
                return batch[0][:, 0] * 2

        one = side.trainer().predict(Model(), [side.loader(3)])
        several = side.trainer(limit_predict_batches=1).predict(Model(), [side.loader(3), side.loader(4)])
        return one, several

    same(scenario)
