"""Printed tables as an SVG picture that needs no font from outside and reads well on a light page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from ifso.cli.console import write_text

if TYPE_CHECKING:
    from rich.console import RenderableType

INK, PAPER, LINE, ACCENT = "#24292f", "#ffffff", "#c4ccd4", "#0b5394"
FONTS = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', 'Liberation Mono', monospace"
ASPECT = 0.6
"""Width of a character as a share of its height, as in most fixed-width fonts."""

FORMAT = (
    """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<title></title>
<style>
.{unique_id}-matrix {{ font-family: FONTS; font-size: {char_height}px; }}
{styles}
</style>
<defs>
{lines}
</defs>
<rect width="100%" height="100%" rx="8" fill="PAPER" stroke="LINE"/>
<g class="{unique_id}-matrix" transform="translate(14, 20)">
{matrix}
</g>
</svg>
""".replace("FONTS", FONTS)
    .replace("PAPER", PAPER)
    .replace("LINE", LINE)
)


def write_svg(path: Path, command: str, parts: Sequence[RenderableType]) -> None:
    """Write ``parts`` (tables and text), as ``command`` prints them, into the SVG file ``path``."""
    write_text(path, draw(command, parts))


def draw(command: str, parts: Sequence[RenderableType]) -> str:
    """The SVG document; the same parts always give the same text."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.terminal_theme import TerminalTheme
    from rich.theme import Theme

    from ifso.graph.printing import WIDTH

    looks = Theme({"table.title": f"bold {ACCENT}", "table.header": f"bold {INK}", "table.caption": "#57606a"})
    console = Console(
        file=StringIO(), record=True, width=WIDTH, theme=looks, highlight=False, markup=False, emoji=False
    )
    tables = [part for part in parts if isinstance(part, Table)]
    for table in tables:  # upright lines fall apart where a font is not made for them
        table.box, table.border_style = box.SIMPLE_HEAD, LINE
    console.width = max((console.measure(table).maximum for table in tables), default=console.width - 1) + 1
    console.print(f"$ {command}")
    for part in parts:
        console.print("", part, sep="\n")
    theme = TerminalTheme(_rgb(PAPER), _rgb(INK), [_rgb(INK)] * 8, [_rgb(INK)] * 8)
    svg = console.export_svg(title="", theme=theme, code_format=FORMAT, font_aspect_ratio=ASPECT, unique_id="ifso")
    lines = (line.rstrip() for line in svg.splitlines())
    return "\n".join(lines).replace("<title></title>", f"<title>{escape(command)}</title>", 1) + "\n"


def _rgb(colour: str) -> tuple[int, int, int]:
    """``#rrggbb`` as three numbers.

    >>> _rgb("#0b5394")
    (11, 83, 148)
    """
    red, green, blue = bytes.fromhex(colour.removeprefix("#"))
    return red, green, blue
