"""Tables of text, and how a terminal and Markdown show them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

Line = tuple[str, ...]


@dataclass(frozen=True)
class Grid:
    """A table: ``headings``, ``sections`` of lines of cells, ``notes`` below. The first ``words`` columns are text."""

    title: str
    headings: Line
    sections: tuple[tuple[Line, ...], ...]
    notes: tuple[str, ...] = ()
    words: int = 1


def as_rich(grid: Grid) -> Table:
    """For a terminal: words to the left, numbers to the right, a rule between sections."""
    from rich.table import Table
    from rich.text import Text

    caption = Text("\n".join(grid.notes)) if grid.notes else None
    table = Table(title=Text(grid.title), caption=caption, title_justify="left", caption_justify="left")
    for number, heading in enumerate(grid.headings):
        table.add_column(Text(heading), justify="left" if number < grid.words else "right")
    for lines in grid.sections:
        for cells in lines:
            table.add_row(*(Text(cell) for cell in cells))
        table.add_section()
    return table


def as_markdown(grid: Grid) -> str:
    r"""As Markdown, where sections merely follow each other.

    >>> print(as_markdown(Grid("Sums", ("a", "a + a"), ((("1", "2"),), (("|x|", "2|x|"),)))))
    ## Sums
    <BLANKLINE>
    | a | a + a |
    |---|---:|
    | 1 | 2 |
    | \|x\| | 2\|x\| |
    <BLANKLINE>
    """
    rule = "|" + "---|" * grid.words + "---:|" * (len(grid.headings) - grid.words)
    lines = [cells for section in grid.sections for cells in section]
    table = [_markdown_line(grid.headings), rule, *map(_markdown_line, lines)]
    return "\n".join([f"## {grid.title}", "", *table, "", *(f"{note}\n" for note in grid.notes)])


def _markdown_line(cells: Line) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
