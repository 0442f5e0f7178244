"""The summary as a table of rich's, for those who ask for it (`pip install jaxlightning[rich]`)."""

from __future__ import annotations

import importlib.util
from typing import Any

from jaxlightning.callbacks._summary import Summary
from jaxlightning.callbacks.model_summary import ModelSummary


class RichModelSummary(ModelSummary):
    """Print the table of `ModelSummary` with rich.

    Args:
        max_depth: How many levels of layers are shown: 1 for the networks, -1 for all, 0 for no table.
        header_style: Style of the header, in rich's notation.

    Raises:
        ModuleNotFoundError: rich is not installed.
        ValueError: `max_depth` is not an int >= -1.
    """

    def __init__(self, max_depth: int = 1, header_style: str = "bold magenta") -> None:
        if importlib.util.find_spec("rich") is None:
            raise ModuleNotFoundError(
                "`RichModelSummary` needs the package `rich`. Install it with `pip install jaxlightning[rich]`, or use "
                "`ModelSummary`."
            )
        super().__init__(max_depth)
        self._header_style = header_style

    def summarize(self, summary: Summary) -> str:
        """Return the table as text, in colour where standard output is a terminal.

        Args:
            summary: Rows and totals.

        Returns:
            The text.
        """
        from rich.console import Console

        console = Console()
        with console.capture() as capture:
            console.print(self.table(summary))
            for number, what in summary.totals():
                console.print(f"[bold]{what}[/]: {number.strip()}", highlight=False)
        text: str = capture.get()
        return text.rstrip("\n")

    def table(self, summary: Summary) -> Any:
        """Return the layers as a `rich.table.Table`.

        Args:
            summary: Rows and totals.

        Returns:
            The table.
        """
        from rich.markup import escape
        from rich.table import Table

        table = Table(header_style=self._header_style)
        columns = summary.columns()
        for header in columns:
            table.add_column(
                header, justify="right" if header in ("Params", "Size") else "left", style="" if header else "dim"
            )
        for cells in zip(*columns.values(), strict=True):
            table.add_row(*map(escape, cells))
        return table
