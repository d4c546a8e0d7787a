"""Pieces that all sections of a page are made of."""

from __future__ import annotations

from ifso.report.markup import Markup, element
from ifso.runs.record import RunRecord

FEW = 8
"""A table of more rows than this is folded."""


def section(kind: str, number: int, title: str, *inside: object) -> Markup:
    """A section with its heading; ``kind`` and the number of the run name it in links."""
    name = f"{kind}-{number}"
    heading = element("h2", title, id=f"{name}-title")
    return element("section", heading, *inside, id=name, class_=kind, aria_labelledby=f"{name}-title", data_kind=kind)


def chart(kind: str, label: str) -> Markup:
    """An empty place that a chart is drawn into."""
    return element("div", class_="chart", data_chart=kind, aria_label=label, role="group")


def pair(one: Markup, other: Markup) -> Markup:
    """Two charts side by side where there is room."""
    return element("div", one, other, class_="pair")


def said(*words: object) -> Markup:
    """A paragraph that explains."""
    return element("p", *words, class_="said")


def folded(title: str, inside: Markup, rows: int) -> Markup:
    """A table behind its title, open if it is short."""
    return element("details", element("summary", title), inside, open=rows <= FEW)


def capital(word: str) -> str:
    """As a heading begins.

    >>> capital("accuracy"), capital("mAP")
    ('Accuracy', 'mAP')
    """
    return word if word[1:].lower() != word[1:] else word[:1].upper() + word[1:]


def status(run: RunRecord) -> str:
    """How far a run has come, in a few words."""
    if not run.config:
        return "a saved network"
    state, count = "finished" if run.finished else "not finished", len(run.resumes)
    if not count:
        return state
    return f"{state}, resumed {'once' if count == 1 else f'{count} times'}"


def duration(seconds: float) -> str:
    """As people say it.

    >>> duration(4.21), duration(200), duration(7400)
    ('4.2 s', '3 min 20 s', '2 h 3 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
