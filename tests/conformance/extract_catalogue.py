"""Write `catalogue.json` from the catalogue's text: id, applicability and the golden keys that a row cites.

python tests/conformance/extract_catalogue.py PATH/TO/CATALOGUE.md
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

_ROW = re.compile(r"^\| (?P<id>[A-Z]{2}\d\d) \|(?P<body>.*)\|\s*$")
_GOLDEN = re.compile(r"golden:((?:\\\||[^\s,;|])+)")


def rows_of(text: str) -> list[dict[str, object]]:
    """The rows of every area's table, in order."""
    rows: list[dict[str, object]] = []
    for line in text.splitlines():
        found = _ROW.match(line)
        if found is None:
            continue
        cells = re.split(r"(?<!\\)\|", found["body"])
        pinned, applies = cells[-2], cells[-1].strip()
        golden = [each.replace("\\|", "|").rstrip(".") for each in _GOLDEN.findall(pinned)]
        rows.append({"id": found["id"], "applies": applies[0], "golden": golden})
    return rows


def main() -> None:
    """Write the table beside this file."""
    rows = rows_of(Path(sys.argv[1]).read_text())
    lines = ",\n".join(" " + json.dumps(row) for row in rows)
    (Path(__file__).parent / "catalogue.json").write_text(f"[\n{lines}\n]\n")
    print(f"{len(rows)} rows")


if __name__ == "__main__":
    main()
