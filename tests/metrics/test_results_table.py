"""The table that an evaluation prints."""

from __future__ import annotations

import pytest

from jaxlightning.metrics import _table, print_results

LIGHTNING = pytest.mark.lightning


def test_metrics_are_rows_in_order_and_loaders_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(_table, "_rich_is_there", lambda: False)
    print_results([{"b/dataloader_idx_0": 1.0, "a": 0.5}, {"b/dataloader_idx_1": 2.0, "only": 3.0}], "test")
    rule, head, _, *rows, last = capsys.readouterr().out.splitlines()
    assert rule == last == "─" * 120
    assert head.split() == ["Test", "metric", "DataLoader", "0", "DataLoader", "1"]
    assert [row.split() for row in rows] == [["a", "0.5"], ["b", "1.0", "2.0"], ["only", "3.0"]]


def test_nothing_is_printed_without_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    print_results([{}, {}], "validate")
    assert capsys.readouterr().out == ""


@LIGHTNING
def test_the_plain_table_is_lightnings(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import lightning.pytorch.loops.evaluation_loop as reference
    import torch

    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(reference, "_RICH_AVAILABLE", False)
    monkeypatch.setattr(_table, "_rich_is_there", lambda: False)
    cases = [
        [{"loss": 0.25, "acc": 1.0}],
        [{"a/dataloader_idx_0": 3.5, "end": 9.0}, {"a/dataloader_idx_1": 21.0, "end": 9.0}],
        [{f"k{i}": float(i)} for i in range(7)],
    ]
    for results in cases:
        print_results(results, "test")
        ours = capsys.readouterr().out
        reference._EvaluationLoop._print_results(
            [{name: torch.tensor(value) for name, value in result.items()} for result in results], "test"
        )
        assert ours == capsys.readouterr().out
