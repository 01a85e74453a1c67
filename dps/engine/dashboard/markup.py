"""Markup: escaped text and tables, for all HTML of dps that no template makes (the pages and the report)."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

__all__ = ["escape", "html_table"]


def escape(value: object) -> str:
    return html.escape(str(value))


def html_table(
    head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int] = (), box: str = "scroll"
) -> str:
    """A table in a box that scrolls.

    Parameters
    ----------
    rows : iterable of sequence of str
        Cells, as HTML.
    numbers : iterable of int
        The columns that are aligned to the right.
    box : str
        CSS classes of the box. The attribute ``data-name`` of each cell lets a style sheet put the name of the column
        beside the value, where the page has no room for columns.
    """
    of = dict.fromkeys(numbers, ' class="n"')
    top = "".join(f"<th{of.get(n, '')}>{escape(name)}</th>" for n, name in enumerate(head))
    cells = [f'<td data-name="{escape(name)}"{of.get(n, "")}>' for n, name in enumerate(head)]
    body = "".join(
        "<tr>" + "".join(f"{begin}{cell}</td>" for begin, cell in zip(cells, row, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<div class="{box}"><table><tr>{top}</tr>{body}</table></div>'
