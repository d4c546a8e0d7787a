"""HTML that is safe by default: every text is escaped unless it is already markup."""

from __future__ import annotations

import json
from collections.abc import Iterable
from html import escape
from typing import Any

VOID = frozenset({"br", "col", "hr", "img", "input", "link", "meta"})


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def element(tag: str, *children: object, **attributes: object) -> Markup:
    """An element; texts within it and its attributes are escaped, None is left out.

    A trailing underscore of an attribute's name goes, the others become hyphens.

    >>> element("p", "a < b", element("br"), class_="note", aria_label='"x"', title=None)
    '<p class="note" aria-label="&quot;x&quot;">a &lt; b<br></p>'
    """
    given = "".join(
        _attribute(name, value) for name, value in attributes.items() if value is not None and value is not False
    )
    if tag in VOID:
        return Markup(f"<{tag}{given}>")
    return Markup(f"<{tag}{given}>{joined(children)}</{tag}>")


def _attribute(name: str, value: object) -> str:
    """With a space before it; True is an attribute without a value.

    >>> _attribute("data_detail", True), _attribute("width", 0)
    (' data-detail', ' width="0"')
    """
    word = name.rstrip("_").replace("_", "-")
    return f" {word}" if value is True else f' {word}="{escape(str(value))}"'


def joined(children: Iterable[object]) -> Markup:
    """Several pieces one after the other, escaped where they are no markup."""
    return Markup(
        "".join(each if isinstance(each, Markup) else escape(str(each)) for each in children if each is not None)
    )


def embedded(document: Any) -> Markup:
    r"""JSON that can stand within a script element: it ends no element and begins no comment.

    >>> print(embedded({"name": "</script><!--&"}))
    {"name":"\u003c/script>\u003c!--\u0026"}
    """
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c"))


def table(
    headings: Iterable[object], rows: Iterable[Iterable[object]], *, caption: str, **attributes: object
) -> Markup:
    """A table whose first column names the row; it scrolls by itself where the page is narrow."""
    head = element("thead", element("tr", *(element("th", each, scope="col") for each in headings)))
    body = element("tbody", *(_row(list(row)) for row in rows))
    found = element("table", element("caption", caption), head, body, **attributes)
    return element("div", found, class_="scroll", tabindex="0", role="region", aria_label=caption)


def _row(cells: list[object]) -> Markup:
    first, *others = cells
    return element("tr", element("th", first, scope="row"), *(element("td", each) for each in others))
