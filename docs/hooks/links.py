"""Links that only a checkout can follow, to folders and to files outside of ``docs/``, are plain text in the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Called by mkdocs with the text of every page."""
    return within(markdown, Path(config.docs_dir), Path(page.file.src_uri))


def within(markdown: str, docs: Path, page: Path) -> str:
    """The text without links that lead to folders or out of ``docs``; a link to nothing stays, for mkdocs to see."""

    def plain(link: re.Match[str]) -> str:
        if "://" in link[2]:
            return link[0]
        target = (docs / page.parent / link[2]).resolve()
        outside = not target.is_relative_to(docs.resolve())
        return link[1] if target.exists() and (outside or target.is_dir()) else link[0]

    return LINK.sub(plain, markdown)
