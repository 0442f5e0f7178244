"""The table that `validate` and `test` print."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping, Sequence

__all__ = ["print_results"]

_SUFFIX = "/dataloader_idx_"


def print_results(results: Sequence[Mapping[str, float]], stage: str) -> None:
    """Print the metrics of an evaluation: a row for each metric in order of name, a column for each loader.

    Args:
        results: For each loader its metrics.
        stage: `"validate"` or `"test"`, for the heading.
    """
    columns = [{name.split(_SUFFIX)[0]: value for name, value in result.items()} for result in results]
    names = sorted({name for column in columns for name in column})
    if not names:
        return
    headers = [f"DataLoader {i}" for i in range(len(columns))]
    terminal = shutil.get_terminal_size(fallback=(120, 30)).columns or 120
    width = max(1, int(min(max(len(name) for name in (*names, *headers, " " * 25)), terminal / 2)))
    per_table = max(1, int((terminal - width) / width))
    for start in range(0, len(columns), per_table):
        chosen = slice(start, start + per_table)
        head = [f"{stage} metric".capitalize(), *headers[chosen]]
        rows = [[name, *(_text(column.get(name)) for column in columns[chosen])] for name in names]
        if _rich_is_there():
            _print_rich(head, rows, width)
        else:
            print(os.linesep.join(_lines(head, rows, width, terminal)))


def _rich_is_there() -> bool:
    return importlib.util.find_spec("rich") is not None


def _print_rich(head: list[str], rows: list[list[str]], width: int) -> None:
    from rich import get_console
    from rich.table import Column, Table

    styles = ["cyan", *["magenta"] * (len(head) - 1)]
    columns = [
        Column(text, justify="center", style=style, width=width) for text, style in zip(head, styles, strict=True)
    ]
    table = Table(*columns)
    for row in rows:
        table.add_row(*row)
    get_console().print(table)


def _text(value: float | None) -> str:
    return "" if value is None else str(value)


def _lines(head: list[str], rows: list[list[str]], width: int, terminal: int) -> list[str]:
    rule = _rule_character() * terminal

    def line(cells: list[str]) -> str:
        return "".join(f"{cell:^{width}}" for cell in cells).rstrip()

    lines = [rule, line(head), rule]
    for name, *values in rows:
        # A name longer than its column goes on in the next lines.
        parts = [name[i : i + width] for i in range(0, len(name), width)]
        lines.append(line([parts[0], *values]))
        lines.extend(line([part]) for part in parts[1:])
    lines.append(rule)
    return lines


def _rule_character() -> str:
    try:
        "─".encode(sys.stdout.encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return "-"
    return "─"
