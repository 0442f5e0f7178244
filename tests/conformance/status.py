"""Write `STATUS.md` again from the sources and the last results: `python tests/conformance/status.py --write`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from conformance import table


def main() -> None:
    """Print what is open; with --write, write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write STATUS.md")
    options = parser.parse_args()
    results = table.last_results()
    if options.write:
        table.STATUS.write_text(table.render(results))
    found = table.standings(results)
    for area in dict.fromkeys(each.row.area for each in found if each.row.due):
        mine = [each for each in found if each.row.area == area and each.row.due]
        undone = [f"{each.row.id}({each.row.applies},{each.state})" for each in mine if each.state not in GOOD]
        print(area, *["{}/{}".format(*table.share(mine, kind)) for kind in "AJ"], *undone)


GOOD = {"passed", "difference", "n/a", "later"}

if __name__ == "__main__":
    main()
