"""What mkdocstrings shows of a docstring: roles become names in code type, doctests become blocks of code."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

ROLE = re.compile(r":(?:class|func|meth|mod|attr):`~?([^`]+)`")
PROMPT = ">>> "


def as_markdown(text: str) -> str:
    r"""A docstring as Markdown.

    >>> print(as_markdown("See :func:`ifso.trace`:\n\n>>> 1 + 1\n2\n\nDone."))
    See `ifso.trace`:
    <BLANKLINE>
    ```pycon
    >>> 1 + 1
    2
    ```
    <BLANKLINE>
    Done.
    """
    lines: list[str] = []
    inside = ""
    for line in ROLE.sub(r"`\1`", text).splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        if not inside and line.lstrip().startswith(PROMPT):
            inside = f"{indent}```"
            lines.append(f"{inside}pycon")
        if inside and not line.strip():
            lines.append(inside)
            inside = ""
        lines.append(line)
    return "\n".join([*lines, inside] if inside else lines)


class Docstrings(Extension):
    """Rewrites every docstring before it is parsed."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Called for every module, class, function and attribute that was read."""
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)
