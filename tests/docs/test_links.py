"""Links within README, CONTRIBUTING and docs lead to files and headings that are there."""

import re

import pytest
from documents import DOCS, PAGES, ROOT

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCED = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)


def text_of(page):
    """Without what stands between fences."""
    return FENCED.sub("", page.read_text())


def anchors(page):
    """What headings are called in a link, where mkdocs (no two dashes in a row) and GitHub agree."""
    headings = re.findall(r"^#+ +(.+)$", text_of(page), re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings]
    return [name for name in (re.sub(r"\s", "-", words) for words in plain) if "--" not in name]


def broken(page):
    for target in LINK.findall(text_of(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        place = (page.parent / path).resolve() if path else page
        if not place.exists() or (anchor and anchor not in anchors(place)):
            yield target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    assert list(broken(page)) == []


def test_a_broken_link_is_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# One `two`\n\n[a](#one-two) [b](#three) [c](other.md) [d](page.md#one-two) [e](page.md#no)\n")
    assert list(broken(page)) == ["#three", "other.md", "page.md#no"]


def test_every_page_is_in_the_menu():
    menu = (ROOT / "mkdocs.yml").read_text()
    assert [page.name for page in sorted(DOCS.rglob("*.md")) if str(page.relative_to(DOCS)) not in menu] == []
