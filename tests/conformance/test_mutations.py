"""Tests of rows notice when the behaviour breaks: all edits apply, and each makes its test fail."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from conformance import mutations, table


def test_thirty_rows_have_an_edit_that_applies_to_the_source() -> None:
    assert len({each.row for each in mutations.MUTATIONS}) >= 30
    for each in mutations.MUTATIONS:
        text = Path(mutations.PROJECT, "jaxlightning", each.file).read_text()
        assert text.count(each.old) == 1, (each.row, each.file, each.old)


def test_each_edit_is_tried_with_a_test_that_carries_its_row() -> None:
    carried = {(each.test.removeprefix("tests/"), row) for each in table.carriers() for row in each.rows}
    assert [each.row for each in mutations.MUTATIONS if (each.test.partition("[")[0], each.row) not in carried] == []


SAMPLE = random.Random(0).sample(mutations.MUTATIONS, 1)
"""What every run of the tests tries; `make test-all` tries all."""


@pytest.mark.torch
@pytest.mark.lightning
@pytest.mark.parametrize(
    "mutation",
    [pytest.param(each, id=each.row, marks=[] if each in SAMPLE else pytest.mark.slow) for each in mutations.MUTATIONS],
)
def test_a_broken_behaviour_is_noticed(mutation: mutations.Mutation) -> None:
    assert mutations.survives(mutation) is None
