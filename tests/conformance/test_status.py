"""The page of results is current, complete and honest about what it rests on."""

from __future__ import annotations

import pytest
from conformance import table


def test_the_catalogue_has_its_454_rows() -> None:
    rows = table.rows()
    assert len({each.id for each in rows}) == len(rows) == 454
    assert [sum(each.applies == kind for each in rows) for kind in "AJN"] == [303, 135, 16]


def test_the_page_is_current(request: pytest.FixtureRequest) -> None:
    """Tests, markers, differences and the last results give exactly this page."""
    if request.config.getoption("--write-status"):
        return  # this very run writes it anew
    assert table.STATUS.read_text() == table.render(table.last_results()), (
        "tests/conformance/STATUS.md is out of date: run `make test-all`, or `pytest --write-status` on the tests that "
        "you have changed"
    )


def test_every_marker_names_rows_that_exist() -> None:
    known = {each.id for each in table.rows()}
    assert [(each.test, name) for each in table.carriers() for name in each.rows if name not in known] == []


def test_every_carrying_test_reads_what_the_row_cites_or_runs_lightning_beside() -> None:
    rows = {each.id: each for each in table.rows()}
    places = table.places_read()
    carried: dict[str, list[table.Carrier]] = {}
    for each in table.carriers():
        for name in each.rows:
            carried.setdefault(name, []).append(each)
    unproven = {
        name: [each.test for each in tests]
        for name, tests in carried.items()
        if table.excused(rows[name]) is None and not any(table.proves(rows[name], each, places) for each in tests)
    }
    assert unproven == {}


@pytest.mark.parametrize("area", [*table.OURS, "CB"])
def test_an_area_passes(area: str, request: pytest.FixtureRequest) -> None:
    """98 % of its A rows and 92 % of its J rows, and none without an entry."""
    if request.config.getoption("--write-status"):
        return
    found = [each for each in table.standings(table.last_results()) if each.row.area == area and each.row.due]
    for kind, least in (("A", 0.98), ("J", 0.92)):
        passed, counted = table.share(found, kind)
        assert passed >= least * counted, [each.row.id for each in found if each.state in ("open", "failed", "not run")]
