"""What all figures have in common: sizes of print, colours, markers and lines, and the two files of each."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ifso.errors import IfsoError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMN, PAGE = 3.5, 7.16
"""Inches: the width of one column and of a page in print of two columns."""

BLUE, VERMILION, GREEN, PURPLE, SKY, INK, MUTED, PALE = (
    "#0072B2", "#D55E00", "#009E73", "#AA4499", "#56B4E9", "#222222", "#595959", "#d4d4d4"
)  # fmt: skip
"""Mostly of Okabe and Ito's colours, which people who are colour-blind tell apart."""

STYLE: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "ifso", "font.size": 8, "axes.titlesize": 8.5, "axes.labelsize": 8,
    "axes.edgecolor": MUTED, "axes.labelcolor": INK, "axes.linewidth": 0.7, "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True, "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6, "text.color": INK, "xtick.color": INK, "ytick.color": INK, "xtick.labelsize": 7,
    "ytick.labelsize": 7, "xtick.major.width": 0.7, "ytick.major.width": 0.7, "legend.fontsize": 7.5,
    "legend.title_fontsize": 7, "legend.frameon": False, "lines.linewidth": 1.3, "lines.markersize": 4.5,
    "hatch.linewidth": 0.6, "hatch.color": "#ffffff",
}  # fmt: skip
"""Text stays text in SVG, and the same data always give the same file."""

DPI = 220


class PlotUnavailable(IfsoError):
    """matplotlib is not installed."""


@dataclass(frozen=True)
class Look:
    """How a line looks: each has its own colour, marker and dashes, so that any one of them is enough."""

    color: str
    marker: str
    linestyle: Any

    def as_dict(self) -> dict[str, Any]:
        """Keywords of ``Axes.plot``; markers are filled with white where lines cross."""
        return {
            "color": self.color, "marker": self.marker, "linestyle": self.linestyle, "markerfacecolor": "white",
            "markeredgewidth": 1.1,
        }  # fmt: skip


LOOKS = (
    Look(BLUE, "o", "-"),
    Look(VERMILION, "s", (0, (5, 1.5))),
    Look(GREEN, "^", (0, (5, 1.5, 1, 1.5))),
    Look(PURPLE, "D", (0, (1, 1))),
    Look(MUTED, "v", (0, (3, 1, 1, 1, 1, 1))),
    Look(SKY, "P", (0, (8, 2))),
)


def draw(stem: Path, title: str, size: tuple[float, float], fill: Callable[[Figure], None]) -> tuple[Path, Path]:
    """Let ``fill`` draw on a sheet of ``size`` inches, and write ``stem.svg`` and ``stem.png``."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotUnavailable('figures need matplotlib: pip install "ifso[figures]"') from error
    from ifso.common.files import replacing

    svg, png = stem.with_name(f"{stem.name}.svg"), stem.with_name(f"{stem.name}.png")
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        fill(figure)
        try:
            stem.parent.mkdir(parents=True, exist_ok=True)
            with replacing(svg) as new:
                figure.savefig(new, format="svg", metadata={"Date": None, "Title": title})
            with replacing(png) as new:
                figure.savefig(new, format="png", dpi=DPI, metadata={"Software": None, "Title": title})
        except OSError as error:
            reason = " ".join(str(error).split())
            raise IfsoError(f"the picture cannot be written to {stem.parent}: {reason}") from error
    return svg, png


def key(figure: Figure, handles: Sequence[Any], notes: Sequence[str] = (), columns: int = 5) -> None:
    """The legend above all panels, and below them in small print what else must be said."""
    lines = textwrap.wrap(plain(" ".join(notes)), int(figure.get_size_inches()[0] * 19.5))
    if lines:
        figure.supxlabel("\n".join(lines), fontsize=6.5, color=MUTED, linespacing=1.35)
    if handles:
        figure.legend(
            handles=list(handles), loc="outside upper center", ncols=columns, handlelength=2.6, columnspacing=1.5
        )


def plain(text: str) -> str:
    r"""Words that come from a model or a file, of which nothing is read as a formula.

    >>> print(plain("cost_$"))
    cost_\$
    """
    return text.replace("$", r"\$")


def name(axes: Axes, title: str, small: str = "", *, room: bool = True) -> None:
    """The title of a panel, and in small print below it what is missing, if any panel needs the ``room`` for that."""
    axes.set_title(title, pad=13 if room else None)
    if small:
        axes.text(0.5, 1.02, small, transform=axes.transAxes, fontsize=6.5, color=MUTED, ha="center", va="bottom")


def empty(axes: Axes, words: str) -> None:
    """A panel without data says why."""
    axes.set_yticks([])
    axes.grid(visible=False)
    axes.set_facecolor("#f4f4f4")
    axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center", va="center", color=MUTED, fontsize=8)
