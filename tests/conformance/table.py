"""The catalogue's rows, the tests that carry them, and the page that says how each stands.

Which test carries which row is read from the source (`@pytest.mark.catalogue("LG12", ...)` on a test function), so
the page can be checked without running anything. Results, and the places in the recordings that each test looked at
while it ran, are those of the last run with `--write-status`.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TESTS = HERE.parent
STATUS = HERE / "STATUS.md"
RESULTS = HERE / "results.json"
PLACES = HERE / "places.json"

OURS = ["TF", "LP", "HK", "LG", "DL", "DM", "PR", "TA", "HP", "ER", "PB", "LO", "TM", "ES", "LM", "GA",
        "OP", "SC", "PN", "MC", "RS", "MO", "JX"]  # fmt: skip
"""Areas that are complete now; CB (in part) is counted with them."""
OURS_TOO = {f"CB{i:02}" for i in (1, 2, 3, 4, 5, 6, 9, 12)}
READERS = {"golden", "read", "read_golden"}


@dataclasses.dataclass(frozen=True)
class Row:
    """One behaviour: `applies` is A (as it stands), J (adapted to a compiled step) or N (not in JAX)."""

    id: str
    applies: str
    golden: tuple[str, ...]

    @property
    def area(self) -> str:
        """The two letters of the area."""
        return self.id[:2]

    @property
    def due(self) -> bool:
        """Whether the row has to hold now, rather than with a later issue."""
        return (self.area in OURS or self.id in OURS_TOO) and self.id not in differences()["later"]


@dataclasses.dataclass(frozen=True)
class Carrier:
    """A marker of a test: the rows that it carries, and what the test compares with."""

    test: str
    rows: tuple[str, ...]
    adaptation: str
    evidence: frozenset[str]
    """Names of golden files that it reads, and `lightning` when it runs Lightning beside."""


def rows() -> list[Row]:
    """All rows of the catalogue."""
    return [Row(each["id"], each["applies"], tuple(each["golden"])) for each in json.loads(_read("catalogue.json"))]


@functools.cache
def differences() -> dict[str, dict[str, str]]:
    """Where we differ on purpose, and what belongs to later work."""
    found: dict[str, dict[str, str]] = json.loads(_read("differences.json"))
    return found


def _read(name: str) -> str:
    return (HERE / name).read_text()


# --- Which test carries which row


def carriers() -> list[Carrier]:
    """Every test with the marker, in the order of files and lines."""
    found: list[Carrier] = []
    for path in sorted(TESTS.rglob("test_*.py")):
        text = path.read_text()
        if "mark.catalogue(" in text:
            found += _carriers_of(ast.parse(text), path.relative_to(TESTS.parent).as_posix())
    return found


def _marker(node: ast.expr, name: str) -> ast.Call | bool | None:
    call = node if isinstance(node, ast.Call) else None
    target = call.func if call is not None else node
    if ast.unparse(target) != f"pytest.mark.{name}":
        return None
    return call if call is not None else True


def _carriers_of(module: ast.Module, file: str) -> list[Carrier]:
    functions = {each.name: each for each in module.body if isinstance(each, (ast.FunctionDef, ast.ClassDef))}
    values = _assigned(module)
    whole = values.get("pytestmark")
    reference = _names_of_the_reference(module)
    found = []
    for function in functions.values():
        calls = [_marker(each, "catalogue") for each in function.decorator_list]
        marks = [each for each in calls if isinstance(each, ast.Call)]
        if not marks:
            continue
        evidence = _evidence(function, functions, values, reference)
        decorators = [*function.decorator_list, *([] if whole is None else [whole])]
        if not any("mark.lightning" in ast.unparse(each) for each in decorators):
            evidence -= {"lightning"}
        for mark in marks:
            ids = tuple(ast.literal_eval(argument) for argument in mark.args)
            words = [ast.literal_eval(each.value) for each in mark.keywords if each.arg == "adaptation"]
            found.append(Carrier(f"{file}::{function.name}", ids, "; ".join(words), frozenset(evidence)))
    return found


def _assigned(module: ast.Module) -> dict[str, ast.expr]:
    values: dict[str, ast.expr] = {}
    for node in module.body:
        if isinstance(node, ast.Assign):
            values |= {target.id: node.value for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            values[node.target.id] = node.value
    return values


def _names_of_the_reference(module: ast.Module) -> set[str]:
    """What a module has imported from Lightning or torchmetrics, and what of ours runs them."""
    return {
        (each.asname or each.name).partition(".")[0]
        for node in ast.walk(module)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for each in node.names
        if _of_the_reference(node, each) or (getattr(node, "module", "") == "support.beside" and each.name != "QUIET")
    }


def _of_the_reference(node: ast.Import | ast.ImportFrom, name: ast.alias) -> bool:
    package = name.name if isinstance(node, ast.Import) else node.module or ""
    return package.partition(".")[0] in ("lightning", "torchmetrics")


def _evidence(start: ast.AST, functions: dict[str, Any], values: dict[str, ast.expr], reference: set[str]) -> set[str]:
    """The golden files that a function reads, and `lightning`, through the module's helpers and constants too."""
    known = {path.stem for path in (HERE / "golden").glob("*.json")}
    found: set[str] = set()
    seen: set[str] = set()
    open_ends: list[ast.AST] = [start]
    while open_ends:
        for node in ast.walk(open_ends.pop()):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                # `golden("flags")`, or the file's own name in a path
                found |= {node.value.removesuffix(".json")} & known if node.value.endswith(".json") else set()
                found |= {"lightning"} if node.value.startswith("lightning.") else set()  # `importorskip`
            elif isinstance(node, ast.Call):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if called in READERS and node.args and isinstance(node.args[0], ast.Constant):
                    found |= {str(node.args[0].value)} & known
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                found |= {"lightning" for each in node.names if _of_the_reference(node, each)}
            name = (
                node.id if isinstance(node, ast.Name) else node.arg if isinstance(node, ast.arg) else None
            )  # a fixture
            found |= {"lightning"} if name in reference else set()
            if name is not None and name not in seen:
                seen.add(name)
                open_ends += [each for each in (functions.get(name), values.get(name)) if each is not None]
    return found


# --- How each row stands


@dataclasses.dataclass(frozen=True)
class Standing:
    """One line of the page."""

    row: Row
    state: str
    """passed, failed, open, difference, later or n/a."""
    tests: tuple[Carrier, ...]
    words: str


def places_read() -> dict[str, list[str]]:
    """For each carrying test, the places cited by its rows that it looked at when it last ran with `--write-status`."""
    found: dict[str, list[str]] = json.loads(PLACES.read_text()) if PLACES.exists() else {}
    return found


def cited() -> dict[str, set[str]]:
    """For each carrying test, the places in the recordings that its rows cite."""
    golden = {each.id: each.golden for each in rows()}
    found: dict[str, set[str]] = {}
    for each in carriers():
        found.setdefault(each.test, set()).update(place for name in each.rows for place in golden.get(name, ()))
    return found


def proves(row: Row, carrier: Carrier, places: dict[str, list[str]]) -> bool:
    """Whether a test may carry a row: it looked at a place that the row cites, or runs Lightning beside.

    Args:
        row: The row; one that cites no recording may have its adaptation stated instead, and a recording of another.
        carrier: The test.
        places: What `places_read` says.
    """
    if "lightning" in carrier.evidence:
        return True
    if row.golden:
        seen = places.get(carrier.test)
        if seen is None:  # not run since this is recorded: the source says which recordings it opens
            return bool({place.partition(".")[0] for place in row.golden} & carrier.evidence)
        return bool(set(row.golden) & set(seen))
    return bool(carrier.evidence) or (row.applies in "JN" and bool(carrier.adaptation)) or excused(row) is not None


def excused(row: Row) -> str | None:
    """What DIFFERENCES says about a row, if it does."""
    table = differences()
    return table["better"].get(row.id) or table["compiled"].get(row.id)


def standings(results: dict[str, str]) -> list[Standing]:
    """How each of the rows stands."""
    places = places_read()
    by_row: dict[str, list[Carrier]] = {}
    for carrier in carriers():
        for name in carrier.rows:
            by_row.setdefault(name, []).append(carrier)
    return [_standing(row, tuple(by_row.get(row.id, ())), results, places) for row in rows()]


def _standing(row: Row, tests: tuple[Carrier, ...], results: dict[str, str], places: dict[str, list[str]]) -> Standing:
    later = differences()["later"]
    difference = excused(row)
    outcomes = [results.get(each.test, "not run") for each in tests]
    adaptation = "; ".join(dict.fromkeys(each.adaptation for each in tests if each.adaptation))
    proven = bool(tests) and (difference is not None or any(proves(row, each, places) for each in tests))
    good = proven and all(each == "passed" for each in outcomes)
    if outcomes and not all(each == "passed" for each in outcomes):
        state = "failed" if "failed" in outcomes else "not run"
    elif difference is not None:
        state = "difference" if tests else "later" if not row.due else "open"
    elif row.applies == "N":
        state = "n/a"
    elif good and (row.applies == "A" or adaptation or not row.due):
        state = "passed"
    elif (row.id in later or row.area in later) and not row.due:
        state = "later"
    else:
        state = "open"
    words = [difference or "", adaptation, later.get(row.id, later.get(row.area, "")) if state == "later" else ""]
    return Standing(row, state, tests, "; ".join(each for each in words if each))


def last_results() -> dict[str, str]:
    """The outcome of each carrying test in the last run with `--write-status`."""
    found: dict[str, str] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return found


def render(results: dict[str, str]) -> str:
    """The page."""
    lines = [
        "# How the catalogue stands",
        "",
        "Written by `pytest --write-status` (`make test-all`), checked by `test_status.py`; do not edit. A row passes "
        "by a test that reads the golden trace it cites or runs Lightning beside; a J row by one that states its "
        "adaptation. Differences are those of DIFFERENCES.md; MIGRATION.md has them in users' words.",
        "",
        "| area | rows | passed | difference | n/a | later | open | A passed | J passed |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    found = standings(results)
    for area in dict.fromkeys(each.row.area for each in found):
        lines.append(_summary(area, [each for each in found if each.row.area == area]))
    lines.append(_summary("**due now**", [each for each in found if each.row.due]))
    lines += ["", "| row | | result | by |", "|---|---|---|---|"]
    for each in found:
        by = "<br>".join(
            [f"`{test.test.removeprefix('tests/')}`" for test in each.tests] + [each.words] * bool(each.words)
        )
        lines.append(f"| {each.row.id} | {each.row.applies} | {each.state} | {by} |")
    return "\n".join(lines) + "\n"


def share(found: list[Standing], applies: str) -> tuple[int, int]:
    """How many rows of a kind pass, of how many; differences are counted apart."""
    counted = [each for each in found if each.row.applies == applies and each.state != "difference"]
    return sum(each.state == "passed" for each in counted), len(counted)


def _summary(name: str, found: list[Standing]) -> str:
    counts = Counter(each.state for each in found)
    unsure = counts["open"] + counts["failed"] + counts["not run"]
    shares = ["{}/{}".format(*share(found, kind)) for kind in "AJ"]
    cells = [name, len(found), counts["passed"], counts["difference"], counts["n/a"], counts["later"], unsure, *shares]
    return "| " + " | ".join(str(each) for each in cells) + " |"
